"""Whatever operator of PyTorch a module calls, and whatever numbers a record has, nothing of its neighbours shows.

The operators and their arguments are those with which PyTorch tests itself. Each tensor among them becomes a record's
input, as it is and with numbers at its ends that point elsewhere or are not finite. The record's results and gradients
must be the same bits beside other neighbours, also beside such as are NaN throughout.
"""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from murmuration.train.clip.losses import isolated

SAMPLES = 14
FINITE, OTHERS, NAN = 1, 2, 3
"""Which neighbours a record has."""
# What takes places, and has kernels that do not check all of them or rules for vmap that lay records in a row.
POINTED = {
    "__getitem__", "gather", "index_add", "index_fill", "index_put", "index_select", "masked_scatter",
    "nn.functional.ctc_loss", "nn.functional.embedding", "nn.functional.embedding_bag", "nn.functional.max_unpool2d",
    "put", "scatter_add", "searchsorted", "take", "take_along_dim", "_segment_reduce",
}  # fmt: skip
# They return memory as they find it, which is no operator's fault.
UNFILLED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Loops as long as a number says, up to 1e9, or sizes that take minutes; nn.functional.grid_sample has the same kernels.
ENDLESS = {"grid_sampler_3d"}


def operators() -> list[Any]:
    # PyTorch's list imports the base of its own tests, of which nothing is used here.
    absent = types.ModuleType("expecttest")
    absent.TestCase = unittest.TestCase  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules.setdefault("expecttest", absent)
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.name not in UNFILLED | ENDLESS and "polynomial" not in op.name]


def neighbour(like: Tensor, kind: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * kind + seed)
    if like.is_floating_point() and kind == NAN:
        return torch.full_like(like, torch.nan)
    if like.dtype == torch.bool:
        return torch.rand(like.shape, generator=draw) < 0.5
    if not (like.is_floating_point() or like.is_complex()):
        return torch.randint(int(like.min()), int(like.max()) + 1, like.shape, generator=draw, dtype=like.dtype)
    drawn = 3 * torch.randn(like.shape, generator=draw)
    if like.dim() > 1 and like.shape[-1] == like.shape[-2]:  # what is decomposed is as good as positive
        drawn = drawn @ drawn.mT + torch.eye(like.shape[-1])
    return drawn.to(like.dtype)


def records(leaves: list[Any], places: list[int]) -> Iterator[tuple[str, list[Any]]]:
    yield "as it is", leaves
    for place in places:
        like = leaves[place]
        if like.dtype == torch.bool or like.is_complex():
            continue
        odd = (torch.nan, torch.inf, 1e9, -7.5) if like.is_floating_point() else (-1, -2, like.numel(), 1000)
        for number in odd:
            for where in {0, like.numel() - 1}:
                changed = like.detach().clone(memory_format=torch.contiguous_format)
                changed.view(-1)[where] = number
                yield f"{number} at {where} of argument {place}", [*leaves[:place], changed, *leaves[place + 1 :]]


def beside(
    op: Any, leaves: list[Any], form: Any, places: list[int], kind: int | list[Any], learnt: bool
) -> list[Tensor | None]:  # fmt: skip
    """Results and gradients of the record in the middle. `kind`: of its neighbours, or what they are themselves."""
    inputs: dict[str, Tensor] = {}
    for place in places:
        own = leaves[place].detach()
        if isinstance(kind, list):
            inputs[str(place)] = torch.stack([kind[place].detach(), own, kind[place].detach()])
        else:
            around = [neighbour(own, kind, 2 * place + side) for side in (0, 1)]
            inputs[str(place)] = torch.stack([around[0], own, around[1]])
    wanted = [x.requires_grad_() for x in inputs.values() if learnt and x.is_floating_point()]

    def run(record: Any) -> Tensor:
        given = [record[str(place)][0] if place in places else leaf for place, leaf in enumerate(leaves)]
        first, args, options = pytree.tree_unflatten(given, form)
        results = [x for x in pytree.tree_leaves(op.op(first, *args, **options)) if isinstance(x, Tensor)]
        return torch.cat([(torch.view_as_real(x) if x.is_complex() else x).double().flatten() for x in results])

    found = isolated(run, inputs, 3).reshape(3, -1)
    if not (wanted and found.requires_grad):
        return [found[1].detach().clone()]
    weights = torch.linspace(0.5, 1.5, found.shape[1], dtype=torch.float64)
    gradients = torch.autograd.grad((found * weights).sum(), wanted, allow_unused=True)
    return [found[1].detach().clone(), *(None if x is None else x[1].clone() for x in gradients)]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and a.shape == b.shape and torch.allclose(a, b, 0, 0, True))
        for a, b in zip(one, other, strict=True)
    )


def differences(op: Any) -> tuple[int, list[str]]:
    """How many records were taken, and those whose results their neighbours changed."""
    kind = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    taken, found = 0, list[str]()
    for sample in islice(op.sample_inputs("cpu", kind, requires_grad=False), SAMPLES):
        leaves, form = pytree.tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
        places = [
            place
            for place, x in enumerate(leaves)
            if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized and x.numel()
        ]
        plain: list[Tensor | None] | None = None
        for name, record in records(leaves, places) if places else ():
            for learnt in (True, False):
                try:
                    first = beside(op, record, form, places, FINITE, learnt)
                except Exception:  # refused, or no number that it takes, or nothing that has a gradient
                    continue
                taken += 1
                if record is leaves:
                    plain = first
                around: dict[str, tuple[int | list[Any], list[Any], list[Tensor | None]]]
                around = {"others": (OTHERS, record, first), "NaN": (NAN, record, first)}
                if plain is not None and len(plain) == len(first):
                    around["it"] = (record, leaves, plain)
                for where, (other, mine, expected) in around.items():
                    try:
                        again = beside(op, mine, form, places, other, learnt)
                    except Exception:  # of the neighbours' own numbers
                        continue
                    if not same(expected, again):
                        found.append(f"{op.name} {op.variant_test_name}: {name}, beside {where}")
                break
    return taken, found


def all_differences(few: bool) -> tuple[int, list[str]]:
    tried = [differences(op) for op in operators() if op.supported_dtypes("cpu") and (op.name in POINTED) == few]
    return sum(taken for taken, _ in tried), [each for _, found in tried for each in found]


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_no_operator_shows_anything_of_a_record_s_neighbours(few: bool) -> None:
    # PyTorch's list changes settings of the process that loads it, and a kernel that is pointed elsewhere may end it.
    with ProcessPoolExecutor(1, get_context("fork")) as apart:
        taken, found = apart.submit(all_differences, few).result()
    assert not found
    assert taken > (1_000 if few else 20_000)
