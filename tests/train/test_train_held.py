"""What the model holds between passes: whether any change of its bits is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from murmuration.train.self_test import held

LONG = 2 * held.ON_HOST + 5


def swapped(tensor: Tensor, one: slice, other: slice) -> None:
    tensor[one], tensor[other] = tensor[other].clone(), tensor[one].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("length", [1, 3, 5, LONG])
def test_a_change_of_any_element_is_seen(dtype: torch.dtype, length: int) -> None:
    plain = (torch.rand(length, generator=torch.Generator().manual_seed(0)) * 2 - 0.5).to(dtype)
    before = held.checksums({"w": plain})
    assert held.checksums({"w": plain.clone()}) == before != held.checksums({"w": plain.view(1, -1)})
    for place in {0, length // 2, length - 1}:
        changed = plain.clone()
        changed.view(torch.uint8)[place * plain.element_size()] ^= 1  # the lowest bit
        assert held.checksums({"w": changed}) != before, place


@pytest.mark.parametrize("changed", ["a", "b", "c", "d", "e"])
def test_a_change_is_seen_in_its_own_tensor_among_others(changed: str) -> None:
    tensors = {name: torch.randn(size) for name, size in {"a": 1, "b": 7, "c": LONG, "d": 300, "e": 1}.items()}
    tensors["none"] = torch.empty(0)
    before = held.checksums(tensors)
    tensors[changed][-1] += 1
    now = held.checksums(tensors)
    assert [name for name in before if before[name] != now[name]] == [changed] and before.keys() == now.keys()


def test_a_change_of_places_is_seen() -> None:
    plain = torch.randn(LONG, generator=torch.Generator().manual_seed(0))
    before, stretch = held.checksums({"w": plain}), held.ON_HOST
    for one, other in (
        (slice(0, 1), slice(1, 2)), (slice(7, 8), slice(stretch + 7, stretch + 8)),
        (slice(0, stretch), slice(stretch, 2 * stretch)),
    ):  # fmt: skip
        changed = plain.clone()
        swapped(changed, one, other)
        assert held.checksums({"w": changed}) != before, (one, other)
    few = plain[:9]
    assert held.checksums({"w": few.flip(0)}) != held.checksums({"w": few})
