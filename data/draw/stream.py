"""Public shards streamed by webdataset itself, in shuffled epochs and without an index; exactly resumable.

The shards are dealt out to lanes, as webdataset splits them by node. A lane is an endless stream: its shards in
shuffled order, their records through a shuffle buffer, then the same with another order, and so on. Step t takes
fixed places of every lane, so its records depend on key, shards, lanes and buffer, but not on ranks, workers or
restarts, and only the step number has to be saved. A record comes once per epoch of its lane.

A stream cannot be entered in the middle. To continue at step t, a lane is read from its first byte, without decoding:
to its place if that lies in the first epoch; otherwise to the end of that epoch, which shows that it has N records, and
then through the epoch that contains the place. This costs at most two passes over the shards, however long the run was.

Not for private phases: a shuffled stream is no Poisson sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from webdataset import filters, pipeline, shardlists, tariterators

from murmuration.data.decode.fields import ClassFilter
from murmuration.data.draw.node_placement import Placement
from murmuration.data.index.scan import scan
from murmuration.data.index.shard_index import expand
from murmuration.data.store.index_files import open_regular
from murmuration.data.store.place import Place, Shard, ShardError, UnreadableError, is_url
from murmuration.data.store.remote import TIMEOUT_SECONDS
from murmuration.data.store.retry import Patience, patiently
from murmuration.data.store.tar import BLOCK, LONGEST_END

# A shard as a tape: read once from its first byte to its last, from a disk or from a store, patiently.

_CHUNK = 1 << 20
_ZERO = bytes(BLOCK)
T = TypeVar("T")


class Tape:
    """`read(count)` returns at most one tar block at a time, and nothing at the end.

    Given more, tarfile would consume what follows the end marker, and nobody could check it any more.
    """

    def __init__(self, more: Callable[[int], bytes]) -> None:
        self._more = more
        self._held, self._at = b"", 0
        self._last = b""

    def read(self, count: int) -> bytes:
        if self._at == len(self._held):
            self._held, self._at = self._more(_CHUNK), 0
        found = self._held[self._at : self._at + min(count, BLOCK)]
        self._at += len(found)
        self._last = found or self._last
        return found

    def check_end(self, what: str) -> None:
        """Requires that tarfile stopped at the end marker and only zeros are left: else it was cut or has a hole."""
        stopped_at, rest = self._last, 0
        while found := self.read(BLOCK):
            rest += len(found)
            if found != _ZERO[: len(found)] or rest > LONGEST_END:
                raise UnreadableError(f"{what}: damaged, or a hole of zeros with data after it; fetch it again")
        if stopped_at != _ZERO or rest < BLOCK:
            raise UnreadableError(f"{what}: no end marker (two zero blocks); the file was cut off, fetch it again")


@contextmanager
def open_tape(place: str, timeout_seconds: float) -> Iterator[Tape]:
    """Raises UnreadableError, here or from a read, once patience is exhausted."""
    if is_url(place):
        from murmuration.data.store.remote import open_shard

        with open_shard(place, timeout_seconds=timeout_seconds) as stream:
            yield Tape(stream.read)
        return
    patience = Patience()

    def asked(act: Callable[[], T]) -> T:
        try:
            return patiently(act, patience)
        except OSError as error:
            raise UnreadableError(f"{place}: cannot be read ({error.strerror or error}); restore access") from error

    descriptor = asked(lambda: open_regular(Path(place)))
    at = 0

    def more(count: int) -> bytes:
        nonlocal at
        found = asked(lambda: os.pread(descriptor, count, at))
        at += len(found)
        return found

    try:
        yield Tape(more)
    finally:
        os.close(descriptor)


class Tapes:
    """Opens shard after shard for webdataset and checks the end of each: tarfile stops silently where one is cut."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._url = ""
        self._tape: Tape | None = None
        self._error: ShardError | None = None

    def open_each(self, sources: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for source in sources:
            self._url = source["url"]
            try:
                with open_tape(self._url, self._timeout) as self._tape:
                    yield {"url": self._url, "stream": _Watched(self._tape, self)}
            except ShardError as error:
                self.note(error)
                raise

    def check_ends(self, files: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """webdataset marks the end of a shard; only if that end is sound may its last record be taken as complete."""
        for file in files:
            if not file and self._tape is not None:
                self._tape.check_end(self._url)
            yield file

    def note(self, error: ShardError) -> None:
        self._error = self._error or error

    def trouble(self, error: Exception) -> UnreadableError:
        """The error in its original words: webdataset adds its own to errors that pass through it."""
        if self._error is not None:
            return UnreadableError(_own_words(self._error))
        return UnreadableError(f"{self._url}: not a sound tar archive ({_own_words(error)}); fetch it again")


def _own_words(error: Exception) -> str:
    return str(error.args[0] if error.args else error).partition(" @ <")[0]


class _Watched:
    """The file object that tarfile reads from."""

    def __init__(self, tape: Tape, tapes: Tapes) -> None:
        self._tape, self._tapes = tape, tapes

    def read(self, count: int) -> bytes:
        try:
            return self._tape.read(count)
        except ShardError as error:
            self._tapes.note(UnreadableError(str(error)))
            raise


PLACES = 1 << 40  # record number = lane · PLACES + place in the lane
Members = dict[str, bytes]


class StreamIndex:
    """What is known before a step: the shards and how they are dealt out, but not how many records they contain."""

    folder = Path()  # there is no index folder
    shards: tuple[Shard, ...] = ()
    excluded_digest = ""

    def __init__(self, path: str, lanes: int, shuffle: int, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.places = expand(path)
        if len(self.places) < lanes:
            raise ShardError(f"{path}: {len(self.places)} shards cannot feed {lanes} lanes; set lanes to at most that")
        if len(set(self.places)) < len(self.places):
            raise ShardError(f"{path}: names a shard twice; its records would come twice in an epoch")
        for place in self.places:
            if not str(place).endswith(".tar"):
                raise ShardError(f"{place}: only plain .tar files are streamed; unpack it, or name the right files")
        self.lanes, self.shuffle, self.timeout_seconds = lanes, shuffle, timeout_seconds
        self.records = lanes * PLACES  # the range of record numbers
        self.sizes = [_size(place) for place in self.places]
        self.filter: ClassFilter | None = None

    def without(self, classes: ClassFilter) -> StreamIndex:
        """The same stream without the records of some classes, as if the shards did not contain them."""
        other = copy(self)
        other.filter = classes
        return other

    @property
    def manifest_digest(self) -> str:
        """Names, sizes (of local files) and what decides the order. Contents are not pinned: that takes an index."""
        names = [Path(str(place)).name for place in self.places]
        rule = ["murmuration stream", 1, self.lanes, self.shuffle, names, self.sizes]
        return hashlib.sha256(json.dumps(rule).encode()).hexdigest()

    def left_out(self, record: int) -> bool:
        return False

    def locate(self, record: int) -> tuple[Place, int, int]:
        return Path(self.owner(record)), record, record + 1

    def owner(self, record: int) -> str:
        return f"lane {record // PLACES}"

    def members(self, record: int, raw: bytes) -> Members:
        raise ShardError("records of a stream have no place of their own; read them one after the other")

    def check_unchanged(self, *, contents: bool = False) -> None:
        for place, size in zip(self.places, self.sizes, strict=True):
            if _size(place) != size:
                raise ShardError(f"{place}: changed since the run began; restore it")

    def shared_with(self, others: Sequence[Shard], at: frozenset[str] = frozenset()) -> Shard | None:
        """The first of the shards that is one of `others`, which are stored `at` these places. Files of equal size are
        read and compared; a shard behind a URL is known by its URL."""
        known = {shard.bytes for shard in others if shard.records}
        for place, size in zip(self.places, self.sizes, strict=True):
            if str(place) in at:
                return Shard(str(place), 0, size or 0, "", "")
            if size is None or size not in known:
                continue
            try:
                found = scan(place)
            except ShardError:  # an index contains only whole shards
                continue
            twin = Shard(str(place), found.records, found.bytes, found.sha256, found.offsets_sha256)
            if any(shard.sha256 == twin.sha256 for shard in others):
                return twin
        return None

    def begin(self, key: bytes, batch: int) -> Stream:
        return Stream(self, key, batch)


class Stream(StreamIndex):
    """The index of a running phase, whose records can be read: by several threads, ideally in the order of numbers."""

    def __init__(self, shards: StreamIndex, key: bytes, batch: int) -> None:
        self.__dict__.update(shards.__dict__)
        self._lanes = [
            Lane(
                shards.places[lane :: shards.lanes], key, lane, shards.shuffle, portion, shards.timeout_seconds,
                shards.filter,
            )
            for lane, portion in enumerate(portions(batch, shards.lanes))
        ]  # fmt: skip

    def read(self, record: int) -> Members:
        lane, place = divmod(record, PLACES)
        return self._lanes[lane].read(place)


def portions(batch: int, lanes: int) -> list[int]:
    """How many records of a step come from each lane."""
    return [batch // lanes + (lane < batch % lanes) for lane in range(lanes)]


@dataclass(frozen=True)
class StreamEpochs:
    """`ids(step)` of endless epochs, with steps counted from zero; every step has exactly `batch` records."""

    lanes: int
    batch: int

    def ids(self, step: int) -> np.ndarray:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        places = [
            np.arange(step * portion, (step + 1) * portion, dtype=np.int64) + lane * PLACES
            for lane, portion in enumerate(portions(self.batch, self.lanes))
        ]
        return np.concatenate(places)


def lane_placement(lanes: int, world: int) -> Placement:
    """Puts each lane on one rank; otherwise two ranks would stream the same bytes."""
    if world > lanes:
        raise ShardError(f"{lanes} lanes cannot feed {world} ranks; use at least as many lanes and shards as ranks")
    owners = np.arange(lanes, dtype=np.int64) * world // lanes
    return Placement((np.arange(lanes, dtype=np.int64) + 1) * PLACES, owners, tuple((rank,) for rank in range(world)))


class Lane:
    """`read(place)` is cheap from one place to the next, expensive backwards. Records skipped nearby are kept, because
    threads do not ask in order."""

    def __init__(
        self, places: Sequence[Place], key: bytes, number: int, shuffle: int, portion: int, timeout_seconds: float,
        without: ClassFilter | None = None,
    ) -> None:  # fmt: skip
        self._urls, self._number, self._shuffle = [str(place) for place in places], number, shuffle
        self._key, self._portion, self._timeout = key, max(1, portion), timeout_seconds
        self._filter = without
        self._lock = threading.Lock()
        self._waiting: dict[int, Members] = {}
        self._coming: Iterator[Members] | None = None
        self._epoch = self._next = 0
        self._length: int | None = None

    def read(self, place: int) -> Members:
        with self._lock:
            if place not in self._waiting:
                self._go_to(place)
            found = self._waiting.pop(place)
            # Two steps are in flight at a time; older records were asked for or never will be.
            for old in [kept for kept in self._waiting if kept < place - 3 * self._portion]:
                del self._waiting[old]
            return found

    def _go_to(self, place: int) -> None:
        floor = max(0, place // self._portion - 1) * self._portion
        if self._coming is None or place < self._next or self._beyond(floor):
            self._waiting.clear()
            self._open(0 if self._length is None else floor // self._length)
        while self._next <= place:
            assert self._coming is not None
            members = next(self._coming, None)
            if members is None:
                self._end_epoch(floor)
                continue
            if self._next >= floor:
                self._waiting[self._next] = members
            self._next += 1

    def _beyond(self, floor: int) -> bool:
        """Whether whole epochs lie between the current place and `floor`; they need not be read."""
        return self._length is not None and floor // self._length > self._epoch + 1

    def _end_epoch(self, floor: int) -> None:
        found = self._next - self._epoch * (self._length or 0)
        if not found:
            raise UnreadableError(f"{self._urls[0]}: no record in it or in the other shards of its lane")
        if self._length not in (None, found):
            raise UnreadableError(
                f"{self._urls[0]}: it or another shard of its lane changed while it was streamed ({found} records "
                f"instead of {self._length}); restore it"
            )
        self._length = found
        self._open(max(self._epoch + 1, floor // found))

    def _open(self, epoch: int) -> None:
        self._epoch, self._next = epoch, epoch * (self._length or 0)
        self._coming = self._records(epoch)

    def _records(self, epoch: int) -> Iterator[Members]:
        """One epoch, read by webdataset."""
        tapes = Tapes(self._timeout)
        order, mix = (random.Random(self._seed(epoch, use)) for use in (0, 1))
        shards, buffer = len(self._urls), self._shuffle
        samples = pipeline.DataPipeline(
            shardlists.SimpleShardList(self._urls),
            filters.shuffle(shards, initial=shards, rng=order),
            tapes.open_each,
            tariterators.tar_file_expander,
            tapes.check_ends,
            tariterators.group_by_keys,
            filters.shuffle(buffer, initial=buffer, rng=mix),
        )
        try:
            for sample in samples:
                members = {name: value for name, value in sample.items() if not name.startswith("__")}
                if self._filter is None or self._filter.keeps(members):
                    yield members
        except Exception as error:
            self._coming = None
            raise tapes.trouble(error) from error

    def _seed(self, epoch: int, use: int) -> int:
        name = struct.pack("<QQQ", self._number, epoch, use)
        return int.from_bytes(hashlib.blake2b(name, key=self._key, digest_size=16, person=b"mur-stream").digest())


def _size(place: Place) -> int | None:
    """Size of a local file; None for a URL."""
    if not isinstance(place, Path):
        return None
    try:
        return place.stat().st_size
    except OSError as error:
        raise ShardError(f"{place}: cannot be read ({error.strerror}); check the path") from error
