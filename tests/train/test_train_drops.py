"""Drops in training: every step sees keyed masks, no measurement sees any, and neither rows nor ranks matter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.data.batch.reader import BatchReader
from murmuration.data.decode.augment import drop_key
from murmuration.data.draw.micro_batch import slots
from murmuration.model.build import build
from murmuration.model.drop import KeyedDropout, KeyedDropPath, RowKeys
from murmuration.model.inputs import DROP_KEY
from murmuration.train.audit.canaries import CanaryBatches
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.reference import OpacusClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.phase import Mixing
from murmuration.train.engines.base import evaluating
from murmuration.train.engines.forward import PlainForward
from murmuration.train.engines.fsdp2 import GatheredModel
from murmuration.train.planner.forecast import counted
from murmuration.train.public.evaluation import PublicEvaluator, layer_of
from murmuration.train.public.monitor import LossMonitor
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.phase import PhaseTraining
from murmuration.train.run.public_mixing import MixingEngine
from murmuration.train.self_test.probes import SyntheticRecords, synthetic_batch
from murmuration.train.self_test.self_test import self_test
from tests.support.drops_world import Modes, config, measured, noted, private_of, ready
from tests.support.train_helpers import LocalEngine, alone, on_ranks, plan_for, private_engine

RULE = ClipRule("flat", 0.05, 0.0)


def key_of(purpose: str) -> bytes:
    return purpose.ljust(32).encode()


# Which keys


def test_a_phase_derives_its_keys_for_dropout_as_for_masks() -> None:
    asked: list[str] = []

    def derive(purpose: Any) -> bytes:
        asked.append(purpose)
        return key_of(purpose)

    run: Any = SimpleNamespace(ranks=alone())
    batch = PhaseTraining(run, ready()).read(derive).read(np.array([4, -1, 9]), 3)
    assert set(asked) == {"augmentation", "dropout", "masks"}
    assert batch.inputs[DROP_KEY].tolist() == [drop_key(key_of("dropout"), 3, 4), 0, drop_key(key_of("dropout"), 3, 9)]
    plain = PhaseTraining(run, ready(dropout=0.0, drop_path=0.0)).read(derive).read(np.array([4]), 3)
    assert set(plain.inputs) == {"images", "mask_noise"}
    assert not ready().data_spec(augment=False).drop_keys and ready(dropout=0.0).data_spec(augment=True).drop_keys


def test_mixed_in_records_have_keys_of_their_own() -> None:
    phase = ready()
    mixing = Mixing.model_validate({"data": {"source": "synthetic", "kind": "shapes", "records": 64}, "batch": 8})
    phase = replace(phase, settings=phase.settings.model_copy(update={"mixing": mixing}), mixed=phase.index)
    run: Any = SimpleNamespace(ranks=alone(), config=config())
    model = Modes(build(phase.shape, "mae"))
    inner: Any = LocalEngine(PlainForward(model), alone())
    engine = MixingEngine.of(run, phase, 16.0, inner, b"k" * 32)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][DROP_KEY]))
    try:
        first, again = engine._gradient.of_step(1), engine._gradient.of_step(1)
        other = engine._gradient.of_step(2)
    finally:
        engine.close()
    assert noted(model) == [True] * 3
    assert torch.equal(seen[0], seen[1]) and len({*seen[0].tolist(), *seen[2].tolist()}) == 16
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_an_input_canary_has_another_key_at_each_step_as_a_record_has() -> None:
    phase = ready()
    reader = BatchReader(phase.index, phase.data_spec(augment=True), mask_key=b"m" * 32, dropout_key=b"d" * 32)
    own = synthetic_batch(phase.shape, "mae", 3, 1).inputs
    batches = CanaryBatches(reader, alone(), 4, 60, np.array([True, False, True]), own)
    for step in (1, 2):
        (batch,) = batches(np.array([59, 60, 61, 62]), step)
        expected = [drop_key(b"d" * 32, step, record) for record in (59, 60, 61, 62)]
        expected[2] = 0
        assert batch.inputs[DROP_KEY].tolist() == expected and batch.present.tolist() == [True, True, False, True]
        assert torch.equal(batch.inputs["images"][1], own["images"][0])


# What is summed


def sums_of(phase: ReadyPhase, world: int, micro_batch: int, key: bytes) -> dict[str, Tensor]:
    """The clipped sum of 23 records over ranks and their micro-batches, from a real reader."""
    model, clip = build(phase.shape, "mae"), BookKeepingClip(RULE)
    clip.prepare(model)
    reader = BatchReader(phase.index, phase.data_spec(augment=True), mask_key=b"m" * 32, dropout_key=key)
    total: dict[str, Tensor] = {}
    for rank in range(world):
        for row in slots(np.arange(1, 64, 3)[:23], rank, world, micro_batch):
            batch = reader.read(row, 5)
            for name, part in clipped_totals(clip, model, batch.inputs, batch.present)[0].items():
                total[name] = total.get(name, 0) + part.double()
    return total


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    squares = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (squares / sum(float(part.square().sum()) for part in one.values())) ** 0.5


def test_a_logical_batch_sums_to_the_same_on_any_number_of_ranks_and_rows() -> None:
    phase = ready()
    expected = sums_of(phase, 1, 23, b"d" * 32)
    for world, micro_batch in ((1, 1), (1, 5), (2, 4), (3, 3), (7, 2)):
        assert apart(expected, sums_of(phase, world, micro_batch, b"d" * 32)) <= 1e-6, (world, micro_batch)
    assert all(torch.equal(part, expected[name]) for name, part in sums_of(phase, 1, 23, b"d" * 32).items())
    assert apart(expected, sums_of(phase, 1, 23, b"e" * 32)) > 1e-2, "another key gives other masks"


def test_a_plain_step_is_the_loop_over_its_records() -> None:
    phase = ready()
    batch = synthetic_batch(phase.shape, "mae", 6, 3)
    batch.present[2] = False
    model, whole = build(phase.shape, "mae"), build(phase.shape, "mae")
    LocalEngine(PlainForward(model), alone()).accumulate(batch)
    for row in batch.present.nonzero().flatten().tolist():
        whole({name: tensor[row : row + 1] for name, tensor in batch.inputs.items()}).sum().backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_opacus_finds_the_same_sum_with_drops() -> None:
    class Plain(nn.Module):
        """A model of layers that Opacus knows."""

        def __init__(self) -> None:
            super().__init__()
            self.row_keys = RowKeys()
            self.body = nn.Sequential(
                nn.Linear(7, 16), nn.GELU(), KeyedDropout(0.4, self.row_keys), nn.LayerNorm(16), nn.Linear(16, 4),
                KeyedDropPath(0.3, self.row_keys),
            )  # fmt: skip

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.row_keys.around(lambda inputs: (self.body(inputs["x"]) - 1).square().sum((1, 2)), inputs)

    draw = torch.Generator().manual_seed(1)
    inputs = {"x": torch.randn(9, 3, 7, generator=draw), DROP_KEY: torch.arange(9) * 1_000_003}
    inputs["x"][4] = 1e19
    present = torch.arange(9) != 2
    model, rule = Plain(), ClipRule("flat", 0.5, 0.0)
    peer = OpacusClip(rule)
    peer.prepare(model)
    expected, theirs = clipped_totals(peer, model, inputs, present)
    found, ours = clipped_totals(BookKeepingClip(rule), model, inputs, present)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.factors.double(), theirs.factors.double(), rtol=1e-5, atol=0)
    other, _ = clipped_totals(BookKeepingClip(rule), model, inputs | {DROP_KEY: inputs[DROP_KEY] + 1}, present)
    assert apart(found, other) > 0.05


# The self-test


@pytest.mark.parametrize(
    ("objective", "micro_batch", "rates"),
    [("mae", 4, (0.3, 0.3)), ("mae", 1, (0.0, 0.95)), ("caption", 2, (0.6, 0.9)), ("classify", 4, (0.3, 0.3))],
)
def test_the_self_test_passes_where_whole_blocks_are_dropped(
    objective: Any, micro_batch: int, rates: tuple[float, float]
) -> None:
    family = {"mae": "mae", "caption": "captioner", "classify": "classifier"}[objective]
    given = config(*rates).model.model_dump() | {"family": family}
    shape = type(config().model).model_validate(given).resolved()
    if micro_batch == 1:  # in training mode the test's own record leaves some weights without a gradient
        losing = build(shape, objective)
        losing(synthetic_batch(shape, objective, 1, 0).inputs).sum().backward()
        assert not any(bool(p.grad.any()) for p in losing.blocks[2].parameters() if p.grad is not None)

    def start(ranks: Any) -> None:
        engine, clip, noise = private_engine(ranks, plan_for(), False, build(shape, objective))
        before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        assert (
            self_test(engine, clip, noise, 0, SyntheticRecords.of(shape, objective), micro_batch, ranks).largest_hostile
            <= 1
        )
        assert engine.model.training
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.model.state_dict().items())

    on_ranks(2 if micro_batch == 4 else 1, start)


def test_the_planner_knows_of_drops() -> None:
    whole = config(0.4, 0.5)
    without = counted(config(0.0, 0.0), whole.phases[0])[0]
    dropped = counted(whole, whole.phases[0])[0]
    assert dropped.step_flops == without.step_flops and dropped.kept_bytes > without.kept_bytes


# What is measured drops nothing, and training goes on as it was.


def test_measurements_drop_nothing_and_training_goes_on_dropping() -> None:
    phase = measured(ready())
    model = Modes(build(phase.shape, "mae"))
    engine, _, _ = private_engine(alone(), plan_for(), False, model)
    clip = BookKeepingClip(ClipRule("flat", 0.05, 0.0))
    training = synthetic_batch(phase.shape, "mae", 4, 0)
    evaluator = PublicEvaluator(phase, engine, alone(), 8, b"m" * 32, private_of(clip, plan_for()))
    monitor = LossMonitor(phase, engine, alone(), 8, b"m" * 32)
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
            phase, engine, alone(), 16, b"m" * 32, private_of(clip, plan_for()), precision=precision
        ).measure()["public_loss"]
        for precision in ("fp32", "bf16")
    }
    batch = PublicEvaluator(phase, engine, alone(), 16, b"m" * 32).reader.read(np.arange(16), 0)
    model = engine.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = float(model(batch.inputs).float().mean())
    assert found["bf16"] == pytest.approx(expected, rel=1e-6) and found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)


def test_signal_to_noise_is_told_of_the_whole_gradient_and_of_each_layer() -> None:
    phase, plan = measured(ready()), plan_for()
    engine, clip, _ = private_engine(alone(), plan, False, build(phase.shape, "mae"))
    evaluator = PublicEvaluator(phase, engine, alone(), 16, b"m" * 32, private_of(clip, plan))
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
