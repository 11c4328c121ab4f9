"""A GroupNorm's clipped sums, judged by plain autograd record by record in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.train.clip.bookkeeping import BookKeepingClip
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.parity_cases import Case, dense
from tests.support.parity_engines import judged, rule_of, summed
from tests.support.parity_models import OnX


class Twice(nn.Module):
    """One scale and shift at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.norm(x)))


class Pictures(nn.Module):
    """Each record has three rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x.flatten(0, 1).unsqueeze(1))
        return self.norm(rows).unflatten(0, (len(x), -1))


class InHalf(nn.Module):
    """Scales and shifts in the type of the input, as timm has them where a norm is to be fast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group, self.layer = nn.Linear(5, 6), nn.GroupNorm(2, 4), nn.LayerNorm(6)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self.first(inputs["x"])
        half = [parameter.to(x.dtype) for parameter in (*self.group.parameters(), *self.layer.parameters())]
        normal = F.group_norm(x, 2, *half[:2])
        return F.layer_norm(normal, (6,), *(each.to(normal.dtype) for each in half[2:])).square().flatten(1).mean(1)


def without(name: str) -> nn.Module:
    norm = nn.GroupNorm(2, 4)
    norm.get_parameter(name).requires_grad_(False)
    return nn.Sequential(nn.Conv2d(4, 4, 1), norm)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "first": lambda: nn.GroupNorm(4, 4),
    "within": lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), nn.GELU(), nn.Conv2d(6, 2, 1)),
    "no positions": lambda: nn.Sequential(nn.Flatten(1), nn.Linear(4 * 7 * 5, 4), nn.GroupNorm(2, 4)),
    "twice": Twice,
    "rows of a record": Pictures,
    "frozen scale": lambda: without("weight"),
    "frozen shift": lambda: without("bias"),
}


@pytest.mark.parametrize("name", MODULES)
def test_clipped_sums_are_those_of_plain_autograd(name: str) -> None:
    case = Case(lambda: OnX(MODULES[name]()), dense(4, 7, 5))
    model, inputs = case.model(torch.float64), case.batch(7, torch.float64)
    with torch.no_grad():  # neither ones nor zeros, which would hide a factor
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    everyone = torch.ones(7, dtype=torch.bool)
    records = brute_force.records_of(model, inputs)
    bound, _, expected = judged(records, everyone)
    clip = BookKeepingClip(rule_of("flat", bound), "fp32")
    clip.prepare(model)
    totals, _ = summed(clip, model, [(inputs, everyone)], double=True)
    assert max(relative_error({each: totals[each]}, {each: expected[each]}) for each in expected) <= 1e-9


def test_weights_may_be_cast_to_halves_with_their_input() -> None:
    torch.manual_seed(0)
    model, x = InHalf(), torch.randn(6, 4, 5)
    everyone = torch.ones(6, dtype=torch.bool)
    found = []
    for precision in ("bf16", "fp32"):
        clip = BookKeepingClip(rule_of("flat", 0.1), precision)
        clip.prepare(model)
        found.append(summed(clip, model, [({"x": x}, everyone)])[0])
    assert relative_error(found[0], {name: total.double() for name, total in found[1].items()}) <= 0.03
