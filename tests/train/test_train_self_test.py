"""The self-test at start-up: an honest machine passes and is left as it was, whatever optimizer it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from murmuration.model.build import build
from murmuration.train.clip.rule import ClipError
from murmuration.train.noise.aes import AESNoise
from murmuration.train.self_test.probes import SyntheticRecords, synthetic_batch
from murmuration.train.self_test.self_test import SelfTestError, self_test
from tests.support.planted_faults import ChangedAfterwards
from tests.support.self_test_world import caption_model, tried
from tests.support.train_helpers import ADAMW, SHAPE, LocalEngine, alone, on_ranks, plan_for, private_engine


@pytest.mark.parametrize("objective", ["caption", "mae"])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_an_honest_engine_passes_and_is_left_bit_by_bit_as_it_was(objective: str, micro_batch: int) -> None:
    model = build(SHAPE, objective)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with torch.no_grad():  # as after some training: no zeros left
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.01)
    engine, clip, noise = private_engine(alone(), plan_for(), False, model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flat, rule = engine.flats[0].detach().clone(), clip.rule
    torch.manual_seed(5)
    state = torch.get_rng_state()
    report = self_test(engine, clip, noise, 0, SyntheticRecords.of(SHAPE, objective), micro_batch, alone())
    assert report.measured_sigma == pytest.approx(1.5, rel=0.05)
    assert 0 < report.largest_hostile <= 1 and report.records_per_second > 0 and report.written_out == 0
    after = model.state_dict()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert torch.equal(engine.flats[0], flat) and clip.rule is rule
    assert engine.optimizer_step() == 0 and not engine.base.state
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.rest)])
@pytest.mark.parametrize("replicated", [False, True])
def test_honest_ranks_pass_together(world: int, replicated: bool) -> None:
    reports = on_ranks(world, lambda ranks: tried(ranks, replicated))
    assert len({report.measured_sigma for report in reports}) == 1


def test_the_noise_of_the_self_test_is_its_own() -> None:
    """What it draws must come from the key it is given, never from the run's noise key."""
    used: list[tuple[int, int]] = []

    class Spy(AESNoise):
        def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
            used.append((step, parameter))
            return super().draw(step, parameter, start, length, dtype)

    tried(alone(), change=lambda e, c, n: Spy(b"t" * 32, n.std, n.divisor))
    assert used


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "LARS"])
def test_every_optimizer_passes_and_shows_what_changes_the_gradient_after_the_noise(kind: Any) -> None:
    optimizer = ADAMW.model_copy(update={"type": kind})
    tried(alone(), optimizer=optimizer)
    on_ranks(2, lambda ranks: tried(ranks, optimizer=optimizer))
    with pytest.raises(SelfTestError, match="after the noise"):
        tried(alone(), engine=ChangedAfterwards, optimizer=optimizer)


def test_it_refuses_to_run_where_it_would_lose_the_optimizer_state() -> None:
    engine, clip, noise = private_engine(alone(), model=caption_model())
    engine.set_optimizer_step(7)
    with pytest.raises(SelfTestError, match="before the optimizer's state is restored"):
        self_test(engine, clip, noise, 0, SyntheticRecords.of(SHAPE, "caption"), 4, alone())
    assert engine.optimizer_step() == 7


def test_the_batches_are_synthetic_and_repeatable() -> None:
    for objective in ("mae", "caption"):
        first, second = (synthetic_batch(SHAPE, objective, 3, 1) for _ in range(2))
        assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
        assert first.present.all() and len(first.inputs) == 2


def test_ranks_whose_records_have_other_numbers_try_as_many_hostile_ones() -> None:
    """Where weights are gathered, a rank that ran the model once less would leave the others waiting."""
    records = SyntheticRecords.of(SHAPE, "caption")
    for labels in ([0, 4, 2], [3, 3, 3], [-100, 1, 0]):
        tried = [each["labels"] for _, each in records.at_their_ends({"labels": torch.tensor(labels)}, beyond=False)]
        assert len(tried) == 6 and all(min(labels) <= each[0] <= max(labels) for each in tried)
        assert {min(labels), max(labels)} <= {int(each[0]) for each in tried}


def test_what_the_check_of_gradients_finds_stops_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def objects(*given: Any, **options: Any) -> None:
        raise ClipError("it found something")

    monkeypatch.setattr("murmuration.train.self_test.self_test.check_gradients", objects)
    with pytest.raises(SelfTestError, match="it found something"):
        on_ranks(2, tried)


class OneElementStays(LocalEngine):
    def step(self) -> None:
        kept = self.flats[0].detach()[7].clone()
        super().step()
        with torch.no_grad():
            self.flats[0][7] = kept


def test_a_single_element_that_never_moves_is_caught() -> None:
    with pytest.raises(SelfTestError, match=r"does not move|changes the gradient"):
        tried(alone(), engine=OneElementStays)
