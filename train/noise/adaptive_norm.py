"""The clipping norm of each step, where it adapts: set before the step opens, moved by the share that was released.

The rule and its arithmetic are in `accounting/adaptive.py`, where the ledger's reader checks them; here C_t reaches the
three that act by it: the clip engine, the noise and the count.
"""

from __future__ import annotations

from murmuration.accounting.adaptive import METRIC
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.clip.rule import ClipError
from murmuration.train.noise.aes import Noise
from murmuration.train.noise.metrics import MetricRelease

RELEASED = f"noised_{METRIC}"


class AdaptiveNorm:
    """Equal on all ranks: it depends on the plan and on released shares alone. `norm` is C of the next step."""

    def __init__(
        self, plan: PrivacyPlan, norm: float, clip: ClipEngine, noise: Noise, metrics: MetricRelease
    ) -> None:  # fmt: skip
        if plan.adaptive is None:
            raise ClipError("the plan's clipping norm is fixed")
        self._rule, self._sigma = plan.adaptive, plan.noise_multiplier
        self._clip, self._noise, self._metrics = clip, noise, metrics
        self.norm = norm
        self._set(norm)

    def advance(self, share: float) -> dict[str, float]:
        """After a step, with its share as it stands in the ledger; gives what may be published of both."""
        told = {RELEASED: share, "clip_norm": self.norm}
        self._set(self._rule.following(self.norm, share))
        return told

    def _set(self, norm: float) -> None:
        self.norm = norm
        self._clip.rule = self._clip.rule.at(norm)
        self._noise.std = self._sigma * norm
        self._metrics.clip_bound = self._clip.rule.bound
