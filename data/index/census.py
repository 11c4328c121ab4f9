"""The names of the members of shards: how many records have which suffixes, and which files belong to no record; and
what lies beside shards and images and is not read.

Only structure is counted, never content: names of members, and the keys of some of their .json. The counts are shown to
the person who builds the index. What of them stays with it, shard by shard, is for the owner alone: n is all that is
published about private records.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmuration.data.decode.decode import SUFFIXES
from murmuration.data.decode.fields import CAPTIONS
from murmuration.data.index.folders import extension, ignored_names, most_common
from murmuration.data.store.index_files import index_file, read_json
from murmuration.data.store.tar import shown

CAPTION = "txt"
_SHOWN = 6
# Files beside shards: NVIDIA Energon's, img2dataset's, and those of prepare.py pack.
_COMPANIONS = (".tar", ".tar.idx", "_stats.json", ".parquet", "classes.txt", "left_out.jsonl", "packed.json")
_TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_JSON_AT_FIRST, _LARGEST_JSON = 100, 1 << 20
MOST_KEYS = 1000


CENSUS = "census.json"
LONGEST_NAME = 200
_FORMAT = 1


@dataclass
class Census:
    """`sets` counts records by their suffixes, `loose` counts the files that belong to no record; `keys` counts the
    fields of some `.json` members of each shard, of which `opened` could be read."""

    sets: Counter[tuple[str, ...]] = field(default_factory=Counter)
    loose: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    opened: int = 0
    _json: int = 0

    def count(self, suffixes: Iterable[str]) -> None:
        """Count one more record; without suffixes there is nothing to count."""
        if found := tuple(sorted(suffixes)):
            self.sets[found] += 1

    def wants(self, suffix: str, size: int) -> bool:
        """Whether the keys of one more member of this suffix and size are to be counted: the first hundred, then every
        second, every fourth and so on, so that a shard whose records are sorted is seen up to its end."""
        if suffix != "json":
            return False
        number, self._json = self._json, self._json + 1
        every = 1 << (number // _JSON_AT_FIRST).bit_length()
        return number % every == 0 and size <= _LARGEST_JSON

    def look_into(self, raw: bytes) -> None:
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict):
            self.opened += 1
            self.keys.update(key for key in found if key in self.keys or len(self.keys) < MOST_KEYS)

    def facts(self) -> dict[str, Any]:
        return {
            "sets": list(self.sets.items()), "loose": self.loose, "keys": dict(self.keys), "opened": self.opened,
        }  # fmt: skip

    @classmethod
    def of_facts(cls, facts: Any) -> Census:
        sets = Counter({tuple(map(str, suffixes)): int(count) for suffixes, count in facts["sets"]})
        keys = Counter({str(key): int(count) for key, count in dict(facts["keys"]).items()})
        return cls(sets, int(facts["loose"]), keys, int(facts["opened"]))


def total(parts: Iterable[Census]) -> Census:
    whole = Census()
    for part in parts:
        whole.sets.update(part.sets)
        whole.loose += part.loose
        whole.keys.update(part.keys)
        whole.opened += part.opened
    return whole


def remarks(census: Census) -> Iterator[str]:
    """Which members records have, and what may be a mistake in how the shards were made."""
    records = census.sets.total()
    members: Counter[str] = Counter()
    for suffixes, count in census.sets.items():
        members.update(dict.fromkeys(suffixes, count))
    if members:
        yield f"of {records} records read, {_shares(members, records, '.', 'suffixes')}"
    if census.keys:
        yield f"of {census.opened} .json looked into, {_shares(census.keys, census.opened, '', 'fields')}"
    if bare := sum(count for suffixes, count in census.sets.items() if not set(suffixes) & set(SUFFIXES)):
        known = " ".join(f".{suffix}" for suffix in SUFFIXES)
        yield f"records without a picture ({known}): {bare}; where a run needs one they are bad records"
    if 0 < (captioned := members[CAPTION]) < records:
        listed = f" unless their .json lists {CAPTIONS}" if census.keys[CAPTIONS] else ""
        bare = records - captioned
        yield f"records without a caption (.{CAPTION}): {bare}; where a run needs one they are bad records{listed}"
    if census.loose:
        yield f"files that belong to no record: {census.loose}; members of records are named like 000123.jpg"


def _shares(counts: Counter[str], of: int, before: str, what: str) -> str:
    first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    shares = (f"{'all' if count == of else count} have {before}{shown(name)}" for name, count in first)
    return ", ".join(shares) + (f", {len(counts) - _SHOWN} other {what}" if len(counts) > _SHOWN else "")


def beside_shards(folder: Path) -> Iterator[str]:
    """The files in a folder of shards that are not read. Folders are not counted, as the index is one itself."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".") and not entry.is_dir()]
    if others := Counter(extension(name) for name in names if not name.endswith(_COMPANIONS)):
        yield f"not used: {most_common(others)}{_fix(others)}"


