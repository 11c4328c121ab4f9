"""The private step with a real ledger: open, compute, commit; and what is done is what is charged."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.draw.samplers import make_sampler
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.distributed.ranks import Disagreement
from murmuration.train.distributed.stop import Stopped
from murmuration.train.engines.forward import PlainForward
from murmuration.train.noise.update import PlainUpdate
from murmuration.train.step import PlainStep, Records
from tests.support.step_world import DIGEST_KEY, KEY, RECORDS, Stop, journal_at, kinds, read, step_of, weights
from tests.support.train_helpers import LocalEngine, Toy, alone, on_ranks, plan_for, private_engine, toy_batch
from tests.support.whole_history import steps_of


@pytest.fixture
def plan() -> PrivacyPlan:
    return plan_for()


def test_the_ledger_is_written_before_anything_is_computed_and_after_everything(
    tmp_path: Path, plan: PrivacyPlan
) -> None:
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan)
    order: list[str] = []
    for name in ("accumulate", "update"):
        real = getattr(engine, name)

        def act(*arguments: Any, real: Any = real, name: str = name) -> Any:
            lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
            order.append(f"{name} after {json.loads(lines[-1])['kind']}")
            return real(*arguments)

        setattr(engine, name, act)
    observed = step.run(1, 1e-2)
    assert set(order[:-1]) == {"accumulate after open"} and order[-1] == "update after open"
    assert kinds(journal) == ["open", "commit"]
    draw = step.records.draw(1)
    assert observed.records == len(draw.ids) > 0
    facts = next(iter(steps_of(journal).committed.values()))
    assert facts.sampling.digest == draw.digest and facts.sampling.rule == plan.sampling
    assert facts.noise.elements == engine.trainable_elements and facts.noise.std == plan.noise_std
    assert facts.clipping.sensitivity == pytest.approx(plan.clip_norm, rel=1e-9)
    assert "norm" not in (tmp_path / "ledger.jsonl").read_text().split('"open"')[1]


def test_no_rank_touches_a_weight_before_the_opened_line_is_on_the_disk(
    tmp_path: Path, plan: PrivacyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are computed meanwhile: that is what the disk has time for."""
    order: list[str] = []
    computed, sync = threading.Event(), os.fsync

    def run(ranks: Any) -> None:
        step, engine = step_of(ranks, journal if ranks.main else None, plan)
        if ranks.main:
            monkeypatch.setattr(os, "fsync", slowly)
        accumulate, update = engine.accumulate, engine.update
        engine.accumulate = lambda *given: (order.append("sum"), computed.set(), accumulate(*given))[2]  # type: ignore[method-assign]
        engine.update = lambda *given: (order.append("update"), update(*given))[1]  # type: ignore[method-assign]
        step.run(1, 1e-2)

    def slowly(descriptor: int) -> None:
        assert computed.wait(60), "nothing was computed while the line was on its way"
        time.sleep(0.5)
        sync(descriptor)
        order.append("durable")

    journal = journal_at(tmp_path, plan)
    on_ranks(2, run)
    journal.settle()
    durable = order.index("durable")
    assert "sum" in order[:durable] and order.count("update") == 2
    assert "update" not in order[:durable], order


