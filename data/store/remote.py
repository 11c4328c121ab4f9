"""Shards behind a URL: HTTP(S), S3, Google and Azure stores, read by byte range through obstore.

Credentials and endpoints come from the stores' usual environment variables (AWS_REGION, AWS_ENDPOINT_URL,
AWS_SKIP_SIGNATURE for public buckets ...), the users of web servers from HTTP_USERS. Every answer gives the size, and
usually the ETag, of the whole object; an object that is not the indexed one stops the run, because its records are
other people's. Nothing is retried here: `data.batch.shard_reader` does that, so that all failures are treated alike.

The requested ranges reveal which records were drawn, so requests go only to the named host: redirects to other
hosts or to plain http are refused. Errors reach the console, so they quote only the status of an answer.
"""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.client import responses
from os import PathLike
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from murmuration.data.store.place import HTTP_USERS, ShardError, UnreadableError, is_loopback, require_no_access
from murmuration.data.store.retry import Patience, patiently

TIMEOUT_SECONDS = 30.0
SCHEMES = ("http", "https", "s3", "gs", "az", "azure", "abfs", "abfss")
_STREAM_CHUNK = 8 << 20
_STREAM_AHEAD = 4
_NO_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(0)}
_NOWHERE = "127.0.0.1:0"  # nothing can listen on port 0
# Patterns in obstore's debug text, and the reason reported for each. The text also quotes bodies, headers and ranges.
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
_REASONS = (
    (rf"{_NOWHERE}|kind: Redirect|BadScheme",
     "a redirect to another host, to plain http or in a circle, which is refused; name the URL that it leads to"),
    (r"kind: InvalidData|tls handshake", "TLS: no handshake with the server; does it speak https on this port?"),
    (r"kind: Timeout|TimedOut", "no answer in time"),
    (r"dns error", "the name of the host is not known"),
    (r"ConnectionRefused", "connection refused"),
    (r"ConnectionReset", "connection reset"),
    (r"MissingContentLength",
     "the server sends the range in chunks, without its length; let it send a Content-Length, or take another server"),
    (r"RangeNotSupported|UnexpectedRange|ContentRange", "the server does not send the range of bytes asked for"),
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """The object that a URL stood for when it was indexed; `etag` is None if the server sends none."""

    size: int
    etag: str | None = None

    def same(self, other: Identity) -> bool:
        return self.size == other.size and (None in (self.etag, other.etag) or self.etag == other.etag)


class Stores:
    """One client, with its pool of connections, per host or bucket. Safe to call from several threads."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout = timeout_seconds
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()

    def fetch(self, url: str, start: int, end: int) -> tuple[bytes, Identity]:
        """Bytes [start, end) and the object they belong to; OSError for any failure that a retry may fix."""
        store, path = self._store(url)
        try:
            answer = obstore.get(store, path, options={"range": (start, end)})
            meta = answer.meta
            return bytes(answer.bytes()), Identity(meta["size"], meta["e_tag"])
        except (BaseError, OSError, ValueError) as error:
            raise OSError(_reason(error)) from None

    def identify(self, url: str) -> Identity:
        store, path = self._store(url)
        try:
            meta = obstore.head(store, path)
            return Identity(meta["size"], meta["e_tag"])
        except (BaseError, OSError, ValueError) as error:
            raise OSError(_reason(error)) from None

    def _store(self, url: str) -> tuple[Any, str]:
        require_no_access(url)
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ShardError(f"{url}: {parts.scheme}:// is not supported; use one of {', '.join(SCHEMES)}")
        root = f"{parts.scheme}://{parts.netloc}"
        with self._lock:
            if root not in self._stores:
                options: Any = {
                    "timeout": timedelta(seconds=self._timeout),
                    "connect_timeout": timedelta(seconds=min(5.0, self._timeout)),
                    "allow_http": _plain_http(parts.scheme),
                }
                if parts.scheme in ("http", "https"):
                    options |= _no_other_host(parts.scheme, parts.hostname or "") | _user(root)
                try:
                    self._stores[root] = from_url(root, client_options=options, retry_config=_NO_RETRY)
                except (BaseError, ValueError) as error:
                    reason = str(error).partition("\n")[0][:200]  # about local settings: no server was contacted yet
                    raise ShardError(f"{root}: cannot be used as a store ({reason}); check the URL") from error
        path = parts.path.lstrip("/")
        return self._stores[root], unquote(path) if parts.scheme.startswith("http") else path


def _plain_http(scheme: str) -> bool:
    """Whether the URL or a store's variables ask for plain http: a cluster's own store often has no TLS.

    Otherwise a redirect must not lead to it.
    """
    if scheme in ("http", "https"):
        return scheme == "http"
    ours = {name: text.lower() for name, text in os.environ.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))}
    return any(
        ("ENDPOINT" in name and text.startswith("http://")) or (name.endswith("_ALLOW_HTTP") and text in ("true", "1"))
        for name, text in ours.items()
    )


def _user(root: str) -> dict[str, Any]:
    """Options that name the user whom the environment has for this server."""
    host = urlsplit(root).netloc
    for each in os.environ.get(HTTP_USERS, "").split():
        access, at, place = each.rpartition("@")
        if at and place == host:
            if read_on_the_way(root) is not None:
                raise ShardError(f"{root}: a password would be sent over plain http; use https, or no {HTTP_USERS}")
            told = base64.b64encode(unquote(access).encode()).decode()
            return {"default_headers": {"Authorization": f"Basic {told}"}}
    return {}


def read_on_the_way(url: str) -> str | None:
    """The URL or setting that makes requests readable on the way to the store; None if TLS or loopback protects
    them."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        return f"http://{parts.netloc}" if parts.scheme == "http" and not is_loopback(parts.hostname) else None
    prefix = {"s3": "AWS_", "gs": "GOOGLE_"}.get(parts.scheme, "AZURE_")
    for name, text in sorted(os.environ.items()):
        endpoint = urlsplit(text) if name.startswith(prefix) and "ENDPOINT" in name else None
        if endpoint is not None and endpoint.scheme.lower() == "http" and not is_loopback(endpoint.hostname):
            return f"{name}={text}"
    return None


def _no_other_host(scheme: str, host: str) -> dict[str, str]:
    """Options that block redirects to other hosts. obstore always follows redirects, so all hosts but this one go
    through a proxy that does not exist. A real proxy stays in use; then only redirects to plain http are refused."""
    proxies = getproxies()
    if (proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(host):
        return {}
    return {"proxy_url": f"http://{_NOWHERE}", "proxy_excludes": host}


def _reason(error: Exception) -> str:
    """The reason for an error, as it may reach the console."""
    text = str(error)
    if status := _STATUS.search(text):
        return f"{status[1]} {responses.get(int(status[1]), '')}".rstrip() + " from the server"
    # The text before "inner: " is the request, and its URL may contain anything.
    text = text.rpartition("inner: ")[2]
    if certificate := _CERTIFICATE.search(text):
        return (
            f"TLS: the server's certificate is refused ({certificate[1]}); renew it, or name a file with the authority "
            "that signed it in SSL_CERT_FILE"
        )
    return next((reason for pattern, reason in _REASONS if re.search(pattern, text)), "no usable answer")


class RemoteRanges:
    """A RangeSource over URLs. `expected` gives the object that each URL was when the index was made."""

    def __init__(self, expected: Mapping[str, Identity], timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._expected = expected
        self._stores = Stores(timeout_seconds)

    def read(self, path: str | PathLike[str], start: int, end: int) -> bytes:
        url = str(path)
        raw, found = self._stores.fetch(url, start, end)
        known = self._expected.get(url)
        if known is not None and not known.same(found):
            raise ChangedShardError(
                f"{url}: changed since it was indexed ({found.size} bytes, indexed with {known.size}"
                f"{', another ETag' if found.size == known.size else ''}); restore it or run launch/prepare.py index"
            )
        return raw

    def forget(self, path: str | PathLike[str]) -> None:
        """Nothing is kept per shard."""


class ChangedShardError(ShardError):
    """The shard is not the one that was indexed. A retry cannot help."""


class ShardStream:
    """One remote shard from its first byte to its last, each fetched once, some chunks ahead of the reader."""

    def __init__(self, url: str, identity: Identity, fetch: Callable[[int, int], bytes], pool: ThreadPoolExecutor):
        self.url, self.size, self.etag = url, identity.size, identity.etag
        self._fetch, self._pool = fetch, pool
        self._next = 0
        self._waiting: list[Future[bytes]] = []
        self._have = memoryview(b"")

    def read(self, count: int = -1) -> bytes:
        """Up to `count` bytes, or all remaining bytes for -1; empty at the end, as with files."""
        if count < 0:
            return b"".join(iter(lambda: self.read(_STREAM_CHUNK), b""))
        if not self._have:
            self._refill()
        part, self._have = bytes(self._have[:count]), self._have[count:]
        return part

    def _refill(self) -> None:
        while self._next < self.size and len(self._waiting) < _STREAM_AHEAD:
            end = min(self.size, self._next + _STREAM_CHUNK)
            self._waiting.append(self._pool.submit(self._fetch, self._next, end))
            self._next = end
        if self._waiting:
            self._have = memoryview(self._waiting.pop(0).result())


@contextmanager
def open_shard(
    url: str, *, timeout_seconds: float = TIMEOUT_SECONDS, patience: Patience | None = None
) -> Iterator[ShardStream]:
    """`with open_shard(url) as stream`: `.size`, `.etag`, `.read(n)`. ShardError once `patience` is exhausted."""
    patience = patience or Patience()
    stores = Stores(timeout_seconds)
    mend = "check the URL and the access to it"

    def asked(act: Callable[[], Any]) -> Any:
        try:
            return patiently(act, patience)
        except OSError as error:
            raise UnreadableError(f"{url}: cannot be read ({error}); {mend}") from error

    identity = asked(lambda: stores.identify(url))

    def fetch(start: int, end: int) -> bytes:
        def once() -> bytes:
            raw, found = stores.fetch(url, start, end)
            if not identity.same(found):
                raise ChangedShardError(f"{url}: changed while it was read; wait until its writer is done")
            if len(raw) != end - start:
                raise OSError(f"{len(raw)} bytes came instead of {end - start}")
            return raw

        return asked(once)

    pool = ThreadPoolExecutor(_STREAM_AHEAD, thread_name_prefix="stream")
    try:
        yield ShardStream(url, identity, fetch, pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
