"""The masked autoencoder against a plain, slow statement of what it should compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers.patch_embed import PatchEmbed as TimmPatchEmbed
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.model.encoder import PatchEmbed, patchify, take_rows, unpatchify
from murmuration.model.settings import ModelSettings

MakeInputs = Callable[[str, int], dict[str, Tensor]]


def test_projection_equals_timms_convolution_and_gathering_commutes() -> None:
    ours, theirs = PatchEmbed(128, 8), TimmPatchEmbed(32, 8, 3, 128)
    assert isinstance(theirs.proj, nn.Conv2d) and theirs.proj.bias is not None
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-6)
    kept = torch.rand(3, 16).argsort(1)[:, :4]
    torch.testing.assert_close(ours(images, kept), take_rows(theirs(images), kept), rtol=1e-5, atol=1e-6)


def test_patchify_and_back() -> None:
    images = torch.randn(2, 3, 32, 32)
    patches = patchify(images, 8)
    assert torch.equal(patches[0, 5].reshape(3, 8, 8), images[0, :, 8:16, 8:16])
    assert torch.equal(unpatchify(patches, 8, 4), images)


def test_exactly_the_smallest_noises_stay_visible(settings: ModelSettings, make_inputs: MakeInputs) -> None:
    model = build(settings, "mae")
    inputs = make_inputs("mae", 2)
    removed = model.reconstruct(inputs).removed
    for row in range(2):
        smallest = set(inputs["mask_noise"][row].argsort()[:4].tolist())
        assert set((~removed[row]).nonzero().flatten().tolist()) == smallest
    assert torch.equal(
        unpatchify(patchify(model.reconstruct(inputs).images, 8) * ~removed[..., None], 8, 4),
        unpatchify(patchify(inputs["images"], 8) * ~removed[..., None], 8, 4),
    )


def test_loss_reads_removed_pixels_as_targets_only(settings: ModelSettings, make_inputs: MakeInputs) -> None:
    model = build(settings, "mae")
    inputs = make_inputs("mae", 1)
    before = model.reconstruct(inputs)
    patches = patchify(inputs["images"], 8)
    changed = {**inputs, "images": unpatchify(torch.where(before.removed[..., None], 7.0, patches), 8, 4)}
    assert torch.equal(model.reconstruct(changed).images, before.images)


def test_loss_equals_the_textbook_order(settings: ModelSettings, make_inputs: MakeInputs) -> None:
    """Mask tokens put back in their places, every position predicted, loss over the removed ones."""
    model = build(settings, "mae")
    inputs = make_inputs("mae", 3)
    order = inputs["mask_noise"].argsort(1)
    rank = order.argsort(1)
    seen = model.decoder_embed(model.tokens(inputs["images"], order[:, :4]))
    full = torch.cat([seen[:, 1:], model.mask_token.expand(3, 12, -1)], 1)
    x = torch.cat([seen[:, :1], take_rows(full, rank)], 1) + model.decoder_pos_embed
    for block in model.decoder_blocks:
        x = block(x)
    guess = model.decoder_pred(model.decoder_norm(x))[:, 1:]
    # (row, column, channel) order, cut by hand.
    image = inputs["images"].permute(0, 2, 3, 1)
    cuts = [image[:, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8].flatten(1) for r in range(4) for c in range(4)]
    error = (guess - torch.stack(cuts, 1)).square().mean(-1)
    removed = rank >= 4
    expected = (error * removed).sum(1) / 12
    torch.testing.assert_close(model(inputs), expected, rtol=1e-5, atol=1e-6)
