"""What the book-keeping engine cannot clip it refuses, and adds nothing to any sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from murmuration.train.clip.accumulator import NormAccumulator
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.per_record import Dense
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.sums import ExactSums, trainable_shapes
from tests.support.clip_world import FLAT, Body
from tests.support.train_helpers import Toy, toy_batch


def test_a_use_that_was_not_announced_is_no_part_of_any_sum() -> None:
    accumulator = NormAccumulator({"w": 0}, 2, 1.0, False, torch.device("cpu"))
    piece = Dense("w", torch.ones(2, 3))
    accumulator.add([piece], {"w": 1})
    with pytest.raises(ClipError, match="more uses"):
        accumulator.add([piece], {"w": 1})


def reentrant(body: Any, x: Tensor) -> Tensor:
    out = checkpoint(body.second, body.first(x), use_reentrant=True)
    assert isinstance(out, Tensor)
    return out


@torch.jit.script
def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


REFUSED: list[tuple[str, Callable[[Any, Tensor], Tensor]]] = [
    ("does not use second", lambda body, x: body.first(x)),
    ("use_reentrant=False", reentrant),
    (
        "second.weight reaches the loss past the clip engine",
        lambda body, x: body.second(body.first(x)) + scripted(body.first(x), body.second.weight),
    ),
]


@pytest.mark.parametrize(("message", "act"), REFUSED)
def test_what_cannot_be_clipped_is_refused(message: str, act: Callable[[Any, Tensor], Tensor]) -> None:
    batch, model = toy_batch(4), Body(act)
    clip = BookKeepingClip(FLAT)
    clip.prepare(model)
    for _ in range(2):
        with pytest.raises(ClipError, match=message):
            clip.add_clipped(model, batch.inputs, batch.present, _Nowhere())


def test_a_scripted_part_hides_its_parameters_and_is_refused() -> None:
    model = Toy()
    model.second = torch.jit.script(model.second)  # pyright: ignore[reportAttributeAccessIssue]
    batch = toy_batch(4)
    with pytest.raises(ClipError, match=r"second\.(weight|bias)"):
        BookKeepingClip(FLAT).add_clipped(model, batch.inputs, batch.present, _Nowhere())


class Seeing(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("it was given records")


def test_a_tensor_with_functions_of_its_own_is_refused() -> None:
    model, batch = Toy(), toy_batch(4)
    model.register_buffer("table", torch.ones(3).as_subclass(Seeing))
    with pytest.raises(ClipError, match="table is a Seeing, whose functions are given all records together"):
        BookKeepingClip(FLAT).add_clipped(model, batch.inputs, batch.present, _Nowhere())


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.troubles = nn.Linear(3, 2), iter(())

    def forward(self, inputs: Any) -> Tensor:
        for trouble in self.troubles:
            raise RuntimeError(trouble)
        return nn.functional.cross_entropy(self.layer(inputs["x"]), inputs["label"], reduction="none")


def test_a_record_that_the_model_cannot_compute_ends_the_pass_until_it_may_be_left_out() -> None:
    clip, model, everyone = BookKeepingClip(FLAT), Labelled(), torch.ones(4, dtype=torch.bool)
    inputs = {"x": torch.randn(4, 3), "label": torch.tensor([0, 1, 4321, 1])}
    sums = ExactSums(trainable_shapes(model), torch.device("cpu"))
    with pytest.raises(IndexError):
        clip.add_clipped(model, inputs, everyone, sums)
    assert clip.left_out == 0 and not sums.flat.any()
    clip.leaves_out = True
    seen = clip.add_clipped(model, inputs, everyone, sums)
    assert clip.left_out == 1 and seen.losses.isnan().tolist() == [False, False, True, False]
    assert (seen.factors > 0).tolist() == [True, True, False, True] and bool(sums.flat.any())
    with pytest.raises(IndexError):
        clip.add_clipped(model, inputs, everyone, _Nowhere())
    model.troubles = iter(["which no record by itself has"])
    with pytest.raises(RuntimeError, match="which no record by itself has"):
        clip.add_clipped(model, {**inputs, "label": torch.ones(4).long()}, everyone, sums)


class _Nowhere:
    def add(self, name: str, value: Tensor) -> None:
        raise AssertionError(f"{name} was added to, although the model is refused")

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        raise AssertionError(f"{name} was added to, although the model is refused")


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Embedding(9, 4, scale_grad_by_freq=True), torch.randint(0, 9, (3, 5))),
        (nn.Embedding(9, 4, max_norm=1.0), torch.randint(0, 9, (3, 5))),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), torch.randn(3, 5, 4)),
        (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), torch.randn(3, 5, 4)),
        (nn.BatchNorm1d(5), torch.randn(3, 5)),
    ],
)
def test_layers_that_mix_records_or_drop_units_are_refused(layer: nn.Module, inputs: Tensor) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, given: Any) -> Tensor:
            x = given["x"]
            out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
            return out.flatten(1).square().sum(1)

    with pytest.raises(ClipError):
        BookKeepingClip(FLAT).add_clipped(Only(), {"x": inputs}, torch.ones(3, dtype=torch.bool), _Nowhere())


def test_half_parameters_and_models_without_any_are_refused() -> None:
    with pytest.raises(ClipError, match="half precision"):
        BookKeepingClip(FLAT).prepare(Toy().bfloat16())
    with pytest.raises(ClipError, match="no trainable"):
        BookKeepingClip(FLAT).prepare(Toy().requires_grad_(False))
