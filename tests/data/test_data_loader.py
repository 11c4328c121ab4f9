"""The loader: any step at any time, read ahead within bounds, the same bytes however it is stopped and resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import murmuration.data.batch.loader as loader_module
from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.draw.micro_batch import Fetched, MicroBatch, slots
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.index.epochs import PublicEpochs, PublicOrder
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError

KEY = b"k" * 32
SPEC = DataSpec(24, augment="random_resized_crop", mask_patches=9)
STEPS = 6


def _reader(index: ShardIndex, **reading) -> BatchReader:
    return BatchReader(index, SPEC, augment_key=KEY, mask_key=KEY, reading=ReadOptions(**reading))


def _sampler(index: ShardIndex, rate: float = 0.4) -> PoissonSampler:
    return PoissonSampler(KEY, b"d" * 32, index.records, round(rate * LANES))


@contextmanager
def loading(reader: BatchReader, sampler, rank: int = 0, world: int = 1, ahead: int = 3, last: int = STEPS) -> Iterator:
    loader = Loader(reader, sampler, rank, world, 2, last=last, ahead=ahead)
    try:
        yield loader
    finally:
        loader.close()


def _bytes(batches) -> list[bytes]:
    return [
        batch.present.numpy().tobytes()
        + b"".join(batch.inputs[name].numpy().tobytes() for name in sorted(batch.inputs))
        for batch in batches
    ]


def _plainly(index: ShardIndex, step: int, rank: int = 0, world: int = 1) -> list[bytes]:
    """No loader, no threads, no processes."""
    reader = _reader(index)
    return _bytes(reader.read(row, step) for row in slots(_sampler(index).draw(step).ids, rank, world, 2))


@pytest.mark.parametrize(("workers", "in_flight", "ahead"), [(0, 1, 1), (0, 3, 4), (2, 4, 3)])
def test_every_rank_gets_its_bytes(small_set: ShardIndex, workers: int, in_flight: int, ahead: int) -> None:
    for rank, world in ((0, 1), (1, 3)):
        reader = _reader(small_set, workers=workers, in_flight=in_flight)
        with loading(reader, _sampler(small_set), rank, world, ahead) as loader:
            for step in range(1, STEPS + 1):
                draw, batches = loader.step(step)
                assert draw.digest == _sampler(small_set).draw(step).digest
                assert _bytes(batches) == _plainly(small_set, step, rank, world)


def test_resumed_at_any_step_and_in_any_order(small_set: ShardIndex) -> None:
    expected = {step: _plainly(small_set, step) for step in range(1, STEPS + 1)}
    for start in range(1, STEPS + 1):
        with loading(_reader(small_set, in_flight=2), _sampler(small_set)) as loader:
            for step in range(start, STEPS + 1):
                assert _bytes(loader.step(step)[1]) == expected[step]
    with loading(_reader(small_set, in_flight=2), _sampler(small_set)) as loader:
        for step in (3, 4, 2, 2, 6, 5, 1):
            assert _bytes(loader.step(step)[1]) == expected[step]


def test_equal_ids_of_another_step_are_other_bytes(small_set: ShardIndex) -> None:
    """At q = 1 all draws are alike; what was read ahead for step 2 must not be taken for step 3."""
    plain = _reader(small_set)
    with loading(_reader(small_set), _sampler(small_set, 1.0)) as loader:
        for step in (1, 3, 2):
            expected = _bytes(plain.read(row, step) for row in slots(np.arange(25), 0, 1, 2))
            assert _bytes(loader.step(step)[1]) == expected


def test_a_step_left_early_leaves_nothing_behind(small_set: ShardIndex) -> None:
    with loading(_reader(small_set), _sampler(small_set)) as loader:
        for step, take in ((1, 1), (2, 2), (3, 1)):
            batches = loader.step(step)[1]
            first = [next(batches) for _ in range(take)]
            assert _bytes(first) == _plainly(small_set, step)[:take]
            batches.close()
        assert _bytes(loader.step(3)[1]) == _plainly(small_set, 3)


def test_other_ids_than_foreseen_are_read_anew(small_set: ShardIndex) -> None:
    """What was read ahead is a guess; the ids that are handed in count."""
    reader = _reader(small_set)
    with loading(reader, _sampler(small_set)) as loader:
        list(loader.step(1)[1])
        loader.draw(2)
        ids = np.array([0, 7, 8, 20])
        assert _bytes(loader.micro_batches(ids, 2)) == _bytes(reader.read(row, 2) for row in slots(ids, 0, 1, 2))


def test_the_first_step_takes_the_first_records_of_the_first_epoch() -> None:
    """Trainers count steps from one, epochs theirs from zero: off by one, a batch changes its epoch."""
    epochs = PublicEpochs(20, 5, b"order")
    order = PublicOrder(epochs)
    assert [order.draw(step).ids.tolist() for step in (1, 2, 5)] == [epochs.ids(n).tolist() for n in (0, 1, 4)]
    assert sorted(np.concatenate([order.draw(step).ids for step in (1, 2, 3, 4)]).tolist()) == list(range(20))


def test_public_epochs(small_set: ShardIndex) -> None:
    epochs = PublicEpochs(small_set.records, 7, KEY)
    reader = _reader(small_set)
    with loading(reader, PublicOrder(epochs)) as loader:
        for step in range(1, STEPS + 1):
            expected = _bytes(reader.read(row, step) for row in slots(epochs.ids(step - 1), 0, 1, 2))
            assert _bytes(loader.micro_batches(epochs.ids(step - 1), step)) == expected


class _Counting(BatchReader):
    """Notes what is read, and waits at a gate."""

    def __init__(self, index: ShardIndex) -> None:
        super().__init__(index, SPEC, augment_key=KEY, mask_key=KEY)
        self.begun: list[tuple[int, int]] = []
        self.changed = threading.Condition()
        self.fail_at: int | None = None

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        with self.changed:
            self.begun.append((step, int(ids_row[0])))
            self.changed.notify_all()
        if step == self.fail_at:
            raise ShardError("a.tar: gone")
        return super().fetch(ids_row, step)

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 20), self.begun


def test_reads_ahead_over_the_step_border_and_no_further(small_set: ShardIndex) -> None:
    reader = _Counting(small_set)
    plan = {step: slots(_sampler(small_set).draw(step).ids, 0, 1, 2) for step in (1, 2, 3)}
    rows = [(step, int(row[0])) for step in (1, 2, 3) for row in plan[step]]
    with loading(reader, _sampler(small_set), ahead=3) as loader:
        draw, batches = loader.step(1)
        loader._sampler._known[2].result(20)
        for taken in range(1, len(plan[1]) + 1):
            next(batches)
            # The one in the consumer's hands, and three that are ready or on their way.
            reader.wait_for(taken + 3)
            assert len(loader._waiting) == 3 and sorted(reader.begun) == sorted(rows[: taken + 3])
        assert next(batches, None) is None
        assert {step for step, _ in reader.begun} == {1, 2}, "the next step is being read before it is asked for"
        del draw
        list(loader.step(2)[1])
    assert reader.begun.count(rows[len(plan[1])]) == 1, "what was read ahead is used, not read again"


def test_nothing_is_read_after_the_last_step(small_set: ShardIndex) -> None:
    reader = _Counting(small_set)
    drawn: list[int] = []

    class Noted(PoissonSampler):
        def draw(self, step: int):
            drawn.append(step)
            return super().draw(step)

    with loading(reader, Noted(KEY, b"d" * 32, small_set.records, LANES // 3), last=2) as loader:
        for step in (1, 2):
            list(loader.step(step)[1])
    assert sorted(drawn) == [1, 2] and {step for step, _ in reader.begun} == {1, 2}


def test_the_time_that_a_step_waits_for_records_is_counted_and_no_other(
    small_set: ShardIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on only while the step waits for a record that is late."""
    reader, late = _Counting(small_set), threading.Semaphore(0)
    clock, asked = [0.0], list[float]()

    def fetch(ids_row: np.ndarray, step: int) -> Fetched:
        assert late.acquire(timeout=20)
        clock[0] += 5.0
        return BatchReader.fetch(reader, ids_row, step)

    def now() -> float:
        """Asked before and after each wait, of which the first is for the draw; only then is a record on its way."""
        asked.append(clock[0])
        if len(asked) > 2 and len(asked) % 2 == 1:
            late.release()
        return asked[-1]

    monkeypatch.setattr(reader, "fetch", fetch)
    monkeypatch.setattr(loader_module, "time", SimpleNamespace(monotonic=now))
    with loading(reader, _sampler(small_set), ahead=1, last=1) as loader:
        rows = 0
        for _ in loader.step(1)[1]:
            rows += 1
            clock[0] += 100.0  # the step computes
        assert rows == len(slots(_sampler(small_set).draw(1).ids, 0, 1, 2)) > 1 and loader.waited == 5.0 * rows


