"""The census that stays with an index, shard by shard: which members, and which fields of a .json, its records have.

A config that asks for a name that no record has can then be refused before anything is computed. The file is for the
owner of the data (0600), since counts of private records are private. What a refusal may say in public is decided in
train/recipe/record_names.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmuration.data.decode.decode import SUFFIXES
from murmuration.data.index.census import MOST_KEYS, Census
from murmuration.data.store.index_files import index_file, read_json

CENSUS = "census.json"
LONGEST_NAME = 200
_FORMAT = 1


@dataclass(frozen=True)
class Names:
    """Counts of one or more shards: how many of `records` have each member (by suffix) and any `pictures`, and how
    many of the `opened` .json have each field. Unless `whole`, some names found no room."""

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
