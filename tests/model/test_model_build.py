"""Initial weights, position tables, and the copy of an encoder."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import Block as TimmBlock

from murmuration.model.attention import use_fused
from murmuration.model.block import Block, norm_layer
from murmuration.model.build import build, take_encoder
from murmuration.model.drop import RowKeys
from murmuration.model.encoder import Encoder
from murmuration.model.positions import image_positions, text_positions
from murmuration.model.settings import ModelSettings
from murmuration.model.sizes import Stack


def test_sincos_spot_values() -> None:
    text = text_positions(8, 5)[0]
    assert text[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    expected = [math.sin(3 / 10000 ** (i / 4)) for i in range(4)] + [math.cos(3 / 10000 ** (i / 4)) for i in range(4)]
    torch.testing.assert_close(text[3], torch.tensor(expected))
    image = image_positions(8, 3)[0]
    assert image.shape == (10, 8) and not bool(image[0].any())
    # Patch 5 is row 1, column 2: the column in the first half, the row in the second.
    halves = [[math.sin(p), math.sin(p / 100), math.cos(p), math.cos(p / 100)] for p in (2, 1)]
    torch.testing.assert_close(image[6], torch.tensor(halves[0] + halves[1]))


def test_position_tables_are_fixed_buffers(model: Encoder) -> None:
    buffers = dict(model.named_buffers())
    assert {"pos_embed", "decoder_pos_embed"} <= set(buffers)
    assert not any("pos_embed" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(buffers["pos_embed"], image_positions(128, 4))


def test_weights_depend_on_the_seed_alone(settings: ModelSettings) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(settings, "mae").state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build(settings, "mae").state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = build(settings.model_copy(update={"init_seed": 1}), "mae").state_dict()
    assert not torch.equal(first["cls_token"], other["cls_token"])
    caption = build(settings, "caption").state_dict()
    assert torch.equal(first["blocks.2.attn.qkv.weight"], caption["blocks.2.attn.qkv.weight"])
    assert not torch.equal(first["blocks.2.attn.qkv.weight"], first["blocks.3.attn.qkv.weight"])


def test_initial_distributions(settings: ModelSettings) -> None:
    state = build(settings, "mae").state_dict()
    weight = state["blocks.0.mlp.fc1.weight"]
    bound = math.sqrt(6 / (128 + 512))
    assert bound * 0.99 < float(weight.abs().max()) <= bound
    patch = state["patch_embed.proj.weight"]
    assert float(patch.abs().max()) <= math.sqrt(6 / (128 + 192)) and abs(float(patch.mean())) < 0.01
    assert not bool(state["blocks.0.mlp.fc1.bias"].any()) and bool((state["norm.weight"] == 1).all())
    assert 0.014 < float(state["mask_token"].std()) < 0.026
    caption = build(settings, "caption").state_dict()
    for name in ("decoder_image_type_embedding", "decoder_text_type_embedding", "text_embedding.weight"):
        assert 0.014 < float(caption[name].std()) < 0.026


def test_take_encoder_copies_everything_and_only_the_encoder(settings: ModelSettings) -> None:
    source = build(settings.model_copy(update={"init_seed": 5}), "mae")
    target = build(settings, "caption")
    head = target.decoder_embed.weight.clone()
    copied = take_encoder(source.state_dict(), target)
    assert len(copied) == len(set(copied)) == 2 + 2 + 4 * 11 + 2
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(source.tokens(images), target.tokens(images))
    assert torch.equal(head, target.decoder_embed.weight) and not target.cls_token.requires_grad


@pytest.mark.parametrize(
    ("change", "mend"),
    [({"width": 64}, "image_size, patch_size, width"), ({"depth": 3}, "model.depth"), ({"qkv_bias": True}, "qkv_bias")],
)
def test_take_encoder_refuses_and_leaves_the_target_alone(
    settings: ModelSettings, change: dict[str, object], mend: str
) -> None:
    source = build(settings.model_copy(update=change), "mae").state_dict()
    target = build(settings.model_copy(update={"init_seed": 9}), "caption")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(ValueError, match=mend):
        take_encoder(source, target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_layers_feed_the_linear_probe(model: Encoder, inputs: dict[str, torch.Tensor]) -> None:
    outputs = model.layers(inputs["images"])
    assert [tuple(x.shape) for x in outputs] == [(6, 17, 128)] * 4
    assert torch.equal(model.norm(outputs[-1]), model.tokens(inputs["images"]))


# The transformer block computes what timm's does, from the same names, to the last bit.


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_the_block_is_timms_name_for_name_and_bit_for_bit(fused: bool, qkv_bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = Block(Stack(48, 2, 4), qkv_bias, RowKeys())
    theirs = TimmBlock(48, 4, mlp_ratio=4.0, qkv_bias=qkv_bias, norm_layer=norm_layer)  # pyright: ignore[reportArgumentType]
    state = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in theirs.state_dict().items()}
    for block in (ours, theirs):
        block.load_state_dict(state)
        use_fused(block, fused)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(3, 17, 48, generator=generator)
    out, wanted = ours(x), theirs(x)
    assert torch.equal(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # pyright: ignore[reportArgumentType]


# docs/encoders.md is made of the committed measurements, and as many of timm's encoders are exact as was promised.


ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current_and_nine_of_ten_encoders_are_exact() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "encoders.json").read_text())
    made = runpy.run_path(str(ROOT / "benchmarks" / "encoder_page.py"))
    remedy = "run: python benchmarks/encoders.py --page"
    assert (ROOT / "docs" / "encoders.md").read_text() == made["page"](found), remedy
    assert set(found["names"]) <= set(runpy.run_path(str(ROOT / "benchmarks" / "encoder_names.py"))["NAMES"])
    shares = made["shares"](found["names"])
    assert len(found["names"]) >= 60 and shares["exact"] >= 0.9 and shares["by_rules"] >= 0.7
