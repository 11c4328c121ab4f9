"""Layers that couple samples are refused by type, before anything runs (pitfall A26)."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers.drop import DropPath
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from murmuration.model.build import build
from murmuration.model.encoder import Encoder
from murmuration.model.safety import CouplingError, refuse_coupling
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(4), "whole batch"),
        (nn.BatchNorm2d(4, track_running_stats=False), "whole batch"),
        (nn.SyncBatchNorm(4), "whole batch"),
        (nn.LazyBatchNorm2d(), "whole batch"),
        (BatchNormAct2d(4), "whole batch"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "running statistics"),
        (nn.Dropout(0.1), "not keyed"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "not keyed"),
        (DropPath(0.1), "not keyed"),
    ],
)
def test_coupling_layers_are_refused_with_their_path(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))
    with pytest.raises(CouplingError, match=rf"^1\.0 \({type(layer).__name__}\).*{reason}"):
        refuse_coupling(model)


def test_foreign_running_statistics_are_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("running_peak", torch.zeros(2))
    with pytest.raises(CouplingError, match="the model itself"):
        refuse_coupling(layer)


def test_our_models_pass(model: Encoder) -> None:
    refuse_coupling(model)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("body", [{"width": 16, "depth": 1, "heads": 2}, {"width": 8, "stages": (1, 1)}])
def test_classifiers_pass(body: dict[str, Any], loss: str) -> None:
    """With a head that is not zero: behind zeros nothing of the body could be seen."""
    given = {"family": "classifier", "image_size": 16, "patch_size": 8, "classes": 5, "head_scale": 1.0, **body}
    model = build(ModelSettings.model_validate({**given, "classify_loss": loss}), "classify")
    refuse_coupling(model)


def test_adapted_and_older_models_pass() -> None:
    given = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2, "decoder_depth": 1}
    older = {"decoder_bias": True, "decoder_activation": "relu", "vocabulary": 16, "text_length": 6}
    model = build(ModelSettings.model_validate({"family": "captioner", **given, **older}), "caption")
    select(model, "lora", rank=2)
    refuse_coupling(model)


@pytest.mark.parametrize("variant", ["resnetv2_50", "resnetv2_50d"])
def test_batch_norm_variants_of_the_resnet_are_refused(variant: str) -> None:
    with torch.device("meta"):
        with pytest.raises(CouplingError, match="BatchNorm"):
            refuse_coupling(timm.create_model(variant))
        refuse_coupling(timm.create_model("resnetv2_50x1_bit"))


def test_harmless_layers_pass() -> None:
    refuse_coupling(nn.Sequential(nn.Dropout(0.0), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), DropPath(0.0)))
