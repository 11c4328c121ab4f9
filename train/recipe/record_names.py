"""What a config asks of records by name: pictures, captions, a label, a weight, a zero-shot axis. A name that no record
has is refused before anything is computed; otherwise every record would be a bad one, and a run would spend its whole
budget on noise.

The index kept a census of names (data/index/census.py), so no record is read for this. A refusal is public, and
the census of private records is not. So for these a refusal shows no count, names only what many records have, and
draws the line at a hundredth of them instead of one: who sees refusals does not learn whether some single record has a
name (docs/proof.md, "What a refusal may say").
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from murmuration.data.decode.decode import SUFFIXES
from murmuration.data.decode.fields import CAPTIONS
from murmuration.data.index.census import CAPTION, LONGEST_NAME, Names, names_of
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.open import open_index
from murmuration.data.index.public_split import whole_of
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.store.tar import shown
from murmuration.train.config.data import ShardData
from murmuration.train.config.phase import TEXTUAL
from murmuration.train.config.root import Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.labels import FOLDERS
from murmuration.train.storage.sibling_runs import RunLog

FEWEST, SHARE = 10, 0.01
"""Private records have a name if at least this many, and at least this share, of those that were counted have it."""
TELLING = 2 * FEWEST
"""Below this many private records nothing is concluded."""
_LISTED = 6


@dataclass(frozen=True)
class RequiredName:
    """A name that records must have, and the config key that says so. Without a name: a picture."""

    key: str
    name: str | None


@dataclass(frozen=True)
class Part:
    """One set of records of a phase; `key` names its path in the config."""

    name: str
    key: str
    path: str
    public: bool
    asked: list[RequiredName]
    captions: bool
    cut: bool = False
    """Only a fraction of the set is used here, and perhaps only that fraction is public."""


def parts_of(number: int, phase: Phase) -> Iterator[Part]:
    """The indexed sets of a phase, each with what its records must have."""
    where = f"phases.{number}"
    given = f"{where}.data.label" if phase.trains else f"{where}.evaluation.path"
    label = [] if phase.label is None else [RequiredName(given, phase.label)]
    told = phase.objective in TEXTUAL
    picture = [] if phase.objective == "text" else [RequiredName("", None)]
    if isinstance(phase.data, ShardData):
        weight = [] if phase.weight is None else [RequiredName(f"{where}.data.weight", phase.weight)]
        names, data = [*picture, *label, *weight], phase.data
        yield Part("data", f"{where}.data.path", data.path, data.public, names, told, _cut(data))
    if (measured := phase.evaluation) is not None:
        scored = measured.zero_shot
        axes = [RequiredName(f"{where}.evaluation.zero_shot.axes", name) for name in (scored and scored.axes) or {}]
        # Without captions a captioner's labels are still scored.
        needed = told and scored is None
        yield Part("evaluation", f"{where}.evaluation.path", measured.path, True, [*picture, *label, *axes], needed)
    if (monitor := phase.monitor) is not None:
        yield Part("monitor", f"{where}.monitor.path", monitor.path, True, [*picture, *label], told)
    if phase.mixing is not None and isinstance(mixed := phase.mixing.data, ShardData):
        key = f"{where}.mixing.data"
        weight = [] if mixed.weight is None else [RequiredName(f"{key}.weight", mixed.weight)]
        yield Part("mixing", f"{key}.path", mixed.path, True, [*picture, *label, *weight], told, _cut(mixed))


def _cut(data: ShardData) -> bool:
    return data.public_fraction is not None


def require_names(number: int, phase: Phase, find: Callable[[Part], RecordIndex | None]) -> list[str]:
    """Refuses names that no record has. Returns the sets that could not be compared, as sentences that name the fix;
    `find` gives the index of a set, or None where it is not at hand."""
    notes: list[str] = []
    parts = [(part, find(part)) for part in parts_of(number, phase)]
    private = {whole_of(index).folder for part, index in parts if index is not None and not part.public}
    for part, index in parts:
        whole = whole_of(index)
        if isinstance(whole, FolderIndex):
            _require_of_images(part, whole)
        elif isinstance(whole, ShardIndex):
            names = names_of(whole.folder, whole.manifest_digest, len(whole.shards))
            if names is None:
                notes.append(
                    f"{part.key}: its index counts no names of members and fields, so the config's were not compared "
                    f"with them; python launch/prepare.py index {part.path} --rescan counts them"
                )
                continue
            log = RunLog.of(whole)
            # Counts may be shown of all records of an index, and so only if none of them is private. Where a set is
            # cut, the census is that of both parts.
            cut = part.cut or bool(log.splits())
            open_to_all = part.public and not cut and whole.folder not in private and log.protecting() is None
            _Comparison(part, names, open_to_all).refuse()
    return notes


def names_at_hand(number: int, phase: Phase) -> list[str]:
    """`require_names` for the sets that are there, as far as nothing was opened yet."""

    def find(part: Part) -> RecordIndex | None:
        with suppress(ShardError, OSError):
            return open_index(part.path)
        return None

    return require_names(number, phase, find)


def _require_of_images(part: Part, index: FolderIndex) -> None:
    for asked in part.asked:
        if asked.name == FOLDERS and not index.labelled:
            raise RecipeError(
                f"{part.key}: {part.path} has no class folders, but the label is {FOLDERS!r}; put each class into a "
                "folder of its own, or pack pictures and labels into shards: python launch/prepare.py pack"
            )
        if asked.name not in (None, FOLDERS):
            raise RecipeError(
                f"{asked.key}: {part.path} ({part.key}) has single images, which have no field {_quoted(asked.name)}; "
                f"write {FOLDERS!r} for class folders, or pack pictures and labels into shards: python "
                "launch/prepare.py pack"
            )


def shared_names(index: ShardIndex) -> tuple[frozenset[str], frozenset[str]] | None:
    """Members (such as ".txt") and fields of the .json that so many records have that they may be told of private ones;
    None where they were not counted, or where too few records were."""
    names = names_of(index.folder, index.manifest_digest, len(index.shards))
    if names is None or names.records < TELLING:
        return None
    private = _Comparison(Part("data", "", "", False, [], False), names, False)
    return private.shared(private.members), private.shared(private.fields)


@dataclass(frozen=True)
class _Known:
    """Names of one kind: how many of `counted` have each of them."""

    kind: str
    counts: Counter[str]
    counted: int


class _Comparison:
    """One set's names with those that are asked for. `open_to_all`: whether its counts may be shown."""

    def __init__(self, part: Part, names: Names, open_to_all: bool) -> None:
        self._part, self._names, self._open = part, names, open_to_all
        dotted = Counter({f".{suffix}": count for suffix, count in names.members.items()})
        self.members = _Known("member", dotted, names.records)
        self.fields = _Known("field", names.fields, names.opened)

    def refuse(self) -> None:
        names, part = self._names, self._part
        for asked in part.asked:
            if asked.name is None:
                if self._few(names.pictures, names.records):
                    raise self._refusal(part.key, f"a picture (.{' .'.join(SUFFIXES)})", None, self.members)
            elif asked.name == FOLDERS:
                if self._few(names.members[FOLDERS], names.records):
                    raise self._refusal(asked.key, f"a member .{FOLDERS}", f".{FOLDERS}", self.members)
            elif self._lacks(asked.name):
                raise self._refusal(asked.key, f"a field {_quoted(asked.name)} in its .json", asked.name, self.fields)
        if part.captions and self._few(names.members[CAPTION], names.records) and self._lacks(CAPTIONS):
            what = f"a caption (.{CAPTION}, or a list {_quoted(CAPTIONS)} in its .json)"
            raise self._refusal(part.key, what, CAPTIONS, self.fields if names.opened else self.members)

    def _lacks(self, name: str) -> bool:
        """Whether no record has the field."""
        names = self._names
        if len(name) > LONGEST_NAME:
            return False  # none of such names was kept
        return self._few(names.members["json"], names.records) or self._few(names.fields[name], names.opened)

    def shared(self, known: _Known) -> frozenset[str]:
        return frozenset(name for name, count in known.counts.items() if self._many(count, known.counted))

    def _few(self, count: int, of: int) -> bool:
        """Whether none has it, as far as that may be told."""
        if self._open:
            return not count and of > 0
        return of >= TELLING and count < max(FEWEST, SHARE * of)

    def _many(self, count: int, of: int) -> bool:
        """Whether enough records have a name for it to be told."""
        return count > 0 if self._open else of >= TELLING and not self._few(count, of)

    def _refusal(self, key: str, what: str, name: str | None, known: _Known) -> RecipeError:
        who = "no record" if self._open else "no record, or next to none,"
        at = "" if key == self._part.key else f" ({self._part.key})"
        return RecipeError(f"{key}: {who} of {self._part.path}{at} has {what}; {self._instead(name, known)}")

    def _instead(self, name: str | None, known: _Known) -> str:
        there = [each for each, count in known.counts.most_common() if self._many(count, known.counted)]
        if not there:
            return f"name other data: these have no {known.kind} that could be meant"
        near = difflib.get_close_matches(name, there, n=1, cutoff=0.5) if name is not None else []
        if near and self._open:
            return f"{_quoted(near[0])} is in {known.counts[near[0]]:,} of {known.counted:,}"
        if near:
            return f"{_quoted(near[0])} is the nearest name that they have"
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        return f"their {known.kind}s are {', '.join(map(_quoted, there[:_LISTED]))}{more}"


def _quoted(name: str | None) -> str:
    return f'"{shown(name or "")}"'
