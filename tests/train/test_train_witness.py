"""Heads of the ledger, told to a real command and a real server; what does not answer ends no run."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from murmuration.accounting.ledger.facts import Charge, Head
from murmuration.accounting.ledger.heads import read_heads
from murmuration.train.run.witness import Witness

HEAD = Head("run", 7, "f" * 64, (Charge(0, 0.5, 1.0, 3),))


def test_a_command_gets_lines_that_verify_can_read(tmp_path: Path) -> None:
    kept = tmp_path / "it's kept.jsonl"
    program = tmp_path / "keep.py"
    program.write_text("import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())\n")
    said: list[str] = []
    for _ in range(2):
        Witness(f'{sys.executable} {program} "{kept}"', said.append)(HEAD)
    assert read_heads(kept) == [HEAD, HEAD] and said == []


class Asked(BaseHTTPRequestHandler):
    """Answers with `codes` in turn, and notes what came."""

    codes: Iterator[int]
    came: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self) -> None:
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.came.append((self.command, body))
        self.send_response(next(self.codes, 200))
        self.send_header("Location", "/login")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def told(times: int, *codes: int) -> tuple[list[tuple[str, bytes]], list[str]]:
    """What a server was asked, and what was said of its answers."""
    handler = type("Handler", (Asked,), {"codes": iter(codes), "came": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    said: list[str] = []
    try:
        for _ in range(times):
            Witness(f"http://127.0.0.1:{server.server_port}/heads", said.append)(HEAD)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    return handler.came, said


def test_a_server_gets_a_post() -> None:
    came, said = told(2, 204, 503)
    assert [(method, json.loads(body)["length"]) for method, body in came] == [("POST", 7), ("POST", 7)]
    [sentence] = said
    assert "ledger line 7 could not be reported" in sentence and "503" in sentence


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_is_said(code: int) -> None:
    """A redirected POST becomes a GET without the line, which a page for logging in answers with 200."""
    came, said = told(1, code)
    assert [method for method, _ in came] == ["POST"]
    assert said == [
        f"ledger line 7 could not be reported to the witness: it answered {code}, a redirect, which is not followed"
    ]


def test_one_that_is_not_reached_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    absent = str(tmp_path / "absent")
    for target in (f"{sys.executable} -c 'raise SystemExit(3)'", absent, "http://127.0.0.1:1/", "'", " "):
        Witness(target, said.append)(HEAD)
    assert len(said) == 5 and "ended with 3" in said[0]


def test_one_that_speaks_another_language_ends_no_run_and_its_address_stays_secret() -> None:
    """A hook's address is often all that one needs to write to it, and this goes to the public console."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        Witness(f"http://127.0.0.1:{server.getsockname()[1]}/hook/SECRET", said.append)(HEAD)
        thread.join()
    Witness("http://127.0.0.1:1/hook/SECRET TOKEN", said.append)(HEAD)
    Witness("http://no-such-host.invalid/SECRET", said.append)(HEAD)
    assert len(said) == 3 and not any("SECRET" in each for each in said), said
