"""The append-only record of what touched private data: one JSON line per act, hash-chained, fsynced, locked.

A line is durable before the act that it announces (`open`), and another is written after it (`commit`). Every line
contains the hash of the previous line and its own, over its exact bytes, so that any changed byte is found, and its
place. Nothing in it depends on private values: set digests are keyed, there are no batch sizes and no times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from murmuration.accounting.durable import flush, naming, sync, try_lock
from murmuration.accounting.errors import BUDGET_SPENT, REFUSED, RunError
from murmuration.accounting.strict_json import MOST_DEPTH, JsonError
from murmuration.accounting.strict_json import parse as parse_json

FORMAT = "murmuration-ledger/1"
GENESIS = "0" * 64
LONG, AS_ZEROS = b"0" * 19, bytes.maketrans(b"123456789", b"0" * 9)
"""The fewest digits of an integer that may not fit in 64 bits, in a line all of whose digits are zeros."""
VARYING = re.compile(rb'":(?<=[a-z]":)(?:"[0-9a-f]{64}"|[0-9]+(?=[,}]))')
"""After a key (in a string, a backslash is before each quote), the values that differ between the lines of two steps:
digests and counts, which JSON can write in one way only."""
STEPS = ("open", "commit")
"""Kinds of the lines that steps write."""


class LedgerError(RunError, RuntimeError):
    """The ledger cannot be trusted or used; the message names the line and the reason."""

    exit_code = REFUSED


class BudgetSpent(RunError, RuntimeError):
    """The next step would pass the planned epsilon."""

    exit_code = BUDGET_SPENT


@dataclass(frozen=True)
class LedgerEntry:
    index: int
    kind: str
    fields: dict[str, Any]
    previous: str
    hash: str
    line: bytes = field(repr=False)
    """All of that, as it stands in the file."""


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def make_entry(index: int, kind: str, fields: dict[str, Any], previous: str) -> LedgerEntry:
    line = _canonical({**fields, "index": index, "kind": kind, "previous": previous, "hash": ""}) + b"\n"
    digest = hashlib.sha256(_hashed(line[:-1], "")).hexdigest()
    line = line.replace(b'"hash":"",', f'"hash":"{digest}",'.encode(), 1)
    return _entry(json.loads(line), line)


def _hashed(raw: bytes, digest: str) -> bytes:
    """What is hashed: the line without its hash, whose name is never the last."""
    return raw.replace(f'"hash":"{digest}",'.encode(errors="replace"), b"", 1)


def _follow(raw: bytes, index: int, previous: str, name: str) -> LedgerEntry:
    where = f"{name} line {index + 1}"
    if not raw.endswith(b"\n"):
        raise LedgerError(f"{where}: the line is torn or its end was changed")
    line, raw = raw, raw[:-1]
    try:
        value, canonical = _value(raw)
    except JsonError as error:
        raise LedgerError(f"{where}: the line {error}; it was changed after it was written") from None
    known = isinstance(value, dict) and {"index", "kind", "previous", "hash"} <= value.keys()
    if not known or not isinstance(value["kind"], str):
        raise LedgerError(f"{where}: not a ledger entry")
    if type(value["index"]) is not int or value["index"] != index or value["previous"] != previous:
        raise LedgerError(f"{where}: does not follow the line before it; a line was removed, added or changed")
    if not canonical or hashlib.sha256(_hashed(raw, value["hash"])).hexdigest() != value["hash"]:
        raise LedgerError(f"{where}: its content does not match its hash, so it was changed after it was written")
    return _entry(value, line)


_like: deque[bytes] = deque(maxlen=2)
"""The last lines found to be in the bytes that we write, without what varies: a step's `open` and `commit`."""


def _value(raw: bytes) -> tuple[Any, bool]:
    """What a line says, and whether in the bytes that we write. Those name no key twice and hold no NaN, so that only
    depth and long integers are left to the strict reader, which would take most of the time of reading a long ledger.

    A line that has the same keys as one that was found to be so, in their order, and the same bytes but for what
    varies, is so, too: mostly nothing needs to be encoded.
    """
    if raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH and LONG not in raw.translate(AS_ZEROS):
        with contextlib.suppress(ValueError):
            value = from_json(raw)
            rest = VARYING.sub(b'":', raw)
            if rest in _like:
                return value, True
            if _canonical(value) == raw:
                _like.append(rest)
                return value, True
    value = parse_json(raw)
    return value, _canonical(value) == raw


def _entry(value: dict[str, Any], line: bytes) -> LedgerEntry:
    pop = value.pop
    return LedgerEntry(pop("index"), pop("kind"), value, pop("previous"), pop("hash"), line)


