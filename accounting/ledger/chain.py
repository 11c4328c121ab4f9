"""The append-only record of what touched private data: one JSON line per act, hash-chained, fsynced, locked.

A line is durable before the act that it announces (`open`), and another is written after it (`commit`). Every line
contains the hash of the previous line and its own, over its exact bytes, so that any changed byte is found, and its
place. Nothing in it depends on private values: set digests are keyed, there are no batch sizes and no times.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.accounting.durable import sync, try_lock
from murmuration.accounting.errors import REFUSED, RunError
from murmuration.accounting.strict_json import JsonError
from murmuration.accounting.strict_json import parse as parse_json

FORMAT = "murmuration-ledger/1"
GENESIS = "0" * 64


class LedgerError(RunError, RuntimeError):
    """The ledger cannot be trusted or used; the message names the line and the reason."""

    exit_code = REFUSED


@dataclass(frozen=True)
class LedgerEntry:
    index: int
    kind: str
    fields: dict[str, Any]
    previous: str
    hash: str

    def line(self) -> bytes:
        body = _body(self.index, self.kind, self.fields, self.previous)
        return _canonical({**body, "hash": self.hash}) + b"\n"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _body(index: int, kind: str, fields: dict[str, Any], previous: str) -> dict[str, Any]:
    return {**fields, "index": index, "kind": kind, "previous": previous}


def make_entry(index: int, kind: str, fields: dict[str, Any], previous: str) -> LedgerEntry:
    digest = hashlib.sha256(_canonical(_body(index, kind, fields, previous))).hexdigest()
    return LedgerEntry(index, kind, fields, previous, digest)


def parse(content: bytes, name: str = "ledger.jsonl") -> list[LedgerEntry]:
    """Every entry, or a LedgerError that names the first line that is not as it was written."""
    entries: list[LedgerEntry] = []
    previous = GENESIS
    lines = content.split(b"\n")
    if lines.pop() != b"":
        raise LedgerError(f"{name} line {len(lines) + 1}: the line is torn or its end was changed")
    for index, raw in enumerate(lines):
        where = f"{name} line {index + 1}"
        try:
            value = parse_json(raw)
        except JsonError as error:
            raise LedgerError(f"{where}: the line {error}; it was changed after it was written") from None
        known = isinstance(value, dict) and {"index", "kind", "previous", "hash"} <= value.keys()
        if not known or not isinstance(value["kind"], str):
            raise LedgerError(f"{where}: not a ledger entry")
        fields = {k: v for k, v in value.items() if k not in ("index", "kind", "previous", "hash")}
        if value["index"] != index or value["previous"] != previous:
            raise LedgerError(f"{where}: does not follow the line before it; a line was removed, added or changed")
        entry = make_entry(index, value["kind"], fields, previous)
        if entry.hash != value["hash"] or entry.line() != raw + b"\n":
            raise LedgerError(f"{where}: its content does not match its hash, so it was changed after it was written")
        entries.append(entry)
        previous = entry.hash
    return entries


class Ledger:
    """The one writer of a ledger file. Holds an exclusive lock until closed."""

    def __init__(self, path: Path, entries: list[LedgerEntry], descriptor: int) -> None:
        self.path = path
        self.entries = entries
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
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            entries = parse(whole, path.name)
            ledger = cls(path, entries, descriptor)
            if len(whole) != len(content):
                ledger._mend(content[len(whole) :], len(whole))
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    def _mend(self, tail: bytes, whole: int) -> None:
        try:
            completed = parse(b"".join(entry.line() for entry in self.entries) + tail + b"\n", self.path.name)
        except LedgerError:
            os.ftruncate(self._descriptor, whole)
        else:
            os.write(self._descriptor, b"\n")
            self.entries = completed
        if self.entries:  # a ledger's first line describes the run, so an empty one stays empty
            self.append("recovered", torn_bytes=len(tail))

    @property
    def head(self) -> str:
        """Hash of the last durable line: anyone who notes it elsewhere may hold the ledger to it."""
        self.settle()
        return self.entries[-1].hash if self.entries else GENESIS

    @property
    def length(self) -> int:
        self.settle()
        return len(self.entries)

    def append(self, kind: str, **fields: Any) -> LedgerEntry:
        """Returns once the line is durable: the caller may then do what it announced."""
        entry = self._write(kind, fields)
        os.fsync(self._descriptor)
        self._broken = False
        self.entries.append(entry)
        return entry

    def append_soon(self, kind: str, **fields: Any) -> LedgerEntry:
        """Returns while the line is on its way to the disk: what it announced may be done once `settle` has returned.
        The next line waits for it, too."""
        entry = self._write(kind, fields)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._syncing = self._thread.submit(os.fsync, self._descriptor)
        self.entries.append(entry)
        return entry

    def settle(self) -> None:
        """Returns once every line is durable."""
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            syncing.result()
            self._broken = False

    def _write(self, kind: str, fields: dict[str, Any]) -> LedgerEntry:
        entry = make_entry(self.length, kind, json.loads(_canonical(fields)), self.head)
        line = entry.line()
        if self._broken:
            raise LedgerError(f"{self.path} could not be written before; start again, and the ledger will be repaired")
        self._broken = True  # until this line is durable: a line after half a line would be lost with it
        if os.write(self._descriptor, line) != len(line):
            raise LedgerError(f"{self.path}: the disk took only part of a line; free space and start again")
        return entry

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
