"""What the Gram kernel computes, by products of the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from murmuration.train.clip.norms import Bounds


def gram(left: Tensor, right: Tensor, part: int, bounds: Bounds, summed: bool) -> tuple[Tensor, ...]:
    lefts, rights = (x.float() @ x.float().transpose(1, 2) for x in (left, right))
    a, g = (x.diagonal(dim1=1, dim2=2).double() for x in (lefts, rights))
    length = (a * g).sqrt().sum(1)
    square, added = (lefts * rights).double().sum((1, 2)), bounds.added * length
    doubt = bounds.share * length.square() + (2 * square.clamp(min=0.0).sqrt() + added) * added
    doubt = doubt + bounds.lost_left * a.amax(1) + bounds.lost_right * g.amax(1)
    return square, doubt, length, *([left.sum(1, dtype=torch.float32)] if summed else [])
