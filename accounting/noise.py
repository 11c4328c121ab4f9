"""The forms of a plan's noise. Each is one object, with everything that follows from it: what is charged for it, what
the noise mechanism must report of it, and the sentences about it. Correlated noise is in `accounting/banded.py`.

A plan freezes one of them; `train/noise/choose.py` makes the noise. A new form is a class, an entry of `plan.NOISES`,
and the noise that is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from murmuration.accounting.errors import PlanError
from murmuration.accounting.strict_json import CLOSED

NoiseKind = Literal["aes", "chacha20", "exact"]
"""The source of random bits, as a config names it."""
EXACT = "aes-256-ctr-exact"
GENERATORS = ("aes-256-ctr", EXACT, "chacha20")
GRID_GROWTH = 1e-6
"""With exact noise: the share of C by which rounding to a grid may at most enlarge one record's effect on a sum."""


@dataclass(frozen=True)
class CorrelationFact:
    """Reported by correlated noise: the digest of its matrix, and the standard deviation of what it added at the step,
    which is a weighted sum of draws."""

    __pydantic_config__ = CLOSED
    matrix: str
    added: float


class NoiseForm:
    """What all forms have in common: independent draws at every step, in floating point."""

    bands: int = 1
    """How many steps use each other's draws, and into how many parts the records are dealt."""
    growth: float = 0.0
    """The share by which rounding enlarges what one record does, before the noise."""
    draws: float = 1.0
    """Draws per step, on average."""
    typical_spread: float = 1.0
    """Root mean square of the noise of steps, in units of its draws'."""
    sentence: ClassVar[str] = ""
    """What a certificate adds to the mechanism."""
    deviation: ClassVar[str | None] = None
    """What a certificate adds about copies of the secret file."""

    def correlation(self, std: float, step: int, first: int) -> CorrelationFact | None:
        """What is to be reported of a step's noise, of draws of this deviation, in a segment that begins with the step
        `first`; None for one draw."""
        return None

    def departure(self, generator: str, grids: Sequence[tuple[float, int, float]]) -> str | None:
        """How a step's noise contradicts this form. `grids`: of each release the grid to which it was rounded, its
        elements and its sensitivity."""
        if generator == EXACT or any(grid for grid, _, _ in grids):
            return "rounds to a grid for exact noise, but its plan charges nothing for that"
        return None

    def agreeing_steps(self, steps: int) -> float:
        """Steps in one direction over what their noise adds up to, in units of one draw."""
        return math.sqrt(steps)

    def in_a_certificate(self, std: float) -> dict[str, Any]:
        """What a phase's entry adds to its plan."""
        return {}

    def in_a_dry_run(self, sigma: float, steps: int) -> list[str]:
        return []


@dataclass(frozen=True)
class IndependentNoise(NoiseForm):
    __pydantic_config__ = CLOSED
    kind: Literal["independent"] = "independent"


@dataclass(frozen=True)
class ExactGrid(NoiseForm):
    """Sums are rounded to a grid before noise in whole numbers of its steps (`train/noise/exact.py`)."""

    __pydantic_config__ = CLOSED
    growth: float = GRID_GROWTH
    """Rounding may add this share of C (and of a metric's bound) to one record's effect. All noise multipliers are
    charged as that much smaller."""
    kind: Literal["exact"] = "exact"

    def __post_init__(self) -> None:
        if not 0 < self.growth <= GRID_GROWTH:
            raise PlanError(f"the growth of exact noise must lie in (0, {GRID_GROWTH:g}], but is {self.growth}")

    def departure(self, generator: str, grids: Sequence[tuple[float, int, float]]) -> str | None:
        if generator != EXACT:
            return f"draws noise from {generator!r}, but its plan says that the noise is exact"
        for grid, elements, sensitivity in grids:
            if not fits_grid(grid, elements, self.growth * sensitivity):
                return (
                    f"rounds {elements} numbers to multiples of {grid:g}, but its plan charges no more for that than "
                    f"{self.growth:g} of the sensitivity {sensitivity:g}"
                )
        return None

    def in_a_dry_run(self, sigma: float, steps: int) -> list[str]:
        return [f"noise         exact; charged as {1 / (1 + self.growth):.6f}·sigma for its grid"]


def fits_grid(grid: float, elements: int, most: float) -> bool:
    """Whether rounding `elements` numbers to multiples of `grid`, a power of two, adds at most `most` to a distance."""
    return 0 < grid < math.inf and math.frexp(grid)[0] == 0.5 and grid * math.sqrt(elements) <= most
