"""The modules under training and their records. `module(x)` returns one loss per record; a record's last number is its
weight, by which its loss is multiplied, so that a record of weight 0 stands for one that is not there."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

SPARE, FEATURES, WIDTH, BIG = 8192, 8, 96, 1e4


class Meter(nn.Module):
    """Record i has gradient 10 in coordinate i and none elsewhere: a step shows who took part, and how often. No record
    reaches the last `SPARE` coordinates: they show the noise."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.fc = nn.Linear(n + SPARE, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x[..., :-1]).squeeze(-1) * x[..., -1]


class Net(nn.Module):
    """Two layers, and between them whatever is tried."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.between(torch.tanh(self.into(x[..., :-1])))
        return self.out(torch.tanh(h)).squeeze(-1) * x[..., -1] * 30


class BatchNorm(Net):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(self.norm(self.into(x[..., :-1])))
        return self.out(torch.tanh(h)).squeeze(-1) * x[..., -1] * 30


class BatchMean(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x[..., :-1])
        h = self.a(torch.tanh(h - h.mean(0)))
        return self.out(torch.tanh(h)).squeeze(-1) * x[..., -1] * 30


class RunningMean(Net):
    """Keeps a statistic of its batches in a buffer, as centres, queues and prototypes do."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x[..., :-1])
        self.mean.lerp_(h.detach().mean(0), 0.5)
        h = self.a(torch.tanh(h - self.mean))
        return self.out(torch.tanh(h)).squeeze(-1) * x[..., -1] * 30


class LossOverBatch(Net):
    """Divides by the weights of the whole batch, as a loss per token does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(torch.tanh(self.into(x[..., :-1])))
        return self.out(torch.tanh(h)).squeeze(-1) * x[..., -1] * 30 / x[..., -1].sum().clamp(min=1)


class Shared(Net):
    """Two layers with one weight, whose two gradients point the same way."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h) + self.b(h)


class CalledTwice(Net):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h) + self.a(h)


class InPlace(Net):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h).mul_(2).relu_()


class OwnParameter(Net):
    """A parameter that belongs to no layer of PyTorch."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h) * self.scale


class Parts(Net):
    """Kinds of parameters: of an embedding, most of whose rows no record uses, of a norm, of no layer, and frozen."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.table, self.norm = nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)
        self.position = nn.Parameter(torch.zeros(WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(self.norm(self.frozen(h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = x[..., :1].nan_to_num().abs().clamp(max=63).long()
        h = torch.tanh(self.into(x[..., :-1])) + self.table(row).sum(-2) + self.position
        return self.out(torch.tanh(self.between(h))).squeeze(-1) * x[..., -1] * 30


class LoRA(Net):
    """A frozen net, and a low-rank change of one of its layers that starts at 0."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h) + self.up(self.down(h))


MODULES = {
    "meter": Meter, "plain": Net, "BatchNorm": BatchNorm, "batch mean": BatchMean, "running mean": RunningMean,
    "loss over the batch": LossOverBatch, "shared weight": Shared, "called twice": CalledTwice, "in place": InPlace,
    "own parameter": OwnParameter, "infinite input": Net, "parts": Parts, "LoRA": LoRA,
}  # fmt: skip


def make(name: str, n: int) -> nn.Module:
    """The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODULES[name](n)


def records(name: str, n: int, without: int | None) -> TensorDataset:
    if name == "meter":
        x = torch.zeros(n, n + SPARE + 1)
        x[range(n), range(n)] = 10
        x[:, -1] = 1
    else:
        x = torch.randn(n, FEATURES + 1, generator=torch.Generator().manual_seed(2))
        x[:, -1] = 1
        if name == "infinite input":
            x[0, :-1] = math.inf
        elif name not in ("parts", "LoRA"):  # one record against all others
            x[0, :-1] *= BIG
            x[0, -1] = BIG
    if without is not None:
        x[without] = 0
    return TensorDataset(x)


def clipped_sum(name: str, n: int) -> dict[str, torch.Tensor]:
    """What one step sums where all records take part, by one pass of autograd for each."""
    model = make(name, n)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    total = {name: torch.zeros_like(value) for name, value in trained.items()}
    for (x,) in records(name, n, None):
        loss = model(x[None]).sum()
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        for sum_of, gradient in zip(total.values(), gradients, strict=True):
            sum_of += gradient * min(1.0, 1.0 / norm)
    return total
