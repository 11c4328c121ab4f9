"""The shard map: slices of DeepSpeed become fragments of parameters, and a map that does not fit is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from murmuration.train.distributed.shards import Fragment, whole_parameters
from murmuration.train.engines.shard_map import ShardMapError, zero_slices
from tests.support.train_helpers import LocalEngine, Toy, on_ranks


def mapped(parameter: nn.Parameter, start: int, length: int, position: int, group: int = 0, outside: int = -1) -> None:
    """The addresses that DeepSpeed leaves on a parameter."""
    parameter._hp_mapping = SimpleNamespace(  # pyright: ignore
        lp_fragment_address=SimpleNamespace(start=start, numel=length),
        hp_fragment_address=SimpleNamespace(start=position, numel=length if outside < 0 else outside),
        param_group_index=group,
    )


@pytest.fixture
def sliced() -> tuple[dict[str, nn.Parameter], torch.Tensor]:
    """This rank holds the end of `a`, all of `b`, nothing of `c`, and two elements of padding."""
    a, b, c = (nn.Parameter(torch.arange(n, dtype=torch.float32) + 100 * n) for n in (10, 4, 3))
    flat = torch.cat([a.detach()[6:], b.detach(), torch.zeros(2)])
    mapped(a, 6, 4, 0)
    mapped(b, 0, 4, 4)
    return {"a": a, "b": b, "c": c}, flat


def test_slices_become_fragments_in_order(sliced: Any) -> None:
    trainable, flat = sliced
    found, fragments = zero_slices(dict(reversed(trainable.items())), [flat])[id(flat)]
    assert found is flat and [f.name for f in fragments] == ["a", "b"]
    _, fragments = zero_slices(trainable, [flat])[id(flat)]
    assert fragments == [Fragment("a", 0, 6, 4, 0), Fragment("b", 1, 0, 4, 4)]
    assert fragments[0].of(flat).tolist() == trainable["a"][6:].tolist()


def test_a_map_that_does_not_fit_the_weights_is_refused(sliced: Any) -> None:
    trainable, flat = sliced
    flat[5] += 1
    with pytest.raises(ShardMapError, match="b: its shard does not contain its weights"):
        zero_slices(trainable, [flat])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ((0, 4, 3), "overlaps"), ((0, 4, 0), "overlaps"), ((0, 4, 8), "does not contain"),
        ((1, 3, 4), "does not contain"),
        ((0, 4, 4, 0, 3), "different sizes"),
    ],
)  # fmt: skip
def test_overlaps_and_wrong_places_are_refused(sliced: Any, address: tuple[int, ...], message: str) -> None:
    trainable, flat = sliced
    mapped(trainable["b"], *address)
    with pytest.raises(ShardMapError, match=message):
        zero_slices(trainable, [flat])


def test_without_sharding_the_parameters_are_the_shards() -> None:
    trainable = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}
    layout = whole_parameters(trainable)
    assert layout[id(trainable["b"])] == (trainable["b"], [Fragment("b", 1, 0, 4, 0)])
    fragment = layout[id(trainable["a"])][1][0]
    fragment.of(trainable["a"].detach()).fill_(7.0)
    assert trainable["a"].detach().tolist() == [[7.0] * 3] * 2


def test_the_tests_own_engine_tiles_the_model() -> None:
    layouts = on_ranks(3, lambda ranks: LocalEngine(_plain(), ranks).layout[0])
    covered = sorted((f.parameter, f.start, f.length) for layout in layouts for f in layout)
    assert sum(length for _, _, length in covered) == sum(p.numel() for p in Toy().parameters() if p.requires_grad)
    assert any(length % 2 for _, _, length in covered)


def _plain() -> Any:
    from murmuration.train.engines.forward import PlainForward

    return PlainForward(Toy())
