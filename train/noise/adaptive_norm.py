"""The clipping norm of each step, where it adapts: fixed before the step opens, moved by the share that was released.

The rule and its arithmetic are in `accounting/adaptive.py`, where the ledger's reader checks them. Here C_t becomes the
clipping rule and the noise of one step. Both are passed to the parts that act by them; none of these keeps them.
"""

from __future__ import annotations

from murmuration.accounting.adaptive import METRIC
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.noise.update import Noise

RELEASED = f"noised_{METRIC}"


class AdaptiveNorm:
    """Equal on all ranks: it depends on the plan and on released shares alone. `norm` is C of the next step."""

    def __init__(self, plan: PrivacyPlan, norm: float) -> None:
        if plan.adaptive is None:
            raise ClipError("the plan's clipping norm is fixed")
        self._rule, self._sigma = plan.adaptive, plan.noise_multiplier
        self.norm = norm

    def clipping(self, fixed: ClipRule) -> ClipRule:
        return fixed.at(self.norm)

    def noise(self, fixed: Noise) -> Noise:
        # σ is the plan's for every step, and C this step's: the noise is in proportion to what a record can move.
        return fixed.at(self._sigma * self.norm)

    def advance(self, share: float) -> dict[str, float]:
        """Called after a step, with its share as the ledger states it; returns what may be published of both."""
        told = {RELEASED: share, "clip_norm": self.norm}
        # From the noised share alone: by the true one, the next step's C would tell of this step's records.
        self.norm = self._rule.following(self.norm, share)
        return told


def next_rule(clip: ClipEngine, norm: AdaptiveNorm | None) -> ClipRule:
    """The rule that the next step clips by."""
    return clip.rule if norm is None else norm.clipping(clip.rule)
