"""Slope and curvature of the loss on PUBLIC records: the terms of Bu et al.'s improvement formula.

Four numbers: ‖g‖², gᵀHg, tr(H) and tr(HΣ), for the mean gradient g, the Hessian H of the mean loss and the covariance Σ
of one record's gradient. None needs a matrix. vᵀHv is one product of the Hessian with a vector; the traces are means
of zᵀHz over random signs z (Hutchinson), and of uᵀHu over sums u of the records' gradients with random signs.

Vectors are handled one at a time, so that memory holds three copies of the gradient whatever the number of probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.distributed.ranks import Ranks

Vector = dict[str, Tensor]


@dataclass(frozen=True)
class Curvature:
    records: int
    slope: float
    """‖g‖²"""
    along: float
    """gᵀHg"""
    trace: float
    """tr(H)"""
    spread: float
    """tr(HΣ)"""


class PublicLoss:
    """The mean loss over fixed public records, as a function of the trainable parameters.

    `batches` gives this rank's records, in the order of the whole list, from `first` on; all ranks make the same calls.
    """

    def __init__(
        self, model: nn.Module, trainable: Mapping[str, torch.Size], batches: Callable[[], Iterator[MicroBatch]],
        ranks: Ranks, records: int, first: int,
    ) -> None:  # fmt: skip
        # Fresh leaves on the same memory: no hook that a sharded engine put on its parameters fires.
        self._weights = {n: p.detach().requires_grad_() for n, p in model.named_parameters() if n in trainable}
        self._model, self._batches, self._ranks = model, batches, ranks
        self.records, self._first = records, first
        counts = ranks.gather(sum(int(batch.present.sum()) for batch in batches()))
        self.present = sum(counts)
        """The number of records that could be read: a bad one has no part in any mean."""

    def gradient(self, signs: Tensor | None = None) -> Vector:
        """The gradient of the mean loss; or, given a sign for every record, of the sum of the signed losses."""
        total = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        at = self._first
        for batch in self._batches():
            factors = None if signs is None else signs[at : at + len(batch.present)]
            at += len(batch.present)
            for name, part in self._slope(batch, factors, differentiable=False).items():
                total[name] += part
        for part in total.values():
            self._ranks.add(part)
            part.div_(self.present if signs is None else 1)
        return total

    def balance(self, signs: Tensor) -> float:
        """Sum of the signs of those records that could be read."""
        own, at = 0.0, self._first
        for batch in self._batches():
            there = batch.present.cpu()[: max(0, len(signs) - at)]
            own += float(signs[at : at + len(batch.present)][there].sum())
            at += len(batch.present)
        return sum(self._ranks.gather(own))

    def quadratic(self, vector: Vector) -> float:
        """vᵀHv."""
        own = 0.0
        for batch in self._batches():
            slope = self._slope(batch, None, differentiable=True)
            along = torch.stack([(slope[name] * part).sum() for name, part in vector.items()]).sum()
            if not along.requires_grad:
                continue  # a loss that is linear in the weights
            bent = torch.autograd.grad(along, list(self._weights.values()), materialize_grads=True)
            own += sum(
                float((b.double() * v.double()).sum()) for b, v in zip(bent, vector.values(), strict=True)
            )  # fmt: skip
        return sum(self._ranks.gather(own)) / self.present

    def _slope(self, batch: MicroBatch, factors: Tensor | None, differentiable: bool) -> Vector:
        # The fused attention kernels have no second derivative; the plain one has.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            losses = functional_call(self._model, self._weights, (batch.inputs,)).float()
            losses = torch.where(batch.present, losses, torch.zeros_like(losses))
            if factors is not None:
                padding = losses.new_zeros(len(losses) - len(factors))
                losses = losses * torch.cat([factors.to(losses), padding])
            found = torch.autograd.grad(
                losses.sum(), list(self._weights.values()), create_graph=differentiable, materialize_grads=True
            )
        return dict(zip(self._weights, found, strict=True))


def measure(loss: PublicLoss, probes: int) -> tuple[Curvature, Vector]:
    """The four numbers, and the mean gradient that two of them are computed from."""
    mean = loss.gradient()
    slope = inner(mean, mean)
    along = loss.quadratic(mean)
    trace = spread = 0.0
    for probe in range(probes):
        # A public seed: the same directions at every checkpoint, so that a curve shows the weights alone.
        draw = torch.Generator().manual_seed(probe)
        signs = _signs(draw, torch.Size([loss.records]))
        trace += loss.quadratic({name: _signs(draw, part.shape).to(part) for name, part in mean.items()}) / probes
        mixed = loss.gradient(signs)
        balance = loss.balance(signs)
        for name, part in mixed.items():
            part.sub_(mean[name], alpha=balance)
        spread += loss.quadratic(mixed) / (loss.present - 1) / probes
        del mixed
    return Curvature(loss.present, slope, along, trace, spread), mean


def inner(one: Vector, other: Vector) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _signs(draw: torch.Generator, shape: torch.Size) -> Tensor:
    return torch.randint(0, 2, shape, generator=draw, dtype=torch.int8).float().mul_(2).sub_(1)
