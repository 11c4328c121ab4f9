"""Where bytes lie, what identifies a set of records, and what may be wrong with either."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from murmuration.accounting.errors import RESUME_ME, RunError


class ShardError(RunError, ValueError):
    """A shard, or the index over it, cannot be trusted. The run stops: this is never one bad record."""


class UnreadableError(ShardError):
    """Bytes did not come, or came damaged, however patiently they were asked for. Nothing in the run is wrong: once
    the store or the machine is mended, the same command goes on."""

    exit_code = RESUME_ME


Place = Path | str  # of a shard or a file: a path, or a URL as it is written


@dataclass(frozen=True, slots=True)
class Shard:
    """One line of the manifest: a tar shard, or one class of a folder of images."""

    name: str
    records: int
    bytes: int
    sha256: str  # of the content; empty where the index was made without reading it
    offsets_sha256: str = ""  # of this shard's part of offsets.npy
    etag: str = ""  # of a remote shard; no part of the digest, because a copy has another one


def is_url(place: str | os.PathLike[str]) -> bool:
    return isinstance(place, str) and "://" in place


def join(root: Place, name: str) -> Place:
    return root / name if isinstance(root, Path) else f"{root}/{name}"


class RecordIndex(Protocol):
    """What reading, sampling and training need of an index, whatever its records are made of."""

    @property
    def folder(self) -> Path: ...

    @property
    def shards(self) -> Sequence[Shard]: ...

    @property
    def records(self) -> int: ...

    @property
    def manifest_digest(self) -> str: ...

    @property
    def excluded_digest(self) -> str:
        """Of the list of records that are left out; empty where none is."""
        ...

    def left_out(self, record: int) -> bool:
        """Whether the record's slot stays empty: drawn like any other, never read, contributing nothing."""
        ...

    def locate(self, record: int) -> tuple[Place, int, int]:
        """Where one record lies: place, first byte, end."""
        ...

    def owner(self, record: int) -> str:
        """The shard or class of a record: all that a message may name, because which record was drawn is private."""
        ...

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        """The bytes that lie there, taken apart by lower-case suffix; ShardError where they are no such record."""
        ...

    def check_unchanged(self, *, contents: bool = False) -> None: ...
