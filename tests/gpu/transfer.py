"""Run under a pretended GPU by test_gpu_transfer.py: a loader whose micro-batches are copied one ahead of the step.

Copies are real there (device memory is host memory), kernels are not, and PyTorch's own sanitizer watches every access
to see whether the streams are ordered. `races` takes that order away.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch.cuda import _sanitizer

from murmuration.data.batch.loader import Loader
from murmuration.data.draw.micro_batch import IMAGES, Fetched, MicroBatch
from murmuration.data.draw.normalisation import Normalisation, Pixels
from murmuration.data.index.epochs import PublicDraw

GPU = torch.device("cuda", 0)
SIDE = 8


class Bytes:
    """Micro-batches whose pixels and numbers are their first record."""

    in_flight = 1

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        pixels = torch.full((len(ids_row), SIDE, SIDE, 3), int(ids_row[0]), dtype=torch.uint8, pin_memory=True)
        inputs = {"number": torch.from_numpy(ids_row), "step": torch.full((len(ids_row),), step)}
        return Fetched(MicroBatch(inputs, torch.from_numpy(ids_row >= 0), Pixels(pixels, Normalisation())), {})

    def report(self, fetched: Fetched) -> None: ...

    def close(self) -> None: ...


class Everyone:
    def draw(self, step: int) -> PublicDraw:
        return PublicDraw(np.arange(step, step + 9))


def main(races: bool) -> None:
    # There is no driver for PyTorch to set up; the stand-in for the runtime is enough for memory and streams.
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_device = lambda: 0
    _sanitizer.enable_cuda_sanitizer()
    if races:
        torch.cuda.Stream.wait_event = lambda self, event: None  # pyright: ignore[reportAttributeAccessIssue]
    loader = Loader(Bytes(), Everyone(), 0, 1, 4, last=3, device=GPU)
    assert loader._transfer is not None
    computing, copying = torch.cuda.current_stream(GPU), loader._transfer._stream
    assert computing != copying
    for step in (1, 2, 3):
        for number, batch in enumerate(loader.step(step)[1]):
            assert batch.inputs[IMAGES].device == batch.present.device == GPU and batch.pixels is None
            first = step + 4 * number
            assert batch.inputs["number"].tolist() == [i if i < step + 9 else -1 for i in range(first, first + 4)]
            assert batch.inputs["step"].tolist() == [step] * 4
            for row in loader._waiting:
                row.fetched.result()  # so that the next one is read in time, and can be sent ahead
            ahead = loader._transfer._ahead
            print("ahead" if ahead is not None and ahead.batch is loader._waiting[0].fetched.result().batch else "none")
    loader.close()


if __name__ == "__main__":
    main("races" in sys.argv)
