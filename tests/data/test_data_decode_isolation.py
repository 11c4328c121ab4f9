"""Decoding in confined processes: crashes, hangs and hogs cost one record, and the verdict is no matter of luck."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.accounting.key_chain import KeyChain
from murmuration.accounting.keys import Link
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.pool import DecodePool, DecoderError, Limits, Wanted
from murmuration.data.decode.record import PictureMaker, RecordMaker
from murmuration.data.index.shard_index import build
from tests.support.hostile_files import DEEDS, endless_jpeg, one_bit_png

ROOT = Path(__file__).resolve().parents[2]
KEY = b"k" * 32
# Little computing time, but much waiting: what a busy machine does to these tests must not decide them.
QUICK = Limits(cpu_seconds=0.3, wall_seconds=60.0, patience=2.0, address_bytes=1 << 30)
PICTURES = PictureMaker(24, "random_resized_crop", KEY)


@contextmanager
def pool(
    processes: int, limits: Limits = QUICK, program: str = "tests.support.hostile_files:crashing_worker"
) -> Iterator[DecodePool]:
    maker = RecordMaker(DataSpec(24, "random_resized_crop"))
    made = DecodePool(maker, processes, lambda _step: KEY, limits, program)
    try:
        yield made
    finally:
        made.close()


def _children(pid: int | None = None) -> set[int]:
    """By what each process says of its parent; the kernel's own list leaves some out while threads or children end."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            number, _, rest = stat.read_text().partition(" (")
            if int(rest.rpartition(") ")[2].split()[1]) == (pid or os.getpid()):
                found.add(int(number))
    return found


def _together(made: DecodePool, files: Sequence[bytes], step: int) -> list[np.ndarray | str]:
    """All in one message: the pixels of each, or why it is bad. Nothing is taken twice."""
    taken = dict[int, np.ndarray]()

    def take(place: int, row: np.void) -> None:
        assert place not in taken
        taken[place] = row["pixels"][0].copy()

    wanted = [Wanted(record, None, partial(dict, jpg=data)) for record, data in enumerate(files)]
    verdicts = made.make(wanted, step, take)
    assert taken.keys() == {place for place, verdict in enumerate(verdicts) if verdict is True}
    return [str(verdict) if isinstance(verdict, BadRecord) else taken[place] for place, verdict in enumerate(verdicts)]


def test_pixels_are_those_of_this_process(picture: Callable[..., bytes]) -> None:
    files = [picture(number, 30 + number) for number in range(12)]
    expected = [PICTURES.make(data, 5, record) for record, data in enumerate(files)]
    for processes in (1, 3):
        with pool(processes) as made, ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda job: made.picture(job[1], 5, job[0]), enumerate(files)))
            together = _together(made, files, 5)
        assert all(np.array_equal(one, other) for one, other in zip(got, expected, strict=True))
        assert all(np.array_equal(one, other) for one, other in zip(together, expected, strict=True))


def test_bad_records_and_nothing_else(picture: Callable[..., bytes]) -> None:
    """Culprits are bad, all in one message and whatever they do; their neighbours come out the same, before and after
    them."""
    deeds = {1: b"SEGV", 4: b"ABRT", 5: b"EXIT", 8: b"SPIN", 11: b"HOGS"}
    words = {1: "SIGSEGV", 4: "SIGABRT", 5: "exit code 3", 8: "0.6 s of computing", 11: "bytes"}
    assert set(deeds.values()) == DEEDS.keys() - {b"KILL", b"REST"}
    files = [deeds.get(record, picture(record)) for record in range(14)]
    with pool(2) as made, patch.object(made, "_start", side_effect=made._start) as starts:
        got = _together(made, files, 1)
    # Each that dies is tried alone, and the others in a fresh process; what the last one lacked memory for, alone.
    assert starts.call_count == 1 + 2 * 4 + 1
    for record, result in enumerate(got):
        if record in deeds:
            assert isinstance(result, str) and words[record] in result
        else:
            assert np.array_equal(result, PICTURES.make(files[record], 1, record))


def test_a_message_may_take_longer_than_a_record_may(picture: Callable[..., bytes]) -> None:
    """Each record has its time for itself; who waits for a message sees that it gets on."""
    files = [b"NAPS" + picture(record) for record in range(6)]
    with pool(1, replace(QUICK, wall_seconds=1.0)) as made:
        before = _children()
        made.picture(picture(0))
        workers = _children() - before
        got = _together(made, files, 1)
        assert _children() - before == workers
    assert all(np.array_equal(one, PICTURES.make(files[n][4:], 1, n)) for n, one in enumerate(got))


def test_a_decoder_that_sleeps_is_bad(picture: Callable[..., bytes]) -> None:
    """It uses no computing time; a known picture then proves that the machine is not to blame."""
    with pool(1, replace(QUICK, wall_seconds=2.0)) as made:
        with pytest.raises(BadRecord, match="still for 4 s"):
            made.picture(b"REST", 0, 0)
        assert np.array_equal(made.picture(picture(2), 7, 2), PICTURES.make(picture(2), 7, 2))


