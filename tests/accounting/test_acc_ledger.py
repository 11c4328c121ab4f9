"""The ledger's file: any change is found and named, a torn end is mended, one writer at a time, durable before acts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.ledger.chain import GENESIS, Ledger, LedgerError, make_entry
from murmuration.accounting.ledger.history import History
from tests.support.acc_world import begin, certified, facts, parsed, reopen, train, whole_run


def ledger_with_certificate(folder: Path) -> bytes:
    certified(whole_run(folder, steps=2))
    return (folder / "ledger.jsonl").read_bytes()


def test_every_flipped_byte_is_found_and_its_line_named(tmp_path: Path) -> None:
    content = ledger_with_certificate(tmp_path)
    verify(tmp_path)
    for position in range(len(content)):
        line = content[:position].count(b"\n") + 1
        for flip in (0x01, 0x80):
            changed = bytearray(content)
            changed[position] ^= flip
            with pytest.raises(LedgerError) as caught:
                History.of(parsed(bytes(changed)))
            # A changed line end joins its line with the next one, so the fault is seen at either.
            assert any(f"line {k}:" in str(caught.value) for k in (line, line + 1)), (position, str(caught.value))


def test_cutting_anywhere_is_found(tmp_path: Path) -> None:
    content = ledger_with_certificate(tmp_path)
    # Every length that leaves whole lines, and a spread of others.
    for length in sorted(
        {*range(0, len(content), 7), *(k + 1 for k, c in enumerate(content) if c == 10)} - {len(content)}
    ):
        (tmp_path / "ledger.jsonl").write_bytes(content[:length])
        with pytest.raises((LedgerError, CertificateError), match=r"line|empty"):
            verify(tmp_path)


def test_removed_added_and_swapped_lines_are_found(tmp_path: Path) -> None:
    lines = ledger_with_certificate(tmp_path).splitlines(keepends=True)
    for k in range(len(lines)):
        variants = [lines[:k] + lines[k + 1 :], lines[: k + 1] + lines[k:]]
        if k + 1 < len(lines):
            variants.append([*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]])
        for changed in variants:
            (tmp_path / "ledger.jsonl").write_bytes(b"".join(changed))
            with pytest.raises((LedgerError, CertificateError), match="line"):
                verify(tmp_path)


def test_checkpoints_vouch_for_the_ledger_where_there_is_no_certificate(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 4))
    folder = tmp_path / "checkpoints" / "phase00-step00000003"
    folder.mkdir(parents=True)
    header = {"ledger": {"length": journal.ledger.length, "head": journal.ledger.head}}
    (folder / "manifest.json").write_text(json.dumps(header))
    journal.ledger.close()
    assert verify(tmp_path).checkpoints == 1
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(CertificateError, match="lines were removed"):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("_init__", {}), ("init", {}), ("take", {}), ("open", {}), ("segment", {"phase": 0}), ("run", {"format": "x"}),
        ("commit", {"phase": 0, "segment": 0, "step": 1, "facts": {}}), ("copied", {}), ("plan", {"phase": 0}),
    ],
)  # fmt: skip
def test_a_well_chained_line_of_nonsense_is_refused_with_its_line(tmp_path: Path, kind: str, fields: dict) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    length = journal.ledger.length
    line = make_entry(length, kind, fields, journal.ledger.head).line
    content = (tmp_path / "ledger.jsonl").read_bytes() + line
    with pytest.raises(LedgerError, match=f"line {length + 1}"):
        History.of(parsed(content))


def test_segments_are_counted_and_an_empty_ledger_or_one_without_a_plan_claims_nothing(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    run, _, segment = journal.ledger.entries
    line = make_entry(3, "segment", segment.fields | {"number": 5}, journal.ledger.head).line
    with pytest.raises(LedgerError, match="segment 5 is out of order"):
        History.of(parsed((tmp_path / "ledger.jsonl").read_bytes() + line))
    with pytest.raises(LedgerError, match="0 values of delta"):
        History.of([run]).delta()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(LedgerError, match="is empty, so it describes no run"):
        History.read(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("step", [2, 3, 9])
def test_a_commit_of_a_step_that_is_not_open_is_refused(tmp_path: Path, step: int) -> None:
    """One that was committed before, or never opened: the steps between would be charged to nobody."""
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    fields = journal.ledger.entries[-1].fields | {"step": step, "facts": facts(step).as_dict()}
    line = make_entry(journal.ledger.length, "commit", fields, journal.ledger.head).line
    with pytest.raises(LedgerError, match="committed without being open, or twice"):
        History.of(parsed((tmp_path / "ledger.jsonl").read_bytes() + line))


@pytest.mark.parametrize(
    ("kind", "phase", "fault"),
    [("plan", 0, "phase 0 has a plan already"), ("plan", 1, "phase 1 was non-private before"),
     ("nonprivate", 0, "phase 0 was private before"), ("public", 2, "phase 2 was not declared before"),
     ("store", 2, "phase 2 was not declared before")],
)  # fmt: skip
def test_a_phase_is_declared_once_and_stays_on_its_side(tmp_path: Path, kind: str, phase: int, fault: str) -> None:
    """The journal writes no such line; from a forged ledger a weaker plan would take the frozen one's place."""
    journal = begin(tmp_path)
    journal.declare_nonprivate(1, "open", True, "web")
    journal.declare_public(0, "evaluation", "web")
    journal.declare_store(0, "a host")
    said = next(entry for entry in journal.ledger.entries if entry.kind == kind).fields
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    line = make_entry(journal.ledger.length, kind, said | {"phase": phase}, journal.ledger.head).line
    with pytest.raises(LedgerError, match=fault):
        History.of(parsed(whole + line))


