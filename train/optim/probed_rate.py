"""A learning rate that follows noised probes of the loss along the weights' last move, instead of being tuned.

Every few steps, the records that a step draws say by how much their loss falls or rises along the last move of the
weights, and by how much that bends (HyFreeDP, arXiv 2503.00703). At a rate r, a move changes the loss by about
s·r + c·r²/2, which is least at r = -s/c. What is known of s and c is a sum over records with noise, charged with the
step's gradient; everything here is computed from that, so it costs nothing more.

All probes have the same noise, and a move at a higher rate shows more above it. Therefore s and c are fitted by least
squares to all probes, of which earlier ones count less, and are trusted only where they exceed what noise alone would
give. Where nothing can be seen, the rate does nothing that could be seen either, and is raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from murmuration.accounting.metrics import CURVATURE, SLOPE
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.config.privacy import LossProbes

STATE = "probed_rate"
"""Its key in a checkpoint's manifest."""

FORGETTING = 0.5
"""What a probe counts for, at the next one."""
SPAN = 1e4
"""The factor lies between 1 / SPAN and SPAN."""
TRUSTED = 1.0
"""Deviations of the noise above which a fitted number is taken at its word."""


@dataclass(frozen=True)
class Fit:
    """y ≈ k·x by least squares, over all y with the same noise."""

    products: float = 0.0
    squares: float = 0.0

    def with_point(self, x: float, y: float) -> Fit:
        return Fit(FORGETTING * self.products + x * y, FORGETTING * self.squares + x * x)

    @property
    def value(self) -> float:
        return self.products / self.squares if self.squares else 0.0

    def doubt(self, std: float) -> float:
        """At most so large is the deviation of `value`: points that are counted less have no more noise than others."""
        return std / math.sqrt(self.squares) if self.squares else math.inf


@dataclass
class ProbedRate:
    """The factor on the schedule's learning rate; equal on all ranks, since it follows from released values alone."""

    every: int
    most: float
    """The largest change by one probe."""
    span: float
    """The factor lies between 1 / span and span."""
    slope_noise: float
    """Deviation of the noise in what is released, in units of the mean loss."""
    curvature_noise: float
    factor: float = 1.0
    moved: float = 0.0
    """The rate of the weights' last move; 0: there was none."""
    slope: Fit = field(default_factory=Fit)
    curvature: Fit = field(default_factory=Fit)

    @staticmethod
    def of(settings: LossProbes, plan: PrivacyPlan, manifest: Mapping[str, Any] | None) -> ProbedRate:
        """As a phase begins, or as the manifest of its checkpoint says."""
        noise = {metric.name: metric.std / metric.expected(plan.divisor, plan.held_out) for metric in plan.metrics}
        rate = ProbedRate(settings.every, settings.most, SPAN, noise[SLOPE], noise[CURVATURE])
        if manifest is not None and STATE in manifest:
            state = manifest[STATE]
            rate.factor, rate.moved = float(state["factor"]), float(state["moved"])
            rate.slope, rate.curvature = Fit(**state["slope"]), Fit(**state["curvature"])
        return rate

    def state(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of it."""
        fits = {"slope": asdict(self.slope), "curvature": asdict(self.curvature)}
        return {STATE: {"factor": self.factor, "moved": self.moved, **fits}}

    def probes(self, step: int) -> bool:
        """Whether a step measures. A public matter: the ledger charges all steps as if they did."""
        return step % self.every == 0 and self.moved > 0

    def advance(self, step: int, rate: float, released: dict[str, float]) -> dict[str, float]:
        """Called after a step, which moved the weights at `rate`, with what it released; returns what may be published:
        other steps release noise without any loss in it."""
        told = {name: value for name, value in released.items() if name not in RELEASED}
        if self.probes(step):
            slope, curvature = (released[name] for name in RELEASED)
            self.slope = self.slope.with_point(self.moved, slope)
            self.curvature = self.curvature.with_point(self.moved**2, curvature)
            told |= {"learning_rate_factor": self.factor, RELEASED[0]: slope, RELEASED[1]: curvature}
            self.factor = min(self.span, max(1 / self.span, self.factor * self._change()))
        self.moved = rate
        return told

    def _change(self) -> float:
        """By what to multiply the rate."""
        most, bends, falls = self.most, self.curvature.value, -self.slope.value
        if bends > TRUSTED * self.curvature.doubt(self.curvature_noise):
            return min(most, max(1 / most, falls / bends / self.moved))
        return 1 / most if falls < -TRUSTED * self.slope.doubt(self.slope_noise) else most


RELEASED = (f"noised_{SLOPE}", f"noised_{CURVATURE}")
