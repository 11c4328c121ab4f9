"""Fractals of iterated function systems on a textured background.

A system is a few random contracting affine maps. Walkers jump by one of them at random, and the places where they land
are counted. Most random systems leave a picture nearly black, so several are tried for each record and the first whose
points reach enough of the plane is drawn; if none does, one that fills a square stands in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from murmuration.data.synthetic.random import Draws
from murmuration.data.synthetic.spectrum import noise_field

MAPS = 6
FILL = 0.25  # the least share of the cells of a 32 x 32 grid that contain a point
_CELLS = 32
_TRIES = 8
_BURN_IN = 10
_SCOUTS, _SCOUT_STEPS = 512, 14
_WALKERS = 4096
_POINTS_PER_PIXEL = 2.5
_LEVELS = 1023  # colours are summed as whole numbers: the same sum in any order


def fractals(draws: Draws, side: int) -> Tensor:
    """float32 [batch, side, side, 3] between 0 and 1."""
    maps, odds = _system(draws)
    steps = max(4, math.ceil(_POINTS_PER_PIXEL * side * side / _WALKERS))
    points, shade = _walk(draws.branch(1), maps, odds, _WALKERS, steps)
    place = _places(points, side)
    hits = torch.zeros(draws.batch, side * side, dtype=torch.int64, device=draws.device)
    tone = torch.zeros_like(hits)
    hits.scatter_add_(1, place, torch.ones_like(place))
    tone.scatter_add_(1, place, (shade * _LEVELS).to(torch.int64))
    light = (hits.to(torch.float32).log1p() / math.log(12)).clamp_(max=1).view(-1, side, side, 1)
    mean = (tone.to(torch.float32) / (_LEVELS * hits.clamp(min=1))).view(-1, side, side, 1)
    low, high = draws.uniform(1, 1, 3), draws.uniform(1, 1, 3)
    return (1 - light) * _background(draws, side) + light * (low + (high - low) * mean)


def _system(draws: Draws) -> tuple[Tensor, Tensor]:
    """Maps [batch, MAPS, 6] (a b c d e f of x' = ax + by + e, y' = cx + dy + f) and cumulative odds [batch, MAPS]."""
    batch = draws.batch
    # All tries run at once, as if they were records: no record waits for another one's luck.
    maps, odds = _random_maps(draws.branch(2), batch * _TRIES)
    scouts = draws.branch(3)
    points, _ = _walk(scouts, maps.view(batch, _TRIES, MAPS, 6), odds.view(batch, _TRIES, MAPS), _SCOUTS, _SCOUT_STEPS)
    share = _share(points.flatten(0, 1)).view(batch, _TRIES)
    good = share >= FILL
    chosen = good.to(torch.int64).argmax(dim=1)
    rows = torch.arange(batch, device=draws.device)
    maps, odds = maps.view(batch, _TRIES, MAPS, 6)[rows, chosen], odds.view(batch, _TRIES, MAPS)[rows, chosen]
    none = ~good.any(dim=1)
    even = ((torch.arange(MAPS, device=odds.device) + 1) / 4).clamp(max=1).expand_as(odds)
    return torch.where(none[:, None, None], _square(maps), maps), torch.where(none[:, None], even, odds)


def _random_maps(draws: Draws, count: int) -> tuple[Tensor, Tensor]:
    tries = count // draws.batch
    shape = (tries, MAPS)
    turn, tilt = draws.uniform(*shape, high=2 * math.pi), draws.uniform(*shape, high=2 * math.pi)
    # Both scales of a map stay below 1 (it contracts), but not far below: weak maps fill the plane.
    long, short = draws.uniform(*shape, low=0.45, high=0.92), draws.uniform(*shape, low=0.15, high=0.85)
    short = torch.minimum(short, long) * torch.where(draws.uniform(*shape) < 0.3, -1.0, 1.0)
    shift = draws.uniform(*shape, 2, low=-1, high=1)
    cos, sin, left, right = turn.cos(), turn.sin(), tilt.cos(), tilt.sin()
    maps = torch.stack([
        cos * long * left - sin * short * right, -cos * long * right - sin * short * left,
        sin * long * left + cos * short * right, -sin * long * right + cos * short * left,
        shift[..., 0], shift[..., 1],
    ], dim=-1)  # fmt: skip
    # Odds go by area: equal odds would spend most points on small copies. Two to MAPS maps take part.
    odds = (long * short).abs() + 0.02
    part = torch.arange(MAPS, device=draws.device) < 2 + draws.choice(MAPS - 1, tries, 1)
    odds = torch.where(part, odds, 0.0).cumsum(dim=-1)
    return maps.view(count, MAPS, 6), (odds / odds[..., -1:]).view(count, MAPS)


def _square(maps: Tensor) -> Tensor:
    """Four quarters of a square, each turned as the record's own maps are."""
    quarter = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [-0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    turn = maps[..., 4:5].sign()
    half = torch.full_like(turn, 0.5) * turn
    zero = torch.zeros_like(turn)
    shift = quarter.to(maps.device).expand(*maps.shape[:-1], 2)
    return torch.cat([half, zero, zero, half.abs(), shift], dim=-1)


def _walk(draws: Draws, maps: Tensor, odds: Tensor, walkers: int, steps: int) -> tuple[Tensor, Tensor]:
    """Points [..., walkers · steps, 2] after a burn-in, and a shade in [0, 1] that remembers the last few jumps."""
    lead = maps.shape[:-2]
    extra = math.prod(lead[1:])
    x = draws.uniform(extra * walkers, low=-1, high=1).view(*lead, walkers)
    y, shade = torch.zeros_like(x), torch.full_like(x, 0.5)
    xs, ys, shades = [], [], []
    for step in range(_BURN_IN + steps):
        luck = draws.uniform(extra * walkers).view(*lead, walkers)
        jump = (luck[..., None] >= odds[..., None, :-1]).sum(dim=-1)
        a, b, c, d, e, f = torch.gather(maps, -2, jump[..., None].expand(*jump.shape, 6)).unbind(-1)
        x, y = a * x + b * y + e, c * x + d * y + f
        shade = 0.5 * shade + jump / (2 * MAPS - 2)
        if step >= _BURN_IN:
            xs.append(x)
            ys.append(y)
            shades.append(shade)
    return torch.stack([torch.cat(xs, dim=-1), torch.cat(ys, dim=-1)], dim=-1), torch.cat(shades, dim=-1)


def _places(points: Tensor, side: int) -> Tensor:
    """Pixel numbers [batch, points]; the picture is the box around all points, with a margin."""
    low, high = points.amin(dim=1, keepdim=True), points.amax(dim=1, keepdim=True)
    unit = 0.03 + 0.94 * (points - low) / (high - low + 1e-6)
    pixel = (unit * side).to(torch.int64).clamp_(0, side - 1)
    return pixel[..., 1] * side + pixel[..., 0]


def _share(points: Tensor) -> Tensor:
    place = _places(points, _CELLS)
    cells = torch.zeros(len(points), _CELLS * _CELLS, dtype=torch.int64, device=points.device)
    return cells.scatter_(1, place, 1).to(torch.float32).mean(dim=1)


def _background(draws: Draws, side: int) -> Tensor:
    """Soft clouds between two colours, made small and enlarged."""
    soft = draws.uniform(1, low=1.0, high=2.0)[:, 0]
    cloud = noise_field(draws, 32, soft, stretch=torch.ones_like(soft))[:, :1]
    cloud = interpolate(cloud, size=(side, side), mode="bilinear", align_corners=False)[:, 0, ..., None]
    base, tint = draws.uniform(1, 1, 3, high=0.7), draws.uniform(1, 1, 3, low=-0.15, high=0.15)
    return base + tint * cloud
