"""Optimizers written out on whole parameters in fp64, and the same run on uneven padded shards of 1 to 3 ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from murmuration.train.config.optimizer import Optimizer
from murmuration.train.optim.base import FlatOptimizer
from murmuration.train.optim.optimizers import make_optimizer
from tests.support.train_helpers import fragments_of, on_ranks, slice_of

# The second matrix crosses the border of a chunk; a cut among three ranks falls inside it.
SHAPES = {
    "encoder.weight": (13, 7), "encoder.norm.weight": (7,), "encoder.big": (190, 250), "encoder.bias": (190,),
    "pos_embed": (1, 5, 7), "head.weight": (4, 7), "head.bias": (4,),
}  # fmt: skip
PADDING = 3
Weights = dict[str, Tensor]


def initial(scale: float = 0.1) -> Weights:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=draw) * scale for name, shape in SHAPES.items()}


def gradient(step: int, name: str) -> Tensor:
    """Gradients of unlike sizes, so that norms and moments differ between parameters and steps."""
    number = list(SHAPES).index(name)
    draw = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(SHAPES[name], generator=draw) * 0.01 * (1 + number) / step + 0.002


def rate(step: int) -> float:
    return 0.01 * (1 + 0.5 * math.sin(step))


def walk(optimizer: Any, parameters: dict[str, nn.Parameter], steps: Iterable[int] = (1, 2, 3)) -> Weights:
    """The weights after these steps of any optimizer, on whole parameters."""
    for step in steps:
        for name, p in parameters.items():
            p.grad = gradient(step, name)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def on_shards(
    settings: Optimizer, world: int, steps: int = 3, start: Weights | None = None,
    between: Callable[[FlatOptimizer, int], None] | None = None,
) -> tuple[Weights, Weights]:  # fmt: skip
    """Final weights, and moving averages where kept, put together from the shards; padding is watched."""
    start = start or initial()
    parameters = {name: nn.Parameter(weights.clone()) for name, weights in start.items()}
    total = sum(p.numel() for p in parameters.values())
    padding = torch.tensor([5.0, -7.0, 11.0])

    def one(ranks: Any) -> dict[str, Tensor]:
        low, high = slice_of(ranks.rank, ranks.world, total)
        optimizer = make_optimizer(settings, parameters.items())
        flat = nn.Parameter(torch.cat([_flat(start)[low:high], padding]))
        fragments = fragments_of(parameters, low, high)
        optimizer.param_groups[0]["params"] = [flat]
        optimizer.bind({id(flat): (flat, fragments)}, ranks.add)
        for step in range(1, steps + 1):
            whole = _flat({name: gradient(step, name) for name in SHAPES})
            flat.grad = torch.cat([whole[low:high], torch.full((PADDING,), 1e6)])
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
            if between is not None:
                between(optimizer, step)
        assert torch.equal(flat.detach()[high - low :], padding), "padding moved"
        assert optimizer.steps_done == steps
        found = {"weights": flat.detach(), **optimizer.state_tensors(flat)}
        assert all(tensor.shape == flat.shape and tensor.dtype == torch.float32 for tensor in found.values())
        return {name: tensor[: high - low] for name, tensor in found.items()}

    parts = on_ranks(world, one)
    joined = {name: _shaped(torch.cat([part[name] for part in parts])) for name in parts[0]}
    return joined["weights"], joined.get("weights_ema", {})


def off(found: Weights, expected: Weights, names: tuple[str, ...] = tuple(SHAPES)) -> float:
    """Distance between the two, less what fp32 weights must round, over the distance that the expected one moved."""
    start = initial()
    apart = norm([found[name].double() - expected[name].double() for name in names])
    moved = norm([expected[name].double() - start[name].double() for name in names])
    rounding = 3 * 2.0**-24 * norm([expected[name] for name in names])
    assert moved > 1000 * rounding, "too small a move to tell anything"
    return max(0.0, apart - rounding) / moved


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _flat(weights: Weights) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in weights.values()])


def _shaped(flat: Tensor) -> Weights:
    found, begin = {}, 0
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        found[name] = flat[begin : begin + size].view(shape)
        begin += size
    return found


def textbook(
    kind: str, factor: Callable[[str], float] = lambda name: 1.0, decay: Callable[[str], float] = lambda name: 0.0,
    adapts: Callable[[str], bool] = lambda name: True, steps: int = 3, start: Weights | None = None, **o: Any,
) -> Weights:  # fmt: skip
    """One parameter at a time, fp64, as the papers write it."""
    weights = {name: tensor.double().clone() for name, tensor in (start or initial()).items()}
    b1, b2 = o.get("betas", (0.9, 0.999))
    eps, momentum = o.get("eps", 1e-8), o.get("momentum", 0.9)
    for name, w in weights.items():
        m, v, velocity = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
        for t in range(1, steps + 1):
            g, lr, wd = gradient(t, name).double(), rate(t) * factor(name), decay(name)
            if kind in ("AdamW", "LAMB"):
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
                r = m_hat / (v_hat.sqrt() + eps)
            if kind == "AdamW":
                w = w - lr * wd * w - lr * r
            elif kind == "LAMB":
                u = r + wd * w
                size = float(w.norm())
                trust = size / float(u.norm()) if adapts(name) and size > 0 and float(u.norm()) > 0 else 1.0
                w = w - lr * trust * u
            else:
                trust = 1.0
                if kind == "LARS" and adapts(name) and float(w.norm()) > 0 and float(g.norm()) > 0:
                    trust = 0.001 * float(w.norm()) / (float(g.norm()) + wd * float(w.norm()) + eps)
                d = trust * (g + wd * w)
                velocity = momentum * velocity + d
                w = w - lr * velocity
        weights[name] = w
    return weights
