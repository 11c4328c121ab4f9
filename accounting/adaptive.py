"""A clipping norm that follows the gradients by what was released of them: the rule is public and frozen in the plan.

With each step's sum goes a noised count: the share of records whose gradient was longer than C_t. The next norm is a
function of C_t and of that share, so the ledger, which holds all shares, fixes every norm. (Andrew et al., 2021,
Differentially private learning with adaptive clipping.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Context, Decimal, localcontext
from typing import TYPE_CHECKING

from accounting.typed import CLOSED

if TYPE_CHECKING:
    from accounting.facts import StepFacts

# A record adds 1/2 if its gradient is longer than C_t and -1/2 if not: half of what counting to 1 would cost. A record
# that is absent adds nothing, so one record moves the sum by 1/2.
METRIC, SENSITIVITY = "clipped_share", 0.5
# Between a stated sensitivity and C_t, by which it was divided and multiplied again.
ROUNDING = 1e-12
DIGITS = 60


class AdaptiveError(ValueError):
    """The numbers of the rule cannot work, or a norm is not the one that follows from what was released."""


@dataclass(frozen=True)
class AdaptiveRule:
    """C_{t+1} = C_t · exp(learning_rate · (share over C_t - (1 - quantile))), kept within [lowest, highest]."""

    __pydantic_config__ = CLOSED
    quantile: float
    learning_rate: float
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        if not (0 < self.quantile < 1 and 0 < self.learning_rate <= 10):
            raise AdaptiveError(
                f"adaptive clipping needs a quantile in (0, 1) and a learning rate in (0, 10]: {self.quantile:g}, "
                f"{self.learning_rate:g}"
            )
        if not (math.isfinite(self.highest) and 0 < self.lowest <= self.highest):
            raise AdaptiveError(f"adaptive clipping needs 0 < lowest <= highest: {self.lowest:g}, {self.highest:g}")

    def following(self, norm: float, share: float) -> float:
        """In decimals and rounded once: the same bits on every machine, so that anybody can recompute them."""
        with localcontext(Context(prec=DIGITS)):
            over = min(Decimal(1), max(Decimal(0), Decimal(share)))
            exponent = Decimal(self.learning_rate) * (over - 1 + Decimal(self.quantile))
            moved = float(Decimal(norm) * exponent.exp())
        return min(self.highest, max(self.lowest, moved))


@dataclass
class NormTrail:
    """Of one phase, as its ledger is read: what C_t had to be at each step, and what follows. Keys: (segment, step)."""

    rule: AdaptiveRule
    first: float
    norms: dict[tuple[int, int], float] = field(default_factory=dict)
    _following: dict[tuple[int, int], float] = field(default_factory=dict)

    def opened(self, segment: int, step: int, begun_after: int, sigma: float, facts: StepFacts) -> None:
        """The norm that a step states must be the one that was released before it."""
        sensitivity, std = facts.clipping.sensitivity, facts.noise.std
        if step == begun_after + 1:
            possible = self._at_begin(segment, begun_after)
        else:
            possible = [self._following[segment, step - 1]] if (segment, step - 1) in self._following else []
        for norm in possible:
            if std == sigma * norm and abs(sensitivity - norm) <= ROUNDING * norm:
                self.norms[segment, step] = norm
                return
        expected = " or ".join(f"{norm:.9g}" for norm in possible) or "nothing"
        raise AdaptiveError(
            f"step {step} clips at {sensitivity:.9g} with noise {std:.9g}, but what was released before it gives "
            f"C = {expected} and noise of {sigma:g} times that"
        )

    def _at_begin(self, segment: int, begun_after: int) -> list[float]:
        """A segment goes on from weights of an earlier one, which knew the shares up to there."""
        if begun_after == 0:
            return [self.first]
        return [norm for (s, step), norm in self._following.items() if s < segment and step == begun_after]

    def committed(self, segment: int, step: int, share: object) -> None:
        if not (isinstance(share, float) and math.isfinite(share)):
            raise AdaptiveError(f"step {step} was committed without its share of clipped records")
        self._following[segment, step] = self.rule.following(self.norms[segment, step], share)

    def after(self, segment: int, step: int) -> float:
        """C of the step after a checkpoint of this step, which was made in this segment or is what it began with."""
        if step == 0:
            return self.first
        made_in = [s for s, t in self._following if t == step and s <= segment]
        if not made_in:
            raise AdaptiveError(f"the ledger holds no clipping norm after step {step}")
        return self._following[max(made_in), step]

    def told(self, segment: int) -> int:
        """The last step whose share stands in the ledger; 0 if none does."""
        return max((step for s, step in self._following if s == segment), default=0)
