"""Accuracy on the held-out records of a step's own draw: counted here, noised and charged by `MetricRelease`.

A held-out record that is drawn moves the count by at most 1 and the gradient not at all; any other record moves the
gradient by at most C and the count not at all, because the count is taken with the weights from before the step. So
a draw still releases one vector, and each record moves one of its parts. The ledger charges it as if a record
could move all parts at once, which is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.metrics import ACCURACY
from murmuration.data.batch.held_out import HELD_OUT
from murmuration.data.draw.micro_batch import ROW_SHARE, MicroBatch
from murmuration.train.clip.losses import isolated
from murmuration.train.clip.rows import slot_mean
from murmuration.train.config.section import RecipeError
from murmuration.train.engines.base import Engine, evaluating
from murmuration.train.noise.metrics import MetricRelease

MicroBatches = Callable[[np.ndarray, int], Iterator[MicroBatch]]


class HeldOutCount:
    def __init__(self, engine: Engine, release: MetricRelease) -> None:
        if engine.partitioned:
            raise RecipeError(
                "accuracy on held-out records needs the whole model, which this engine shards; use ZeRO 0, 1 or 2"
            )
        if not callable(getattr(engine.model, "right", None)):
            raise RecipeError(
                "privacy.release: an accuracy needs a model that says which rows it gets right: use the objective "
                "classify, or give the module a method right(inputs)"
            )
        self._model, self._device, self._release = engine.model, engine.device, release

    def around(self, micro_batches: MicroBatches) -> MicroBatches:
        """The same micro-batches, with held-out records marked absent."""

        def rest(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
            for batch in micro_batches(ids, step):
                yield self._count(batch) if batch.inputs else batch  # a batch that could not be read has no inputs

        return rest

    def _count(self, batch: MicroBatch) -> MicroBatch:
        # A KeyError here means a reader that marks nothing: training on held-out records would go unnoticed.
        inputs = dict(batch.inputs)
        held = inputs.pop(HELD_OUT).to(batch.present.device)
        asked = batch.present & held
        self._release.add_measured(ACCURACY, slot_mean(self._right(inputs), inputs, len(asked)), asked)
        # From here on a held-out record is like an empty slot: the inputs contain nothing of it.
        gone = held.repeat_interleave(batch.rows)
        rest = {
            name: torch.where(gone.to(t.device).view(-1, *[1] * (t.dim() - 1)), torch.zeros_like(t), t)
            for name, t in inputs.items()
        }
        return MicroBatch(rest, batch.present & ~held)

    @torch.no_grad()
    def _right(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Per row, for all rows: the number of held-out records must not change a kernel's shapes."""
        here = {name: tensor.to(self._device) for name, tensor in inputs.items() if name != ROW_SHARE}
        rows = len(next(iter(here.values())))

        with evaluating(self._model):
            return isolated(self._model.right, here, rows).squeeze(1)  # pyright: ignore[reportArgumentType]
