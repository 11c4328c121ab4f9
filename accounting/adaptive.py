"""A clipping norm that adapts to the gradients, using only released values; the rule is public and frozen in the plan.

Along with its sum, each step releases a noised count: the share of records whose gradient was longer than C_t. The next
norm is a function of C_t and that share, so the ledger, which contains all shares, determines every norm. (Andrew et
al., 2021, Differentially private learning with adaptive clipping.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import TYPE_CHECKING

from murmuration.accounting.typed import CLOSED

if TYPE_CHECKING:
    pass

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
