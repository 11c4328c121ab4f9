"""Run under `deepspeed`: the self-test of fresh classifiers at every ZeRO stage and with FSDP2."""

from __future__ import annotations

from typing import Any

from sharding_worker import LAYOUTS, MICRO_BATCH, OPTIMIZERS, PLAN, engine_of, noise, start_ranks, trainable

from model.build import build
from model.settings import ModelSettings
from model.trainable import Trainable, select
from tests.end_to_end.answering import answer
from train.clip_bookkeeping import BookKeepingClip
from train.clip_rule import ClipRule
from train.forward import PrivateForward
from train.optim import make_optimizer
from train.self_test import SelfTestError, self_test

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
            optimizer = make_optimizer(OPTIMIZERS["LAMB"], model.named_parameters(), 0.0)
            clip = BookKeepingClip(ClipRule.of(PLAN, "flat", 0.0, MICRO_BATCH), "fp32")
            engine = engine_of(ranks, layout, PrivateForward(model, clip), optimizer)
            assert set(engine.shapes) == declared == set(trainable(model))
            found: dict[str, Any] = {"layout": layout, "model": name, "trainable": word, "objection": ""}
            try:
                report = self_test(
                    engine, clip, noise(), layout == 0, model.shape, "classify", MICRO_BATCH, ranks
                )  # fmt: skip
                found |= {"sigma": report.measured_sigma, "hostile": report.largest_hostile}
            except SelfTestError as error:
                found["objection"] = str(error)
            results.append(found)
            engine.close()
    answer(ranks, {"results": results, "sigma": PLAN.noise_multiplier})


if __name__ == "__main__":
    main()
