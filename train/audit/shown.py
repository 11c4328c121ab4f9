"""What one run with canaries shows, put together: the guesses, the pairs, and whether steps share draws of noise.

Why the guesses bound epsilon, whatever the mechanism: the coin of a canary decides between a record and a blank in its
place, which are the neighbours of the definition. All else that decides a score is what was released, without the real
records' part, and public numbers. The real records, and which steps they took part in, may be fixed: under Poisson
sampling they are drawn independently of the canary, and the proofs for blocks of correlated noise and for random
allocation (docs/privacy.md) hold for each way in which the others are drawn. So a run that keeps its claim makes many
right guesses as rarely as `audit_bound` and `audit_curve` say, if no score looks at a coin or at who was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from murmuration.accounting.epsilon.audit_evidence import Evidence, collect
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.audit.checks import Check, check_noise
from murmuration.train.audit.scores import scores
from murmuration.train.audit.turns import Group, SeenSegment, noise_in, pairs_in, turns_of


@dataclass(frozen=True)
class Shown:
    evidence: Evidence
    noise: Check | None = None
    groups: Sequence[Group] = ()
    gain: float = 0.0
    """What one participation adds to a released number."""
    deviation: float = 0.0
    """The planned one of a draw of noise, in the same unit."""

    def scored(self, included: np.ndarray, draw: np.random.Generator, scale: float = 1.0) -> np.ndarray:
        """The scores that another such run might have shown, whose draws are so many times the planned ones."""
        groups = [each.simulated(included, self.gain, scale * self.deviation, draw) for each in self.groups]
        return scores(groups, len(included), self.gain, self.deviation)

    @staticmethod
    def by(
        segments: Sequence[SeenSegment], plan: PrivacyPlan, numbers: np.ndarray, included: np.ndarray, bound: float
    ) -> Shown:
        """`numbers`: those of the canaries among all records; `bound`: what a canary adds to a sum."""
        gain, deviation = bound / plan.divisor, plan.noise_std / plan.divisor
        groups = turns_of(segments, plan, numbers)
        evidence = collect(scores(groups, len(included), gain, deviation), included, pairs_in(groups))
        return Shown(evidence, check_noise(noise_in(segments, plan, gain)), groups, gain, deviation)