@pytest.mark.parametrize(
    "raw", [b"7", b"[]", b"null", b"{}", b'{"index":0,"kind":[],"previous":"","hash":""}', b"[" * 99999]
)
def test_lines_that_are_no_entries(raw: bytes) -> None:
    with pytest.raises(LedgerError, match="line 1"):
        parsed(raw + b"\n")


@pytest.mark.parametrize("number", [b"false", b"0.0"])
def test_the_number_of_a_line_is_a_whole_one(number: bytes) -> None:
    """Python takes False and 0.0 for 0, and the line's hash is right."""
    body = b'{"index":%s,"kind":"run","previous":"%s"}' % (number, GENESIS.encode())
    line = b'{"hash":"%s",%s\n' % (hashlib.sha256(body).hexdigest().encode(), body[1:])
    with pytest.raises(LedgerError, match="line 1: does not follow"):
        parsed(line)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (b'"step":2', b'"step":2e0'), (b'"step":2', b'"step": 2'),
        (b'"step":2', b'"step":02'), (b'"step":2', b'"step":-0'), (b'"step":2', b'"step":1,"step":2'),
        (b'"step":2', b'"step":99999999999999999999'), (b'"phase":0,"previous":"%s"', b'"previous":"%s","phase":0'),
        (b'"kind":"open"', b'"kind":"\\u006fpen"'), (b'"step":2', b'"\\u0073tep":2'),
        (b'"a\\":1,":0,"a\\":2,":0', b'"a\\":2,":0,"a\\":1,":0'), (b'"share":"', b'"share":"\xc3\xa9'),
        (b'"records":9,"rule":1e-07', b'"rule":1e-07,"records":9'), (b'"rule":1e-07', b'"rule":12e-07'),
        (b'"std":1.5', b'"std":1.50'),
        (b'"a:1,":0,"a:2,":0', b'"a:2,":0,"a:1,":0'), (b'"digest":"%s"', b'"digest":"%s" '),
    ],
)  # fmt: skip
def test_a_line_like_the_one_before_is_refused_if_it_is_spelled_otherwise(ours: bytes, theirs: bytes) -> None:
    """Its hash is right, and but for digests and counts Python's parser finds the same in most of them."""
    share = {"a:1,": 0, "a:2,": 0, 'a":1,': 0, 'a":2,': 0, "share": "x"}
    sampling = {"digest": 64 * "a", "records": 9, "rule": 1e-7, "std": 1.5}
    first, second = (
        make_entry(index, "open", {"phase": 0, "segment": 0, "share": share, "step": 1 + index, "x": sampling}, GENESIS)
        for index in (0, 1)
    )
    body = second.line[:-1].replace(b'"hash":"%s",' % second.hash.encode(), b"")
    body = body.replace(b'"previous":"%s"' % GENESIS.encode(), b'"previous":"%s"' % first.hash.encode())
    if b"%s" in ours:
        digest = (first.hash if b"previous" in ours else sampling["digest"]).encode()
        ours, theirs = ours % digest, theirs % digest
    assert ours in body

    def forged(body: bytes) -> bytes:
        return b'{"hash":"%s",%s\n' % (hashlib.sha256(body).hexdigest().encode(), body[1:])

    assert len(parsed(first.line + forged(body))) == 2
    with pytest.raises(LedgerError, match="line 2"):
        parsed(first.line + forged(body.replace(ours, theirs)))


