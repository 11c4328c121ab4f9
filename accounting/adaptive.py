"""A clipping norm that adapts to the gradients, using only released values; the rule is public and frozen in the plan.

Along with its sum, each step releases a noised count: the share of records whose gradient was longer than C_t. The next
norm is a function of C_t and that share, so the ledger, which contains all shares, determines every norm. (Andrew et
al., 2021, Differentially private learning with adaptive clipping.)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
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
    """What C_t had to be at each step of one phase, as its ledger is read, and the C that follows from it. A segment's
    steps come one after the other."""

    rule: AdaptiveRule
    first: float
    norms: dict[str, float] = field(default_factory=dict)
    """The first, last, lowest and highest C of a step."""
    _following: dict[int, tuple[int, array[float]]] = field(default_factory=dict)
    """Of each segment, the step that it began after, and the norms that its shares gave."""

    def opened(
        self, segment: int, step: int, begun_after: int, sigma: float, sensitivity: float, std: float
    ) -> None:  # fmt: skip
        """The norm that a step states by its sensitivity and noise must be the one that was released before it."""
        before = range(segment) if step == begun_after + 1 else [segment]
        possible = [self.first] if step == 1 else self._given(before, step - 1)
        for norm in possible:
            if std == sigma * norm and abs(sensitivity - norm) <= ROUNDING * norm:
                lowest, highest = self.norms.get("lowest", norm), self.norms.get("highest", norm)
                self.norms = {
                    "first": self.norms.get("first", norm), "last": norm, "lowest": min(lowest, norm),
                    "highest": max(highest, norm),
                }  # fmt: skip
                self._following.setdefault(segment, (begun_after, array("d")))
                return
        expected = " or ".join(f"{norm:.9g}" for norm in possible) or "nothing"
        raise AdaptiveError(
            f"step {step} clips at {sensitivity:.9g} with noise {std:.9g}, but what was released before it gives "
            f"C = {expected} and noise of {sigma:g} times that"
        )

    def _given(self, segments: Iterable[int], step: int) -> list[float]:
        """The norms that followed from this step in any of these segments."""
        found = []
        for segment in segments:
            begun_after, norms = self._following.get(segment, (0, array("d")))
            if 0 < step - begun_after <= len(norms):
                found.append(norms[step - begun_after - 1])
        return found

    def committed(self, segment: int, step: int, share: object) -> None:
        if not (isinstance(share, float) and math.isfinite(share)):
            raise AdaptiveError(f"step {step} was committed without its share of clipped records")
        self._following[segment][1].append(self.rule.following(self.norms["last"], share))

    def after(self, segment: int, step: int) -> float:
        """C of the step after a checkpoint of this step, which was made in this segment or is what it began with."""
        if step == 0:
            return self.first
        given = self._given(range(segment + 1), step)
        if not given:
            raise AdaptiveError(f"the ledger holds no clipping norm after step {step}")
        return given[-1]

    def told(self, segment: int) -> int:
        """The last step whose share is in the ledger; 0 if none is."""
        begun_after, norms = self._following.get(segment, (0, array("d")))
        return begun_after + len(norms) if norms else 0
