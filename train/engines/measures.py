"""Which released metrics take a pass of their own over a step's micro-batches, and which pass that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from murmuration.accounting.metrics import ACCURACY, CURVATURE, SLOPE
from murmuration.data.batch.held_out import HELD_OUT
from murmuration.data.draw.micro_batch import ROW_SHARE, MicroBatch
from murmuration.train.clip.losses import blanked, incomputable, isolated, losses_of, slot_mean
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine, evaluating
from murmuration.train.noise.metrics import MetricRelease
from murmuration.train.optim.base import BEFORE

# Losses of a step's own records along the weights' last move, summed, noised and charged by `MetricRelease`.
#
# With u the last move and w the weights, a record's slope is (l(w + u) - l(w - u)) / 2 and its curvature is l(w + u)
# - 2·l(w) + l(w - u). Each is bounded, and a record moves both, beside the gradient, in the one vector that a step
# releases. The weights w and w ± u are those from before the step, so none of them depends on its records.
#
# `w - u`, where the move began, is part of the optimizer's state, so a run that continues probes what it would have
# probed. The model is called with other tensors in place of its parameters, which stay as they are.


MicroBatches = Callable[[np.ndarray, int], Iterator[MicroBatch]]
Probes = Callable[[int], bool]


class LossProbes:
    """`probes` says which steps measure."""

    def __init__(
        self, engine: Engine, release: MetricRelease, ranks: Ranks, probes: Callable[[int], bool]
    ) -> None:  # fmt: skip
        if engine.partitioned:
            raise RecipeError("privacy.loss_probes needs the whole model, which this engine shards; use ZeRO 0, 1 or 2")
        self._engine, self._release, self._ranks, self._probes = engine, release, ranks, probes

    def around(self, micro_batches: MicroBatches) -> MicroBatches:
        """The same micro-batches, whose losses are measured before they are trained on."""

        def measured(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
            if not self._probes(step):
                yield from micro_batches(ids, step)
                return
            before = weights_before(self._engine, self._ranks)
            now = dict(self._engine.model.named_parameters())
            after = {name: (2 * now[name] - tensor).detach() for name, tensor in before.items()}
            for batch in micro_batches(ids, step):
                if batch.inputs:  # a batch that could not be read has none
                    self._measure(batch.to(self._engine.device), before, after)
                yield batch

        return measured

    @torch.no_grad()
    def _measure(self, batch: MicroBatch, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """With the weights before the last move, as they are, and after another move like it."""
        with evaluating(self._engine.model):
            behind, here, ahead = (self._losses(batch, weights) for weights in (before, {}, after))
        self._release.add_measured(SLOPE, (ahead - behind) / 2, batch.present)
        self._release.add_measured(CURVATURE, ahead - 2 * here + behind, batch.present)

    def _losses(self, batch: MicroBatch, weights: Mapping[str, Tensor]) -> Tensor:
        def model(inputs: dict[str, Tensor]) -> Tensor:
            return functional_call(self._engine.model, dict(weights), (inputs,))

        return losses_of(model, batch.inputs, len(batch.present)).double()


def weights_before(engine: Engine, ranks: Ranks) -> dict[str, Tensor]:
    """Every trained parameter as it was before the optimizer's last step, on every rank. All ranks call this
    together."""
    starts, size = {}, 0
    for name, shape in engine.shapes.items():
        starts[name] = size
        size += shape.numel()
    flat = torch.zeros(size, device=engine.device)
    own = 0
    for shard in engine.shards():
        for fragment in shard.fragments:
            start = starts[fragment.name] + fragment.start
            flat[start : start + fragment.length] = fragment.of(shard.state[BEFORE]).to(flat.device)
            own += fragment.length
    if ranks.sum(own) == size:  # else every rank has all of them
        flat = ranks.add(flat)
    return {
        name: flat[start : start + engine.shapes[name].numel()].view(engine.shapes[name])
        for name, start in starts.items()
    }


# Accuracy on the held-out records of a step's own draw: counted here, noised and charged by `MetricRelease`.
#
# A held-out record that is drawn moves the count by at most 1 and the gradient not at all; any other record moves the
# gradient by at most C and the count not at all, because the count is taken with the weights from before the step. So
# a draw still releases one vector, and each record moves one of its parts. The ledger charges it as if a record could
# move all parts at once, which is more.


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

        def right(model: Any, inputs: Mapping[str, Tensor], rows: int) -> Tensor:
            return isolated(model.right, inputs, rows, model=model).squeeze(1)

        with evaluating(self._model):
            try:
                return right(self._model, here, rows)
            except (IndexError, RuntimeError):  # a record that it cannot answer about adds nothing, like its gradient
                every = torch.ones(rows, dtype=torch.bool, device=self._device)
                if self._device.type != "cpu" or not (odd := incomputable(self._model, here, every, right)).any():
                    raise
                return torch.where(odd, math.nan, right(self._model, blanked(here, odd), rows))


PASSES: dict[str, Callable[[Engine, MetricRelease, Ranks, Probes | None], HeldOutCount | LossProbes | None]] = {
    ACCURACY: lambda engine, release, ranks, probes: HeldOutCount(engine, release),
    # Slope and curvature are measured together.
    SLOPE: lambda engine, release, ranks, probes: LossProbes(engine, release, ranks, probes) if probes else None,
}
