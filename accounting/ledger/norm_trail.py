"""Tracks the clipping norms of one phase as its ledger is read: what each step had to use, and what follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from murmuration.accounting.adaptive import ROUNDING, AdaptiveError, AdaptiveRule
from murmuration.accounting.ledger.facts import StepFacts


@dataclass
class NormTrail:
    """What C_t had to be at each step of one phase, and the C that follows from it. Keys are (segment, step)."""

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
