"""The names of the members of shards: how many records have which suffixes, and which files belong to no record.

Only names are counted, never contents. The counts are shown to the person who builds the index and are not kept once
the index is complete: n is all that is published about private records.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmuration.data.decode.decode import SUFFIXES
from murmuration.data.index.folders import extension, most_common
from murmuration.data.store.tar import shown

CAPTION = "txt"
_SHOWN = 6
_COMPANIONS = (".tar", ".tar.idx", "_stats.json", ".parquet")  # Energon's and img2dataset's files beside shards


@dataclass
class Census:
    """`sets` counts records by their suffixes, `loose` counts the files that belong to no record."""

    sets: Counter[tuple[str, ...]] = field(default_factory=Counter)
    loose: int = 0

    def count(self, suffixes: Iterable[str]) -> None:
        """Count one more record; without suffixes there is nothing to count."""
        if found := tuple(sorted(suffixes)):
            self.sets[found] += 1

    def facts(self) -> dict[str, Any]:
        return {"sets": list(self.sets.items()), "loose": self.loose}

    @classmethod
    def of_facts(cls, facts: Any) -> Census:
        sets = Counter({tuple(map(str, suffixes)): int(count) for suffixes, count in facts["sets"]})
        return cls(sets, int(facts["loose"]))


def total(parts: Iterable[Census]) -> Census:
    whole = Census()
    for part in parts:
        whole.sets.update(part.sets)
        whole.loose += part.loose
    return whole


def remarks(census: Census) -> Iterator[str]:
    """Which members records have, and what may be a mistake in how the shards were made."""
    records = census.sets.total()
    members: Counter[str] = Counter()
    for suffixes, count in census.sets.items():
        members.update(dict.fromkeys(suffixes, count))
    if members:
        shares = (f"{'all' if count == records else count} have .{shown(name)}" for name, count in _first(members))
        others = f", {len(members) - _SHOWN} other suffixes" if len(members) > _SHOWN else ""
        yield f"of {records} records read, {', '.join(shares)}{others}"
    if bare := sum(count for suffixes, count in census.sets.items() if not set(suffixes) & set(SUFFIXES)):
        known = " ".join(f".{suffix}" for suffix in SUFFIXES)
        yield f"records without a picture ({known}): {bare}; where a run needs one they are bad records"
    if 0 < (captioned := members[CAPTION]) < records:
        bare = records - captioned
        yield f"records without a caption (.{CAPTION}): {bare}; where a run needs one they are bad records"
    if census.loose:
        yield f"files that belong to no record: {census.loose}; members of records are named like 000123.jpg"


def _first(members: Counter[str]) -> list[tuple[str, int]]:
    return sorted(members.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]


def beside_shards(folder: Path) -> Iterator[str]:
    """The files in a folder of shards that are not read. Folders are not counted, as the index is one itself."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".") and not entry.is_dir()]
    if others := Counter(extension(name) for name in names if not name.endswith(_COMPANIONS)):
        compressed = any(what.startswith(".tar.") or what == ".tgz" for what in others)
        fix = "; unpack compressed shards into plain .tar files" if compressed else ""
        yield f"not used: {most_common(others)}{fix}"
