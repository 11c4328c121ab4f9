"""Classifiers with their head of zeros pass the self-test at a run's start; a coupled body does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import Trainable, select
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import self_test
from tests.support.train_helpers import alone, on_ranks, plan_for, private_engine

VIT: dict[str, Any] = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "heads": 2}
BIT: dict[str, Any] = {"image_size": 16, "width": 8, "stages": (1, 1)}


def settings(body: dict[str, Any]) -> ModelSettings:
    return ModelSettings.model_validate({"family": "classifier", "classes": 5, "classify_loss": "sigmoid", **body})


def start(
    ranks: Any, body: dict[str, Any], trainable: Trainable, change: type | None = None, kept: bool = False
) -> float:  # fmt: skip
    """`kept`: features of the frozen body, in place of pictures."""
    model = build(settings(body), "classify")
    select(model, trainable, rank=2)
    if change is not None:
        model.__class__ = change
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine, clip, noise = private_engine(ranks, plan_for(), False, model)
    records = SyntheticRecords.of(model.shape, "classify")
    if kept:
        records = SyntheticRecords.of_features(model.shape.encoder.width, 5, rows=1)
    report = self_test(engine, clip, noise, 0, records, 4, ranks)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return report.largest_hostile


@pytest.mark.parametrize(
    ("body", "trainable"), [(VIT, "all"), (VIT, "head"), (VIT, "bias"), (VIT, "lora"), (BIT, "all"), (BIT, "head")]
)
def test_fresh_classifiers_pass(body: dict[str, Any], trainable: Trainable) -> None:
    assert 0 < start(alone(), body, trainable) <= 1


def test_a_head_on_kept_features_is_tested_on_features() -> None:
    assert 0 < start(alone(), VIT, "head", kept=True) <= 1


def test_ranks_pass_together() -> None:
    on_ranks(2, lambda ranks: start(ranks, VIT, "all"))
