"""Training metrics of private records that may be published: bounded per record, summed, noised and charged.

All that is released from one draw is one event: the gradient and these sums form one vector with noise on each part,
and the ledger charges their combined noise multiplier (contract 9). Values are held back until a checkpoint is durable.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.adaptive import METRIC
from murmuration.accounting.errors import PlanError
from murmuration.accounting.ledger.facts import MetricFact
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import StepKey
from murmuration.train.clip.engine import Observation
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import sum_on_grid

STEPS_TO_BOUND = 30
"""Bits of what one record may add: its share of the bound is known to a billionth, far below any noise."""
MOST_RECORDS = 2**23
"""Size of a step: so many numbers of STEPS_TO_BOUND bits have a sum of at most 53 bits, as fp64 has."""


def _clipped(observed: Observation, bound: float) -> Tensor:
    assert observed.norms is not None, "a private phase measures gradient norms"
    return (observed.norms > bound).double()


def _half_of_clipped(observed: Observation, bound: float) -> Tensor:
    """1/2 or -1/2; not a number where the norm is none."""
    assert observed.norms is not None, "a private phase measures gradient norms"
    return torch.where(torch.isfinite(observed.norms), _clipped(observed, bound) - 0.5, math.nan)


MEASURES: dict[str, Callable[[Observation, float], Tensor]] = {
    "loss": lambda observed, bound: observed.losses, "clipped": _clipped, METRIC: _half_of_clipped
}  # fmt: skip
"""What the pass that makes the gradients tells of each record, given the norm to which it clipped."""


class MetricRelease:
    """Releases the noised metrics of each logical step; does nothing if the plan has no metrics."""

    def __init__(
        self, key: bytes | StepKey, plan: PrivacyPlan, ranks: Ranks,
        make: Callable[[bytes | StepKey, PlannedMetric, PrivacyPlan], AESNoise] = AESNoise.of_metric,
    ) -> None:  # fmt: skip
        if plan.metrics and plan.divisor > MOST_RECORDS / 2:
            raise PlanError(
                f"noised metrics add up at most {MOST_RECORDS:,} records exactly, and batches of {plan.divisor:,.0f} "
                "are expected; release none (privacy.release), or lower privacy.expected_batch"
            )
        self._ranks = ranks
        self.planned = plan.metrics
        self._expected = [metric.expected(plan.divisor, plan.held_out) for metric in plan.metrics]
        self._noise = [make(key, metric, plan) for metric in plan.metrics]
        self._sums = torch.zeros(len(plan.metrics), dtype=torch.float64, device=ranks.device)

    def facts(self) -> tuple[MetricFact, ...]:
        """States how far each record moves a sum, and the noise that the mechanisms in use draw."""
        return tuple(
            MetricFact(metric.name, metric.bound, noise.std, noise.grid)
            for metric, noise in zip(self.planned, self._noise, strict=True)
        )

    def add(self, present: Tensor, observed: Observation, bound: float) -> None:
        """A micro-batch of this rank, with the norm to which its gradients were clipped."""
        for index, metric in enumerate(self.planned):
            if not metric.apart:  # otherwise, whoever measures it calls `add_measured`
                self._add(index, MEASURES[metric.name](observed, bound), present)

    def add_measured(self, name: str, values: Tensor, asked: Tensor) -> None:
        """Adds what a pass of its own has measured of this rank's records; those that are not `asked` add nothing. Of
        the accuracy: the share of a record's rows that are right, which is 0 or 1 where it has one row."""
        self._add([metric.name for metric in self.planned].index(name), values, asked)

    def _add(self, index: int, values: Tensor, counted: Tensor) -> None:
        metric = self.planned[index]
        lowest = -metric.bound if metric.signed else 0.0
        self._sums[index] += _bounded_sum(values, counted, lowest, metric.bound)

    def release(self, step: int) -> dict[str, float]:
        """Adds up the sums of all ranks, adds noise once (each rank draws the same keyed noise), and divides by a
        constant: q·n, or the part of it that is expected to be held out, or not to be.

        The noise has as many bits as the sum, and the result is rounded to fp32: any bits of an fp64 number that lie
        below those of its noise would show the bare sum.
        """
        if not self.planned:
            return {}
        sums = self._ranks.add(self._sums.to(self._ranks.device, copy=True)).cpu()
        self._sums.zero_()
        return {
            f"noised_{metric.name}": rounded(
                _noised(sums[index : index + 1], noise, step, index) / self._expected[index] + metric.offset
            )
            for index, (metric, noise) in enumerate(zip(self.planned, self._noise, strict=True))
        }


def _noised(total: Tensor, noise: AESNoise, step: int, index: int) -> float:
    drawn = noise.draw(step, index, 0, 1, np.float64)
    return float(sum_on_grid(total, torch.from_numpy(drawn), noise.grid) if noise.grid else total[0] + float(drawn[0]))


def rounded(value: float) -> float:
    return float(np.float32(value))


def _bounded_sum(values: Tensor, present: Tensor, lowest: float, highest: float) -> Tensor:
    """Each present record adds a number within the bounds; one that is not finite adds 0. Stays on the device.

    What a record adds is a whole multiple of a power of two that is so coarse that fp64 adds up MOST_RECORDS of them
    without rounding, in any order. So a record moves the sum by what it adds and by nothing else: with a rounded sum,
    whether it is there could also decide how the others' numbers are rounded.
    """
    unit = math.ldexp(1.0, math.frexp(max(-lowest, highest))[1] - STEPS_TO_BOUND)
    values = values.detach().double()
    counts = present.to(values.device) & torch.isfinite(values)
    whole = values.div(unit).round_().clamp_(math.ceil(lowest / unit), math.floor(highest / unit))
    return torch.where(counts, whole.mul_(unit), torch.zeros_like(values)).sum()
