"""Toy models and inputs shared by the model tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from murmuration.model.build import Objective, build
from murmuration.model.encoder import Encoder
from murmuration.model.settings import ModelSettings

NANO = ModelSettings(
    family="captioner",
    image_size=32,
    patch_size=8,
    width=128,
    depth=4,
    heads=4,
    decoder_depth=2,
    mae_decoder_width=128,
    mae_decoder_depth=2,
    mae_decoder_heads=4,
    vocabulary=512,
    text_length=16,
)


def toy_inputs(objective: Objective, batch: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, 32, 32, generator=draw)
    if objective == "mae":
        return {"images": images, "mask_noise": torch.rand(batch, 16, generator=draw)}
    tokens = torch.randint(4, 512, (batch, 16), generator=draw)
    lengths = torch.randint(3, 16, (batch, 1), generator=draw)
    return {"images": images, "tokens": torch.where(torch.arange(16)[None] < lengths, tokens, 0)}


@pytest.fixture
def make_inputs() -> Callable[[Objective, int], dict[str, Tensor]]:
    return toy_inputs


@pytest.fixture(params=["mae", "caption"])
def objective(request: pytest.FixtureRequest) -> Objective:
    return request.param


@pytest.fixture
def model(objective: Objective) -> Encoder:
    return build(NANO, objective)


@pytest.fixture
def inputs(objective: Objective) -> dict[str, Tensor]:
    return toy_inputs(objective, 6)


@pytest.fixture
def settings() -> ModelSettings:
    return NANO
