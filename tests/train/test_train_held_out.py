"""Accuracy on held-out private records: who is held out, what one record can move, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.accounting.metrics import ACCURACY, HeldOutAccuracy, PlannedMetric
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.held_out import HELD_OUT, HeldOutReader, is_held_out
from murmuration.data.draw.micro_batch import Fetched, MicroBatch
from murmuration.model.classifier import Classifier
from murmuration.train.clip.engine import Observation
from murmuration.train.config.phase import Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.engines.measures import HeldOutCount
from murmuration.train.noise.metrics import MetricRelease
from tests.support.config_base import plan_of, private_phase
from tests.support.step_world import METRIC_KEY
from tests.support.train_helpers import alone, plan_for

SHARE = 0.25


def test_the_same_records_are_held_out_always_and_about_as_many_as_asked_for() -> None:
    ids = np.arange(100_000)
    for share in (0.01, 0.25, 0.5):
        held = is_held_out(ids, share)
        error = 6 * math.sqrt(share * (1 - share) / len(ids))
        assert abs(held.mean() - share) < error and abs(held[::7].mean() - share) < 3 * error
        assert np.array_equal(is_held_out(ids[50:60], share), held[50:60]), "wherever they stand in a batch"
    assert not (is_held_out(ids, 0.01) & ~is_held_out(ids, 0.25)).any(), "a larger share holds out more, not others"
    assert not is_held_out(np.full(100, -1), 0.5).any(), "an empty slot is no record"
    assert np.flatnonzero(is_held_out(np.arange(24), SHARE)).tolist() == FROZEN, (
        "another choice trains on held-out ones"
    )


FROZEN = [2, 4, 6, 8, 18]


class Answers(Classifier):
    """Says the class whose pixel is largest."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.head.weight)

    def features(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0]


def quiet_plan() -> PrivacyPlan:
    metrics = (PlannedMetric("loss", 4.0, 1e-9), HeldOutAccuracy.of(1e-9, SHARE))
    return replace(plan_for(), metrics=metrics)


def engine_of(model: Any, partitioned: bool = False) -> Any:
    return SimpleNamespace(model=model, device=torch.device("cpu"), partitioned=partitioned)


def batch_of(answers: list[int], labels: list[int], held: list[bool], present: list[bool]) -> MicroBatch:
    images = torch.zeros(len(answers), 3, 1, 1)
    images[torch.arange(len(answers)), torch.tensor(answers)] = 1.0
    inputs = {"images": images, "labels": torch.tensor(labels), HELD_OUT: torch.tensor(held)}
    return MicroBatch(inputs, torch.tensor(present))


