"""Which records may be used as public: none of an index that has private runs, except the public part of its cut.

The log of the runs on an index, and the share that was made public, lie beside it; the share is frozen at first use. A
run is held to both before it computes anything; otherwise what one run protects would not stay protected in the next.
Nor may public data be a folder that contains private records, or lie in one. Training and the command `evaluate` both
ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.data.draw.stream import StreamIndex
from murmuration.data.index.format import FOLDER
from murmuration.data.index.public_split import FROZEN, PublicSplit, SplitIndex, apart, index_folders
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.private_around import Extent, protected_around, share_records
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
    _refuse_private_around(uses)
    for use in uses:
        if isinstance(use.index, SplitIndex):
            _freeze(use.where, use.index)


def hold_folder_to_what_was_promised(where: str, pictures: Path) -> None:
    """For a folder of pictures, or a single one, that has no index."""
    try:
        _refuse_logged(where, pictures, Extent.of(pictures), [])
    except ShardError as error:
        raise RecipeError(f"{where}: {error}") from None


def _refuse_private_around(uses: Sequence[Use]) -> None:
    """For all public uses of a config. What is not public in it counts, too: before the first run there is no log."""
    extents: list[tuple[Use, Extent]] = []
    for use in uses:
        try:
            extents.append((use, Extent.of(use.index)))
        except ShardError as error:
            raise RecipeError(f"{use.where}: {error}") from None
    for use, extent in extents:
        if use.public:
            others = [(o, around) for o, around in extents if not o.public and not apart(use.index, o.index)]
            for other, around in others:
                if share_records(use.index, extent, other.index, around):
                    raise RecipeError(
                        f"{use.where}: contains the folders of {other.where}, which is not declared public, or lies in "
                        "them, so records of it would be used without noise; name other data, or move one of the two"
                    )
            _refuse_logged(use.where, use.index, extent, [other.index for other, _ in others])


def _refuse_logged(
    where: str, public: RecordIndex | Path, extent: Extent, known_apart: Sequence[RecordIndex]
) -> None:  # fmt: skip
    if (found := protected_around(public, extent, known_apart)) is not None:
        raise RecipeError(
            f"{where}: run {found.run!r} protects these records, or some in a folder below or above them (so says "
            f"{found.log}), so nobody may use them as public; name other data, or move the private records elsewhere"
        )


def _check(use: Use) -> None:
    index, where = use.index, use.where
    frozen = _frozen(where, index)
    if isinstance(index, SplitIndex):
        wanted = index.cut
        if frozen is not None and frozen != wanted:
            raise RecipeError(
                f"{where}: this set was cut with public_fraction {frozen.fraction!r} of {frozen.records:,} "
                f"{frozen.things}, but the config asks for {wanted.fraction!r} of {wanted.records:,} {wanted.things}; "
                "records that one run protects would be public in another, so keep the first"
            )
        if frozen is None and (run := protecting_run(index)) is not None:
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
    if use.public and (run := protecting_run(index)) is not None:
        raise RecipeError(
            f"{where}: run {run!r} protects these records (or says so in the log beside their index), so nobody may "
            "use them as public; name other data"
        )


def _frozen(where: str, index: RecordIndex) -> PublicSplit | None:
    try:
        found = (PublicSplit.frozen(folder) for folder in index_folders(index))
        return next((cut for cut in found if cut is not None), None)
    except ShardError as error:
        raise RecipeError(f"{where}: {error}") from None


def protecting_run(index: RecordIndex) -> str | None:
    """The name of a private run in the log of these records. A stream has a log only if its shards have an index."""
    folders: set[Path] = set(index_folders(index))
    if isinstance(index, StreamIndex):
        folders = {place.parent / FOLDER for place in index.places if isinstance(place, Path)}
    entries = (entry for folder in sorted(folders) for entry in RunLog.beside(folder).siblings())
    return next((str(entry.get("run")) for entry in entries if entry.get("private", True)), None)


def _freeze(where: str, index: SplitIndex) -> None:
    try:
        index.cut.freeze(index.folder)
    except OSError as error:
        raise RecipeError(
            f"{where}: {index.folder / FROZEN} cannot be written ({error.strerror}), so another run could make "
            f"another part public; let the owner of the index run prepare.py split {index.folder} --public-fraction "
            f"{index.fraction!r}, or index into a folder of your own with --out"
        ) from None
