"""Which records may be used as public: none of an index that has private runs, except the public part of its cut.

The log of the runs on an index, and the share that was made public, lie beside it; the share is frozen at first use. A
run is held to both before it computes anything; otherwise what one run protects would not stay protected in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.data.draw.stream import StreamIndex
from murmuration.data.index.format import FOLDER
from murmuration.data.index.public_split import FROZEN, Cut, SplitIndex, index_folders
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.train.config.section import RecipeError
from murmuration.train.storage.sibling_runs import RunLog


@dataclass(frozen=True)
class Use:
    """`public`: used without noise because the user declares it public; `private`: protected by a phase's promise;
    neither: NOT PRIVATE anyway."""

    where: str
    index: RecordIndex
    public: bool
    private: bool = False


def hold_to_what_was_promised(uses: Sequence[Use]) -> None:
    """Refuses every wrong use, and only then freezes the sets that are cut for the first time."""
    for use in uses:
        _check(use)
    for use in uses:
        if isinstance(use.index, SplitIndex):
            _freeze(use.where, use.index)


def _check(use: Use) -> None:
    index, where = use.index, use.where
    frozen = _frozen(where, index)
    if isinstance(index, SplitIndex):
        wanted = Cut(index.whole.records, index.fraction)
        if frozen is not None and frozen != wanted:
            raise RecipeError(
                f"{where}: this set was cut with public_fraction {frozen.fraction!r} of {frozen.records:,} records, "
                f"but the config asks for {wanted.fraction!r} of {wanted.records:,}; records that one run protects "
                "would be public in another, so keep the first"
            )
        if frozen is None and (run := _run_on(index)) is not None:
            raise RecipeError(
                f"{where}: run {run!r} has used these records before a public_fraction was frozen; if it and all "
                f"others used this one, declare it: prepare.py split {index.folder} --public-fraction "
                f"{index.fraction!r}"
            )
        return
    if use.private and frozen is not None:
        raise RecipeError(
            f"{where}: a part of this set was made public (public_fraction {frozen.fraction!r}), so no phase can "
            "protect all of it; set public_fraction to the same value, and the phase protects the rest"
        )
    if use.public and (run := _run_on(index)) is not None:
        raise RecipeError(
            f"{where}: run {run!r} protects these records (or says so in the log beside their index), so nobody may "
            "use them as public; name other data"
        )


def _frozen(where: str, index: RecordIndex) -> Cut | None:
    try:
        found = (Cut.frozen(folder) for folder in index_folders(index))
        return next((cut for cut in found if cut is not None), None)
    except ShardError as error:
        raise RecipeError(f"{where}: {error}") from None


def _run_on(index: RecordIndex) -> str | None:
    """The name of a private run in the log of these records. A stream has a log only if its shards have an index."""
    folders: set[Path] = set(index_folders(index))
    if isinstance(index, StreamIndex):
        folders = {place.parent / FOLDER for place in index.places if isinstance(place, Path)}
    entries = (entry for folder in sorted(folders) for entry in RunLog.beside(folder).siblings())
    return next((str(entry.get("run")) for entry in entries if entry.get("private", True)), None)


def _freeze(where: str, index: SplitIndex) -> None:
    try:
        Cut(index.whole.records, index.fraction).freeze(index.folder)
    except OSError as error:
        raise RecipeError(
            f"{where}: {index.folder / FROZEN} cannot be written ({error.strerror}), so another run could make "
            f"another part public; let the owner of the index run prepare.py split {index.folder} --public-fraction "
            f"{index.fraction!r}, or index into a folder of your own with --out"
        ) from None
