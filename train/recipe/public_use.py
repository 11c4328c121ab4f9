"""Which records may be used as public: none of an index that has private runs, except the public part of its cut.

The log of the runs on the records tells who used them, and which share was made public; that is frozen at first use. A
run is held to both before it computes anything; otherwise what one run protects would not stay protected in the next.
Nor may public data be a folder that contains private records, or lie in one. Training and the command `evaluate` both
ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.data.index.public_split import apart
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


def hold_to_what_was_promised(uses: Sequence[Use], registry: str | None = None) -> None:
    """Refuses every wrong use, and only then freezes the sets that are cut for the first time."""
    logs = [RunLog.of(use.index, registry) for use in uses]
    for use, log in zip(uses, logs, strict=True):
        _check(use, log)
    _refuse_private_around(uses)
    for use, log in zip(uses, logs, strict=True):
        if log.cut is not None:
            _held(use, log.freeze)


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


def _check(use: Use, log: RunLog) -> None:
    if use.private or log.cut is not None:
        _held(use, log.require_cut)
    elif use.public and (run := log.protecting()) is not None:
        raise RecipeError(
            f"{use.where}: run {run!r} protects these records (or says so in the log of runs on them), so nobody may "
            "use them as public; name other data"
        )


def _held(use: Use, act: Callable[[], None]) -> None:
    try:
        act()
    except ShardError as error:
        raise RecipeError(f"{use.where}: {error}") from None
