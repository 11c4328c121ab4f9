"""How many rows of micro-batches a step takes: a fixed number in a public phase, an expected one for Poisson draws.

Every rank computes as many rows as the fullest rank needs (`data.draw.micro_batch.row_count`), and the last one is
filled up with padding, which costs as much as records. Where the mean draw fills nearly a whole number of rows, about
half of the steps need one row more, so the rows of the mean draw are not the mean number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from murmuration.accounting.plan import PrivacyPlan

# Standard deviations above the mean that advice leaves room for: one draw in 30,000 is larger.
ROOM = 4.0
# Standard deviations beyond which a draw is too unlikely to matter in a double.
FAR = 9.0
# Rows of a rank from which on their last one no longer matters.
MANY_ROWS = 64
FIXED, OF_WEIGHTS = 2.0 * 2**20, 0.25
"""What a processor does once for a micro-batch, whatever its size, takes about as long as records whose activations
fill so many bytes: calls of functions, and a product and an addition for every weight, by the bytes of these."""
MOST_FIXED = 1 / 32
"""Once that is so small a part of a micro-batch, a larger one saves nothing and takes memory."""


@dataclass(frozen=True)
class Batch:
    """Records of one step: their mean, and the standard deviation of a draw; 0 where every step has the same number."""

    mean: float
    spread: float = 0.0
    public: bool = True

    @classmethod
    def drawn(cls, plan: PrivacyPlan) -> Batch:
        """A binomial draw; with q = 1 it is the whole data set each time."""
        return cls(plan.divisor, math.sqrt(plan.divisor * (1 - plan.sampling_rate)), public=False)

    @property
    def most(self) -> float:
        """Hardly any step has more."""
        return self.mean + ROOM * self.spread

    def rows(self, gpus: int, micro_batch: int) -> float:
        """The mean over steps: 1 + Σ P(a step has more records than k rows hold), k = 1, 2, …, with the binomial
        approximated by a normal."""
        slots = gpus * micro_batch
        if not self.spread:
            return float(max(1, math.ceil(self.mean / slots)))
        # Rows that every draw fills need not be summed.
        found = first = max(1, math.floor((self.mean - FAR * self.spread) / slots))
        for full in range(first, math.ceil((self.mean + FAR * self.spread) / slots) + 1):
            # A draw is a whole number: "more than m" begins half way to m + 1.
            found += 0.5 * math.erfc((full * slots + 0.5 - self.mean) / self.spread / math.sqrt(2))
        return float(found)

    def slots(self, gpus: int, micro_batch: int) -> float:
        """The mean number of slots that one GPU computes in a step. The rows of a public batch are only as wide as they
        must be (`data.draw.micro_batch.even_width`)."""
        rows = self.rows(gpus, micro_batch)
        return rows * (math.ceil(self.mean / gpus / rows) if self.public else micro_batch)

    def padding(self, gpus: int, micro_batch: int) -> float:
        """The share of the slots that hold no record."""
        return max(0.0, 1 - self.mean / (self.slots(gpus, micro_batch) * gpus))

    def even(self, gpus: int, largest: int) -> int:
        """The smallest micro-batch that needs no more rows than one of `largest`, even for a large draw."""
        return self._filling(gpus, self._most_rows(gpus, largest)) if largest else 0

    def fewer(self, gpus: int, micro_batch: int) -> int:
        """The smallest that needs one row less than `micro_batch` does; 0 where `micro_batch` needs only one."""
        rows = self._most_rows(gpus, micro_batch) - 1
        return self._filling(gpus, rows) if rows else 0

    def on_processors(self, ranks: int, record: float, trained: int, fitting: float = math.inf) -> int:
        """The micro-batch whose rows take a processor the least time on average. `record`: the bytes of a record's
        activations; `trained`: the number of trained weights; at most `fitting` fit."""
        fixed = (FIXED + OF_WEIGHTS * 4 * trained) / max(1.0, record)
        largest = max(1, int(min(fitting, fixed / MOST_FIXED, self.most / ranks + 1)))
        least = max(1, min(largest, math.ceil(self.mean / ranks / MANY_ROWS)))
        return min(range(least, largest + 1), key=lambda size: self.rows(ranks, size) * (size + fixed))

    def _most_rows(self, gpus: int, micro_batch: int) -> int:
        return max(1, math.ceil(self.most / gpus / micro_batch))

    def _filling(self, gpus: int, rows: int) -> int:
        return math.ceil(self.most / gpus / rows)