def through(
    batch: MicroBatch, plan: PrivacyPlan, model: nn.Module | None = None
) -> tuple[MicroBatch, dict[str, float]]:  # fmt: skip
    release = MetricRelease(METRIC_KEY, plan, ranks=alone())

    def batches(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        del ids, step
        yield batch

    (rest,) = HeldOutCount(engine_of(model or Answers()), release).around(batches)(np.arange(4), 1)
    ones = torch.ones(len(rest.present))
    release.add(rest.present, Observation(ones, ones, 1.0), bound=1.0)
    return rest, release.release(1)


def test_held_out_records_are_counted_and_absent_and_the_others_are_not_counted() -> None:
    plan = quiet_plan()
    batch = batch_of([0, 1, 2, 0, 1], [0, 1, 0, 0, 1], [True, True, True, False, True], [True, True, True, True, False])
    rest, released = through(batch, plan)
    assert rest.present.tolist() == [False, False, False, True, False] and HELD_OUT not in rest.inputs
    assert not rest.inputs["images"][[0, 1, 2, 4]].any() and torch.equal(
        rest.inputs["images"][3], batch.inputs["images"][3]
    )
    assert released["noised_accuracy"] * plan.divisor * SHARE == pytest.approx(2.0, abs=1e-5), "right, held out, there"
    assert released["noised_loss"] * plan.divisor * (1 - SHARE) == pytest.approx(1.0, abs=1e-5)


def test_a_record_moves_the_count_by_at_most_one_or_the_gradient_and_never_both() -> None:
    plan = quiet_plan()
    for held in (True, False):
        there = batch_of([0, 1], [0, 1], [False, held], [True, True])
        blank = batch_of([0, 1], [0, 1], [False, held], [True, False])
        (one, with_it), (other, without) = through(there, plan), through(blank, plan)
        moved = (with_it["noised_accuracy"] - without["noised_accuracy"]) * plan.divisor * SHARE
        assert moved == pytest.approx(float(held), abs=1e-5)
        assert bool((one.present != other.present).any()) == (not held)


def test_hostile_pictures_and_labels_count_at_most_once_each() -> None:
    batch = batch_of([0, 0, 0], [-1, 10**9, 0], [True] * 3, [True] * 3)
    batch.inputs["images"][2] = math.nan
    _, released = through(batch, quiet_plan())
    assert 0 <= released["noised_accuracy"] * quiet_plan().divisor * SHARE < 3.5


class LooksUp(Answers):
    """Raises for a label that is no class."""

    def right(self, inputs: Any) -> Tensor:
        answers = self.features(inputs["images"])
        return (answers.gather(1, inputs["labels"][:, None])[:, 0] >= answers.amax(1)).float()


@pytest.mark.parametrize("held", [True, False])
def test_a_record_about_which_the_model_raises_adds_nothing_and_ends_nothing(held: bool) -> None:
    plan = quiet_plan()
    there = batch_of([0, 1, 2], [0, 10**9, 2], [True, held, True], [True] * 3)
    rest, released = through(there, plan, LooksUp())
    assert released["noised_accuracy"] * plan.divisor * SHARE == pytest.approx(2.0, abs=1e-5)
    assert rest.present.tolist() == [False, not held, False]


def test_a_reader_that_marks_nothing_is_an_error_and_an_unreadable_batch_passes() -> None:
    with pytest.raises(KeyError):
        through(MicroBatch({"images": torch.zeros(1, 3, 1, 1)}, torch.ones(1, dtype=torch.bool)), quiet_plan())
    rest, _ = through(MicroBatch({}, torch.zeros(0, dtype=torch.bool)), quiet_plan())
    assert not rest.inputs


def test_the_reader_marks_by_record_number() -> None:
    inner: Any = SimpleNamespace(
        in_flight=1, report=lambda fetched: None, close=lambda: None,
        fetch=lambda ids, step: Fetched(MicroBatch({"labels": torch.zeros(len(ids))}, torch.from_numpy(ids >= 0)), {}),
    )  # fmt: skip
    found = HeldOutReader(inner, SHARE).fetch(np.array([2, 3, 4, -1]), 1)
    assert found.batch.inputs[HELD_OUT].tolist() == [True, False, True, False]
    assert found.batch.present.tolist() == [True, True, True, False]


def test_a_sharded_model_and_what_is_no_classifier_are_refused() -> None:
    release = MetricRelease(METRIC_KEY, quiet_plan(), ranks=alone())
    with pytest.raises(RecipeError, match="use ZeRO 0, 1 or 2"):
        HeldOutCount(engine_of(Answers(), partitioned=True), release)
    with pytest.raises(RecipeError, match="objective classify"):
        HeldOutCount(engine_of(nn.Linear(1, 1)), release)


def test_a_plan_tells_the_share_where_there_is_one() -> None:
    plan = quiet_plan()
    assert "metrics" not in plan_for().as_dict() and plan.held_out == SHARE
    assert PrivacyPlan(**plan.as_dict()) == plan  # pyright: ignore[reportArgumentType]


def phase(objective: str = "classify", **metric: Any) -> Phase:
    data = {"path": "x"} | ({"label": "cls"} if objective == "classify" else {"tokenizer": "t"})
    released = {"name": "accuracy", "noise_multiplier": 5.0} | metric
    return private_phase({"release": [released]}, objective=objective, data=data)


def test_the_config_asks_for_a_share_and_the_plan_pays_for_the_metric() -> None:
    settings = phase(share=0.1)
    plan = plan_of(settings)
    assert plan.held_out == 0.1 and plan.metrics == (HeldOutAccuracy(ACCURACY, 1.0, 5.0, 0.1),)
    assert plan.effective_noise_multiplier < plan.noise_multiplier, "charged with the gradient"
    for wrong, reason in (
        ({}, "needs `share`"), ({"share": 0.1, "bound": 2.0}, "bound of the metric 'accuracy' is 1"),
        ({"share": 0.1, "name": "loss"}, "others take none"), ({"share": 0.1, "objective": "caption"}, "no accuracy"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            phase(**wrong)
