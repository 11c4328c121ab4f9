"""One collective adds the totals of all ranks; another, of a few numbers, shows that it did.

Each rank weighs its totals before they are added up: two numbers per parameter, which know where elements lie. What
the ranks' weights add up to must be the weight of the sum. So a rank that was left out, a scale, or a shift within a
parameter is an error, not a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from train.gradient import UpdateError
from train.ranks import Ranks
from train.sums import ExactSums

# Of fp64 sums over all elements of a parameter, relative to the sum of their sizes.
AGREEMENT = 1e-9
# Elements weighed at a time.
PIECE = 1 << 20


def reduce_and_prove(sums: ExactSums, ranks: Ranks) -> None:
    """`sums.reduce`, checked; every rank comes to the same verdict."""
    expected, size = ranks.add(_weigh(sums.totals))
    sums.reduce(ranks)
    apart = (_weigh(sums.totals)[0] - expected).abs()
    wrong = ~(apart <= AGREEMENT * size)
    if ranks.any(bool(wrong.any())):
        names = [name for name, bad in zip(sums.totals, wrong.tolist(), strict=True) if bad] or ["another rank"]
        if not bool(torch.isfinite(size).all()):
            raise UpdateError(f"the sum of clipped gradients of {names[0]} is no number; a clip engine let one through")
        raise UpdateError(
            f"what was reduced for {names[0]} is not the sum over the ranks; collective operations cannot be relied "
            "upon here"
        )


def _weigh(totals: Mapping[str, Tensor]) -> Tensor:
    """[2, parameters]: each parameter's sum and sum of sizes, elements weighing from 1 to 2 along it."""
    found = [torch.stack([part.sum(), part.abs().sum()]) for part in map(_weighed, totals.values())]
    return torch.stack(found, dim=1)


def _weighed(total: Tensor) -> Tensor:
    """In one number per piece and sign: the positive and the negative part."""
    flat, step = total.view(-1), 1.0 / max(1, total.numel())
    parts = []
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        ramp = torch.arange(start, start + len(piece), dtype=torch.float64, device=flat.device).mul_(step).add_(1.0)
        weighed = ramp.mul_(piece)
        parts += [weighed.clamp(min=0).sum(), weighed.clamp(max=0).sum()]
    return torch.stack(parts) if parts else flat.new_zeros(1)
