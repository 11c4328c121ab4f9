"""The next step's noise, drawn by threads while the micro-batches compute; the same bits as if drawn on demand.

AES and numpy release the interpreter lock, so drawing costs the training loop little as long as a core is free.
Memory is bounded: at most `most_bytes` wait to be taken, and every piece taken makes room for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.noise import CorrelationFact
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import AESNoise, in_chunks

if TYPE_CHECKING:
    from murmuration.train.noise.correlated import CorrelatedNoise

MOST_BYTES = 1 << 30


class NoiseAhead:
    """A `Noise` around another: `prepare(step)` starts drawing; `chunks` yields the noise, and draws what is not ready.

    For one consumer, which takes the fragments in the order given here; any other order or step is also correct, only
    not drawn ahead. Abandoning a step needs no call: the next `prepare` discards what was drawn for it.
    """

    def __init__(
        self, mechanism: AESNoise | CorrelatedNoise, fragments: Sequence[Fragment], threads: int = 1,
        most_bytes: int = MOST_BYTES, pool: ThreadPoolExecutor | None = None,
    ) -> None:  # fmt: skip
        self._mechanism, self._fragments = mechanism, fragments
        self._plan = list(map(_anywhere, in_chunks(fragments)))
        self._room = self._most_bytes = most_bytes
        self._pool = pool or ThreadPoolExecutor(threads, thread_name_prefix="noise")
        self._step: int | None = None
        self._waiting: deque[Fragment] = deque()
        self._drawing: dict[Fragment, Future[np.ndarray]] = {}

    @property
    def std(self) -> float:
        return self._mechanism.std

    def at(self, std: float) -> NoiseAhead:
        """Uses the threads of this object, which discards what it has drawn."""
        if std == self.std:
            return self
        self.cancel()  # what waits was drawn for another C
        return NoiseAhead(self._mechanism.at(std), self._fragments, most_bytes=self._most_bytes, pool=self._pool)

    @property
    def generator(self) -> str:
        return self._mechanism.generator

    @property
    def grid(self) -> float:
        return self._mechanism.grid

    @property
    def divisor(self) -> float:
        return self._mechanism.divisor

    def correlation(self, step: int) -> CorrelationFact | None:
        return self._mechanism.correlation(step)

    def prepare(self, step: int) -> None:
        """Starts drawing the noise of this step, and discards any other."""
        self.cancel()
        self._step = step
        self._waiting.extend(self._plan)
        self._fill()

    def cancel(self) -> None:
        """Discards what is drawn; pieces that are being drawn now, one per thread, are finished and dropped."""
        self._step = None
        self._waiting.clear()
        for chunk, future in self._drawing.items():
            future.cancel()
            self._room += _bytes(chunk)
        self._drawing.clear()

    def close(self) -> None:
        self.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        for chunk in in_chunks(fragments):
            drawn = self._take(step, _anywhere(chunk))
            if drawn is None:
                yield from self._mechanism.chunks(step, [chunk], device, dtype)
            else:
                yield chunk, torch.from_numpy(drawn).to(device=device, dtype=dtype)

    def _take(self, step: int, chunk: Fragment) -> np.ndarray | None:
        """Takes a piece that was drawn ahead, once; an error in its thread is raised here."""
        if step != self._step:
            return None
        future = self._drawing.pop(chunk, None)
        if future is None:
            if chunk in self._waiting:  # requested out of order, or no piece fits into memory
                self._waiting.remove(chunk)
            return None
        drawn = future.result()
        self._room += _bytes(chunk)
        self._fill()
        return drawn

    def _fill(self) -> None:
        """Submits pieces in order, as many as there is room for."""
        while self._waiting and self._step is not None and _bytes(self._waiting[0]) <= self._room:
            chunk = self._waiting.popleft()
            self._room -= _bytes(chunk)
            self._drawing[chunk] = self._pool.submit(
                self._mechanism.draw, self._step, chunk.parameter, chunk.start, chunk.length, np.float64
            )


def _anywhere(chunk: Fragment) -> Fragment:
    """Noise belongs to elements, wherever an engine has them in its buffer."""
    return replace(chunk, position=0)


def _bytes(chunk: Fragment) -> int:
    return 8 * chunk.length
