"""What tests of the book-keeping engine share: a rule, distances of sums, and a body of two layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from murmuration.train.clip.rule import ClipRule

FLAT = ClipRule("flat", 0.5, 0.0)


def size(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return size({name: found[name].double() - expected[name].double() for name in found}) / size(expected)


class Body(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(48, 5), nn.Linear(5, 5), act

    def forward(self, inputs: Any) -> Tensor:
        return self.act(self, inputs["images"].flatten(1)).square().sum(1)
