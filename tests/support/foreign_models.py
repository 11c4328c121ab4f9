"""Small models of ours, and the same ones of timm and Hugging Face."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers.norm_act import GroupNormAct
from timm.layers.std_conv import StdConv2d
from timm.models import save_for_hf
from timm.models.resnetv2 import ResNetV2
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
)  # fmt: skip

from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.settings import ModelSettings

ENCODER: dict[str, Any] = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 2, "heads": 4}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def classifier(**more: Any) -> Classifier:
    return build(ModelSettings.model_validate({"family": "classifier", "classes": 5, **ENCODER, **more}), "classify")


def captioner(**more: Any) -> Captioner:
    text = {"decoder_width": 24, "decoder_heads": 6, "decoder_depth": 1, "text_length": 9, "vocabulary": 50}
    given = {"family": "captioner", **ENCODER, "width": 48, "heads": 6, **text, **more}
    return build(ModelSettings.model_validate(given), "caption")


def moved(model: nn.Module) -> nn.Module:
    """No weight at a special value."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def timm_vit(**more: Any) -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4, "num_classes": 5}
    return moved(timm.create_model("vit_base_patch16_224", **{**sizes, **more}))


def hugging_face() -> ViTForImageClassification:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5, layer_norm_eps=1e-6)
    model = moved(ViTForImageClassification(config))
    assert isinstance(model, ViTForImageClassification)
    return model


def timm_bit() -> nn.Module:
    return moved(
        ResNetV2(
            layers=[1, 1], channels=(32, 64), num_classes=5, stem_chs=8, stem_type="fixed",
            norm_layer=partial(GroupNormAct, num_groups=8), conv_layer=partial(StdConv2d, eps=1e-8),
        )
    )  # fmt: skip


def resnet() -> Classifier:
    return build(ModelSettings(family="classifier", classes=5, image_size=16, width=8, stages=(1, 1)), "classify")


VIT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER: dict[str, Any] = {**VIT, "intermediate_size": 64, "image_size": 56, "patch_size": 14}
TEXT: dict[str, Any] = {**VIT, "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 9}
HF_TOYS: dict[str, tuple[Any, Any]] = {
    "dinov2": (Dinov2Model, Dinov2Config(**VIT, image_size=56, patch_size=14)),
    "swin": (SwinModel, SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 4], image_size=56, window_size=7)),
    "clip": (CLIPModel, CLIPConfig(text_config=TEXT, vision_config=TOWER, projection_dim=16)),
    "clip vision": (CLIPVisionModel, CLIPVisionConfig(**TOWER)),
    "siglip": (SiglipModel, SiglipConfig(text_config=TEXT, vision_config=TOWER)),
    "siglip vision": (SiglipVisionModel, SiglipVisionConfig(**TOWER)),
    "convnext": (ConvNextModel, ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=56)),
}
TIMM_VIT: dict[str, Any] = {"img_size": 56, "embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN: dict[str, Any] = {"img_size": 56, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
TIMM_TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "timm dinov2": ("vit_small_patch14_dinov2.lvd142m", TIMM_VIT),
    "timm eva": ("eva02_tiny_patch14_224", TIMM_VIT),
    "timm clip": ("vit_base_patch16_clip_224", {**TIMM_VIT, "patch_size": 14}),
    "timm siglip": ("vit_base_patch16_siglip_224", {**TIMM_VIT, "patch_size": 14}),
    "timm swin": ("swin_tiny_patch4_window7_224", SWIN),
    "timm convnext": ("convnext_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}),
}


def library_folder(folder: Path, kind: str) -> Path:
    """A toy of an architecture that is none of ours, saved by its own library."""
    torch.manual_seed(0)
    if kind in TIMM_TOYS:
        name, sizes = TIMM_TOYS[kind]
        save_for_hf(
            timm.create_model(name, num_classes=0, **sizes), str(folder), model_args=sizes, safe_serialization=True
        )
        return folder
    make, config = HF_TOYS[kind]
    make(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return folder