def test_a_disk_that_fails_after_the_step_was_opened_stops_every_rank_before_its_weights_change(
    tmp_path: Path, plan: PrivacyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_at(tmp_path, plan)
    raised: list[str] = []

    def run(ranks: Any) -> None:
        step, engine = step_of(ranks, journal if ranks.main else None, plan)
        before = weights(engine)
        ranks.barrier()
        if ranks.main:
            monkeypatch.setattr(os, "fsync", full)
        ranks.barrier()
        with pytest.raises(OSError, match="No space left"):
            step.run(1, 1e-2)
        raised.append("here")
        assert torch.equal(weights(engine), before)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    on_ranks(2, run)
    assert len(raised) == 2


def test_the_update_is_the_clipped_sum_and_the_noise_over_the_constant(tmp_path: Path, plan: PrivacyPlan) -> None:
    """The whole step against a few lines of plain PyTorch."""
    step, engine = step_of(alone(), journal_at(tmp_path, plan), plan)
    reference, clip, noise = private_engine(alone(), plan)
    before = weights(engine)
    ids = step.records.draw(1).ids
    images = RECORDS[torch.from_numpy(ids.copy())]
    total, _ = clipped_totals(clip, reference.model, {"images": images}, torch.ones(len(ids), dtype=torch.bool))
    for index, (name, p) in enumerate(reference.parameters.items()):
        drawn = torch.from_numpy(noise.draw(1, index, 0, p.numel())).view_as(p)
        p.grad = (total[name] + drawn) / plan.divisor
    torch.optim.AdamW(reference.parameters.values(), lr=1e-2, weight_decay=0.01).step()
    step.run(1, 1e-2)
    assert not torch.equal(weights(engine), before)
    assert torch.allclose(weights(engine), weights(reference), atol=2e-6)


def test_world_size_and_sharding_do_not_change_the_step(tmp_path: Path, plan: PrivacyPlan) -> None:
    found = {}
    for world, replicated in ((1, False), (2, False), (3, False), (2, True)):
        folder = tmp_path / f"{world}{replicated}"
        folder.mkdir()
        journal = journal_at(folder, plan)

        def act(ranks: Any, journal: Journal = journal, replicated: bool = replicated) -> torch.Tensor:
            step, engine = step_of(ranks, journal if ranks.main else None, plan, replicated=replicated)
            for number in (1, 2, 3):
                step.run(number, 1e-2)
            return weights(engine)

        results = on_ranks(world, act)
        assert all(torch.equal(results[0], other) for other in results)
        found[world, replicated] = (results[0], (folder / "ledger.jsonl").read_bytes())
    reference, ledger = found[1, False]
    for result, written in found.values():
        assert torch.allclose(result, reference, atol=5e-6) and written == ledger


def test_an_empty_draw_is_still_a_step_of_noise_alone(tmp_path: Path) -> None:
    plan = plan_for(batch=400 / 2**32, noise_multiplier=2.0)  # K = 1: nobody comes
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan)
    assert len(step.records.draw(1).ids) == 0
    before = weights(engine)
    observed = step.run(1, 1e-2)
    assert observed.records == 0 and kinds(journal) == ["open", "commit"]
    assert bool((weights(engine) != before).all())
    moment = engine.shards()[0].state["exp_avg"]
    drawn = np.concatenate([step.noise.draw(1, f.parameter, f.start, f.length) for f in engine.layout[0]])
    assert torch.allclose(moment, 0.1 * torch.from_numpy(drawn) / plan.divisor, rtol=1e-5)


def test_a_replayed_step_writes_nothing_and_gives_the_same_bits(tmp_path: Path, plan: PrivacyPlan) -> None:
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan)
    step.run(1, 1e-2)
    written = (tmp_path / "ledger.jsonl").read_bytes()
    journal.ledger.close()
    again, second = step_of(alone(), journal_at(tmp_path, plan, begin=False), plan)
    again.run(1, 1e-2)
    assert (tmp_path / "ledger.jsonl").read_bytes() == written
    assert torch.equal(weights(engine), weights(second))


@pytest.mark.parametrize("at", [1, 2])
def test_a_stop_in_mid_step_leaves_it_open_and_the_weights_alone(tmp_path: Path, plan: PrivacyPlan, at: int) -> None:
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan, stop=Stop(at))
    before = weights(engine)
    with pytest.raises(Stopped):
        step.run(1, 1e-2)
    assert kinds(journal) == ["open"] and torch.equal(weights(engine), before)
    assert engine.optimizer_step() == 0
    assert journal.history.charged()[0].count == 1, "an opened step is charged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl"], "the partial sum reaches no file"


def test_nothing_is_computed_when_the_ledger_refuses(tmp_path: Path) -> None:
    plan = plan_for(epsilon_budget=0.05, noise_multiplier=0.8)
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan)
    engine.accumulate = None  # pyright: ignore
    with pytest.raises(BudgetSpent):
        step.run(1, 1e-2)
    assert kinds(journal) == []


def test_ranks_that_drew_different_records_stop(tmp_path: Path, plan: PrivacyPlan) -> None:
    journal = journal_at(tmp_path, plan)

    def act(ranks: Any) -> None:
        key = KEY if ranks.main else b"x" * 32
        sampler = make_sampler(plan.sampling, key, DIGEST_KEY, plan.records)
        step_of(ranks, journal if ranks.main else None, plan, sampler=sampler)[0].run(1, 1e-2)

    with pytest.raises(Disagreement, match="the records of step 1"):
        on_ranks(2, act)
    assert kinds(journal) == []


@pytest.mark.parametrize(
    ("sampler", "change", "message"),
    [
        (lambda plan: make_sampler(plan.sampling, KEY, DIGEST_KEY, 300), None, "states n = 300"),
        (lambda plan: PoissonSampler(KEY, DIGEST_KEY, plan.records, 2**31), None, "draws a Poisson sample"),
        (None, lambda step: object.__setattr__(step.clip.rule, "bound", 2 * step.clip.rule.bound),
         "states the sensitivity"),
        (None, lambda step: setattr(step.noise, "std", 0.5 * step.noise.std), "states the deviation of the noise"),
        (None, lambda step: setattr(step.noise, "std", 0.0), "states the deviation of the noise = 0.0"),
        (None, lambda step: setattr(step.noise, "divisor", 19.0), "states the divisor = 19"),
    ],
    ids=["records", "K", "C", "sigma", "no noise", "divisor"],
)  # fmt: skip
def test_altered_parts_are_refused_before_anything_is_computed(
    tmp_path: Path, plan: PrivacyPlan, sampler: Any, change: Any, message: str
) -> None:
    """Inside the acting objects, changed after the plan was frozen."""
    journal = journal_at(tmp_path, plan)
    step, _ = step_of(alone(), journal, plan, **({} if sampler is None else {"sampler": sampler(plan)}))
    if change is not None:
        change(step)
    with pytest.raises(LedgerError, match=message):
        step.run(1, 1e-2)
    assert kinds(journal) == []


