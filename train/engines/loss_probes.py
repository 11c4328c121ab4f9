"""Losses of a step's own records along the weights' last move, summed, noised and charged by `MetricRelease`.

With u the last move and w the weights, a record's slope is (l(w + u) - l(w - u)) / 2 and its curvature is
l(w + u) - 2·l(w) + l(w - u). Each is bounded, and a record moves both, beside the gradient, in the one vector that a
step releases. The weights w and w ± u are those from before the step, so none of them depends on its records.

`w - u`, where the move began, is part of the optimizer's state, so a run that continues probes what it would have
probed. The model is called with other tensors in place of its parameters, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from murmuration.accounting.metrics import CURVATURE, SLOPE
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.losses import losses_of
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine, evaluating
from murmuration.train.noise.metrics import MetricRelease
from murmuration.train.optim.base import BEFORE

MicroBatches = Callable[[np.ndarray, int], Iterator[MicroBatch]]


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