def test_a_crash_that_does_not_come_again_is_no_verdict(tmp_path: Path) -> None:
    """The second try is a fresh process's; here it says that the content is empty, not that it crashed."""
    mark = tmp_path / "crashed"
    with pool(1) as made, pytest.raises(BadRecord, match="empty"):
        made.picture(b"ONCE" + str(mark).encode(), 0, 0)
    assert mark.exists()


def test_killed_from_outside_is_nobodys_fault() -> None:
    with pool(1) as made, pytest.raises(DecoderError, match="memory"):
        made.picture(b"KILL", 0, 0)


def test_a_machine_that_stands_still_is_nobodys_fault(picture: Callable[..., bytes]) -> None:
    limits = Limits(cpu_seconds=0.3, wall_seconds=0.4, patience=1.5)
    with (
        pool(1, limits, "tests.support.hostile_files:standing_machine") as made,
        pytest.raises(DecoderError, match="is stuck on this machine"),
    ):
        made.picture(picture(1), 0, 0)


def test_a_decoder_that_sleeps_is_bad_where_every_step_has_its_own_key(picture: Callable[..., bytes]) -> None:
    """As in private phases, which have no key for what is made outside of a step."""
    key_of = partial(KeyChain(Link.first("segment", 1, b"s" * 32)).key, "augmentation")
    maker = RecordMaker(DataSpec(24, "random_resized_crop"))
    made = DecodePool(maker, 1, key_of, replace(QUICK, wall_seconds=1.0), "tests.support.hostile_files:crashing_worker")
    try:
        with pytest.raises(BadRecord, match="still for 2 s"):
            made.picture(b"REST", 5, 3)
        expected = PictureMaker(24, "random_resized_crop", key_of(5)).make(picture(2), 5, 2)
        assert np.array_equal(made.picture(picture(2), 5, 2), expected)
    finally:
        made.close()


@pytest.mark.parametrize("program", ["standing_decoder", "misjudging_decoder"])
def test_a_machine_is_asked_for_a_picture_whatever_else_records_need(
    program: str, picture: Callable[..., bytes]
) -> None:  # fmt: skip
    """The known picture has neither label nor caption, which a record of the phase would be bad without."""
    maker = RecordMaker(DataSpec(24, labels=("cls",), target="cls", classes=2))
    made = DecodePool(
        maker, 1, limits=Limits(cpu_seconds=60, wall_seconds=0.5, patience=2),
        program=f"tests.support.hostile_files:{program}",
    )  # fmt: skip
    members = {"jpg": picture(1), "cls": b"1"}
    try:
        with pytest.raises(DecoderError, match="is stuck on this machine"):
            made.make([Wanted(1, None, lambda: members)], 0, lambda place, row: None)
    finally:
        made.close()


def test_a_starved_process_is_not_a_hanging_one(picture: Callable[..., bytes]) -> None:
    """Stopped for five times its limit of computing time, it goes on where it was: no death, no second try."""
    limits = Limits(cpu_seconds=0.3, wall_seconds=60.0)
    with pool(1, limits) as made:
        before = _children()
        made.picture(picture(1), 0, 0)
        (worker,) = _children() - before
        threading.Thread(target=_goes_on_after, args=(worker, 1.5)).start()
        assert np.array_equal(made.picture(b"STOP" + picture(2), 7, 2), PICTURES.make(picture(2), 7, 2))
        assert worker in _children()


def _goes_on_after(process: int, seconds: float) -> None:
    """Once it stands still: before that, the signal would be lost."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(process, signal.SIGCONT)


def test_a_jpeg_that_decodes_for_minutes_is_bad() -> None:
    """A real file: 1.6 megabytes, thousands of valid scans."""
    data = endless_jpeg(4000, 4000)
    with (
        pool(1, program="murmuration.data.decode.worker:serve") as made,
        pytest.raises(BadRecord, match=r"not done after 0\.6 s"),
    ):
        made.picture(data)


def test_a_file_that_wants_more_memory_than_there_is_is_bad(picture: Callable[..., bytes]) -> None:
    limits = Limits(address_bytes=400 << 20)
    with pool(1, limits, "murmuration.data.decode.worker:serve") as made:
        with pytest.raises(BadRecord):
            made.picture(one_bit_png(9_400), 0, 0)
        assert np.array_equal(made.picture(picture(1), 0, 1), PICTURES.make(picture(1), 0, 1))


def test_memory_that_earlier_images_left_behind_decides_about_no_record(picture: Callable[..., bytes]) -> None:
    with pool(1, program="tests.support.hostile_files:leaking_worker") as made:
        for record in range(3):
            got = made.picture(picture(record), 1, record)
            assert np.array_equal(got, PICTURES.make(picture(record), 1, record))


def test_processes_are_confined_and_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with pool(1) as made:
        before = _children()
        with pytest.raises(BadRecord):
            made.picture(b"no image", 0, 0)
        (worker,) = _children() - before
        assert resource.prlimit(worker, resource.RLIMIT_CORE) == (0, 0)
        assert resource.prlimit(worker, resource.RLIMIT_AS) == (QUICK.address_bytes, QUICK.address_bytes)
        command = Path(f"/proc/{worker}/cmdline").read_bytes() + Path(f"/proc/{worker}/environ").read_bytes()
        assert KEY not in command and KEY.hex().encode() not in command
        # A scheduler's orderly stop goes to all processes of a job; the trainer still needs this one.
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker, name)
        with pytest.raises(BadRecord):
            made.picture(b"no image", 0, 0)
        assert worker in _children()
        with pytest.raises(BadRecord):
            made.picture(b"ABRT", 0, 0)
    assert _children() <= before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", ["none", "webp", "bmp"])
def test_loading_parsers_is_not_the_first_records_time(suffix: str) -> None:
    """It took a quarter of a second of computing, which on a slow machine came near to a limit."""
    raw = io.BytesIO(b"no image")
    if suffix != "none":
        Image.new("RGB", (16, 16)).save(raw, suffix)

    def in_its_first_process() -> bool:
        before = _children()
        with pool(1, replace(QUICK, cpu_seconds=0.04)) as made:
            if suffix == "none":
                with pytest.raises(BadRecord):
                    made.picture(raw.getvalue(), 0, 0)
            else:
                made.picture(raw.getvalue(), 0, 0)
            return len(_children() - before) == 1

    # A system that charges time by the tick may charge a process too much, but not each time.
    assert any(in_its_first_process() for _ in range(3)), "the record was tried again in another process"


def test_processes_end_with_the_trainer(tmp_path: Path, picture: Callable[..., bytes]) -> None:
    """kill -9 of the trainer, in the middle of a decode that would last for ever."""
    (tmp_path / "good.jpg").write_bytes(picture(1))
    code = f"""
