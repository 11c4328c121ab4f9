"""One process, plain PyTorch: the whole model on one device, no launcher, no process group, nothing compiled.

Clipped gradients are totalled in fp64 by the clip engine; noise is added to these totals, and the optimizer gets the
result in fp32. In a phase without privacy, gradients are ordinary ones.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor, nn

from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.process import describe_process
from murmuration.train.distributed.ranks import Alone, Ranks
from murmuration.train.distributed.shards import whole_parameters
from murmuration.train.engines.base import NOT_FINITE, AppliedUpdate, all_finite
from murmuration.train.engines.forward import EngineOfForward, PlainForward, PrivateForward
from murmuration.train.noise.update import Update, UpdateError
from murmuration.train.optim.base import FlatOptimizer


def start_ranks() -> Ranks:
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise RecipeError(
            f'run.engine = "local" is one process, but {world} were started; start it with plain python, or choose '
            '"deepspeed" or "fsdp2"'
        )
    return Alone(describe_process())


class LocalEngine(EngineOfForward):
    partitioned = False

    def __init__(self, forward: PrivateForward | PlainForward, optimizer: FlatOptimizer, ranks: Ranks) -> None:
        super().__init__(forward, optimizer, ranks)
        self.model: nn.Module = forward.model.to(self.device)
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._layout = whole_parameters(self._trained)
        if isinstance(forward, PrivateForward):
            del forward.handover  # for engines that reduce gradients; here the totals are used directly
            forward.begin(self.device)
        optimizer.bind(self._layout, None)

    @torch.no_grad()
    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        before = self._optimizer.steps_done
        try:
            if isinstance(self._forward, PrivateForward):
                self._forward.settle()
                # At once: on a GPU, noise is drawn by dozens of launches, whatever their size.
                sums = self._forward.exact_sums
                parts = [(sums.places[each.name].start, each) for _, own in self._layout.values() for each in own]
                update.finish(sums.flat, [replace(each, position=start + each.position) for start, each in parts])
                for name, parameter in self._trained.items():
                    parameter.grad = sums.totals[name].to(parameter.dtype)
            else:
                for parameter, fragments in self._layout.values():
                    trained = self._trained[fragments[0].name]
                    total = torch.zeros_like(trained) if trained.grad is None else trained.grad.contiguous()
                    update.finish(total.view(-1), fragments)
                    parameter.grad = total.to(parameter.dtype)
            self._optimizer.step()
        finally:
            self.discard()
        return self._check(update, self._optimizer.steps_done == before + 1)

    def discard(self) -> None:
        if isinstance(self._forward, PrivateForward):
            self._forward.clear()
        for parameter in self._trained.values():
            parameter.grad = None

    def _check(self, update: Update, stepped: bool) -> AppliedUpdate:
        if update.elements != self.trainable_elements:
            raise UpdateError(
                f"{update.elements} of {self.trainable_elements} elements were finished; some got no noise, or got it "
                "twice"
            )
        if not stepped:
            raise UpdateError("the optimizer did not take exactly one step")
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if own.keys() != self._trained.keys() or any(own[name] is not p for name, p in self._trained.items()):
            raise UpdateError(
                "the model's parameters are no longer those that the optimizer updates; something replaced them"
            )
        if not all_finite(self._trained.values()):
            raise UpdateError(NOT_FINITE)
        return AppliedUpdate(self.trainable_elements)

    def whole_weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def plain_model(self) -> nn.Module | None:
        return None

    def close(self) -> None:
        self.discard()
