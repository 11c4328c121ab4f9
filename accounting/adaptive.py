"""A clipping norm that adapts to the gradients, using only released values; the rule is public and frozen in the plan.

Along with its sum, each step releases a noised count: the share of records whose gradient was longer than C_t. The next
norm is a function of C_t and that share, so the ledger, which contains all shares, determines every norm. (Andrew et
al., 2021, Differentially private learning with adaptive clipping.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Context, Decimal, localcontext

from murmuration.accounting.strict_json import CLOSED

# A record adds 1/2 if its gradient is longer than C_t and -1/2 if not: half the sensitivity of counting 0 or 1. An
# absent record adds nothing, so one record moves the sum by 1/2.
METRIC, SENSITIVITY = "clipped_share", 0.5
# Relative tolerance between a stated sensitivity and C_t: it was divided by C_t and multiplied by it again.
ROUNDING = 1e-12
DIGITS = 60


class AdaptiveError(ValueError):
    """The numbers of the rule cannot work, or a norm does not follow from what was released."""


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
        """Computed in decimals and rounded once: the same bits on every machine, so that anyone can recompute them."""
        with localcontext(Context(prec=DIGITS)):
            over = min(Decimal(1), max(Decimal(0), Decimal(share)))
            exponent = Decimal(self.learning_rate) * (over - 1 + Decimal(self.quantile))
            moved = float(Decimal(norm) * exponent.exp())
        return min(self.highest, max(self.lowest, moved))


@dataclass
class NormTrail:
    """What C_t had to be at each step of one phase, as its ledger is read, and the C that follows from it. Keys are
    (segment, step)."""

    rule: AdaptiveRule
    first: float
    norms: dict[tuple[int, int], float] = field(default_factory=dict)
    _following: dict[tuple[int, int], float] = field(default_factory=dict)

    def opened(
        self, segment: int, step: int, begun_after: int, sigma: float, sensitivity: float, std: float
    ) -> None:  # fmt: skip
        """The norm that a step states by its sensitivity and noise must be the one that was released before it."""
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
        """Norms that a segment may begin with: it continues from weights of an earlier one, which has those shares."""
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
        """The last step whose share is in the ledger; 0 if none is."""
        return max((step for s, step in self._following if s == segment), default=0)
