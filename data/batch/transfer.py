"""Micro-batches on their way to a GPU: copied by a stream of its own, one micro-batch ahead of the step.

While the GPU computes one micro-batch, its copy engine fetches the bytes of the next. They are normalised by the
stream that computes, once it has waited for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from murmuration.data.draw.micro_batch import MicroBatch


@dataclass(frozen=True)
class _Begun:
    batch: MicroBatch
    copy: MicroBatch
    done: torch.Event


class Transfer:
    """For use by the thread that computes."""

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