def test_errors_come_with_the_step_that_has_them(small_set: ShardIndex) -> None:
    reader = _Counting(small_set)
    reader.fail_at = 2
    with loading(reader, _sampler(small_set)) as loader:
        draw, batches = loader.step(1)
        loader._sampler._known[2].result(20)
        assert len(list(batches)) == len(slots(draw.ids, 0, 1, 2)), (
            "step 1 is whole, although step 2 has failed already"
        )
        reader.wait_for(len(slots(draw.ids, 0, 1, 2)) + 1)
        with pytest.raises(ShardError, match="gone"):
            list(loader.step(2)[1])
        reader.fail_at = None
        assert _bytes(loader.step(2)[1]) == _plainly(small_set, 2), "and it can be tried again"


def test_a_failing_draw_reaches_the_caller(small_set: ShardIndex) -> None:
    class Broken(PoissonSampler):
        def draw(self, step: int):
            if step == 2:
                raise RuntimeError("no draw")
            return super().draw(step)

    with loading(_reader(small_set), Broken(KEY, b"d" * 32, small_set.records, LANES // 3)) as loader:
        assert list(loader.step(1)[1])
        with pytest.raises(RuntimeError, match="no draw"):
            loader.step(2)


def test_bad_records_are_reported_when_they_are_used(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]
) -> None:
    """What was drawn for a step that never ran must not be told, not even to the private report."""
    samples = [{"__key__": f"{number:03d}", "jpg": picture(number) if number % 2 else b""} for number in range(8)]
    write_tar(tmp_path / "a.tar", samples)
    index = build(tmp_path)
    reader = BatchReader(index, DataSpec(24))
    with loading(reader, _sampler(index, 1.0), ahead=8) as loader:
        _, batches = loader.step(1)
        assert reader.bad_records == []
        next(batches)
        loader._waiting[-1].fetched.result(20)
        assert reader.bad_records == [0]
        list(batches)
        assert reader.bad_records == [0, 2, 4, 6]


def test_closing_in_the_middle_ends_all_threads(small_set: ShardIndex) -> None:
    before = set(threading.enumerate())
    reader = _reader(small_set, in_flight=4)
    with loading(reader, _sampler(small_set, 1.0)) as loader:
        batches: Iterator[MicroBatch] = loader.step(1)[1]
        next(batches)
    begun = set(threading.enumerate()) - before
    for thread in begun:
        thread.join(20)
    assert not [thread for thread in begun if thread.is_alive()]
    with pytest.raises(RuntimeError):
        list(loader.step(1)[1])
