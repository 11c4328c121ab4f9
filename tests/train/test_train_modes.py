"""What is measured drops nothing, and training goes on as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.engines.base import evaluating
from murmuration.train.engines.fsdp2 import GatheredModel
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor
from murmuration.train.self_test.probes import synthetic_batch
from tests.support.drops_world import Modes, measured, noted, ready
from tests.support.train_helpers import alone, plan_for, private_engine


def test_measurements_drop_nothing_and_training_goes_on_dropping() -> None:
    phase = measured(ready())
    model = Modes(build(phase.shape, "mae"))
    engine, _, _ = private_engine(alone(), plan_for(), False, model)
    clip = BookKeepingClip(ClipRule("flat", 0.05, 0.0))
    training = synthetic_batch(phase.shape, "mae", 4, 0)
    evaluator = PublicEvaluator(phase, engine, alone(), 8, b"m" * 32, clip, plan_for())
    monitor = LossMonitor(phase, engine, alone(), 8, b"m" * 32, None, None)
    engine.accumulate(training)
    assert noted(model) == [True]
    for measurement in (evaluator, monitor):
        first = measurement.measure()
        seen = noted(model)
        assert len(seen) > 2 and not any(seen)
        engine.accumulate(training)
        assert noted(model) == [True]
        again = measurement.measure()
        assert first == again, "nothing of a measurement is left to chance"
        noted(model)
    by_hand = build(phase.shape, "mae").eval()
    batch = evaluator.reader.read(np.arange(16), 0)
    with torch.no_grad():
        assert evaluator.measure()["public_loss"] == pytest.approx(float(by_hand(batch.inputs).mean()), rel=1e-6)


def test_public_records_are_measured_in_the_precision_of_training() -> None:
    phase = measured(ready())
    engine, clip, _ = private_engine(alone(), plan_for(), False, build(phase.shape, "mae"))
    found = {
        precision: PublicEvaluator(
            phase, engine, alone(), 16, b"m" * 32, clip, plan_for(), precision=precision
        ).measure()["public_loss"]
        for precision in ("fp32", "bf16")
    }
    batch = PublicEvaluator(phase, engine, alone(), 16, b"m" * 32, None, None).reader.read(np.arange(16), 0)
    model = engine.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = float(model(batch.inputs).float().mean())
    assert found["bf16"] == pytest.approx(expected, rel=1e-6) and found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)


def test_the_mode_comes_back_after_an_error_too_and_stays_where_it_was() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(KeyError), evaluating(model):
        assert not any(part.training for part in model.modules())
        raise KeyError
    assert all(part.training for part in model.modules())
    model.eval()
    with evaluating(model):
        pass
    assert not any(part.training for part in model.modules())


def test_the_mode_of_a_gathered_model_is_that_of_the_sharded_one() -> None:
    """What FSDP2 shows as the model holds no layer itself; its mode must reach the one that computes."""

    class Units:
        def __init__(self) -> None:
            self.model = build(ready().shape, "mae")

        def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
            yield from self.model.named_parameters()

    units: Any = Units()
    gathered = GatheredModel(units)
    batch = synthetic_batch(ready().shape, "mae", 4, 0)
    losses = gathered(batch.inputs)
    with evaluating(gathered):
        assert not any(part.training for part in units.model.modules())
        assert not torch.equal(gathered(batch.inputs), losses)
    assert gathered.training and all(part.training for part in units.model.modules())
    assert torch.equal(gathered(batch.inputs), losses)
