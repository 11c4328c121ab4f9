"""Fine-tuning's rates and parameter groups against timm's own."""

from __future__ import annotations

import pytest
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch.optim import AdamW

from murmuration.evaluation.measures.fine_tuning import LEAST_RATE, FineTuneSettings, groups_of
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from tests.support.foreign_models import timm_vit

SETTINGS = FineTuneSettings(epochs=20, warmup=4)


def test_each_tensor_has_timms_part_of_the_rate_and_its_decay() -> None:
    theirs = timm_vit()
    expected = {}
    for group in param_groups_layer_decay(
        theirs, 0.05, layer_decay=0.65, no_weight_decay_list=("pos_embed", "cls_token")
    ):
        for parameter in group["params"]:
            expected[id(parameter)] = (group["lr_scale"], group["weight_decay"])
    told = {name: expected[id(parameter)] for name, parameter in theirs.named_parameters()}
    sizes = ModelSettings(family="classifier", image_size=16, patch_size=4, width=24, depth=2, heads=4, classes=5,
                          positions="learned")  # fmt: skip
    ours = build(sizes, "classify")
    found = {}
    for group in groups_of(ours, 2, SETTINGS):
        for parameter in group["params"]:
            (name,) = (name for name, each in ours.named_parameters() if each is parameter)
            found[name] = (group["scale"], group["weight_decay"])
    assert found.keys() == told.keys()
    for name in found:
        # timm counts the last norm to the last block's layer or the head's, depending on its version.
        if not name.startswith("norm."):
            assert found[name] == pytest.approx(told[name]), name
    assert found["norm.weight"] == (1.0, 0.0), "as ViP's fine-tuning counts it"


def test_the_rate_is_a_warm_up_and_timms_half_cosine() -> None:
    peak = SETTINGS.rate(SETTINGS.warmup, 1024)
    assert peak == pytest.approx(5e-4 * 4) and SETTINGS.rate(0, 1024) == 0
    assert SETTINGS.rate(2, 1024) == pytest.approx(peak / 2)
    theirs = CosineLRScheduler(AdamW(timm_vit().parameters(), lr=peak), t_initial=16, lr_min=LEAST_RATE)
    for epoch in range(17):
        expected = theirs._get_lr(epoch)[0] if epoch < 16 else LEAST_RATE
        assert SETTINGS.rate(4 + epoch, 1024) == pytest.approx(expected)


def test_batches_are_even_and_no_larger_than_the_set() -> None:
    assert [SETTINGS.batch_of(records) for records in (2, 7, 1024, 5000)] == [2, 6, 1024, 1024]
