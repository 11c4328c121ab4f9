"""The clipping rule: by what a record's gradient is scaled, what that promises, and what rounding may add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from accounting.facts import ClippingFact
from accounting.plan import PrivacyPlan

UNIT_ROUNDOFF = 2.0**-24
# Norms add squares in fp32 along rows of at most this many elements, which is a relative error below 9.8e-4, and
# factors are rounded once. C is lowered by this much more.
LONGEST_ROW = 1 << 15
FACTOR_ROUNDING = 1e-3
MOST_ALLOWANCE = 0.05


class ClipError(ValueError):
    """Clipping cannot keep its promise here; the message says why."""


def rounding_allowance(largest_batch: int, micro_batch: int) -> float:
    """How far fp32 rounding may move the difference of two neighbouring sums, in units of C, at worst.

    A chain of k fp32 additions of terms with total norm S errs by at most S·k·u/(1-k·u), here S = B·C with every
    gradient aligned. No element goes through more additions than: one micro-batch, then all micro-batches on one
    rank. With W ranks it is one micro-batch, 1/W of the micro-batches and W ranks: no more, as long as there are not
    more ranks than micro-batches (`recipe.clip_rule` refuses that). Neighbouring sums may err in opposite directions.
    """
    chain = micro_batch + -(-largest_batch // micro_batch) + 1
    relative = chain * UNIT_ROUNDOFF / (1 - chain * UNIT_ROUNDOFF)
    return 2 * relative * largest_batch + FACTOR_ROUNDING


@dataclass(frozen=True)
class ClipRule:
    """Factor by which a record's gradient is scaled so that its norm is at most `bound`.

    The sensitivity is stated from the bound in use and what rounding may add to it, not from a config.
    """

    kind: Literal["flat", "automatic"]
    bound: float
    allowance: float
    gamma: float = 0.01

    @staticmethod
    def of(plan: PrivacyPlan, kind: Literal["flat", "automatic"], gamma: float, micro_batch: int) -> ClipRule:
        """C is lowered by the allowance, so that bound and rounding together stay within C."""
        allowance = rounding_allowance(plan.largest_batch, micro_batch)
        if allowance > MOST_ALLOWANCE:
            raise ClipError(
                f"sums of up to {plan.largest_batch} records in fp32 may err by {allowance:.2f}·C, more than the "
                f"{MOST_ALLOWANCE}·C by which C can be lowered; use a smaller expected_batch"
            )
        return ClipRule(kind, plan.clip_norm / (1 + allowance), allowance, gamma)

    @property
    def sensitivity(self) -> float:
        return self.bound * (1 + self.allowance)

    def factors(self, norms: Tensor) -> Tensor:
        """fp64 in, fp32 out; 0 for a norm that is zero or not finite. A record's scaled norm never exceeds `bound`.

        Also 0 where the factor is subnormal in fp32 (norms beyond C·1e38): it would be rounded by far more than
        FACTOR_ROUNDING.
        """
        factors = (self.bound / norms).clamp(max=1.0) if self.kind == "flat" else self.bound / (norms + self.gamma)
        usable = torch.isfinite(norms) & (norms > 0) & (factors >= torch.finfo(torch.float32).tiny)
        return torch.where(usable, factors, torch.zeros_like(factors)).to(torch.float32)

    def fact(self) -> ClippingFact:
        return ClippingFact(self.kind, self.sensitivity)
