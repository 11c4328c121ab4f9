"""A loopback HTTP/1.1 server of byte ranges, with latency and with the ways in which real servers fail.

The tests run it in a thread and choose faults per request; the benchmark runs it as a process of its own:
python tests/support/range_server.py FOLDER --latency 0.025
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

Fault = Literal["ok", "500", "503", "404", "reset", "stall", "truncate", "no-range", "half-close"]
_USER = re.compile(rb"^authorization:\s*(.*?)\s*$", re.IGNORECASE | re.MULTILINE)
_RANGE = re.compile(rb"^range:\s*bytes=(\d+)-(\d+)", re.IGNORECASE | re.MULTILINE)


def always_ok(_path: str, _attempt: int) -> Fault:
    return "ok"


class RangeServer:
    """Serves the files under `folder`. `fault(path, attempt)` is asked before each answer to a GET."""

    def __init__(
        self, folder: Path, *, latency: float = 0.0, fault: Callable[[str, int], Fault] = always_ok,
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.latency, self.fault, self.tls = folder, latency, fault, tls
        self.etags = True
        self.redirects: dict[str, str] = {}  # what these paths lead to
        self.body = b""  # of answers that are errors
        self.users: set[str] = set()  # the Authorization of each request, if it had one
        self.heads: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.bytes_sent = 0
        self.in_flight = self.most_in_flight = 0
        self.gather = 0  # no answer before so many requests are in flight at once, or this has taken too long
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    if not await self._answer(head, writer):
                        break
                finally:
                    self.in_flight -= 1
        writer.close()

    async def _gathered(self) -> None:
        for _ in range(2000):
            if self.most_in_flight >= self.gather:
                return
            await asyncio.sleep(0.01)

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        method, target = head.split(b" ", 2)[:2]
        path = unquote(target.decode()).lstrip("/")
        await asyncio.sleep(self.latency)
        await self._gathered()
        self.users.update(found[1].decode() for found in _USER.finditer(head))
        file = self.folder / path
        what: Fault = "ok"
        if method == b"GET":
            self.requests[path] += 1
            what = self.fault(path, self.requests[path])
        else:
            self.heads[path] += 1
        if path in self.redirects:
            found = f"HTTP/1.1 302 Found\r\nLocation: {self.redirects[path]}\r\nContent-Length: 0\r\n\r\n"
            writer.write(found.encode())
            await writer.drain()
            return True
        if what in ("500", "503", "404") or not file.is_file():
            code = what if what in ("500", "503") else "404"
            body = self.body if method == b"GET" else b""
            writer.write(f"HTTP/1.1 {code} Failed\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            return True
        if what == "reset":
            writer.transport.abort()
            return False
        size = file.stat().st_size
        found = _RANGE.search(head)
        if method == b"HEAD" or found is None or what == "no-range":
            start, end, status = 0, size, "200 OK"
        else:
            start, end, status = int(found[1]), min(size, int(found[2]) + 1), "206 Partial Content"
            if start >= size:
                writer.write(b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
                return True
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {end - start}", "Accept-Ranges: bytes"]
        lines.append("Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT")
        if status.startswith("206"):
            lines.append(f"Content-Range: bytes {start}-{end - 1}/{size}")
        if self.etags:
            stamp = file.stat()
            lines.append(f'ETag: "{hashlib.sha256(f"{stamp.st_mtime_ns} {size}".encode()).hexdigest()[:16]}"')
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        if method == b"HEAD":
            await writer.drain()
            return True
        with file.open("rb") as content:
            content.seek(start)
            body = content.read(end - start)
        self.bytes_sent += len(body)
        if what == "ok" or what == "no-range":
            writer.write(body)
            await writer.drain()
            return True
        writer.write(body[: len(body) // 2])
        await writer.drain()
        if what == "stall":
            await asyncio.sleep(3600)
        return False


@contextlib.contextmanager
def serving(server: RangeServer) -> Iterator[RangeServer]:
    """The server in a thread of this process, until the block ends."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def run() -> None:
        await server.start()
        ready.set()
        await asyncio.Event().wait()

    def body() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    task = loop.create_task(run())
    thread = threading.Thread(target=body, name="range-server")
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the loopback server did not start")
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    arguments = parser.parse_args()

    async def run() -> None:
        server = RangeServer(arguments.folder, latency=arguments.latency)
        await server.start()
        print(server.url, flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
