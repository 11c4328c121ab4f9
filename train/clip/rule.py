"""The clipping rule: how far a record's gradient is scaled down, what that promises, and what rounding may add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from murmuration.accounting.errors import RunError
from murmuration.accounting.ledger.facts import ClippingFact
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.clip.groups import GroupError, Grouping, groups_of, shares

UNIT_ROUNDOFF = 2.0**-24
# The reference engine adds squares in fp32 along rows of at most this many elements, which is a relative error below
# 9.8e-4; the book-keeping engine's norms may be short by 5e-3, half of what squares may be wrong by
# (`norms.TOLERANCE`); factors are rounded once. C is lowered by this much more.
LONGEST_ROW = 1 << 15
FACTOR_ROUNDING = 6.1e-3
# Clipped gradients of at most this many records are added up in fp32; the sums of these are added up in fp64.
RECORDS_AT_ONCE = 128
# Share of FACTOR_ROUNDING that is left to the fp32 windows of sharded sums (`engines/sharded_sums.py`), in units of C.
WINDOW_ROUNDING = 5e-4
# The smallest normal fp32 number times this is still far below any C.
MOST_LIFT = 1e30


class ClipError(RunError, ValueError):
    """Clipping cannot keep its promise here; the message says why."""


def rounding_allowance(micro_batch: int) -> float:
    """How far fp32 rounding may move the difference of two neighbouring sums, in units of C, at worst.

    A micro-batch is cut into stretches of b = RECORDS_AT_ONCE records at most, and what each of them sums to is added
    to totals in fp64 (`sums.ExactSums`). So neither the logical batch nor the number of ranks matters, nor the
    micro-batch beyond b: the two worlds differ in the product of one stretch alone. What is bounded for certain is a
    chain of b fp32 additions, one for each record, of terms with total norm S: it errs by at most S·b·u/(1-b·u), here
    S = b·C with every gradient aligned; the stretches of both worlds may err in opposite directions. A product of
    matrices also adds up the tokens of each record, b·T rows in all. What additions do to the sum of a record's own
    tokens is bounded for certain: it is part of the doubt of its norm (`kernels.Bounds.added`), and a record in doubt
    is kept out of the product (`accumulator`). That tokens are added to what other records have summed to is not, but
    counted as independent: by √(b·T)·u of S. At b = 128 and T = 257 that is 1.4e-3·C, or 2.0e-3·C for the two worlds
    together, where the chain allows for 1.9e-3·C and FACTOR_ROUNDING for 1e-3·C beside norms and own tokens. Half of
    the latter, WINDOW_ROUNDING, is what fp32 windows may add where the totals themselves are sharded. Of records with
    several rows, a stretch has as many fewer (`stretches`), so that b·T stays what it is for one row each.
    """
    records = min(micro_batch, RECORDS_AT_ONCE)
    relative = records * UNIT_ROUNDOFF / (1 - records * UNIT_ROUNDOFF)
    return 2 * relative * records + FACTOR_ROUNDING


def stretches(records: int, rows: int = 1) -> list[slice]:
    """Cuts a micro-batch into parts that may be added up in fp32, of records that have several rows each."""
    at_once = stretch(rows)
    return [slice(start, min(start + at_once, records)) for start in range(0, records, at_once)]


def stretch(rows: int = 1) -> int:
    """How many records of so many rows may be added up in fp32."""
    return max(1, RECORDS_AT_ONCE // rows)


@dataclass(frozen=True)
class ClipRule:
    """Scales a record's gradient so that its norm is at most `bound`.

    The stated sensitivity follows from the bound in use and what rounding may add to it, not from a config.
    """

    kind: Literal["flat", "automatic"]
    bound: float
    allowance: float
    gamma: float = 0.01
    grouping: Grouping = "all"

    @staticmethod
    def of(
        plan: PrivacyPlan, kind: Literal["flat", "automatic"], gamma: float, micro_batch: int,
        grouping: Grouping = "all",
    ) -> ClipRule:  # fmt: skip
        """C is lowered by the allowance, so that bound and rounding together stay within C."""
        allowance = rounding_allowance(micro_batch)
        return ClipRule(kind, plan.clip_norm / (1 + allowance), allowance, gamma, grouping)

    @property
    def sensitivity(self) -> float:
        # C again, since `of` lowered the bound by as much: gradients are clipped to less than C, so that what they and
        # their rounding add is at most C.
        return self.bound * (1 + self.allowance)

    def at(self, norm: float) -> ClipRule:
        """The same rule for another C. What rounding may add is a share of C, whatever C is."""
        return replace(self, bound=norm / (1 + self.allowance))

    def factors(self, norms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Clip factors for fp64 norms; 0 where the norm is zero or not finite. No scaled norm exceeds `bound`.

        The factor is also 0 where it would be subnormal in fp32 (norms beyond C·1e38), since it would be rounded by far
        more than FACTOR_ROUNDING; and where automatic clipping without gamma would lift a gradient that has vanished in
        fp32.
        """
        return self._factors(norms, self.bound, dtype)

    def group_factors(self, norms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Norms and factors are [groups, B]: every group is clipped to its share C_k, with Σ C_k² = C²."""
        if len(norms) == 1:
            return self.factors(norms, dtype)
        parts = torch.tensor(shares(self.grouping, len(norms)), dtype=norms.dtype, device=norms.device)
        return self._factors(norms, self.bound * parts.unsqueeze(1), dtype)

    def require_groups(self, names: Iterable[str]) -> None:
        """Refuses names of trainable parameters that the groups do not fit."""
        try:
            groups_of(names, self.grouping)
        except GroupError as error:
            raise ClipError(str(error)) from None

    def _factors(self, norms: Tensor, bound: float | Tensor, dtype: torch.dtype) -> Tensor:
        factors = (bound / norms).clamp(max=1.0) if self.kind == "flat" else bound / (norms + self.gamma)
        # Every comparison with NaN is false; an infinite norm gives factor 0, which is below the smallest.
        usable = (norms > 0) & (factors >= torch.finfo(torch.float32).tiny) & (factors <= MOST_LIFT)
        return torch.where(usable, factors, 0.0).to(dtype)

    def fact(self) -> ClippingFact:
        return ClippingFact(self.kind, self.sensitivity)
