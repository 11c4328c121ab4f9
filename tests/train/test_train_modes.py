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
from murmuration.train.public.evaluation import PublicEvaluator, layer_of
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


def test_signal_to_noise_is_told_of_the_whole_gradient_and_of_each_layer() -> None:
    phase, plan = measured(ready()), plan_for()
    engine, clip, _ = private_engine(alone(), plan, False, build(phase.shape, "mae"))
    evaluator = PublicEvaluator(phase, engine, alone(), 16, b"m" * 32, clip, plan)
    whole = evaluator.measure()["update_snr"]
    batch = evaluator.reader.read(np.arange(16), 0)
    model = engine.model.eval()
    sums = {name: torch.zeros(shape) for name, shape in engine.shapes.items()}
    for record in range(16):  # one by one, clipped by hand
        model.zero_grad()
        model({name: tensor[record : record + 1] for name, tensor in batch.inputs.items()}).sum().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        norm = float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients.values()])))
        for name, gradient in gradients.items():
            sums[name] += gradient * min(1.0, clip.rule.bound / norm)
    noise = plan.noise_std / plan.divisor  # C is 1 in both
    by_hand: dict[str, list[torch.Tensor]] = {}
    for name, total in sums.items():
        by_hand.setdefault(layer_of(name), []).append((total / 16).flatten())
    assert set(evaluator.signals) == set(by_hand) and len(by_hand) > 4
    for layer, parts in by_hand.items():
        part = torch.cat(parts)
        assert evaluator.signals[layer] == pytest.approx(float(part.norm()) / noise / len(part) ** 0.5, rel=1e-3), layer
    every = torch.cat([part for parts in by_hand.values() for part in parts])
    assert whole == pytest.approx(float(every.norm()) / noise / len(every) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("encoder.blocks.11.attn.qkv.weight", "encoder.blocks.11"),
        ("encoder.pos_embed", "encoder"),
        ("stages.0.blocks.2.conv.weight", "stages.0"),
        ("head.weight", "head"),
        ("temperature", "temperature"),
    ],
)
def test_layers_are_blocks_where_these_are_numbered(parameter: str, layer: str) -> None:
    assert layer_of(parameter) == layer


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
