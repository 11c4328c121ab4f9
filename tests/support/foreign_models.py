"""Small models of ours, and the same ones of timm and Hugging Face."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
from timm.layers.norm_act import GroupNormAct
from timm.layers.std_conv import StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

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
