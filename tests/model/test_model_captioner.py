"""Causality, padding and the decoder's use of the image."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.model.attention import use_fused
from murmuration.model.build import build
from murmuration.model.captioner import caption_loss
from murmuration.model.settings import ModelSettings

MakeInputs = Callable[[str, int], dict[str, Tensor]]


@pytest.mark.parametrize("fused", [False, True])
def test_a_token_changes_no_earlier_logits(settings: ModelSettings, make_inputs: MakeInputs, fused: bool) -> None:
    model = build(settings, "caption")
    use_fused(model, fused)
    inputs = make_inputs("caption", 2)
    memory = model.encode_images(inputs["images"])
    base = model.decode(memory, inputs["tokens"])
    for position in (0, 5, 15):
        changed = inputs["tokens"].clone()
        changed[:, position] = (changed[:, position] + 17) % 512
        logits = model.decode(memory, changed)
        assert torch.equal(logits[:, :position], base[:, :position])
        assert not torch.equal(logits[:, position], base[:, position])


def test_every_image_token_reaches_the_text(settings: ModelSettings, make_inputs: MakeInputs) -> None:
    model = build(settings, "caption")
    inputs = make_inputs("caption", 1)
    memory = model.encode_images(inputs["images"]).detach().requires_grad_()
    assert memory.shape == (1, 17, 128)
    model.decode(memory, inputs["tokens"])[0, 0].square().sum().backward()
    assert memory.grad is not None and bool(memory.grad[0].abs().sum(1).all())


def test_loss_is_the_mean_over_the_captions_own_tokens() -> None:
    logits = torch.randn(2, 5, 11)
    targets = torch.tensor([[3, 4, 2, 0, 0], [0, 0, 0, 0, 0]])
    expected = F.cross_entropy(logits[0, :3], targets[0, :3])
    torch.testing.assert_close(caption_loss(logits, targets), torch.stack([expected, torch.tensor(0.0)]))
    hostile = logits.clone()
    hostile[0, 4] = float("inf")
    assert torch.equal(caption_loss(hostile, targets), caption_loss(logits, targets))


def test_padding_length_does_not_matter(settings: ModelSettings, make_inputs: MakeInputs) -> None:
    model = build(settings, "caption")
    inputs = make_inputs("caption", 2)
    inputs["tokens"][:, 7:] = 0
    short = model({**inputs, "tokens": inputs["tokens"][:, :8]})
    torch.testing.assert_close(short, model(inputs), rtol=1e-6, atol=1e-6)


def test_logits_of_a_beginning_and_the_length_limit(settings: ModelSettings, make_inputs: MakeInputs) -> None:
    model = build(settings, "caption")
    inputs = make_inputs("caption", 2)
    memory = model.encode_images(inputs["images"])
    begun, full = model.decode(memory, inputs["tokens"][:, :4]), model.decode(memory, inputs["tokens"])
    torch.testing.assert_close(begun, full[:, :4], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="text_length"):
        model.decode(memory, torch.ones(2, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match="image_size"):
        model.encode_images(torch.zeros(1, 3, 16, 16))