@pytest.mark.parametrize("what", ["std", "divisor", "bound", "elements"])
def test_a_part_that_changes_between_open_and_commit_stops_the_run(
    tmp_path: Path, plan: PrivacyPlan, what: str
) -> None:
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan)
    honest = step.noise
    real = engine.update

    def meddling(*arguments: Any) -> Any:
        if what in ("std", "divisor"):
            setattr(honest, what, getattr(honest, what) * 0.5)
        if what == "bound":
            object.__setattr__(step.clip.rule, "bound", 2 * step.clip.rule.bound)
        applied = real(*arguments)
        return type(applied)(applied.elements - 1) if what == "elements" else applied

    engine.update = meddling
    with pytest.raises(LedgerError):
        step.run(1, 1e-2)
    if what in ("std", "bound"):  # charged with the weaker of the two
        assert journal.history.charged()[0].sigma == pytest.approx(plan.noise_multiplier * 0.5, rel=1e-6)
    else:  # no accounting fits what happened, and none is made up
        with pytest.raises(LedgerError, match="no epsilon can be given"):
            journal.history.charged()


@pytest.mark.parametrize("odd", [0, 1])
def test_the_largest_sensitivity_that_any_rank_summed_with_is_charged(
    tmp_path: Path, plan: PrivacyPlan, odd: int
) -> None:  # fmt: skip
    """Its rule may be as announced again by the time that the step is committed."""
    journal = journal_at(tmp_path, plan)

    def act(ranks: Any) -> None:
        step, engine = step_of(ranks, journal if ranks.main else None, plan)
        observe = engine.observe
        if ranks.rank == odd:
            engine.observe = lambda: observe()._replace(sensitivity=3.0)
        step.run(1, 1e-2)

    with pytest.raises(LedgerError, match="had announced"):
        on_ranks(2, act)
    (facts,) = steps_of(journal).committed.values()
    assert facts.clipping.sensitivity == 3.0


def test_the_divisor_does_not_follow_the_batch(tmp_path: Path, plan: PrivacyPlan) -> None:
    """Pitfalls A10, B9: whatever number of records comes, the sum is divided by q·n."""
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan)
    sizes = set()
    for number in range(1, 6):
        sizes.add(step.run(number, 0.0).records)
    assert len(sizes) > 1
    assert {facts.noise.divisor for facts in steps_of(journal).committed.values()} == {plan.divisor}
    engine.accumulate(toy_batch(4))


def test_a_plain_step_takes_every_micro_batch_and_divides_once_by_the_planned_batch() -> None:
    """Without privacy: the gradient before the update is that of one pass over all records."""
    ranks, stop, engine, seen = alone(), Stop(), LocalEngine(PlainForward(Toy()), alone()), []
    whole, before = engine.update, weights(engine).clone()

    def update(act: PlainUpdate, rate: float) -> Any:
        seen.append((act.batch, act.step, rate, {name: p.grad.clone() for name, p in engine.parameters.items()}))
        return whole(act, rate)

    engine.update = update
    records = Records(lambda _: SimpleNamespace(ids=np.arange(20)), lambda ids, _: read(ids, ranks))
    observed = PlainStep(records, 16, engine, ranks, stop).run(3, 0.5)
    model = Toy()
    losses = model({"images": RECORDS[:20]})
    losses.sum().backward()
    ((batch, number, rate, gradients),) = seen
    assert (batch, number, rate, stop.count, observed.records) == (16, 3, 0.5, 3, 20)
    assert stop.each == {True}, "some engines reduce in each backward pass, so all ranks must leave at the same one"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert observed.loss_sum == pytest.approx(float(losses.detach().sum()), rel=1e-5)
    assert not torch.equal(weights(engine), before)


def test_a_plain_step_that_is_stopped_leaves_the_weights_alone_and_no_gradient() -> None:
    engine = LocalEngine(PlainForward(Toy()), alone())
    before = weights(engine).clone()
    records = Records(lambda _: SimpleNamespace(ids=np.arange(20)), lambda ids, _: read(ids, alone()))
    with pytest.raises(Stopped):
        PlainStep(records, 16, engine, alone(), Stop(at=2)).run(1, 0.5)
    assert torch.equal(weights(engine), before)
    assert all(parameter.grad is None for parameter in engine.parameters.values())
