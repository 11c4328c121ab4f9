"""A shard as a tape: read once from its first byte to its last, from a disk or from a store, patiently."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from data.index_files import open_regular
from data.index_format import is_url
from data.patience import Patience, patiently
from data.tar import BLOCK, LONGEST_END, ShardError, UnreadableError

_CHUNK = 1 << 20
_ZERO = bytes(BLOCK)
T = TypeVar("T")


class Tape:
    """`read(count)` gives at most one tar block at a time, and nothing at the end.

    Given more, tarfile would take in what follows the end marker, and nobody could look at it any more.
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
        """tarfile stopped at the end marker, and that is all that is left: else the shard was cut, or has a hole."""
        stopped_at, rest = self._last, 0
        while found := self.read(BLOCK):
            rest += len(found)
            if found != _ZERO[: len(found)] or rest > LONGEST_END:
                raise UnreadableError(f"{what}: damaged, or a hole of zeros with data after it; fetch it again")
        if stopped_at != _ZERO or rest < BLOCK:
            raise UnreadableError(f"{what}: no end marker (two zero blocks); the file was cut off, fetch it again")


@contextmanager
def open_tape(place: str, timeout_seconds: float, patience: Patience | None = None) -> Iterator[Tape]:
    """UnreadableError, from here or from a read, once patience is at its end."""
    if is_url(place):
        from data.remote import open_shard

        with open_shard(place, timeout_seconds=timeout_seconds, patience=patience) as stream:
            yield Tape(stream.read)
        return
    patience = patience or Patience()

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
    """Opens shard after shard for webdataset, and looks at each afterwards: tarfile ends silently where one is cut."""

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
        """webdataset marks the end of a shard; not before it is a sound one may its last record be taken for whole."""
        for file in files:
            if not file and self._tape is not None:
                self._tape.check_end(self._url)
            yield file

    def note(self, error: ShardError) -> None:
        self._error = self._error or error

    def trouble(self, error: Exception) -> UnreadableError:
        """What went wrong, in the words of who noticed: webdataset adds its own to errors that pass through it."""
        if self._error is not None:
            return UnreadableError(_own_words(self._error))
        return UnreadableError(f"{self._url}: no sound tar archive ({_own_words(error)}); fetch it again")


def _own_words(error: Exception) -> str:
    return str(error.args[0] if error.args else error).partition(" @ <")[0]


class _Watched:
    """What tarfile reads from."""

    def __init__(self, tape: Tape, tapes: Tapes) -> None:
        self._tape, self._tapes = tape, tapes

    def read(self, count: int) -> bytes:
        try:
            return self._tape.read(count)
        except ShardError as error:
            self._tapes.note(UnreadableError(str(error)))
            raise
