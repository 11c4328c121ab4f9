"""What a clipped sum is, written from the definition: one record at a time, plain autograd, nothing from train/.

Slow on purpose. Tests and benchmarks judge every clip engine by it, so it must share no idea with any of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]
Factor = Callable[[float], float]


@dataclass(frozen=True)
class Record:
    """One record's own loss and gradient; the gradient in fp64, computed in the model's precision."""

    loss: float
    gradient: Gradients

    def norm(self, names: Iterable[str] | None = None) -> float:
        """Over all parameters or over those named; scaled by the largest element, so that squares stay in range."""
        return size([self.gradient[name] for name in (self.gradient if names is None else names)])


def size(tensors: Iterable[Tensor]) -> float:
    """L2 norm over all elements of all tensors: NaN or infinity if any element is."""
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    largest = float(flat.abs().max()) if len(flat) else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * float((flat / largest).square().sum().sqrt())


def records_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Record]:
    """Runs the model on batches of one."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for row in range(len(next(iter(inputs.values())))):
        loss = model({name: tensor[row : row + 1].clone() for name, tensor in inputs.items()})
        assert loss.shape == (1,), "a model gives one loss per record"
        gradients = torch.autograd.grad(loss.sum(), list(trainable.values()), allow_unused=True)
        named = zip(trainable.items(), gradients, strict=True)
        gradient = {name: (torch.zeros_like(p) if g is None else g).double() for (name, p), g in named}
        found.append(Record(float(loss.detach()), gradient))
    return found


def flat(bound: float) -> Factor:
    """min(1, C / norm)."""
    return lambda norm: min(1.0, bound / norm)


def automatic(bound: float, gamma: float) -> Factor:
    """C / (norm + gamma); gamma 0 is plain normalisation."""
    return lambda norm: bound / (norm + gamma)


def factors_of(records: Sequence[Record], present: Tensor, factor: Factor, names: Sequence[str] | None = None) -> list:
    """0 for a record that is absent, that has no gradient, or of which any number is not finite."""
    found = []
    for record, here in zip(records, present.tolist(), strict=True):
        whole, norm = record.norm(), record.norm(names)
        usable = here and math.isfinite(record.loss) and math.isfinite(whole) and norm > 0
        found.append(factor(norm) if usable else 0.0)
    return found


def clipped_sum(records: Sequence[Record], factors: Sequence[float]) -> Gradients:
    total = {name: torch.zeros_like(g) for name, g in records[0].gradient.items()}
    for record, factor in zip(records, factors, strict=True):
        if factor:
            for name, gradient in record.gradient.items():
                total[name] += factor * gradient
    return total


def grouped_sum(
    records: Sequence[Record], present: Tensor, groups: Mapping[str, tuple[Sequence[str], Factor]]
) -> Gradients:
    """Each group of parameters is clipped by its own norm and its own factor."""
    total: Gradients = {}
    for names, factor in groups.values():
        parts = [Record(r.loss, {name: r.gradient[name] for name in names}) for r in records]
        # Finiteness is the whole record's affair: a record broken in one group is left out of all.
        total |= clipped_sum(parts, factors_of(records, present, factor, names))
    return total


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """|found - expected| / |expected|, both seen as one long vector; a parameter missing in `found` counts as 0."""
    assert found.keys() <= expected.keys(), (
        f"sums for parameters that are not trained: {found.keys() - expected.keys()}"
    )
    missing = torch.zeros(())
    error = size([found.get(name, missing).double() - tensor for name, tensor in expected.items()])
    scale = size(expected.values())
    return error / scale if scale else error


def one_by_one(model: nn.Module, inputs: Mapping[str, Tensor], bound: float) -> Gradients:
    """The clipped sum of gradients of fresh copies, each of which has seen one record alone."""
    total: Gradients = {}
    for row in range(len(next(iter(inputs.values())))):
        own = copy.deepcopy(model)
        trained = {name: p for name, p in own.named_parameters() if p.requires_grad}
        loss = own({name: x[row : row + 1] for name, x in inputs.items()}).sum()
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradient = {
            name: torch.zeros_like(p).double() if g is None else g.double()
            for (name, p), g in zip(trained.items(), found, strict=True)
        }
        factor = min(1.0, bound / max(size(gradient.values()), 1e-30))
        total = {name: factor * g + total.get(name, 0.0) for name, g in gradient.items()}
    return total
