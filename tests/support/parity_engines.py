"""How the parity tests run a clip engine: by its public interface, with totals kept in the precision judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from murmuration.model.attention import use_fused
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import ClipEngine, Clipped, Precision
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import Float32Sums, trainable_shapes
from tests.support import brute_force
from tests.support.brute_force import Factor

ENGINES = ("reference", "book-keeping")
GAMMA = 0.01
Batch = tuple[Mapping[str, Tensor], Tensor]


def prepared(name: str, rule: ClipRule, model: nn.Module, precision: Precision = "fp32") -> ClipEngine:
    if name == "reference":
        clip: ClipEngine = ReferenceClip(rule)
    else:
        clip = BookKeepingClip(rule, precision)
    clip.prepare(model)
    # timm's attention knows its switch; PyTorch's own has none and takes the written-out kernel under vmap by itself.
    use_fused(model, name != "reference")
    return clip


class Float64Sums:
    """Totals in fp64, so that an fp64 model can be judged to more digits than fp32 has."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.totals = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}

    def add(self, name: str, value: Tensor) -> None:
        self.totals[name] += value.detach().double()

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        del at_once
        product = left.detach().double().t() @ right.detach().double()
        self.totals[name] += product.view_as(self.totals[name])


def summed(
    clip: ClipEngine, model: nn.Module, batches: Sequence[Batch], *, double: bool = False
) -> tuple[dict[str, Tensor], list[Clipped]]:
    """Totals over the micro-batches, and what was seen of each."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = Float64Sums(trainable) if double else Float32Sums(trainable_shapes(model))
    seen = [clip.add_clipped(model, dict(inputs), present, sums) for inputs, present in batches]
    return dict(sums.totals), seen


def alone(clip: ClipEngine, model: nn.Module, inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """What one record adds when all its neighbours are absent."""
    present = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.bool)
    present[row] = True
    return summed(clip, model, [(inputs, present)])[0]


def contribution(clip: ClipEngine, model: nn.Module, inputs: Mapping[str, Tensor], row: int) -> float:
    return brute_force.size(alone(clip, model, inputs, row).values())


def only(inputs: Mapping[str, Tensor], rows: Sequence[int] | slice | Tensor) -> dict[str, Tensor]:
    return {name: tensor[rows] for name, tensor in inputs.items()}


class Shifted(nn.Module):
    """Adds an input to each record's loss: losses that are not finite, of gradients that are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        rest = {name: tensor for name, tensor in inputs.items() if name != "shift"}
        return self.inner(rest) + inputs["shift"]


class Scaled(nn.Module):
    """Multiplies each record's loss by an input: gradients of any size, zero or broken, on demand."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        rest = {name: tensor for name, tensor in inputs.items() if name != "scale"}
        return self.inner(rest) * inputs["scale"]


def rule_of(kind: str, bound: float) -> ClipRule:
    """With no allowance: what is added is held against the bound itself."""
    return ClipRule("flat" if kind == "flat" else "automatic", bound, 0.0, GAMMA if kind == "automatic" else 0.0)


def factor_of(kind: str, bound: float) -> Factor:
    if kind == "flat":
        return brute_force.flat(bound)
    return brute_force.automatic(bound, GAMMA if kind == "automatic" else 0.0)


def median_norm(records: list[brute_force.Record], present: Tensor) -> float:
    norms = [r.norm() for r, here in zip(records, present.tolist(), strict=True) if here]
    return statistics.median(norm for norm in norms if math.isfinite(norm))


def judged(
    records: list[brute_force.Record], present: Tensor, kind: str = "flat"
) -> tuple[float, list[float], brute_force.Gradients]:
    """The median norm of the records as their bound, and by it their factors and clipped sum."""
    bound = median_norm(records, present)
    factors = brute_force.factors_of(records, present, factor_of(kind, bound))
    return bound, factors, brute_force.clipped_sum(records, factors)


def with_adapters_that_do_something(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_up"):
                parameter.normal_(std=0.1)
    return model
