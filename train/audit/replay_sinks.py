"""Everything that a run shows to the public, as bytes: it must be equal in two runs that differ in one record."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from murmuration.accounting.certificate import certificate
from murmuration.train.run.context import RunContext
from murmuration.train.run.report import write_report
from murmuration.train.run.run import tell_state
from murmuration.train.storage.certify import OF_THIS_TRAINER

OWNERS_ALONE = ("tb/private", "logs/private", "secret")
RECORD_HEADER, RECORD_FOOTER = 12, 4  # length and checksum before an event, checksum after it


@contextlib.contextmanager
def console_to(text: StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(text):
        yield


def write_last_pages(run: RunContext) -> None:
    """The report with the certificate in it, and the state for scripts, as they stand after these steps."""
    history, entries = run.writer.history, run.writer.ledger.entries
    extra = {"known_deviations": OF_THIS_TRAINER, "siblings": [], "hashes": {}}
    document = certificate.compose(history, entries, extra)
    write_report(run.folder, run.config, document, [])
    tell_state(run, status="done")
    run.board.close()


def public_sinks(root: Path, console: StringIO) -> dict[str, bytes]:
    """By name: the console and every file that is not for the owner alone."""
    found = {"console": console.getvalue().encode()}
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        name = path.relative_to(root).as_posix()
        if name.startswith(OWNERS_ALONE):
            continue
        content = path.read_bytes()
        if path.parent.name == "public" and "tfevents" in path.name:
            # The name contains a process id and a time, and the first event says when the file was opened.
            name, content = "tb/public", _without_first_event(content)
        elif name == "run_state.json":
            content = json.dumps(json.loads(content) | {"id": "random"}).encode()
        found[name] = content
    return found


def differing(first: dict[str, bytes], second: dict[str, bytes]) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _without_first_event(content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    return content[RECORD_HEADER + length + RECORD_FOOTER :]
