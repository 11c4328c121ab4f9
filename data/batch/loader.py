"""Micro-batches step after step, on the device, read ahead across step boundaries, with no state but the step number.

The draw of step t+1 can be known while t trains, because the sampler is a function of the step. So it is drawn in a
background thread, and its first micro-batches are requested as soon as the last ones of t are. Reading ahead computes
nothing on private records and reports nothing about them: bad records are reported, and errors raised, with the
micro-batch that is handed out. At most `ahead` micro-batches are in memory or being read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from murmuration.data.draw.micro_batch import Fetched, MicroBatch, slots
from murmuration.data.draw.poisson import Ids, Sampler

D = TypeVar("D", bound=Ids)
HOST = torch.device("cpu")


class BackgroundSampler(Generic[D]):
    """The same draws as `sampler`, each started while the previous step trains."""

    def __init__(self, sampler: Sampler[D], last: int) -> None:
        self._sampler, self._last = sampler, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draw")
        self._known: dict[int, Future[D]] = {}

    def draw(self, step: int) -> D:
        found = self._begin(step)
        for old in [known for known in self._known if known < step]:
            del self._known[old]
        self.begin_after(step)
        return found.result()

    def begin_after(self, step: int) -> None:
        if step < self._last:
            self._begin(step + 1)

    def ready(self, step: int) -> D | None:
        """The draw if it is ready; None if it is not, or if it failed (it fails again when it is requested)."""
        found = self._known.get(step)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def _begin(self, step: int) -> Future[D]:
        if step not in self._known:
            self._known[step] = self._thread.submit(self._sampler.draw, step)
        return self._known[step]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Row:
    """One micro-batch that is being read."""

    step: int
    number: int
    ids: np.ndarray
    fetched: Future[Fetched]


class Reader(Protocol):
    """Reads micro-batches for a loader, from the records of shards or from rows derived from them."""

    @property
    def in_flight(self) -> int: ...

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched: ...

    def report(self, fetched: Fetched) -> None: ...

    def close(self) -> None: ...


def iterate(reader: Reader, rows: np.ndarray, step: int) -> Iterator[MicroBatch]:
    """The micro-batches of `rows` in order, for `MicroBatch.to`; the next one is read while the caller computes."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as ahead:
        waiting = ahead.submit(reader.fetch, rows[0], step) if len(rows) else None
        for number in range(len(rows)):
            assert waiting is not None
            ready = waiting.result()
            if number + 1 < len(rows):
                waiting = ahead.submit(reader.fetch, rows[number + 1], step)
            reader.report(ready)
            yield ready.batch


