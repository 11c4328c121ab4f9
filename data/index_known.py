"""What earlier runs of the index builder found out about shards, and whether it still holds.

Two places: the work area, with one file per shard scanned since the last complete index, and that index itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from data.index_census import Census
from data.index_files import cannot_write, index_file, open_npy, parse_json, read_json
from data.index_format import OFFSETS, SHARDS, Place, Shard, join, read_manifest, shard_of
from data.index_scan import Scan, Stamp, stamp_of
from data.tar import ShardError

STAMPS = "stamps.json"
_ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Noted:
    """A shard's line of the manifest. Its offsets stay on disk: in the work area, or from `row` of the old index."""

    shard: Shard
    stamp: Stamp | None
    row: int | None = None
    census: Census | None = None  # of a shard that was read since the last complete index


@dataclass(frozen=True)
class WorkArea:
    """One file per scanned shard, complete or not there; what worker processes write to."""

    folder: Path
    root: Place

    def place(self, name: str) -> Place:
        return join(self.root, name)

    def note(self, name: str, scan: Scan) -> Noted:
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        shard = Shard(name, scan.records, scan.bytes, scan.sha256, scan.offsets_sha256, scan.etag)
        head = {"place": str(self.place(name)), "stamp": scan.stamp, "shard": asdict(shard)}
        if scan.census is not None:
            head["census"] = scan.census.facts()
        # Readable by its owner alone: which members records have is nobody else's business.
        with index_file(self._file(name), 0o600) as file:
            file.write(json.dumps(head).encode() + b"\n" + scan.offsets.tobytes())
        return Noted(shard, scan.stamp, census=scan.census)

    def read(self, name: str) -> tuple[Noted, np.ndarray] | None:
        """None for what is not there, not whole, or about another place."""
        try:
            head, _, raw = self._file(name).read_bytes().partition(b"\n")
            facts = parse_json(head)
            shard = shard_of(facts["shard"])
            if facts["place"] != str(self.place(name)) or hashlib.sha256(raw).hexdigest() != shard.offsets_sha256:
                return None
            offsets = np.frombuffer(raw, dtype="<u8")
            if len(offsets) != shard.records + 1:
                return None
            stamp = tuple(facts["stamp"]) if facts["stamp"] else None
            census = Census.of_facts(facts["census"]) if "census" in facts else None
            return Noted(shard, stamp, census=census), offsets
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self.folder / hashlib.sha256(json.dumps(str(self.place(name))).encode()).hexdigest()[:40]


class Known:
    """Answers from both places, as far as the shard still looks as it did when it was scanned."""

    def __init__(self, target: Path, work: WorkArea) -> None:
        self._work = work
        self._indexed: dict[str, Noted] = {}
        self._rows: np.ndarray | None = None
        try:
            manifest = read_manifest(target)
            stamps = read_json(target / STAMPS)
            rows = open_npy(target / OFFSETS)
        except (ShardError, OSError, ValueError):
            return
        if manifest.kind != SHARDS or rows.dtype != np.dtype("<u8") or rows.ndim != 1 or not isinstance(stamps, dict):
            return
        self._rows = rows
        root = Path(os.path.realpath(manifest.root)) if isinstance(manifest.root, Path) else manifest.root
        row = 0
        for shard in manifest.shards:
            place = str(join(root, shard.name))
            if isinstance(stamps.get(place), list):
                self._indexed[place] = Noted(shard, tuple(stamps[place]), row)
            row += shard.records + 1

    def look_up(self, names: Sequence[str], *, without_content: bool) -> list[Noted | None]:
        """What is known of each shard, None for what has to be scanned; `without_content` accepts unread ones."""
        if all(isinstance(self._work.place(name), Path) for name in names):
            return [self._find(name, without_content) for name in names]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            return list(pool.map(lambda name: self._find(name, without_content), names))

    def offsets(self, noted: Noted) -> np.ndarray:
        if noted.row is None:
            found = self._work.read(noted.shard.name)
            if found is None or found[0].shard != noted.shard:
                raise ShardError(f"{self._work.folder}: changed while the index was written; give the command again")
            return found[1]
        assert self._rows is not None
        return np.asarray(self._rows[noted.row : noted.row + noted.shard.records + 1])

    def _find(self, name: str, without_content: bool) -> Noted | None:
        found = self._work.read(name)
        indexed = self._indexed.get(str(self._work.place(name)))
        candidates = [found[0] if found else None, indexed if indexed and self._whole(indexed) else None]
        usable = [each for each in candidates if each and each.stamp and (each.shard.sha256 or without_content)]
        now = self._stamp(name) if usable else None
        fitting = next((each for each in usable if each.stamp == now), None)
        if fitting is None:
            return None
        # In the old index the shard may have been named from another root.
        shard = replace(fitting.shard, name=name)
        return replace(fitting, shard=shard)

    def _whole(self, noted: Noted) -> bool:
        return hashlib.sha256(self.offsets(noted).tobytes()).hexdigest() == noted.shard.offsets_sha256

    def _stamp(self, name: str) -> Stamp | None:
        """What the shard looks like now; None where it cannot be asked, so that scanning says what is wrong."""
        place = self._work.place(name)
        try:
            if isinstance(place, Path):
                return stamp_of(place.stat())
            from data.remote import open_shard

            with open_shard(place) as stream:
                return (stream.size, stream.etag) if stream.etag else None
        except (OSError, ShardError):
            return None
