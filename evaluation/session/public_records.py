"""The records of an evaluation: an index, or pictures that have none yet. Only public ones.

`place_of` needs no torch and answers wrong paths at once. `open_public` holds the records to what runs have promised on
them, by the code that training uses for its own public data: an index that has private runs is public for nobody,
except for the part of it that was made public.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.folders import IMAGES, FolderIndex, build_folder
from murmuration.data.index.format import BESIDE, FOLDER, MANIFEST
from murmuration.data.index.keyed_digest import every_ledger_digest, ledger_digests
from murmuration.data.index.open import open_index, open_units
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.selection import Selection
from murmuration.data.store.place import RecordIndex, ShardError, is_url, without_access
from murmuration.evaluation.errors import EvaluationError


@dataclass(frozen=True)
class RecordsPlace:
    """Where records lie: an index, or (without `index`) a folder of pictures or a single one."""

    given: Path
    index: Path | None
    option: str
    """The option that names it."""

    def __str__(self) -> str:
        return f"{self.option} {self.given}"


def place_of(given: str, option: str, public: bool) -> RecordsPlace:
    if not public:
        raise EvaluationError(
            "pass --public to say that the records to evaluate on are public: evaluating on private ones would "
            "release something about them that nobody accounted for"
        )
    if is_url(given):
        raise EvaluationError(
            f"{without_access(given)} is a URL; index it into a folder (prepare.py index URL --out FOLDER) and name it"
        )
    path = Path(given)
    if not path.exists():
        raise EvaluationError(f"{path} does not exist; name an index, a folder of pictures, or a picture")
    if path.is_file():
        if path.suffix.lower() not in IMAGES:
            raise EvaluationError(f"{path} is no picture ({', '.join(IMAGES)}); name one, or a folder")
        return RecordsPlace(path, None, option)
    beside = path.with_name(path.name + BESIDE)
    for folder in (path, path / FOLDER, beside):
        if (folder / MANIFEST).is_file():
            return RecordsPlace(path, folder, option)
    if any(path.glob("*.tar")):
        raise EvaluationError(f"{path} has tar shards without an index; run prepare.py index {path} first")
    return RecordsPlace(path, None, option)


def open_public(
    place: RecordsPlace, scratch: Path, part: bool, classes: ClassList | None = None, make: bool = True
) -> RecordIndex:
    """`part`: only the part that was made public. Pictures without an index get one in `scratch`, unless another
    process did `make` it."""
    try:
        if place.index is None:
            _hold_to_promises(place, None)
        index = (
            open_index(place.index, excluded="absent" if part else "skipped")
            if place.index
            else _scratch(place, scratch, make)
        )
        if classes is not None and isinstance(index, FolderIndex):
            index = index.numbered_by(classes)
        index.check_unchanged()
        found = _public_part(index) if part else index
    except (ShardError, OSError) as error:
        raise EvaluationError(f"{place}: {error}") from None
    if place.index is not None:
        _hold_to_promises(place, found)
    return found


def open_stand_in(place: RecordsPlace, scratch: Path, make: bool = True) -> RecordIndex:
    """Records that play the private set of a run, which their owner says are public or synthetic: no promise holds."""
    try:
        index = open_index(place.index, excluded="skipped") if place.index else _scratch(place, scratch, make)
        index.check_unchanged()
    except (ShardError, OSError) as error:
        raise EvaluationError(f"{place}: {error}") from None
    return index


def refuse_training_records(index: RecordIndex, protected: frozenset[str]) -> None:
    """Refuses the private records that the weights were trained on, also where a copied index lost its log of runs."""
    if not isinstance(index, SplitIndex) and every_ledger_digest(index) & protected:
        raise EvaluationError(
            "these weights were trained on the private records that are named here, which are public for nobody; name "
            "other data"
        )


def digest_for_all(index: RecordIndex) -> str:
    """For a result that is published. Keyed for the public part of private records, whose digest covers all of them."""
    if isinstance(index, Selection):
        return index.digest_with(digest_for_all(index.whole))
    return ledger_digests(index, public=True)[0] if isinstance(index, SplitIndex) else index.manifest_digest


def _scratch(place: RecordsPlace, scratch: Path, make: bool) -> FolderIndex:
    pictures = place.given
    name = hashlib.sha256(str(pictures.resolve()).encode()).hexdigest()[:16]
    if not make:
        return FolderIndex.open(scratch / name / "index")
    if pictures.is_file():
        alone = scratch / name / "picture"
        alone.mkdir(parents=True, exist_ok=True)
        link = alone / pictures.name
        link.unlink(missing_ok=True)
        link.symlink_to(pictures.resolve())
        pictures = alone
    return build_folder(pictures, scratch / name / "index", leave_salt=False)


def _public_part(index: RecordIndex) -> SplitIndex:
    from murmuration.train.storage.sibling_runs import RunLog

    cuts = RunLog.of(index).splits()
    if not cuts:
        raise EvaluationError(
            f"no part of {index.folder} was made public; omit --public-part, or declare one first: prepare.py split"
        )
    units = open_units(index, cuts[0].unit) if cuts[0].unit is not None else None
    return SplitIndex(index, cuts[0].public_fraction, public=True, units=units)


def _hold_to_promises(place: RecordsPlace, index: RecordIndex | None) -> None:
    """Refuses what is public for nobody, by training's own check. Without an index: pictures that have none."""
    from murmuration.train.recipe.public_use import (  # torch: paths are checked first
        Use,
        hold_folder_to_what_was_promised,
        hold_to_what_was_promised,
    )

    if index is None:
        hold_folder_to_what_was_promised(str(place), place.given)
    else:
        hold_to_what_was_promised([Use(str(place), index, public=True)])
