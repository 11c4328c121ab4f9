"""Layers that are read token by token, and records whose tokens' gradients cancel: for the tests of that name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

TOKENS, VOCABULARY = 8, 5
# Narrow layers may be cheaper to write out record by record, wide ones by products of tokens.
WIDTHS = (6, 32)


class Read(nn.Module):
    """A loss whose gradient with respect to the layer's output is an input: per-token gradients at will."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layer = self.build(width)

    def build(self, width: int) -> nn.Module:
        return nn.Linear(width, width)

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.layer(inputs["a"])

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return (self.outputs(inputs) * inputs["g"]).sum((1, 2))


class ReadNoBias(Read):
    def build(self, width: int) -> nn.Module:
        return nn.Linear(width, width, bias=False)


class ReadTable(Read):
    def build(self, width: int) -> nn.Module:
        return nn.Embedding(VOCABULARY, width)

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.layer(inputs["ids"])


class ReadTwice(ReadNoBias):
    """The two halves of the tokens pass through the same layer in two calls."""

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([self.layer(half) for half in inputs["a"].chunk(2, 1)], 1)


class ReadTied(ReadTable):
    """Half of the tokens meet the table by number, half as the matrix of a head."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.layer.weight  # pyright: ignore[reportAttributeAccessIssue]

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        looked_up = self.layer(inputs["ids"][:, : TOKENS // 2])
        logits = self.head(inputs["a"][:, TOKENS // 2 :])
        return torch.cat([looked_up, nn.functional.pad(logits, (0, self.width - VOCABULARY))], 1)


class ReadConv(Read):
    def build(self, width: int) -> nn.Module:
        return nn.Conv1d(width, width, 1)

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.layer(inputs["a"].transpose(1, 2)).transpose(1, 2)


class ReadNorm(Read):
    def build(self, width: int) -> nn.Module:
        return nn.LayerNorm(width)


class ReadFree(Read):
    def build(self, width: int) -> nn.Module:
        return nn.ParameterList([torch.randn(1, 1, width)])

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs["a"] + self.layer[0]  # pyright: ignore[reportIndexIssue]


READERS = {r.__name__: r for r in (Read, ReadNoBias, ReadTable, ReadTwice, ReadTied, ReadConv, ReadNorm, ReadFree)}


def hostile(count: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Pairs (H·u, v), (H·u + δ, -v + ε) that cancel, wholly or nearly, beside one small token of size 1.

    H is log-uniform in 1…1e8, shared between activation and gradient at random; δ and ε are 0 or 1e-7…1e-2 of H.
    """

    def log_uniform(low: float, high: float) -> Tensor:
        return 10 ** (low + (high - low) * torch.rand(count, 1, 1, generator=draw))

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=draw)

    def sometimes(chance: float) -> Tensor:
        return (torch.rand(count, 1, 1, generator=draw) < chance).float()

    pairs = (TOKENS - 2) // 2
    size, share = log_uniform(0, 8), torch.rand(count, 1, 1, generator=draw)
    left, right = normal(pairs, width) * size**share, normal(pairs, width) * size ** (1 - share)
    # In half of the records the pairs are all alike: the roundings then add up instead of averaging out.
    alike = sometimes(0.5)
    left, right = alike * left[:, :1] + (1 - alike) * left, alike * right[:, :1] + (1 - alike) * right
    drift = sometimes(0.5) * log_uniform(-7, -2)
    near = left * (1 + drift * normal(pairs, width)), -right * (1 + sometimes(0.5) * drift * normal(pairs, width))
    small = normal(2, width), normal(2, width) * log_uniform(-2, 1)
    order = torch.rand(count, TOKENS, generator=draw).argsort(1)[..., None].expand(-1, -1, width)
    a = torch.cat([left, near[0], small[0]], 1).gather(1, order)
    g = torch.cat([right, near[1], small[1]], 1).gather(1, order)
    first = torch.randint(0, VOCABULARY, (count, pairs), generator=draw)
    ids = torch.cat([first, first, torch.randint(0, VOCABULARY, (count, 2), generator=draw)], 1)
    return {"a": a, "g": g, "ids": ids.gather(1, order[..., 0])}


def mutated(inputs: Mapping[str, Tensor], draw: torch.Generator) -> dict[str, Tensor]:
    """Children of the records that came out worst: a little different, to climb further."""
    step = 10 ** (-6 * torch.rand(len(inputs["a"]), 1, 1, generator=draw))
    changed = {n: inputs[n] * (1 + step * torch.randn(inputs[n].shape, generator=draw)) for n in ("a", "g")}
    return changed | {"ids": inputs["ids"]}
