"""Notes outside the ledger of how long it has been, so that a ledger restored from a backup is recognised.

A truncated ledger is a valid shorter ledger, and would continue as if the steps after the cut had never been made.
After every durable checkpoint its length, its head and what it charges are therefore noted in the run's secret folder
and in the data set's log of runs. Steps after the last checkpoint released nothing, so no note has to cover them; but
for the shares of adaptive clipping, which stand in the ledger as soon as their steps are committed. Before each of
those, the secret folder notes the ledger in a file of its own, which only the newest note has to be in. The weights of
a library's run may be seen after every step, so before each of them, its log of runs does so, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from murmuration.accounting.durable import atomic, flush, naming
from murmuration.accounting.ledger.chain import Lines
from murmuration.accounting.ledger.facts import Charge, Head
from murmuration.accounting.strict_json import parse, read, whole_lines

NAME, NEWEST, LOGS, LAST_STEPS = "heads.jsonl", "newest.json", "logs.jsonl", "last-steps"


def append(path: Path, line: dict[str, Any], mode: int) -> None:
    """Returns once the line is durable. It begins with a newline: a line torn by a crash must not swallow this one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    try:
        content = b"\n" + json.dumps(line).encode() + b"\n"
        with naming(descriptor):
            written = os.write(descriptor, content)
        if written != len(content):
            raise OSError(errno.ENOSPC, "the disk took only part of a line", str(path))
        flush(descriptor)
    finally:
        os.close(descriptor)


def remember(secret: Path, head: Head) -> None:
    _replace(secret / NEWEST, head, 0o600)


def remember_in_log(log: Path, head: Head) -> None:
    """The same of a run whose weights may be seen after every step, in a folder beside a log: a line for each would
    make the log long."""
    path = _newest_of(log, head.ledger_of)
    path.parent.mkdir(exist_ok=True)
    _replace(path, head, 0o644)


def newest_in_log(log: Path, run: str) -> list[Head]:
    return read_heads(_newest_of(log, run))


def _newest_of(log: Path, run: str) -> Path:
    """A ledger's id may be anything, a path as well."""
    return log.with_name(LAST_STEPS) / f"{hashlib.sha256(run.encode()).hexdigest()}.json"


def _replace(path: Path, head: Head, mode: int) -> None:
    with atomic(path, mode) as file:
        file.write(json.dumps(head.as_dict()).encode())


def noted_in(secret: Path) -> list[Head]:
    """What a run noted in its secret folder, oldest first. OSError if it cannot be read."""
    found = read_heads(secret / NAME)
    return found + [head for head in read_heads(secret / NEWEST) if head not in found]


class Noted(NamedTuple):
    """Where the log of all runs on some records lies, and why it may not know all of them."""

    logs: tuple[Path, ...]
    unknown: str | None


def note_logs(secret: Path, logs: Sequence[Path], unknown: str | None) -> None:
    line = {"logs": [str(log.resolve()) for log in logs], "unknown": unknown}
    if logs and line not in whole_lines(secret / LOGS):
        append(secret / LOGS, line, 0o600)


def logs_of(run_dir: Path) -> list[Noted]:
    """What a run noted. A log inside the run directory would come with a forged one, and so would one whose place is
    named by way of where the reader happens to be: a relative path, or a link."""
    found = []
    for line in whole_lines(run_dir / "secret" / LOGS):
        told, unknown = line.get("logs"), line.get("unknown")
        named = [log for log in told if isinstance(log, str) and "\0" not in log] if isinstance(told, list) else []
        plain = [Path(log) for log in named if os.path.realpath(log) == log]
        if outside := tuple(log for log in plain if run_dir.resolve() not in log.parents):
            found.append(Noted(outside, unknown if isinstance(unknown, str) else None))
    return found


def log_with_signer(run_dir: Path, run: str, signer: str) -> Path | None:
    """A log outside the run directory that knows the run by its id, with the key that signs it. The run directory says
    where it lies, so it counts only where nobody but the reader can have written it."""
    known = {"id": run, "signer": signer}.items()
    for log in (log for noted in logs_of(run_dir) for log in noted.logs):
        with contextlib.suppress(OSError):
            about = log.stat()
            own = about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (own and stat.S_ISREG(about.st_mode)):  # a pipe would be waited for
                continue
            if any(all(line.get(key) == value for key, value in known) for line in whole_lines(log)):
                return log
    return None


def heads_in(lines: Iterable[bytes]) -> list[Head]:
    """The heads in the order in which they were noted; torn lines and lines of other kinds are skipped."""
    found = []
    for line in lines:
        if b'"ledger_of"' not in line:
            continue
        try:
            found.append(read(Head, parse(line)))
        except ValueError:
            continue
    return found


def read_heads(path: Path) -> list[Head]:
    try:
        return heads_in(path.read_bytes().splitlines())
    except FileNotFoundError:
        return []


def lost_charges(entries: Lines, noted: Sequence[Head]) -> tuple[Head, list[Charge]] | None:
    """The newest head that this ledger does not contain, and what was charged since the two diverged.

    All heads are checked, not just the last: two ledgers of one run (a cloned machine) may note theirs alternately.
    """
    strange = unknown(entries, noted)
    if not strange:
        return None
    newest = noted[strange[-1]]
    common = next((head for head in reversed(noted[: strange[0]]) if contains(entries, head)), None)
    if any(contains(entries, head) for head in noted[strange[0] :]):
        common = None  # alternately: it is unknown how many of this ledger's earlier notes are common to both
    before = {replace(each, count=0): each.count for each in common.charged} if common else {}
    lost = [
        replace(each, count=count)
        for each in newest.charged
        if (count := each.count - before.get(replace(each, count=0), 0)) > 0
    ]
    return newest, lost


def unknown(entries: Lines, noted: Sequence[Head]) -> list[int]:
    """Places of the heads that this ledger does not contain, after the last one whose charges it took over."""
    taken_over = _taken_over(entries)
    since = max((place for place, head in enumerate(noted, 1) if head.head in taken_over), default=0)
    return [place for place, head in enumerate(noted) if place >= since and not contains(entries, head)]


def uncharged(charged: Sequence[Charge], noted: Sequence[Head]) -> Head | None:
    """The first head that had charged more than `charged`, a whole ledger's charges; None if there is none. A ledger
    only ever charges more, also where it took over what it lost, so such a one was rewritten. A step that turned out to
    have less noise than announced moves to a smaller sigma, so steps count wherever they have at most as much noise."""
    for head in noted:
        for asked in head.charged:
            count, known = (
                sum(
                    each.count
                    for each in found
                    if (each.phase, each.rate, each.slots) == (asked.phase, asked.rate, asked.slots)
                    and each.sigma <= asked.sigma * (1 + 1e-9)
                )
                for found in (head.charged, charged)
            )
            if count > known:
                return head
    return None


def contains(entries: Lines, head: Head) -> bool:
    if head.head in _taken_over(entries):
        return True
    return 0 < head.length <= len(entries) and entries[head.length - 1].hash == head.head


def _taken_over(entries: Lines) -> set[Any]:
    """Heads whose charges this ledger took over."""
    return {entry.fields.get("head") for entry in entries.acts if entry.kind == "lost"}
