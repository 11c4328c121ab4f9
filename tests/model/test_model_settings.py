"""Sizes, counts and refusals: the published parameter counts are the contract."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import timm
import torch

from murmuration.model import named
from murmuration.model.build import Objective, build
from murmuration.model.settings import ModelSettings
from murmuration.model.sizes import Size

MAE_COUNTS: dict[Size, int] = {
    "nano": 18_590_464,
    "tiny": 34_792_192,
    "small": 61_610_752,
    "base": 99_046_144,
    "large": 316_629_760,
    "huge": 656_613_964,
}
CAPTION_COUNTS: dict[Size, tuple[int, int]] = {
    "nano": (5_479_488, 15_334_266),
    "tiny": (21_575_808, 37_789_626),
    "small": (48_288_960, 67_396_602),
    "base": (85_618_944, 104_155_194),
    "large": (303_025_152, 104_351_802),
}
# With fixed positions trained as well, as the published DP code has it.
MAE_WITH_TABLES: dict[Size, int] = {
    "nano": 18_729_152,
    "tiny": 34_968_704,
    "small": 61_825_088,
    "base": 99_298_304,
    "large": 316_932_352,
    "huge": 657_074_508,
}
CLASSIFIER_COUNTS: list[tuple[dict[str, Any], int, int]] = [
    ({"size": "base", "image_size": 384}, 86_859_496, 768),
    ({"size": "large", "image_size": 384}, 304_715_752, 1024),
    ({"size": "huge", "image_size": 256}, 632_132_840, 1280),
    ({"size": "r50x4"}, 383_540_456, 8192),
    ({"size": "r152x4"}, 936_533_224, 8192),
    ({"size": "r50x1"}, 25_549_352, 2048),
    ({"size": "r50x3"}, 217_319_080, 6144),
    ({"size": "r101x1"}, 44_541_480, 2048),
    ({"size": "r101x3"}, 387_934_888, 6144),
    ({"size": "r152x2"}, 236_335_208, 4096),
    ({"size": "wrn16x4", "classes": 10}, 2_748_890, 256),
    ({"size": "base", "classes": 11_221}, 94_427_605, 768),
]


def trainable(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("size", MAE_COUNTS)
def test_mae_trains_exactly_the_published_number(size: Size) -> None:
    model = build(ModelSettings(family="mae", size=size), "mae", device="meta")
    assert sum(trainable(model).values()) == MAE_COUNTS[size]
    assert MAE_COUNTS[size] + sum(buffer.numel() for buffer in model.buffers()) == MAE_WITH_TABLES[size]
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("size", CAPTION_COUNTS)
def test_captioner_trains_exactly_the_published_number(size: Size) -> None:
    model = build(ModelSettings(family="captioner", size=size, vocabulary=30522), "caption", device="meta")
    counts = trainable(model)
    encoder = sum(n for name, n in counts.items() if name.startswith(("patch_embed.", "blocks.", "norm.")))
    assert (encoder, sum(counts.values()) - encoder) == CAPTION_COUNTS[size]
    assert len(counts) == (353 if size == "large" else 221)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["cls_token"]


@pytest.mark.parametrize(("size", "encoder", "text"), [("huge", 630.4, 65.6), ("base", 85.6, 65.3)])
def test_older_captioners_have_the_published_millions(size: Size, encoder: float, text: float) -> None:
    older: dict[str, Any] = {"decoder_width": 512, "decoder_depth": 8, "decoder_heads": 16, "qkv_bias": True}
    older |= {"decoder_bias": True, "decoder_activation": "relu"}
    settings = ModelSettings(family="captioner", size=size, vocabulary=30522, **(older if size == "base" else {}))
    shape = settings.resolved()
    assert (shape.decoder_bias, shape.decoder_activation, shape.qkv_bias) == (True, "relu", True)
    counts = trainable(build(shape, "caption", device="meta"))
    own = sum(n for name, n in counts.items() if name.startswith(("patch_embed.", "blocks.", "norm.")))
    total = sum(counts.values())
    assert (round(own / 1e6, 1), round((total - own) / 1e6, 1)) == (encoder, text)
    assert round(total / 1e6, 1) == {"huge": 696.0, "base": 151.0}[size]


@pytest.mark.parametrize(("given", "count", "width"), CLASSIFIER_COUNTS)
def test_classifier_trains_exactly_the_published_number(given: dict[str, Any], count: int, width: int) -> None:
    model = build(ModelSettings(family="classifier", **given), "classify", device="meta")
    assert sum(trainable(model).values()) == count
    assert all(p.requires_grad for p in model.parameters())
    classes = given.get("classes", 1000)
    assert model.head.weight.shape == (classes, width)
    # Mehta's head on the 1280 features of H/14 has 1,281,000 parameters.
    assert given["size"] != "huge" or sum(p.numel() for p in model.head.parameters()) == 1_281_000


@pytest.mark.parametrize(
    ("family", "size", "heads", "text"),
    [
        ("mae", "nano", 12, None),
        ("mae", "tiny", 12, None),
        ("mae", "huge", 16, None),
        ("captioner", "nano", 6, (192, 6)),
        ("captioner", "tiny", 6, (384, 6)),
        ("captioner", "large", 16, (768, 12)),
    ],
)
def test_families_keep_their_own_heads(family: Literal["mae", "captioner"], size: Size, heads: int, text: Any) -> None:
    shape = ModelSettings(family=family, size=size).resolved()
    assert shape.encoder.heads == heads
    assert text is None or (shape.text.width, shape.text.heads) == text


def test_published_state_dict_names() -> None:
    mae = set(build(ModelSettings(family="mae", size="nano"), "mae", device="meta").state_dict())
    assert {"cls_token", "pos_embed", "mask_token", "decoder_pos_embed", "decoder_pred.bias"} <= mae
    assert {"blocks.11.attn.qkv.bias", "decoder_blocks.3.mlp.fc2.weight"} <= mae and len(mae) == 206
    cap = build(ModelSettings(family="captioner", size="nano"), "caption", device="meta").state_dict()
    assert tuple(cap["decoder.layers.5.multihead_attn.kv_proj.weight"].shape) == (384, 192)
    assert tuple(cap["decoder.layers.0.self_attn.c_attn.weight"].shape) == (576, 192)
    assert tuple(cap["patch_embed.proj.weight"].shape) == (192, 3, 16, 16)


def test_huge_is_patch_14_unless_told() -> None:
    assert ModelSettings(family="mae", size="huge").patch_size == 14
    assert ModelSettings(family="mae", size="huge", patch_size=16).patch_size == 16
    assert ModelSettings(family="mae", size="base").resolved().kept_patches == 49


OURS, TIMM = {"family": "captioner"}, {"family": "timm", "image_size": 32}
VIT = {"name": "vit_tiny_patch16_224"}
CLASSIFIER = {"family": "classifier"}
BLOCK = {"family": "mae", "image_size": 16, "patch_size": 4, "width": 16, "depth": 1, "heads": 2}
REFUSED: list[tuple[dict[str, Any], Objective | None, str]] = [
    (OURS | {"size": "nano", "image_size": 225}, None, "set image_size to 224 or 240"),
    (OURS | {"size": "nano", "heads": 7}, None, "set heads to 6"),
    (OURS | {"size": "nano", "decoder_heads": 5}, None, "set decoder_heads to"),
    (OURS | {"width": 130, "depth": 2, "heads": 2}, None, "set width to 132"),
    (OURS | {"width": 128}, None, "model.depth, model.heads"),
    (OURS | {"size": "r50x4"}, None, 'model.family to "classifier"'),
    (CLASSIFIER | {"size": "nano"}, None, "choose base, large, huge, r50x1, r50x3, r50x4, "),
    (CLASSIFIER | {"size": "base", "image_size": 15}, None, "set image_size to 16"),
    (CLASSIFIER | {"size": "base", "image_size": 225, "positions": "sincos"}, None, "set image_size to 224 or"),
    (CLASSIFIER | {"size": "r50x4", "heads": 4}, None, "omit it, and set the size by model.width"),
    (CLASSIFIER | {"stages": [1, 1]}, None, "needs model.width with"),
    (CLASSIFIER | {"size": "r50x4", "width": 36}, None, "set width to 32"),
    (CLASSIFIER | {"size": "base"}, "mae", r"model\.positions"),
    (CLASSIFIER | {"size": "r50x4"}, "caption", "ResNet"),
    ({"family": "mae", "size": "nano", "attention_dropout": 0.1}, None, "attention_dropout"),
    ({"family": "mae", "size": "nano", "mask_ratio": 0.0}, "mae", "mask_ratio"),
    (BLOCK, "segment", 'choose "mae", "caption", "classify" or'),  # pyright: ignore[reportAssignmentType]
    *((BLOCK | {"depth": 3, name: rate}, None, name) for rate in (-0.1, 1.0) for name in ("dropout", "drop_path")),
    (BLOCK | {"drop_path": 0.1}, None, "an encoder of one block would drop nothing"),
    *((CLASSIFIER | {"width": 8, "stages": [1, 1], name: 0.1}, None, rf"a ResNet has no model\.{name}")
      for name in ("dropout", "drop_path")),
    (TIMM | {"name": "vit_smal_patch14_dinov2"}, None, "did you mean vit_small_patch14_dinov2"),
    (TIMM | {"name": "vit_small_patch14_dinov2.lvd142"}, None, "choose lvd142m, or leave the tag out"),
    (TIMM | {"name": "hf-hub:timm/resnet18"}, None, "nothing is downloaded; save them"),
    ({"name": "/no/folder", "family": "hf"}, None, "config.json does not exist, and nothing is downloaded"),
    (TIMM, None, "needs a model.name"),
    (TIMM | VIT | {"model_args": {"pretrained": True}}, None, "model_args.pretrained cannot be set"),
    (TIMM | VIT | {"model_args": {"img_size": 32}}, None, "set model.image_size"),
    (TIMM | VIT | {"model_args": {"drop_path_rate": 0.1}}, None, "not keyed by record; leave it out"),
    (TIMM | VIT | {"width": 16}, None, "model.width is for our own encoders"),
    (TIMM | VIT | {"model_args": {"colour": 3}}, None, "cannot be built with pictures of 32 px"),
    (TIMM | VIT | {"classes": 5}, "mae", 'cannot be trained with objective "mae"'),
    (BLOCK | VIT, None, r'family "mae" has no model\.name'),
]  # fmt: skip


@pytest.mark.parametrize(("given", "objective", "mend"), REFUSED, ids=[row[2][:60] for row in REFUSED])
def test_what_no_model_can_be_is_refused_with_the_mend(
    given: dict[str, Any], objective: Objective | None, mend: str
) -> None:
    with pytest.raises(ValueError, match=mend):  # as SettingsError and ValidationError are
        found = ModelSettings.model_validate(given)
        found.resolved() if objective is None else build(found, objective, device="meta")


def test_fixed_positions_are_masked() -> None:
    fixed = build(ModelSettings(family="classifier", size="base", positions="sincos"), "mae", device="meta")
    assert sum(trainable(fixed).values()) == MAE_COUNTS["base"]


@pytest.mark.parametrize("name", [
    "vit_small_patch14_dinov2.lvd142m", "vit_base_patch16_224", "vit_base_patch16_clip_quickgelu_224.openai",
    "vit_large_patch14_clip_quickgelu_224.dfn2b", "resnet50.a1_in1k", "vit_tiny_r_s16_p8_224.augreg_in21k",
])  # fmt: skip
def test_a_look_at_timms_files_refuses_no_name_that_timm_has(name: str) -> None:
    """Names of the quickgelu kind stand in no file: code puts them together."""
    assert timm.is_model_pretrained(name)
    plain, _, tag = name.partition(".")
    named._require_in_source(plain, tag)
    with pytest.raises(named.NamedError, match="timm has no model"):
        named._require_in_source(plain + "x", tag)
