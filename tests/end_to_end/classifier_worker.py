"""Run by several ranks: the self-test of fresh classifiers at every ZeRO stage and with FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import Trainable, select
from murmuration.train.clip.rule import ClipRule
from murmuration.train.core import PrivateCore
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestError
from tests.support.answering import answer
from tests.support.sharded_engines import (
    LAYOUTS,
    MICRO_BATCH,
    NOISE_KEY,
    OPTIMIZERS,
    PLAN,
    engine_of,
    settings_of,
    trainable,
)

VIT: dict[str, Any] = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 2, "heads": 2}
BIT: dict[str, Any] = {"image_size": 16, "width": 8, "stages": [1, 1]}
RUNS: list[tuple[str, dict[str, Any], Trainable]] = [("vit", VIT, word) for word in ("all", "head", "bias", "lora")]
RUNS += [("bit", BIT, word) for word in ("all", "head")]


def main() -> None:
    ranks = start_ranks()
    results = []
    for layout in LAYOUTS:
        for name, body, word in RUNS:
            settings = ModelSettings.model_validate({"family": "classifier", "classes": 5, **body})
            model = build(settings, "classify")
            declared = set(select(model, word, rank=2))
            rule, sharding = ClipRule.of(PLAN, "flat", 0.0, MICRO_BATCH), settings_of(layout)
            built = engine_of(ranks, sharding, model, OPTIMIZERS["LAMB"], rule)
            assert set(built.engine.shapes) == declared == set(trainable(model))
            core = PrivateCore(PLAN, built.clip, built.engine, lambda purpose: NOISE_KEY, ranks)
            found: dict[str, Any] = {"layout": layout, "model": name, "trainable": word, "objection": ""}
            try:
                report = core.prove(SyntheticRecords.of(model.shape, "classify"), sharding.ranks_per_copy, MICRO_BATCH)
                found |= {"sigma": report.measured_sigma, "hostile": report.largest_hostile}
            except SelfTestError as error:
                found["objection"] = str(error)
            results.append(found)
            built.engine.close()
    answer(ranks, {"results": results, "sigma": PLAN.noise_multiplier})


if __name__ == "__main__":
    main()
