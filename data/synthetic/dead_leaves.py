"""Dead leaves: opaque discs and rotated boxes that hide each other, with radii from a power law.

The image model of Lee, Mumford and Huang: occlusion makes edges at all scales. A density of r^-3 between the
limits is the only one for which zooming changes nothing.

All leaves of a batch are painted at once into a depth buffer: radii are stratified, so the number of leaves of each
size, hence the shape of every tensor, is the same for all records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from murmuration.data.synthetic.random import Draws

_SHARPNESS = 2  # the buffer has twice the side of the picture, so that edges come out smooth
LARGEST, SMALLEST_PIXELS = 0.4, 1.5  # radii: a share of the side, and pixels of the picture
_EXPONENT = 3.0  # of the power law of radii: every scale covers as much
_LEAVES_PER_PIXEL_OF_SIDE = 4
_BACK = 6  # large leaves behind the others, so that the ground is hardly ever seen
_BOXES = 0.4
_CORNER = 1.4143  # a box reaches farther than its radius


@dataclass(frozen=True)
class Leaves:
    """Some leaves of one kind: [batch, leaves] each, centres with two coordinates; depth 0 lies in front."""

    depth: Tensor
    centre: Tensor
    radius: Tensor
    turn: Tensor
    boxes: bool


def dead_leaves(draws: Draws, side: int) -> Tensor:
    """float32 [batch, side, side, 3] between 0 and about 1."""
    radius = _radii(draws, side, _EXPONENT)
    leaves = radius.shape[1]
    centre = draws.uniform(leaves, 2, low=-0.05, high=1.05)
    turn = draws.uniform(leaves, high=math.pi)
    # Rank 0 lies in front. Except for the last few, which leaves lie in front does not depend on their size.
    order = draws.uniform(leaves)
    order[:, -_BACK:] += 1
    depth = order.argsort(dim=1).argsort(dim=1).to(torch.int32)
    fine = _SHARPNESS * side
    front = torch.full((draws.batch, fine * fine), leaves, dtype=torch.int32, device=draws.device)
    for first, last, window in _size_classes(side, _EXPONENT, leaves):
        split = first + round(_BOXES * (last - first))
        for start, stop, box in ((first, split, True), (split, last, False)):
            if start < stop:
                part = slice(start, stop)
                shape = Leaves(depth[:, part], centre[:, part], radius[:, part], turn[:, part], box)
                _paint(front, shape, leaves, window)
    return _colour(draws, front.to(torch.int64), depth, centre, leaves, fine)


def _radii(draws: Draws, side: int, exponent: float) -> Tensor:
    """[batch, leaves], ascending up to the jitter inside each stratum; the large ones at the back come last."""
    count = _LEAVES_PER_PIXEL_OF_SIDE * side
    strata = torch.arange(count, dtype=torch.float32, device=draws.device)
    small = _quantile((strata + draws.uniform(count)) / count, side, exponent)
    return torch.cat([small, draws.uniform(_BACK, low=0.35, high=0.7)], dim=1)


def _quantile(share: Tensor, side: int, exponent: float) -> Tensor:
    low, power = min(SMALLEST_PIXELS / side, LARGEST / 2), 1 - exponent
    return (low**power + share * (LARGEST**power - low**power)) ** (1 / power)


@lru_cache(maxsize=16)
def _size_classes(side: int, exponent: float, leaves: int) -> list[tuple[int, int, int]]:
    """Runs of leaves (first, last, window) that fit into square windows of `window` buffer pixels."""
    count = leaves - _BACK
    upper = _quantile(torch.arange(1, count + 1, dtype=torch.float64) / count, side, exponent)
    fine = _SHARPNESS * side
    need = [min(fine, math.ceil(2 * _CORNER * radius * fine) + 2) for radius in upper.tolist()]
    classes: list[tuple[int, int, int]] = []
    first = 0
    while first < count:
        # At most a third larger than the smallest of its class: waste and launches both stay small.
        last = first + 1
        while last < count and need[last] <= max(need[first] + 2, need[first] * 4 // 3):
            last += 1
        classes.append((first, last, need[last - 1]))
        first = last
    return [*classes, (count, leaves, fine)]


def _paint(front: Tensor, leaves: Leaves, nothing: int, window: int) -> None:
    """Lower the depth buffer wherever one of these leaves lies in front of the current one."""
    fine = math.isqrt(front.shape[1])
    whole = window >= fine
    # A window as large as the buffer is the buffer; smaller ones are centred on their leaf.
    start = torch.zeros_like(leaves.centre) if whole else (leaves.centre * fine - window / 2).round()
    pixel = torch.arange(window, dtype=torch.float32, device=front.device)
    column, row = start[..., :1] + pixel, start[..., 1:] + pixel
    x = ((column + 0.5) / fine - leaves.centre[..., :1])[..., None, :]
    y = ((row + 0.5) / fine - leaves.centre[..., 1:])[..., :, None]
    reach = leaves.radius[..., None, None]
    if leaves.boxes:
        cos, sin = leaves.turn.cos()[..., None, None], leaves.turn.sin()[..., None, None]
        inside = ((cos * x + sin * y).abs() < reach) & ((cos * y - sin * x).abs() < reach)
    else:
        inside = x * x + y * y < reach * reach
    # Arithmetic is several times faster on a CPU than a choice between two tensors.
    deep = nothing - inside.to(torch.int32) * (nothing - leaves.depth[..., None, None])
    if whole:
        torch.minimum(front, deep.amin(dim=1).flatten(1), out=front)
        return
    outside = (column < 0) | (column >= fine), (row < 0) | (row >= fine)
    deep.masked_fill_(outside[0][..., None, :], nothing).masked_fill_(outside[1][..., :, None], nothing)
    column, row = column.clamp_(0, fine - 1).to(torch.int64), row.clamp_(0, fine - 1).to(torch.int64)
    place = row[..., :, None] * fine + column[..., None, :]
    front.scatter_reduce_(1, place.flatten(1), deep.flatten(1), "amin")


def _colour(draws: Draws, front: Tensor, depth: Tensor, centre: Tensor, leaves: int, fine: int) -> Tensor:
    """Each leaf has one colour, near one of a few (free colours would average to mud), and uneven light on it."""
    few = draws.uniform(4, 3, low=0.05, high=0.95)
    few = few.mean(dim=-1, keepdim=True) + draws.uniform(4, 1) * (few - few.mean(dim=-1, keepdim=True))
    near = torch.gather(few, 1, draws.choice(4, leaves + 1)[..., None].expand(-1, -1, 3))
    colour = (near + 0.12 * draws.normal(leaves + 1, 3)).clamp_(0, 1)
    slope = draws.uniform(leaves + 1, 2, low=-0.35, high=0.35)
    # Indexed by depth, because the buffer holds depths; the ground lies behind all leaves.
    middle = torch.zeros_like(slope)
    middle.scatter_(1, depth.to(torch.int64)[..., None].expand(-1, -1, 2), centre)
    grid = (torch.arange(fine, dtype=torch.float32, device=front.device) + 0.5) / fine
    offset = 1 - (slope * middle).sum(dim=-1)
    table = torch.cat([colour, slope, offset[..., None]], dim=-1)
    row = front + torch.arange(draws.batch, device=front.device)[:, None] * (leaves + 1)
    seen = table.flatten(0, 1).index_select(0, row.flatten()).view(draws.batch, fine, fine, 6)
    light = seen[..., 3] * grid + seen[..., 4] * grid[:, None] + seen[..., 5]
    lit = seen[..., :3] * light[..., None]
    across = lit[:, :, ::2] + lit[:, :, 1::2]
    return (across[:, ::2] + across[:, 1::2]) / 4