def beside_images(root: Path) -> Iterator[str]:
    """The files in and beside a folder of images that are not read, though they may belong to the images."""
    names = list(ignored_names(root))
    if others := Counter(extension(name) for name in names):
        yield f"not used: {most_common(others)}{_fix(others)}"
    try:
        with os.scandir(root.parent) as entries:
            near = [os.path.join("..", entry.name) for entry in entries if entry.is_file()]
    except OSError:  # the folder's own name may be all that may be read
        near = []
    tables = sorted(name for name in (*names, *near) if name.lower().endswith(_TABLES))
    if tables:
        more = f" and {len(tables) - 1} more tables" if len(tables) > 1 else ""
        table = shown(os.path.normpath(root / tables[0]))
        yield (
            f"{shown(os.path.basename(tables[0]))}{more} beside the images: not used; for captions or labels from a "
            f"table, use: python launch/prepare.py pack {shown(str(root))} --csv {table} --out SHARDS"
        )


def _fix(others: Counter[str]) -> str:
    compressed = any(what.startswith(".tar.") or what == ".tgz" for what in others)
    unpacked = "; unpack compressed shards into plain .tar files" if compressed else ""
    pack = "python launch/prepare.py pack IMAGES --csv TABLE --out SHARDS"
    return unpacked + (f"; to use .dcm files, name them in a table and run: {pack}" if others[".dcm"] else "")


@dataclass(frozen=True)
class Names:
    """What stays with the index of one or more shards: how many of `records` have each member (by suffix) and any
    `pictures`, and how many of the `opened` .json have each field. Unless `whole`, some names found no room.

    A config that asks for a name that no record has can then be refused before anything is computed. The file is for
    the owner of the data (0600), since counts of private records are private. What a refusal may say in public is
    decided in train/recipe/record_names.py.
    """

    records: int = 0
    pictures: int = 0
    members: Counter[str] = field(default_factory=Counter)
    opened: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    whole: bool = True

    @classmethod
    def of(cls, census: Census) -> Names:
        members: Counter[str] = Counter()
        for suffixes, count in census.sets.items():
            members.update(dict.fromkeys(suffixes, count))
        pictures = sum(count for suffixes, count in census.sets.items() if not set(SUFFIXES).isdisjoint(suffixes))
        kept, fields = (
            Counter({name: count for name, count in counts.most_common(MOST_KEYS) if len(name) <= LONGEST_NAME})
            for counts in (members, census.keys)
        )
        whole = len(members) <= MOST_KEYS and len(census.keys) < MOST_KEYS
        return cls(census.sets.total(), pictures, kept, census.opened, fields, whole)

    @classmethod
    def of_facts(cls, facts: Any) -> Names:
        """ValueError, TypeError or KeyError if these are not the facts of a shard."""
        members, fields = (
            Counter({str(name): _count(count) for name, count in dict(facts[key]).items()})
            for key in ("members", "fields")
        )
        counts = (_count(facts[key]) for key in ("records", "pictures", "opened"))
        records, pictures, opened = counts
        return cls(records, pictures, members, opened, fields, facts["whole"] is True)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a count is not a whole number")
    return value


def write_census(folder: Path, digest: str, shards: Sequence[Names | None]) -> None:
    """`digest` is that of the manifest, in whose order the shards are; None for one whose members were not read."""
    facts = [None if names is None else vars(names) for names in shards]
    with index_file(folder / CENSUS) as file:
        head = json.dumps({"format": _FORMAT, "manifest": digest})[:-1]
        lines = ",\n".join(json.dumps(each, sort_keys=True) for each in facts)
        file.write(f'{head}, "shards": [\n{lines}\n]}}\n'.encode())


def read_census(folder: Path, digest: str, shards: int) -> list[Names | None]:
    """The names of each shard. None for all of them where there is no census of exactly this index, or none that can be
    read: nothing but a check rests on it."""
    try:
        found = read_json(folder / CENSUS)
        if found["format"] != _FORMAT or found["manifest"] != digest or len(found["shards"]) != shards:
            raise ValueError("another index's")
        return [None if facts is None else Names.of_facts(facts) for facts in found["shards"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [None] * shards


def names_of(folder: Path, digest: str, shards: int) -> Names | None:
    """The names of all records of an index together; None if a shard's are not known."""
    parts = [names for names in read_census(folder, digest, shards) if names is not None]
    if len(parts) < shards or not all(part.whole for part in parts):
        return None
    members, fields = Counter[str](), Counter[str]()
    for part in parts:
        members.update(part.members)
        fields.update(part.fields)
    records, pictures, opened = (
        sum(getattr(part, each) for part in parts) for each in ("records", "pictures", "opened")
    )
    return Names(records, pictures, members, opened, fields)
