"""The module that a sharded engine wraps: the model, and the part that turns per-record losses into gradient sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from murmuration.train.clip.engine import ClipEngine, Clipped, Observation
from murmuration.train.clip.precision import Precision, autocast
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import ExactSums, trainable_shapes
from murmuration.train.engines.gradient_injection import GradientInjector
from murmuration.train.engines.plain_copy import PlainCopy
from murmuration.train.noise.update import UpdateError


class PrivateForward(nn.Module):
    """Called with a micro-batch, it adds clipped gradients to its totals; called without one, it hands the totals over.

    The scalar that the second kind of call returns has the totals as its gradient, so the engine's own hooks carry
    them.
    """

    def __init__(self, model: nn.Module, clip: ClipEngine) -> None:
        super().__init__()
        self.plain_copy = PlainCopy(model)
        self.model, self.clip = model, clip
        clip.prepare(model)
        self.shapes = trainable_shapes(model)
        self.handover = GradientInjector(model)
        self.sums = ExactSums(self.shapes, torch.device("cpu"))
        self.observed: Clipped | None = None
        self.kept_from_swap = False
        """Whether the totals, which are sums of records without noise, are locked into memory."""

    def begin(self, device: torch.device) -> None:
        self.sums = ExactSums(self.shapes, device)
        self.kept_from_swap = self.sums.keep_from_swap()

    def forward(
        self, inputs: dict[str, Tensor] | None = None, present: Tensor | None = None, rule: ClipRule | None = None
    ) -> Tensor:  # fmt: skip
        if inputs is None or present is None:
            return self.handover(self.sums.totals)
        self.observed = self.clip.add_clipped(self.model, inputs, present, self.sums, rule)
        return torch.zeros((), device=present.device)

    def observation(self) -> Observation:
        assert self.observed is not None, "nothing was accumulated yet"
        seen = self.observed
        return Observation(seen.losses, seen.norms, seen.sensitivity, seen.doubtful)


class PlainForward(nn.Module):
    """For a non-private phase: returns the sum of the losses of the present records."""

    def __init__(self, model: nn.Module, precision: Precision = "fp32") -> None:
        super().__init__()
        self.model = model
        self.precision: Precision = precision
        self.shapes = trainable_shapes(model)
        self.observed: Tensor | None = None

    def forward(self, inputs: dict[str, Tensor], present: Tensor, rule: ClipRule | None = None) -> Tensor:
        """Nothing is clipped, whatever the rule."""
        with autocast(self.precision, present.device):
            losses = self.model(inputs)
        kept = torch.where(present, losses, torch.zeros_like(losses))
        self.observed = kept.detach()
        return kept.sum()

    def observation(self) -> Observation:
        assert self.observed is not None, "nothing was accumulated yet"
        return Observation(self.observed)


def require_fp32(forward: nn.Module) -> None:
    for name, parameter in forward.named_parameters():
        if parameter.dtype != torch.float32:
            raise UpdateError(f"{name} is {parameter.dtype}; parameters must be fp32, or sums are rounded")