class Loader(Generic[D]):
    """`step(t)`, or `draw(t)` and then `micro_batches(ids, t)`. For use by one thread; owns the reader it is given.

    Steps may be requested in any order, but reading ahead helps only if they are consecutive.
    """

    def __init__(
        self, reader: Reader, sampler: Sampler[D], rank: int, world: int, micro_batch: int, *,
        last: int, ahead: int | None = None, plan: Callable[[np.ndarray], np.ndarray] | None = None,
        device: torch.device = HOST,
    ) -> None:  # fmt: skip
        if ahead is None:
            # Small micro-batches must not keep the reader from reading as many records at a time as it can.
            ahead = max(3, 1 + math.ceil(reader.in_flight / micro_batch))
        if ahead < 1:
            raise ValueError(f"{ahead} micro-batches ahead: at least the requested one must be read")
        self._reader, self._last, self._ahead = reader, last, ahead
        self._transfer = Transfer(device) if device.type == "cuda" else None
        self._plan = plan or (lambda ids: slots(ids, rank, world, micro_batch))
        self._sampler = BackgroundSampler(sampler, last)
        self._threads = ThreadPoolExecutor(ahead, thread_name_prefix="micro-batch")
        self._waiting: deque[_Row] = deque()
        self.waited = 0.0
        """Seconds for which steps have waited for their draw and their records. As private as the records: one that is
        slow to decode shows in it."""

    def step(self, step: int) -> tuple[D, Iterator[MicroBatch]]:
        draw = self.draw(step)
        return draw, self.micro_batches(draw.ids, step)

    def draw(self, step: int) -> D:
        with self._noted():
            return self._sampler.draw(step)

    def micro_batches(self, ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of `ids`, in order. Leaving the iterator early drops those read ahead."""
        self._sampler.begin_after(step)
        rows = self._plan(ids)
        at = 0
        try:
            while at < len(rows):
                self._fill(rows, step, at)
                row = self._waiting.popleft()
                with self._noted():
                    fetched = row.fetched.result()
                self._fill(rows, step, at + 1)
                at += 1
                self._reader.report(fetched)
                yield fetched.batch if self._transfer is None else self._transferred(fetched.batch, self._transfer)
        finally:
            if at < len(rows):
                self._drop()

    def _fill(self, rows: np.ndarray, step: int, at: int) -> None:
        """Start reading those of the next `ahead` micro-batches, from row `at` of `step`, not yet being read."""
        wanted = [(step, number, rows[number]) for number in range(at, min(len(rows), at + self._ahead))]
        if len(wanted) < self._ahead and step < self._last and (coming := self._sampler.ready(step + 1)) is not None:
            following = self._plan(coming.ids)[: self._ahead - len(wanted)]
            wanted += [(step + 1, number, row) for number, row in enumerate(following)]
        for place, (when, number, ids) in enumerate(wanted):
            if place < len(self._waiting):
                known = self._waiting[place]
                if (known.step, known.number) == (when, number) and np.array_equal(known.ids, ids):
                    continue
                self._drop(place)
            self._waiting.append(_Row(when, number, ids, self._threads.submit(self._fetch, ids, when)))
        self._drop(len(wanted))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited += time.monotonic() - began

    def _fetch(self, ids: np.ndarray, step: int) -> Fetched:
        """On a CPU, the thread that reads a micro-batch also normalises it, while the step computes another."""
        fetched = self._reader.fetch(ids, step)
        return fetched if self._transfer is not None else replace(fetched, batch=fetched.batch.to(HOST))

    def _transferred(self, batch: MicroBatch, transfer: Transfer) -> MicroBatch:
        """This one on the device, and the next one on its way there if it was read in time."""
        there = transfer.finish(batch)
        coming = self._waiting[0].fetched if self._waiting else None
        if coming is not None and coming.done() and coming.exception() is None:
            transfer.begin(coming.result().batch)
        return there

    def _drop(self, start: int = 0) -> None:
        while len(self._waiting) > start:
            self._waiting.pop().fetched.cancel()

    def close(self) -> None:
        """Close at once, at any point; reads in progress end by themselves and their results are discarded."""
        self._drop()
        self._sampler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reader.close()


@dataclass(frozen=True)
class _Begun:
    batch: MicroBatch
    copy: MicroBatch
    done: torch.Event


class Transfer:
    """Micro-batches on their way to a GPU: copied by a stream of its own, one micro-batch ahead of the step.

    While the GPU computes one micro-batch, its copy engine fetches the bytes of the next. They are normalised by the
    stream that computes, once it has waited for the copy. For use by the thread that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._ahead: _Begun | None = None

    def begin(self, batch: MicroBatch) -> None:
        """Starts copying, without waiting. At most one micro-batch is ahead, so that memory stays bounded."""
        self._ahead = self._begun(batch)

    def finish(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch on the device, for the stream that computes; another that was begun is dropped."""
        ahead, self._ahead = self._ahead, None
        begun = ahead if ahead is not None and ahead.batch is batch else self._begun(batch)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(begun.done)
        for tensor in begun.copy.tensors():
            # Allocated for the other stream, which must not reuse this memory before it has been read here.
            tensor.record_stream(computing)
        return begun.copy.to(self._device)

    def _begun(self, batch: MicroBatch) -> _Begun:
        with torch.cuda.stream(self._stream):
            copy = batch.copied(self._device)
        return _Begun(batch, copy, self._stream.record_event())