class Lines:
    """The lines of a ledger. They stay in its file, since there may be millions: in memory are the place where each
    ends, and those that belong to no step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = GENESIS
        self.acts: list[LedgerEntry] = []
        """All lines but those that open or commit a step."""
        self._ends = array("Q")

    def load(self) -> Iterator[LedgerEntry]:
        """Each line of the file, checked and noted; a LedgerError names the first that is not as it was written."""
        with self.path.open("rb") as file:
            for raw in file:
                yield self.follow(raw)

    def follow(self, raw: bytes) -> LedgerEntry:
        """The next line."""
        entry = _follow(raw, len(self), self.head, self.path.name)
        self.note(entry)
        return entry

    def note(self, entry: LedgerEntry) -> None:
        """A line that was appended."""
        self._ends.append(self.size + len(entry.line))
        self.head = entry.hash
        if entry.kind not in STEPS:
            self.acts.append(entry)

    @property
    def size(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> LedgerEntry:
        return next(self.beginning(range(len(self))[place]))

    def __iter__(self) -> Iterator[LedgerEntry]:
        return self.beginning(0)

    def beginning(self, first: int) -> Iterator[LedgerEntry]:
        """The lines from this one on."""
        places = range(len(self))[first:]
        with self.path.open("rb") as file:
            file.seek(self._ends[places.start - 1] if places.start else 0)
            for raw in islice(file, len(places)):
                yield _entry(json.loads(raw), raw)  # it was checked before


class Ledger:
    """The one writer of a ledger file. Holds an exclusive lock until closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.entries = Lines(path)
        self._descriptor = descriptor
        self._broken = False
        self._thread: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None

    @classmethod
    def open(cls, path: Path, wait_seconds: float = 0.0, say: Callable[[str], None] = print) -> Ledger:
        """Creates the file if there is none; drops a torn last line: what it announced has not happened.

        A last line that lacks only its newline is completed, not dropped: what it announced may have happened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(descriptor, path, wait_seconds, say)
            if fresh:
                sync(path.parent)
            ledger = cls(path, descriptor)
            ledger._load()
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    def _load(self) -> None:
        with self.path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    return self._mend(raw)
                self.entries.follow(raw)
        return None

    def _mend(self, tail: bytes) -> None:
        try:
            self.entries.follow(tail + b"\n")
        except LedgerError:
            os.ftruncate(self._descriptor, self.entries.size)
        else:
            os.write(self._descriptor, b"\n")
        if self.entries:  # a ledger's first line describes the run, so an empty one stays empty
            self.append(self.next("recovered", torn_bytes=len(tail)))

    @property
    def head(self) -> str:
        """Hash of the last durable line: anyone who notes it elsewhere may hold the ledger to it."""
        self.settle()
        return self.entries.head

    @property
    def length(self) -> int:
        self.settle()
        return len(self.entries)

    def next(self, kind: str, **fields: Any) -> LedgerEntry:
        """The line that may be appended next."""
        return make_entry(self.length, kind, fields, self.head)

    def append(self, entry: LedgerEntry) -> None:
        """Returns once the line is durable: the caller may then do what it announced."""
        self._write(entry)
        flush(self._descriptor)
        self._broken = False
        self.entries.note(entry)

    def append_soon(self, entry: LedgerEntry) -> None:
        """Returns while the line is on its way to the disk: what it announced may be done once `settle` has returned.
        The next line waits for it, too."""
        self._write(entry)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._syncing = self._thread.submit(flush, self._descriptor)
        self.entries.note(entry)

    def settle(self) -> None:
        """Returns once every line is durable."""
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            syncing.result()
            self._broken = False

    def _write(self, entry: LedgerEntry) -> None:
        assert (entry.index, entry.previous) == (self.length, self.head)
        if self._broken:
            raise LedgerError(f"{self.path} could not be written before; start again, and the ledger will be repaired")
        self._broken = True  # until this line is durable: a line after half a line would be lost with it
        with naming(self._descriptor):
            written = os.write(self._descriptor, entry.line)
        if written != len(entry.line):
            raise LedgerError(f"{self.path}: the disk took only part of a line; free space and start again")

    def close(self) -> None:
        """Lets go of the file and its lock. What was on its way to the disk gets there first."""
        if self._thread is not None:
            self._thread.shutdown()
        os.close(self._descriptor)


def _lock(descriptor: int, path: Path, wait_seconds: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_seconds
    said = False
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            raise LedgerError(
                f"{path} is in use by another process; wait for that run to stop, or give this one another run.dir"
            )
        if not said:
            say(f"waiting up to {wait_seconds:.0f} s for another process to release {path} …")
            said = True
        time.sleep(0.2)
