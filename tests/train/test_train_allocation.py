"""Random allocation in whole runs: who is drawn, under which key, after stops and in new segments; and its plans."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.keys import KEY_BYTES, RunKey, load
from murmuration.accounting.ledger.history import History
from murmuration.accounting.noise import NoiseKind
from murmuration.accounting.sampling import Poisson, RandomAllocation
from murmuration.accounting.unit import Unit
from murmuration.data.draw.samplers import AllocationSampler
from murmuration.train.config.root import Phase
from murmuration.train.core import Computation
from murmuration.train.recipe.ready_phase import RecipeError, planned_epsilon, with_steps
from tests.support.config_base import plan_of, private_phase
from tests.support.own_module import RATE, SEED, read, training

SLOTS = 3
SETTINGS: dict[str, Any] = {"order": "as listed", 
    "sampling": "allocation", "steps": 9, "epsilon": 50, "noise_multiplier": 1.0, "expected_batch": 20,
}  # fmt: skip


class Watched:
    """Reads records, and remembers which."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, numbers: np.ndarray) -> Any:
        self.seen += numbers.tolist()
        return read(numbers)


def run(
    folder: Path, count: int, save: bool = True, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """So many steps more; the weights, and the records of each step."""
    reader, drawn = Watched(), []
    with training(folder, reader=reader, **SETTINGS | settings) as found:
        found.prove()
        assert found.plan.sampling == RandomAllocation(SLOTS)
        for step in list(found.steps())[:count]:
            reader.seen.clear()
            drawn.append(sorted(found.phase.core.sampler().draw(step).ids.tolist()))
            found.step(step, RATE)
            assert set(reader.seen) <= set(range(found.plan.records))
        weights = {name: tensor.clone() for name, tensor in found.weights().items()}
        if not save:
            found.close()
        return weights, drawn


def test_every_record_is_trained_on_once_in_every_epoch_however_often_the_run_stops(tmp_path: Path) -> None:
    weights, whole = run(tmp_path / "whole", 9)
    parts: list[list[int]] = []
    found: dict[str, torch.Tensor] = {}
    for count in (1, 3, 1, 4):
        found, drawn = run(tmp_path / "parts", count)
        parts += drawn
    assert parts == whole and all(torch.equal(weights[name], found[name]) for name in weights)
    history, _ = History.read(tmp_path / "parts" / "ledger.jsonl")
    records = history.plans[0].records
    for epoch in range(3):
        everyone = [number for step in whole[SLOTS * epoch : SLOTS * (epoch + 1)] for number in step]
        assert sorted(everyone) == list(range(records))
    assert len({tuple(whole[SLOTS * epoch]) for epoch in range(3)}) == 3, "each epoch allocates anew"
    assert len(history.segments) == 1 and [event.count for event in history.charged()] == [3]


def test_the_secret_file_keeps_the_allocation_of_its_epoch_and_no_other_earlier_key(tmp_path: Path) -> None:
    with training(tmp_path, **SETTINGS) as found:
        found.prove()
        states = {}
        for step in found.steps():
            found.step(step, RATE)
            found.save()
            chain = load(tmp_path / "secret" / "run.key").chain
            assert chain is not None and (chain.step, chain.slots) == (step + 1, SLOTS), "no link of an earlier step"
            states[step + 1] = chain
        records = found.plan.records
    for step, chain in states.items():
        same = chain.state[KEY_BYTES:] == states.get(step - 1, chain).state[KEY_BYTES:]
        assert same == (step not in (4, 7, 10)), "the epoch's key ends with the epoch"
    draws = AllocationSampler(lambda step: states[6].key("sampling"), bytes(32), records, SLOTS)
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert history.steps()[0] == 9
    # Whoever has the file of step 6 can name those drawn at steps 4 to 6, and at no others.
    for step in range(1, 10):
        with_it = draws.draw(step).ids
        truly = AllocationSampler(partial(_key_of, tmp_path), bytes(32), records, SLOTS).draw(step).ids
        assert np.array_equal(with_it, truly) == (step in (4, 5, 6))


def _key_of(folder: Path, step: int) -> bytes:
    (segment,) = History.read(folder / "ledger.jsonl")[0].segments
    return RunKey.from_debug_seed(SEED).first_link(segment.chain_name, 1, SLOTS).at(step).key("sampling")


def test_a_new_segment_in_the_middle_of_an_epoch_allocates_anew_and_pays_for_it(tmp_path: Path) -> None:
    _, first = run(tmp_path, 4)
    _, lost = run(tmp_path, 1, save=False)  # step 5 was opened, and its weights may have been seen
    _, rest = run(tmp_path, 5)
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert [segment.from_step for segment in history.segments] == [0, 4]
    assert [event.count for event in history.charged()] == [4], "epochs 1 and 2, and then 2 again and 3"
    assert rest[0] != lost[0], "other keys"
    assert not set(rest[0]) & set(rest[1]), "within the segment, still no record twice"
    records = range(history.plans[0].records)
    assert sorted([*rest[2], *rest[3], *rest[4]]) == list(records)
    assert sorted([*first[0], *first[1], *first[2]]) == list(records)


@pytest.mark.parametrize("kind", ["chacha20", "exact"])
def test_any_noise_goes_with_it(tmp_path: Path, kind: NoiseKind) -> None:
    run(tmp_path, 2, computation=Computation(noise=kind))
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert [event.slots for event in history.charged()] == [SLOTS]


def allocated(steps: int = 20, privacy: dict[str, Any] | None = None, **more: Any) -> Phase:
    return private_phase({"sampling": "allocation", **(privacy or {})}, steps=steps, **more)


def test_a_config_becomes_a_plan_with_epochs() -> None:
    phase = allocated(40)
    plan = plan_of(phase)
    assert (plan.sampling, plan.participations, plan.divisor) == (RandomAllocation(20), 2, 50.0)
    assert 3.99 < planned_epsilon(plan) <= 4.0
    assert planned_epsilon(plan) == epsilon([Event(1 / 20, plan.noise_multiplier, 2, slots=20)], plan.delta)
    assert plan_of(phase, known=plan) == plan
    poisson = private_phase(steps=40)
    assert plan_of(poisson).noise_multiplier > plan.noise_multiplier


def test_a_batch_of_nearly_all_records_becomes_one_of_all() -> None:
    phase = allocated(4, {"expected_batch": 950.0})
    plan = plan_of(phase)
    assert (plan.sampling, plan.sampling_rate, plan.divisor) == (Poisson(2**32), 1.0, 1000.0)


def test_epochs_of_a_config_are_those_of_the_allocation() -> None:
    for records in (1000, 1010):
        phase = with_steps(allocated(0, epochs=3, privacy={"noise_multiplier": 2.0}), records, "phases.0")
        assert phase.steps == 60, "whole epochs"
        plan = plan_of(phase, records)
        assert (plan.sampling, plan.participations, plan.divisor) == (RandomAllocation(20), 3, records / 20)


def test_released_metrics_and_norms_that_adapt_share_its_noise() -> None:
    shared = {
        "release": [{"name": "clipped", "noise_multiplier": 20.0}],
        "clip": {"adaptive": {"noise_multiplier": 30.0}},
    }
    phase = allocated(40, shared)
    plan = plan_of(phase)
    assert plan.effective_noise_multiplier < plan.noise_multiplier and plan.sampling == RandomAllocation(20)
    assert 3.99 < planned_epsilon(plan) <= 4.0


def test_units_are_allocated_in_place_of_records() -> None:
    data = {"path": "x", "tokenizer": "t", "unit": "patient_id", "rows_per_unit": 2}
    phase = allocated(40, data=data)
    plan = plan_of(phase, table="d")
    assert isinstance(plan.units, Unit) and (plan.sampling, plan.records) == (RandomAllocation(20), 1000)


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does() -> None:
    phase = allocated(30)
    with pytest.raises(RecipeError, match=r"1\.5 times; use expected_batch = 66\.6667, or 50 with steps = 40"):
        plan_of(phase)
