"""Where records are stored, what identifies a set of them, and the errors of either."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from murmuration.accounting.errors import RESUME_ME, RunError


class ShardError(RunError, ValueError):
    """A shard, or the index over it, cannot be trusted. The run stops: this is never one bad record."""


class UnreadableError(ShardError):
    """Bytes could not be read, or were damaged, even after all retries. Nothing in the run is wrong: once the store or
    the machine is repaired, the same command resumes it."""

    exit_code = RESUME_ME


Place = Path | str  # of a shard or a file: a path, or a URL as written


@dataclass(frozen=True, slots=True)
class Shard:
    """One line of the manifest: a tar shard, or one class of a folder of images."""

    name: str
    records: int
    bytes: int
    sha256: str  # of the content
    offsets_sha256: str = ""  # of this shard's part of offsets.npy
    etag: str = ""  # of a remote shard; not part of the digest, because a copy has a different one


def is_url(place: str | os.PathLike[str]) -> bool:
    return isinstance(place, str) and "://" in place


_ACCESS = re.compile(r"(?<=://)\S*@|([?#])\S*")
HTTP_USERS = "MURMURATION_HTTP_USERS"
"""The variable for users of web servers: USER:PASSWORD@HOST, and more of them behind spaces."""


def without_access(text: str) -> str:
    """The text without users and passwords of addresses, and without what follows the question mark of a signed one."""
    return _ACCESS.sub(r"\1", text)


def require_no_access(url: str) -> None:
    """Refuse a URL that carries somebody's access: an index would keep it, and messages would print it."""
    shown = without_access(url)
    try:
        parts, _ = urlsplit(url), urlsplit(url).port  # what follows a slash in a password is taken for a path
        # A container of Azure stands before its account: abfss://container@account.
        named = parts.password is not None or (parts.scheme in ("http", "https") and parts.username is not None)
    except ValueError:  # whose text may quote a password
        raise ShardError(f"{shown}: not a URL; correct it") from None
    if named:
        raise ShardError(
            f"{shown}: the URL names a user or a password, which the index would keep and messages would print; leave "
            f"it out, and give it as USER:PASSWORD@HOST in the variable {HTTP_USERS} or in those of the store (AWS_…)"
        )
    if parts.query or parts.fragment:
        raise ShardError(f"{shown}: the URL of a shard has no ? or #, which often carry somebody's access; drop it")


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def join(root: Place, name: str) -> Place:
    return root / name if isinstance(root, Path) else f"{root}/{name}"


class RecordIndex(Protocol):
    """What reading, sampling and training need of an index, whatever the form of its records."""

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
        """The digest of the list of excluded records; empty if none is excluded."""
        ...

    def left_out(self, record: int) -> bool:
        """Whether the record's slot stays empty: drawn like any other, never read, contributing nothing."""
        ...

    def locate(self, record: int) -> tuple[Place, int, int]:
        """The location of one record: place, first byte, end."""
        ...

    def owner(self, record: int) -> str:
        """The shard or class of a record. Messages may name only this, because which record was drawn is private."""
        ...

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        """The record's bytes, split by lower-case suffix; ShardError if they are not that record."""
        ...

    def check_unchanged(self, *, contents: bool = False) -> None: ...
