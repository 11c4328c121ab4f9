"""Per-sample losses and gradients: what the clipping engines rely on, for both models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from murmuration.model.attention import use_fused
from murmuration.model.encoder import Encoder


def sample_gradients(model: Encoder, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, ({key: value[None] for key, value in sample.items()},))[0]

    return vmap(grad(loss), in_dims=(None, 0))(trained, inputs)


def looped_gradients(model: Encoder, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for row in range(len(inputs["images"])):
        loss = model({key: value[row : row + 1] for key, value in inputs.items()})[0]
        rows.append(dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)))
    return rows


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("fused", [False, True])
def test_vmapped_gradients_equal_single_sample_gradients(
    model: Encoder, inputs: dict[str, Tensor], fused: bool
) -> None:
    use_fused(model, fused)
    batched = sample_gradients(model, inputs)
    use_fused(model, True)
    for row, single in enumerate(looped_gradients(model, inputs)):
        whole = torch.cat([g.flatten() for g in single.values()])
        other = torch.cat([batched[name][row].flatten() for name in single])
        assert float((whole - other).norm() / whole.norm()) < 1e-6
        assert all(bool(g.any()) for name, g in single.items()), "a declared parameter is never trained"


def test_fused_and_written_out_attention_agree(model: Encoder, inputs: dict[str, Tensor]) -> None:
    use_fused(model, True)
    fused = model(inputs)
    use_fused(model, False)
    torch.testing.assert_close(fused, model(inputs), rtol=1e-6, atol=1e-6)


def test_losses_are_per_sample_and_ignore_order_and_neighbours(model: Encoder, inputs: dict[str, Tensor]) -> None:
    losses = model(inputs)
    assert losses.shape == (6,) and losses.dtype == torch.float32
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    permuted = model({key: value[order] for key, value in inputs.items()})
    torch.testing.assert_close(permuted, losses[order], rtol=1e-6, atol=1e-6)
    hostile = {key: value.clone() for key, value in inputs.items()}
    hostile["images"][1:] = float("nan")
    assert torch.equal(model(hostile)[0], losses[0])


def test_global_random_state_is_neither_used_nor_moved(model: Encoder, inputs: dict[str, Tensor]) -> None:
    before = torch.get_rng_state()
    first = model(inputs)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(model(inputs), first)


def test_padded_rows_are_finite(model: Encoder, inputs: dict[str, Tensor]) -> None:
    use_fused(model, False)
    empty = {key: torch.zeros_like(value[:2]) for key, value in inputs.items()}
    losses = model(empty)
    assert bool(losses.isfinite().all())
    for gradient in sample_gradients(model, empty).values():
        assert bool(gradient.isfinite().all())
    if "tokens" in inputs:
        assert losses.tolist() == [0.0, 0.0]
        assert not any(bool(g.any()) for g in sample_gradients(model, empty).values())


def test_bf16_autocast_keeps_fp32_losses(model: Encoder, inputs: dict[str, Tensor]) -> None:
    exact = model(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(inputs)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.03)
    rounded.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
