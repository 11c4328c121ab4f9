"""The files of an index of tar shards and those beside the shards. Nothing here loads torch."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from murmuration.accounting.escaping import sentence
from murmuration.accounting.strict_json import parse
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.build import STAMPS, WORK
from murmuration.data.index.exclusions import FACTS, IDS, Exclusions
from murmuration.data.index.format import MANIFEST, OFFSETS
from murmuration.data.index.open import open_index
from murmuration.data.index.shard_index import Wanted, build
from murmuration.data.store.place import ShardError, UnreadableError
from murmuration.launch import prepare
from tests.fuzz.engine import Broken, Target
from tests.fuzz.mutate_bytes import mutate_bytes
from tests.fuzz.mutate_json import mutate_text
from tests.fuzz.mutate_npy import mutate_npy
from tests.support.tars import tar

COUNTS = (3, 2)
EXCLUDED = (1, 4)


def shard(records: range, form: int = tarfile.PAX_FORMAT, prefix: str = "") -> bytes:
    """Three members a record; a folder, and under PAX a header of its own for a name that is not ASCII."""
    members = {
        number: {"txt": b"a red %d" % number, "cls": b"%d" % number, "json": b'{"label": 1}'} for number in records
    }
    return tar(((f"{prefix}{number:06d}", each) for number, each in members.items()), form)


class IndexWorld(Target):
    """Two shards, what img2dataset and Energon leave beside them, an index with exclusions; one file is the case."""

    file = ""
    wanted = Wanted()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.source = folder / "shards"
        self.source.mkdir()
        self.index = self.source / "index"
        first = 0
        for number, count in enumerate(COUNTS):
            (self.source / f"{number:06d}.tar").write_bytes(shard(range(first, first + count)))
            (self.source / f"{number:06d}_stats.json").write_text(json.dumps({"count": count, "successes": count}))
            first += count
        whole = build(self.source, wanted=self.wanted)
        digest = whole.manifest_digest
        Exclusions(digest, np.array(EXCLUDED, np.uint64), ("held out",), 4, "near duplicates").write(self.index)
        # The stamps of a file that was just written are not trusted; here they are those that a case meets.
        stamps = {}
        for path in sorted(self.source.glob("*.tar")):
            stat = path.stat()
            stamps[str(path.resolve())] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        (self.index / STAMPS).write_text(json.dumps(stamps))
        self.content = {path: path.read_bytes() for path in self.source.rglob("*") if path.is_file()}

    @property
    def path(self) -> Path:
        return self.source / self.file

    def lay(self, data: bytes) -> None:
        """Everything as it was, but for the case. The shards are left alone, or their stamps would change."""
        for path in self.source.rglob("*"):
            if path.is_file() and path not in self.content:
                path.unlink()
        for path, content in self.content.items():
            if path.suffix != ".tar":
                path.write_bytes(content)
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_bytes(data)

    def seeds(self) -> list[bytes]:
        return [self.content[self.path]]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_text(chance, data, other)

    def read(self) -> int:
        """As training opens an index and reads every record of it."""
        return answered(self._read)

    def _read(self) -> int:
        index = open_index(self.source)
        index.check_unchanged()
        reader = ShardReader(index, tries=1, pause=0)
        for record in range(min(index.records, 10)):
            if not index.left_out(record):
                reader.read(record)
        return 0

    def prepared(self, *options: str) -> int:
        """By the command; what it complains of must have a place, which no bare error of Python names."""
        return said_where(lambda: prepare.main(["index", str(self.source), "--workers", "1", *options]), self.folder)


def answered(act: Callable[[], int]) -> int:
    """As train/commands/exit_codes.py answers, which would load torch."""
    try:
        return act()
    except (ShardError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 75 if isinstance(error, UnreadableError) else 2


def said_where(act: Callable[[], int], place: Path) -> int:
    at = sys.stderr.tell() if sys.stderr.seekable() else 0
    code = act()
    sys.stderr.flush()
    complaint = sys.stderr.buffer.getvalue()[at:].decode()  # pyright: ignore[reportAttributeAccessIssue]
    if code == 2 and str(place) not in complaint and "shard" not in complaint and ".tar" not in complaint:
        raise Broken("a refusal that does not say what it is about")
    return code


class Manifests(IndexWorld):
    file = f"index/{MANIFEST}"

    def act(self, data: bytes) -> int:
        self.lay(data)
        for name in (IDS, FACTS):  # whose digest is that of the manifest
            (self.index / name).unlink()
        code = self.read()
        self.lay(data)
        return max(code, self.prepared())


class KnownShards(IndexWorld):
    """What is remembered of shards that were scanned: stamps, and notes of a command that was stopped."""

    file = f"index/{STAMPS}"
    here = b"@SHARDS@"
    """Stands in a case for the folder, whose name is another one each time, as numbers below stand for ctimes."""

    def _lasting(self, data: bytes, back: bool = False) -> bytes:
        pairs = [(str(self.source.resolve()).encode(), self.here)]
        for number, path in enumerate(sorted(self.source.glob("*.tar"))):
            pairs.append((str(path.stat().st_ctime_ns).encode(), b"40000000000%d" % number))
            pairs.append((str(path.stat().st_mtime_ns).encode(), b"30000000000%d" % number))
        for one, other in pairs:
            data = data.replace(other, one) if back else data.replace(one, other)
        return data

    def seeds(self) -> list[bytes]:
        notes = []
        for number in range(len(COUNTS)):
            path = (self.source / f"{number:06d}.tar").resolve()
            entry = json.loads(self.content[self.index / MANIFEST])["shards"][number]
            offsets = np.load(self.index / OFFSETS)
            part = offsets[: COUNTS[0] + 1] if number == 0 else offsets[COUNTS[0] + 1 :]
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            head = {"place": str(path), "stamp": stamp, "shard": {"etag": "", **entry}}
            notes.append(json.dumps(head).encode() + b"\n" + part.astype("<u8").tobytes())
        return [self._lasting(data) for data in (self.content[self.path], *notes)]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        head, line, tail = data.partition(b"\n")
        return mutate_text(chance, head, other) + line + (tail if chance.random() < 0.9 else mutate_bytes(chance, tail))

    def act(self, data: bytes) -> int:
        data = self._lasting(data, back=True)
        if b'"place"' not in data:
            self.lay(data)
            return self.prepared()
        self.lay(self.content[self.path])
        (self.index / STAMPS).unlink()
        work = self.index / WORK
        work.mkdir(exist_ok=True)
        for path in sorted(self.source.glob("*.tar")):
            place = json.dumps(str(path.resolve()))
            if place.encode() in data:
                (work / hashlib.sha256(place.encode()).hexdigest()[:40]).write_bytes(data)
        return self.prepared()


class Stats(IndexWorld):
    file = "000000_stats.json"

    def act(self, data: bytes) -> int:
        self.lay(data)
        (self.index / STAMPS).unlink()
        code = self.prepared()
        try:
            counted = parse(data)["successes"]
        except (ValueError, KeyError, TypeError):
            return code  # what is no count, an ambiguous one included, is told and not compared
        if code == 0 and type(counted) is int and 0 <= counted < 1 << 63 and counted != COUNTS[0]:
            raise Broken("a shard with fewer records than were counted is accepted")
        return code


class Offsets(IndexWorld):
    file = f"index/{OFFSETS}"

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_npy(chance, data, other)

    def act(self, data: bytes) -> int:
        self.lay(data)
        for name in (IDS, FACTS):
            (self.index / name).unlink()
        code = self.read()
        self.lay(data)
        return max(code, self.prepared())


class ExclusionFacts(IndexWorld):
    file = f"index/{FACTS}"

    def act(self, data: bytes) -> int:
        self.lay(data)
        return self.read()


class ExcludedIds(IndexWorld):
    """The facts beside them are made to fit, where the ids can be read at all."""

    file = f"index/{IDS}"

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_npy(chance, data, other)

    def act(self, data: bytes) -> int:
        self.lay(data)
        facts = json.loads(self.content[self.index / FACTS])
        for start in (64, 128):
            raw = data[start:]
            facts["ids_sha256"] = hashlib.sha256(raw).hexdigest()
            facts["records"] = len(raw) // 8
            (self.index / FACTS).write_text(json.dumps(facts))
            code = self.read()
            if code == 0:
                break
        return code