import sys, threading; sys.path[:0] = {[str(ROOT)]!r}
from pathlib import Path
from murmuration.data.decode.pool import DecodePool, Limits
from murmuration.data.decode.record import DataSpec, RecordMaker
limits = Limits(cpu_seconds=3.0, wall_seconds=10.0)
pool = DecodePool(RecordMaker(DataSpec(24)), 3, limits=limits, program="tests.support.hostile_files:crashing_worker")
for deed in (b"SPIN", b"REST"):
    threading.Thread(target=pool.picture, args=(deed, 0, 1), daemon=True).start()
    while len(pool._all) < 1 + (deed == b"REST"):
        threading.Event().wait(0.01)
pool.picture(Path({str(tmp_path / "good.jpg")!r}).read_bytes())
print("ready", flush=True)
threading.Event().wait()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    workers = _children(trainer.pid)
    assert len(workers) >= 2
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 120
    while left := [pid for pid in workers if Path(f"/proc/{pid}/cwd").exists()]:
        assert time.monotonic() < deadline, f"{left} outlived the trainer"
        time.sleep(0.05)


def test_batches_with_hostile_files_are_batches_without_them(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    """Through the reader, from real shards: bad is like absent, counted once, at any number of workers."""
    hostile = {2: endless_jpeg(4000, 4000), 5: one_bit_png(14_000), 6: picture(1)[:300], 9: b""}
    suffix = {5: "png"}
    samples = [
        {"__key__": f"{number:04d}", suffix.get(number, "jpg"): hostile.get(number, picture(number))}
        for number in range(12)
    ]
    write_tar(tmp_path / "a.tar", samples)
    index, spec = build(tmp_path), DataSpec(24, augment="inception_crop")
    ids = np.arange(12)
    absent = np.where(np.isin(ids, list(hostile)), -1, ids)
    plain = BatchReader(index, spec, augment_key=KEY).read(absent, 3)
    for workers in (1, 3):
        reading = ReadOptions(workers=workers, in_flight=workers + 1, limits=QUICK)
        reader = BatchReader(index, spec, augment_key=KEY, reading=reading)
        got, raw = reader.read(ids, 3), reader.fetch(ids, 3).batch
        reader.read(ids[6:], 4)
        reader.close()
        assert raw.pixels is not None and not raw.pixels.values[~raw.present].any(), "nothing of it is left in its slot"
        assert torch.equal(got.present, plain.present) and torch.equal(got.inputs["images"], plain.inputs["images"])
        assert sorted(reader.bad_records) == sorted(hostile)


def test_closing_frees_who_waits() -> None:
    with pool(1, Limits(cpu_seconds=600, wall_seconds=600)) as made, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(made.picture, b"SPIN", 0, 0)
        while not _children():
            time.sleep(0.01)
        time.sleep(0.3)
        made.close()
        with pytest.raises(DecoderError, match="closed"):
            waiting.result(30)


def test_processes_are_replaced_before_leaks_add_up(picture: Callable[..., bytes]) -> None:
    before, seen = _children(), []
    with pool(1, replace(QUICK, records_per_process=2), "murmuration.data.decode.worker:serve") as made:
        for number in range(5):
            assert np.array_equal(made.picture(picture(number), 0, number), PICTURES.make(picture(number), 0, number))
            (worker,) = _children() - before
            seen.append(worker)
    assert seen[0] == seen[1] != seen[2] == seen[3] != seen[4]
