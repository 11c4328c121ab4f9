"""Layers that run again, copies and compiled models drop the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from murmuration.model.build import Objective
from tests.support.drop_world import OBJECTIVES, dropping, drops_of, inputs_of


def test_a_copy_has_keys_of_its_own() -> None:
    model, inputs = dropping("mae"), inputs_of("mae", 4)
    copied = copy.deepcopy(model)
    assert {id(part.row_keys) for part in drops_of(copied).values()} == {id(copied.row_keys)} != {id(model.row_keys)}
    assert torch.equal(copied(inputs), model(inputs))


class Checkpointed(nn.Module):
    """A block that keeps nothing for the backward pass but its input, and runs again there."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *x: Tensor) -> Tensor:
        return checkpoint(self.block, *x, use_reentrant=self.reentrant)


def checkpointed(objective: Objective, reentrant: bool) -> nn.Module:
    model = dropping(objective)
    for stack in ("blocks", "decoder_blocks", "decoder.layers"):
        if any(name == stack for name, _ in model.named_modules()):
            layers = model.get_submodule(stack)
            for number, layer in enumerate(list(layers)):  # pyright: ignore[reportArgumentType]
                layers[number] = Checkpointed(layer, reentrant)  # pyright: ignore[reportIndexIssue, reportArgumentType]
    return model


def gradients_of(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_checkpointed_layers_see_the_same_masks_when_they_run_again(objective: Objective, reentrant: bool) -> None:
    plain, model = dropping(objective), checkpointed(objective, reentrant)
    batches = [inputs_of(objective, rows, seed) for seed, rows in enumerate((4, 4, 3))]
    expected = []
    for inputs in batches:
        plain(inputs).sum().backward()
        expected.append(gradients_of(plain))
    assert not any(
        torch.equal(one, other) for one, other in zip(expected[0], expected[1], strict=True) if one.dim() > 1
    )
    # Backward in the forward's order, the other way round, and after other passes in between.
    for order in ((0, 1, 2), (2, 0, 1)):
        losses = [model(inputs) for inputs in batches]
        with torch.no_grad():
            model(inputs_of(objective, 4, 9))
        for number in order:
            losses[number].sum().backward()
            assert all(map(torch.equal, gradients_of(model), expected[number]))
    # All in one backward pass, where autograd itself chooses the order.
    together = [sum(parts[1:], parts[0]) for parts in zip(*expected, strict=True)]
    torch.cat([model(inputs) for inputs in batches]).sum().backward()
    for found, total in zip(gradients_of(model), together, strict=True):
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model_drops_alike() -> None:
    model, inputs = dropping("classify"), inputs_of("classify", 4)
    expected = model(inputs)
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(inputs)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    ours = gradients_of(model)
    expected.sum().backward()
    for one, other in zip(ours, gradients_of(model), strict=True):
        torch.testing.assert_close(one, other)
