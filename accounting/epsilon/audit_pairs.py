"""White-box Gaussian pairs: canaries that took part, compared with canaries that did not.

Along a canary's own direction, a step releases N(0, s²) if the canary did not take part and N(gain, s²) if it did.
Telling the two apart is Gaussian differential privacy with μ = gain / s (Nasr and others 2023 audit single steps this
way; Agrawal and others 2026 keep the continuous values of one run, as we do here). Neither gain nor s is taken from
the plan: the difference of the two means over the pooled deviation has a noncentral t distribution, whose confidence
limits are exact for any number of canaries.

Under random allocation the values are whole epochs, with all their steps added up: a canary took part in one of them,
in whichever, so the sum moves by its gain once and has the noise of all steps. One that took part twice moved it twice.

Assumed, and not tested here: the noise is Gaussian, of one size, and independent from canary to canary and step to
step. The observer knows all other records and who was drawn (with random allocation, only that everybody was, once);
the amplification by sampling is taken from accounting. So the result checks the ratio of noise to contribution, which
is the one number that accounting cannot look into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import nct

LARGEST_MU = 1e3


@dataclass(frozen=True)
class Pairs:
    """Numbers of values with a canary (`there`) and without (`absent`); the difference of means in standard errors.
    Each value is the sum of so many `terms`, each of which has the noise of one step."""

    there: int
    absent: int
    statistic: float
    terms: int = 1

    @property
    def scale(self) -> float:
        """Standard errors in one μ."""
        return (1 / self.there + 1 / self.absent) ** -0.5 / math.sqrt(self.terms)

    @property
    def freedom(self) -> int:
        return self.there + self.absent - 2

    def p_value(self, mu: float) -> float:
        """Upper bound on the probability of a difference this large, if μ is at most `mu`."""
        return float(nct.sf(self.statistic, self.freedom, mu * self.scale))

    def mu_bound(self, level: float) -> float:
        """The largest μ below which all values are refuted at this level; 0 if none is."""
        if self.p_value(0.0) > level:
            return 0.0
        low, high = 0.0, LARGEST_MU
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.p_value(middle) <= level else (low, middle)
        return low

    def power(self, claimed: float, actual: float, level: float) -> float:
        """Probability that as many values refute the claimed μ at this level, if they come from the actual μ."""
        least = nct.isf(level, self.freedom, claimed * self.scale)
        return float(nct.sf(least, self.freedom, actual * self.scale))


def pairs_of(values: np.ndarray, took_part: np.ndarray, terms: int = 1) -> Pairs | None:
    """Takes arrays of any shape; None if one of the two groups has fewer than two values or nothing varies."""
    there, absent = values[took_part], values[~took_part]
    if min(len(there), len(absent)) < 2:
        return None
    squares = np.square(there - there.mean()).sum() + np.square(absent - absent.mean()).sum()
    spread = math.sqrt(squares / (len(there) + len(absent) - 2) * (1 / len(there) + 1 / len(absent)))
    if not spread > 0:
        return None
    return Pairs(len(there), len(absent), float(there.mean() - absent.mean()) / spread, terms)
