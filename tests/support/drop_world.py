"""Models that drop, at toy size, and what they are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from murmuration.model.build import Objective, build
from murmuration.model.drop import KeyedDropout, KeyedDropPath
from murmuration.model.encoder import Inputs
from murmuration.model.inputs import DROP_KEY
from murmuration.model.settings import ModelSettings

OBJECTIVES: tuple[Objective, ...] = ("mae", "caption", "classify")

Dropping = KeyedDropout | KeyedDropPath


def settings_of(objective: str, **more: Any) -> ModelSettings:
    family = {"mae": "mae", "caption": "captioner", "classify": "classifier"}[objective]
    given = {
        "image_size": 16, "patch_size": 4, "width": 16, "depth": 3, "heads": 2, "decoder_depth": 2, "classes": 5,
        "mae_decoder_width": 16, "mae_decoder_depth": 2, "mae_decoder_heads": 2, "text_length": 6, "vocabulary": 16,
        "head_scale": 1.0,
    }  # fmt: skip
    return ModelSettings.model_validate({"family": family, **given, **more})


def dropping(objective: Objective, dropout: float = 0.2, drop_path: float = 0.5, **more: Any) -> nn.Module:
    return build(settings_of(objective, dropout=dropout, drop_path=drop_path, **more), objective)


def inputs_of(objective: str, rows: int, seed: int = 0) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    inputs = {"images": torch.randn(rows, 3, 16, 16, generator=draw)}
    inputs[DROP_KEY] = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=draw)
    more = {
        "mae": ("mask_noise", torch.rand(rows, 16, generator=draw)),
        "caption": ("tokens", torch.randint(1, 16, (rows, 6), generator=draw)),
        "classify": ("labels", torch.randint(0, 5, (rows,), generator=draw)),
    }[objective]
    return inputs | dict([more])


def drops_of(model: nn.Module) -> dict[str, Dropping]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Dropping)}
