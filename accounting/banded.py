"""Correlated noise: what is added to one step is partly taken back in the next ones, so less of it adds up.

The steps fall into blocks of b. With z the keyed draws of a block's steps, each N(0, σ²C²), step i of the block gets
the noise Σ_j B_ij·z_j over j ≤ i: at most b draws, of its own block alone, so that nothing has to be stored for it. B
is lower triangular; `rows` are its rows. Releasing the sums x of a block with the noise B·z is releasing M·x + z with
M = B⁻¹. A record belongs to one of b parts, whose turn comes once in every block, so it moves one column of M·x, and by
at most the largest norm of a column of M: the sensitivity, which is at most 1 here. Blocks share no draw, and a record
is drawn in each of them independently. So T steps are ⌈T/b⌉ Poisson-sampled Gaussian steps of noise multiplier σ, each
at the rate at which a part is drawn. This is the block-diagonal case of banded matrices under cyclic Poisson sampling
(Choquette-Choo et al., arXiv 2306.08153). `docs/proof.md` has the proof.

A banded M whose blocks overlap has an inverse without zeros below its diagonal: its noise needs the noise of earlier
steps, which a checkpoint would have to contain and which, with the weights, gives the bare sums.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from murmuration.accounting.errors import PlanError
from murmuration.accounting.noise import CorrelationFact, NoiseForm
from murmuration.accounting.strict_json import CLOSED

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST_BANDS = 256
DIGITS = 9
"""Significant digits of a frozen entry; the sensitivity is that of the matrix with these digits."""
MARGIN = 1e-6
"""The share of the noise that pays for those digits and for the rounding of the check."""
MOST_ROUNDS = 5000
CLOSE = 1e-8


@dataclass(frozen=True)
class BandedNoise(NoiseForm):
    """The matrix B of one block; frozen in the plan, from which anyone can recompute its sensitivity."""

    __pydantic_config__ = CLOSED
    sentence = (
        "; where a plan's noise is `banded`: records take turns by their number, each step draws from one part, and "
        "its noise is the matrix' weighted sum of keyed Gaussian draws of the steps of its block so far, so that a "
        "block is one Poisson-sampled Gaussian step for each record"
    )
    deviation = (
        "Where noise is correlated, the keys of a block's earlier steps are kept as long as later ones of the block "
        "need them: a checkpoint within a block leaves those of its block in the secret file, and whoever copied that "
        "file then has them, too."
    )
    rows: tuple[tuple[float, ...], ...]
    horizon: int
    """The number of steps over which the noise that adds up was made least."""
    kind: Literal["banded"] = "banded"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        if not 2 <= len(self.rows) <= MOST_BANDS:
            raise PlanError(f"banded noise takes 2 to {MOST_BANDS} bands, not {len(self.rows)}")
        if [len(row) for row in self.rows] != list(range(1, len(self.rows) + 1)):
            raise PlanError("the matrix of banded noise is not lower triangular")
        if not all(math.isfinite(entry) for row in self.rows for entry in row) or min(r[-1] for r in self.rows) <= 0:
            raise PlanError("the matrix of banded noise needs finite entries, above 0 on its diagonal")
        if self.horizon < 1:
            raise PlanError(f"the horizon of banded noise must be at least 1 step, but is {self.horizon}")
        if not self.sensitivity <= 1:
            raise PlanError(f"one record moves what the matrix of banded noise releases by {self.sensitivity}, not 1")

    @property
    def bands(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many steps a block has."""
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def sensitivity(self) -> float:
        """Upper bound on the largest norm of a column of M = B⁻¹, rounding included.

        With an approximate inverse D and R = 1 - B·D, M = D·(1 - R)⁻¹, whose columns exceed those of D by at most
        |D|·|R| / (1 - |R|).
        """
        factor = self.whole
        rounding = (self.bands + 2) * 2.0**-52
        approximate = np.linalg.inv(factor)
        left = np.linalg.norm(np.eye(self.bands) - factor @ approximate)
        left += rounding * np.linalg.norm(np.abs(factor) @ np.abs(approximate))
        if not left < 0.5:
            return math.inf
        columns = np.linalg.norm(approximate, axis=0).max() * (1 + rounding)
        return float(columns + np.linalg.norm(approximate) * left / (1 - left))

    @cached_property
    def whole(self) -> Array:
        """B as a square."""
        found = np.zeros((self.bands, self.bands))
        for place, row in enumerate(self.rows):
            found[place, : place + 1] = row
        return found

    def weights(self, step: int, first: int = 1) -> Iterator[tuple[int, float]]:
        """The steps whose draws make the noise of `step`, in order, and their weights. `first` is the first step of the
        segment: draws of an earlier segment are not used, which leaves a lower right part of B, whose columns in M are
        the whole matrix's."""
        row = self.rows[(step - 1) % self.bands]
        begin = step - len(row) + 1
        return ((at, weight) for at, weight in enumerate(row, begin) if at >= first)

    def spread(self, step: int, first: int = 1) -> float:
        """Standard deviation of the noise of `step`, in units of its draws'; the same bits on every machine."""
        return math.sqrt(math.fsum(weight * weight for _, weight in self.weights(step, first)))

    def correlation(self, std: float, step: int, first: int) -> CorrelationFact:
        return CorrelationFact(self.digest, std * self.spread(step, first))

    def agreeing_steps(self, steps: int) -> float:
        return steps / (math.sqrt(2) * self.accumulated(steps))

    def in_a_certificate(self, std: float) -> dict[str, Any]:
        """What a reader wants to know of the matrix, which is in the plan."""
        noise = [std * self.spread(step) for step in range(1, self.bands + 1)]
        return {"banded": {"bands": self.bands, "matrix": self.digest, "noise_of_a_block": noise}}

    def in_a_dry_run(self, sigma: float, steps: int) -> list[str]:
        independent = math.sqrt((steps + 1) / 2)
        return [
            f"noise         banded, {self.bands} bands: each record has that q in one of {self.bands} steps; "
            f"{sigma * self.typical_spread:.4g}·C per step, adding up to "
            f"{self.accumulated(steps) / independent:.3f} of what independent noise of this sigma would"
        ]

    @property
    def typical_spread(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Root mean square of the spreads of a whole block."""
        return math.sqrt(math.fsum(self.spread(step) ** 2 for step in range(1, self.bands + 1)) / self.bands)

    @property
    def draws(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Draws per step, on average over a block."""
        return (self.bands + 1) / 2

    def accumulated(self, steps: int) -> float:
        """Root mean square, over steps 1 to `steps`, of the deviation of all noise added up so far, in units of the
        draws'. For independent noise it is √((steps + 1) / 2)."""
        variances = np.square(np.cumsum(self.whole, axis=0)).sum(axis=1)
        blocks = np.arange(-(-steps // self.bands))[:, None]
        found = blocks * variances[-1] + variances[None, :]
        return float(np.sqrt(found.ravel()[:steps].mean()))


@lru_cache(maxsize=64)
def best_banded(bands: int, horizon: int) -> BandedNoise:
    """The matrix whose accumulated noise over `horizon` steps is least, to DIGITS digits. The shorter the horizon, the
    less noise each step has, and the more of it adds up over a long run."""
    if not 2 <= bands <= MOST_BANDS:
        raise PlanError(f"banded noise takes 2 to {MOST_BANDS} bands, not {bands}")
    if bands > horizon:
        raise PlanError(f"banded noise of {bands} bands needs at least as many steps and horizon, not {horizon}")
    # Sought is X = MᵀM with a diagonal of ones, for which the accumulated noise of that many blocks is least. That
    # noise is tr(V·X⁻¹), where V weighs each place of a block by how often its prefix sum occurs: convex in X. At its
    # minimum V = X·diag(v)·X for multipliers v > 0, so that X follows from v by a matrix root; v is enlarged where the
    # diagonal of X is above 1 (Denisov et al., arXiv 2202.08312).
    blocks = -(-horizon // bands)
    prefix = np.tril(np.ones((bands, bands)))
    occurs = np.full(bands, float(blocks))
    occurs[-1] += bands * blocks * (blocks - 1) / 2  # the whole block is in all prefix sums of later blocks
    wanted = prefix.T @ (occurs[:, None] * prefix)
    multipliers = np.diag(_root(wanted)) ** 2
    gram = np.eye(bands)
    for _ in range(MOST_ROUNDS):
        weights = np.sqrt(multipliers)
        gram = _root(weights[:, None] * wanted * weights) / weights[:, None] / weights
        diagonal = np.diag(gram)
        if np.abs(diagonal - 1).max() < CLOSE:
            break
        multipliers = multipliers * diagonal**2
    length = np.sqrt(np.diag(gram))
    gram = gram / length[:, None] / length
    # The lower triangular M with MᵀM = gram: a Cholesky root from the last row up.
    root = np.asarray(np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1], np.float64)
    factor = np.linalg.inv(root)
    scale = 1.0
    while True:
        scale *= 1 + MARGIN
        rows = [[float(f"{scale * entry:.{DIGITS - 1}e}") for entry in factor[at, : at + 1]] for at in range(bands)]
        try:
            return BandedNoise(tuple(tuple(row) for row in rows), horizon)
        except PlanError:
            if scale > 1.01:
                raise


def _root(symmetric: Array) -> Array:
    values, vectors = np.linalg.eigh(symmetric)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
