"""What the FSDP2 engine is built from, in one process: rows of a rank, parts of a model, the proof of a map."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmuration.model.build import Objective, build
from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import by_copy
from murmuration.train.engines.choose import EngineSettings, require_compiler
from murmuration.train.engines.forward import PlainForward
from murmuration.train.engines.fsdp2 import parts_of
from murmuration.train.engines.mesh import require_whole_copies
from murmuration.train.engines.shard_map import DIGIT, ShardMapError, prove_numbering, row_slices
from murmuration.train.self_test.probes import synthetic_batch
from tests.support.parity_models import SHAPE

SHAPES = {"one row": (1, 4), "matrix": (7, 3), "vector": (5,), "cube": (4, 2, 3), "even": (6, 2)}


def whole() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def shards_of(tensor: Tensor, world: int) -> list[Tensor]:
    """As FSDP2 cuts: torch.chunk, and nothing for the ranks that are left over."""
    chunks = [chunk.clone() for chunk in tensor.chunk(world)]
    return chunks + [tensor[:0].clone() for _ in range(world - len(chunks))]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_rows_of_all_ranks_tile_each_parameter_once(world: int) -> None:
    parameters = whole()
    shapes = {name: p.shape for name, p in parameters.items()}
    found = {name: torch.full((p.numel(),), float("nan")) for name, p in parameters.items()}
    count = 0
    for rank in range(world):
        mine = {name: shards_of(p, world)[rank] for name, p in parameters.items()}
        for flat, fragments in row_slices(mine, shapes, rank, world).values():
            assert len(fragments) == (flat.numel() > 0)
            for f in fragments:
                assert list(shapes)[f.parameter] == f.name
                found[f.name][f.start : f.start + f.length] = f.of(flat)
                count += f.length
    assert count == sum(p.numel() for p in parameters.values()), "an element lies in two shards"
    assert all(torch.equal(found[name], p.flatten()) for name, p in parameters.items())


def test_another_cut_is_refused() -> None:
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    rows = {name: shards_of(p, 2)[0] for name, p in whole().items()}
    with pytest.raises(ShardMapError, match="matrix: rank 0 holds"):
        row_slices(rows | {"matrix": rows["matrix"][1:]}, shapes, 0, 2)
    with pytest.raises(ShardMapError, match="matrix: rank 0 holds"):
        row_slices(rows | {"matrix": torch.zeros(3, 4).t()}, shapes, 0, 2)


class Store:
    """Whole tensors whose memory the shards share, as if gathering were always right; `view` may make it wrong."""

    def __init__(self) -> None:
        self.parameters = whole()
        self.layout = row_slices(self.parameters, {n: p.shape for n, p in self.parameters.items()}, 0, 1)
        self.sizes = {name: p.numel() for name, p in self.parameters.items()}
        self.view = lambda name, value: (name, value)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.parameters.items():
            yield self.view(name, value.clone())


def test_numbering_proves_an_honest_map_and_puts_the_weights_back() -> None:
    store = Store()
    before = {name: p.clone() for name, p in store.parameters.items()}
    prove_numbering(store.layout, store.sizes, store.gathered)
    assert all(torch.equal(before[name], p) for name, p in store.parameters.items())


WRONG = {
    "two parameters exchanged": lambda name, value: ({"one row": "x", "x": "one row"}.get(name, name), value),
    "rows in another order": lambda name, value: (name, value.flip(0)),
    "the same numbers, another shape": lambda name, value: (name, value.reshape(3, 7).t().contiguous().view_as(value))
    if name == "matrix"
    else (name, value),
    "one element of another": lambda name, value: (name, value.flatten().index_fill(0, torch.tensor([1]), 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_numbering_refuses_a_wrong_map_and_puts_the_weights_back(how: str) -> None:
    store = Store()
    before = {name: p.clone() for name, p in store.parameters.items()}
    store.view = WRONG[how]
    with pytest.raises(ShardMapError, match="in the known order"):
        prove_numbering(store.layout, store.sizes, store.gathered)
    assert all(torch.equal(before[name], p) for name, p in store.parameters.items())


@pytest.mark.rest
def test_numbers_have_a_second_digit_where_fp32_ends() -> None:
    """Elements further apart than fp32 can count must not pass for one another."""
    sizes = {"first": DIGIT, "second": 2}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    layout = row_slices(tensors, {name: t.shape for name, t in tensors.items()}, 0, 1)

    def aliased() -> Iterator[tuple[str, Tensor]]:
        yield "first", tensors["first"]
        yield "second", tensors["first"][:2]

    prove_numbering(layout, sizes, lambda: iter(tensors.items()))
    with pytest.raises(ShardMapError, match="second"):
        prove_numbering(layout, sizes, aliased)


def test_repeated_blocks_are_parts_unless_they_share_a_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
            self.blocks[3].weight = self.blocks[1].weight
            self.chain = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))
            self.head = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
            self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3)]), nn.Identity()])

    model = Model()
    expected = [model.blocks[0], model.blocks[2], *model.chain, *model.nested[0], model]  # pyright: ignore
    assert [id(part) for part in parts_of(model)] == [id(part) for part in expected]


def test_ranks_of_a_copy_are_neighbours() -> None:
    assert by_copy("abcdef", 2) == ["ab", "cd", "ef"]
    assert by_copy("abcdef", 0) == by_copy("abcdef", 6) == ["abcdef"]
    assert by_copy("abc", 1) == ["a", "b", "c"]


def test_an_engine_says_how_many_ranks_hold_a_copy() -> None:
    grid = EngineSettings("fsdp2", shard_over=8)
    assert grid.ranks_per_copy == 8 and "on every 8 ranks" in str(grid)
    assert [EngineSettings("deepspeed", zero=ZeroOptimization(stage=s)).ranks_per_copy for s in (0, 1, 3)] == [1, 0, 0]  # pyright: ignore[reportArgumentType]
    assert (EngineSettings("local").ranks_per_copy, EngineSettings("fsdp2").ranks_per_copy) == (1, 0)
    for name, ranks in (("deepspeed", 8), ("fsdp2", 1)):
        with pytest.raises(RecipeError, match=r'it is for engine "fsdp2", and 2 ranks at least'):
            EngineSettings(name, shard_over=ranks)  # pyright: ignore[reportArgumentType]


def test_ranks_that_leave_part_of_a_copy_are_refused() -> None:
    require_whole_copies(12, 4)
    require_whole_copies(5, None)
    with pytest.raises(RecipeError, match="12 ranks cannot be divided into copies of 8 ranks each; set it to a number"):
        require_whole_copies(12, 8)


# Compiled blocks of public phases


@pytest.mark.rest
@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_blocks_of_one_kind_are_compiled_once_and_nothing_else_is(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[bool] = []

    def noting(graph: Any, inputs: Any) -> Any:
        sizes.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=noting))
    shape = replace(SHAPE, encoder=replace(SHAPE.encoder, depth=3))
    batch = synthetic_batch(shape, objective, 4, 0)
    model = build(shape, objective)
    plain, compiled = PlainForward(model), PlainForward(deepcopy(model), compiled=True)
    torch._dynamo.reset()
    for _ in range(2):
        expected = plain(batch.inputs, batch.present)
        expected.backward()
        found = compiled(batch.inputs, batch.present)
        found.backward()
        assert torch.allclose(found, expected, rtol=1e-6)
        for (name, one), (_, other) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
            if one.grad is None or other.grad is None:
                assert one.grad is other.grad, name
            else:
                assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-7), name
    assert len(sizes) == 2, "the encoder's blocks and the decoder's"
    assert not any(sizes), "compilers may fail where a size is a symbol"
    torch._dynamo.reset()


def test_without_a_compiler_compiling_is_refused_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RecipeError, match=r'run.compile = "blocks" needs a C\+\+ compiler, and g\+\+ is not on'):
        require_compiler()
    monkeypatch.setenv("CXX", f"{sys.executable} with-a-cache")
    require_compiler()
    monkeypatch.setenv("CXX", sys.executable)  # a path of its own
    require_compiler()
    monkeypatch.setenv("CXX", f"{sys.executable} with-a-cache")
    require_compiler()