def test_numbers_that_are_not_finite_are_refused() -> None:
    line = b'{"hash":"0","index":0,"kind":"run","previous":"' + GENESIS.encode() + b'","x":NaN}\n'
    with pytest.raises(LedgerError, match="line 1"):
        parsed(line)


def test_a_number_that_is_not_finite_is_never_written() -> None:
    """A line with one could be read by nobody, and so the ledger neither."""
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="JSON compliant"):
            make_entry(0, "open", {"x": number}, GENESIS)


def test_an_entrys_hash_is_of_its_sorted_fields() -> None:
    """Written out by hand, so that any program can recompute it from the line, whatever order it read the fields in."""
    fields = {"zeta": 1.5, "alpha": {"y": "é", "x": None}}
    body = (
        b'{"alpha":{"x":null,"y":"\\u00e9"},"index":3,"kind":"open","previous":"' + GENESIS.encode() + b'","zeta":1.5}'
    )
    for order in (fields, dict(reversed(fields.items()))):
        assert make_entry(3, "open", order, GENESIS).hash == hashlib.sha256(body).hexdigest()


def test_a_new_ledgers_name_is_on_disk_before_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is synced; but a power cut takes the whole file if its name in the folder is not."""
    synced, sync = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), sync(fd))[1])
    ledger = Ledger.open(tmp_path / "new" / "ledger.jsonl")
    assert (tmp_path / "new").stat().st_ino in synced
    assert ledger.path.stat().st_mode & 0o111 == 0
    ledger.close()


def test_a_torn_tail_is_dropped_and_said(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    journal.open_step(0, 3, facts(3))
    journal.ledger.close()
    torn = (tmp_path / "ledger.jsonl").read_bytes()[:-7]
    for tail in (torn[len(whole) :], b"\0\0\0\0", b"x"):
        (tmp_path / "ledger.jsonl").write_bytes(whole + tail)
        again = reopen(tmp_path)
        assert [e.kind for e in again.ledger.entries][-1] == "recovered"
        assert again.history.steps() == (2, 2)
        again.ledger.close()
        verify(tmp_path)


def test_a_whole_line_without_its_end_is_completed_and_not_forgotten(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.open_step(0, 1, facts(1))
    journal.ledger.close()
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    again = reopen(tmp_path)
    assert [e.kind for e in again.ledger.entries][-2:] == ["open", "recovered"]
    assert again.history.steps()[0] == 1
    again.ledger.close()
    assert History.read(path)[0] == again.history


def test_a_torn_first_line_leaves_an_empty_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b'{"format":')
    assert begin(tmp_path).ledger.length == 3


def test_damage_before_the_end_is_never_mended(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    journal.ledger.close()
    path = tmp_path / "ledger.jsonl"
    content = path.read_bytes().replace(b'"step":1', b'"step":9', 1)
    path.write_bytes(content + b"torn")
    with pytest.raises(LedgerError, match="changed after it was written"):
        reopen(tmp_path)
    assert path.read_bytes() == content + b"torn"


def test_one_writer_in_this_process_and_in_another(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    with pytest.raises(LedgerError, match="in use by another process"):
        reopen(tmp_path)
    program = (
        "import sys; from pathlib import Path; from murmuration.accounting.ledger.chain import Ledger, LedgerError\n"
        "try: Ledger.open(Path(sys.argv[1])); print('taken')\n"
        "except LedgerError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ledger.jsonl")]
    assert "in use by another process" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    journal.ledger.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "taken"
    reopen(tmp_path).ledger.close()


def test_waiting_for_the_lock_is_said_and_ends(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    said: list[str] = []
    with pytest.raises(LedgerError):
        Ledger.open(tmp_path / "ledger.jsonl", 2.0, said.append)
    assert len(said) == 1
    journal.ledger.close()


def test_a_line_is_on_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[str] = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: (acts.append("write"), write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (acts.append("fsync"), sync(fd))[1])
    journal = begin(tmp_path)
    acts.clear()
    journal.ledger.append(journal.ledger.next("resume", phase=0, step=0))
    assert acts == ["write", "fsync"]


def test_the_lines_of_a_step_reach_the_disk_in_their_order_and_before_settle_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []
    write, sync, go = os.write, os.fsync, threading.Event()
    journal = begin(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: (acts.append("write"), write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (go.wait(60), acts.append("fsync"), sync(fd))[2])
    journal.open_step(0, 1, facts(1))
    assert acts == ["write"], "the computation of a step does not wait for the disk"
    threading.Timer(0.2, go.set).start()
    journal.commit_step(0, 1, facts(1))
    journal.settle()
    assert acts == ["write", "fsync"] * 2
    assert journal.head().length == len((tmp_path / "ledger.jsonl").read_bytes().splitlines())


def test_a_head_that_others_write_down_is_one_of_durable_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that names a line which a power cut takes would be refused as one of a restored ledger."""
    synced: list[int] = []
    sync, journal = os.fsync, begin(tmp_path)
    slowly = lambda fd: (time.sleep(0.3), sync(fd), synced.append(os.fstat(fd).st_size))[1]  # noqa: E731
    monkeypatch.setattr(os, "fsync", slowly)
    for read in (lambda: journal.ledger.head, lambda: journal.ledger.length, journal.head):
        journal.open_step(0, len(synced) + 1, facts(len(synced) + 1))
        read()
        assert synced[-1:] == [(tmp_path / "ledger.jsonl").stat().st_size]
        monkeypatch.setattr(os, "fsync", sync)
        number = len(synced)
        journal.commit_step(0, number, facts(number))
        journal.settle()
        monkeypatch.setattr(os, "fsync", slowly)


@pytest.mark.parametrize("fault", ["short write", "no space", "sync fails"])
def test_after_a_failed_write_this_process_writes_no_more(tmp_path: Path, monkeypatch, fault: str) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))

    def broken(fd: int, data: bytes = b"") -> int:
        if fault == "short write":
            return real(fd, data[:9])
        raise OSError(28, "No space left on device")

    name = "fsync" if fault == "sync fails" else "write"
    real = getattr(os, name)
    monkeypatch.setattr(os, name, broken)
    with pytest.raises((LedgerError, OSError)):
        journal.open_step(0, 3, facts(3))
        journal.settle()
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="could not be written before"):
        journal.ledger.append(journal.ledger.next("resume", phase=0, step=2))
    journal.ledger.close()
    again = reopen(tmp_path)
    train(again, range(3, 5))
    again.ledger.close()
    verify(tmp_path)


def test_nothing_private_and_no_time_stands_in_it(tmp_path: Path) -> None:
    for line in ledger_with_certificate(tmp_path).decode().splitlines():
        assert not {"time", "loss", "batch_size", "ids", "norm"} & set(json.loads(line))
