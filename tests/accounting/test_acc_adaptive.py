"""Clipping norms that adapt: every C_t follows from what the ledger says was released before it, or is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import ROUND_HALF_EVEN, Decimal, getcontext
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.adaptive import METRIC, AdaptiveError, AdaptiveRule
from murmuration.accounting.banded import best_banded
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import describe, epsilon
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.facts import ClippingFact, MetricFact, StepFacts
from murmuration.accounting.ledger.heads import NAME, read_heads
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.metrics import ClippedShare, PlannedMetric
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import CyclicPoisson, RandomAllocation
from murmuration.train.engines.local import start_ranks
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.open_run import OpenRun, open_run
from murmuration.train.storage.run_dir import RunDir
from tests.support.acc_world import CONFIG, DATA, PLAN, Change, begin, document_of, facts, on, reopen, rewritten

RULE = AdaptiveRule(quantile=0.6, learning_rate=0.5, lowest=0.01, highest=100.0)
COUNT = ClippedShare(METRIC, 0.5, 7.0, RULE)
ADAPTIVE = replace(PLAN, metrics=(COUNT,), noise_multiplier=30.0)
SHARES = [0.75, 0.1, -3.0, 0.4375, 9.0, 0.5]


def at(step: int, norm: float, plan: PrivacyPlan = ADAPTIVE) -> StepFacts:
    return facts(step, plan, std=plan.noise_multiplier * norm, sensitivity=norm)


def trained(journal: Journal, norm: float, steps: range, plan: PrivacyPlan = ADAPTIVE) -> float:
    """Honest steps; C after the last."""
    for step in steps:
        journal.open_step(0, step, at(step, norm, plan))
        journal.commit_step(0, step, at(step, norm, plan), SHARES[step - 1])
        norm = RULE.following(norm, SHARES[step - 1])
    return norm


def test_the_next_norm_is_the_rule_of_the_paper_rounded_once() -> None:
    """C·exp(-η·(b - γ)), b being the share within C; beside 200 digits, and beside plain floating point."""
    getcontext().prec, getcontext().rounding = 200, ROUND_HALF_EVEN
    for number in range(200):
        norm, share = math.exp(math.sin(number) * 4), math.cos(number * 1.7) * 1.3
        within = 1 - min(1.0, max(0.0, share))
        found = RULE.following(norm, share)
        assert found == pytest.approx(min(100.0, max(0.01, norm * math.exp(-0.5 * (within - 0.6)))), rel=1e-14)
        over = min(Decimal(1), max(Decimal(0), Decimal(share)))
        exact = Decimal(norm) * (Decimal(RULE.learning_rate) * (over - 1 + Decimal(RULE.quantile))).exp()
        assert found == min(100.0, max(0.01, float(exact)))


def test_the_norm_stays_within_its_bounds_which_may_be_one() -> None:
    assert RULE.following(99.0, 1.0) == RULE.highest and RULE.following(0.0101, 0.0) == RULE.lowest
    assert replace(RULE, learning_rate=10.0, lowest=1.0, highest=1.0).following(7.0, 0.3) == 1.0


@pytest.mark.parametrize("weaker", [1e-9, 0.05])
def test_weaker_noise_than_announced_is_charged_where_the_norm_adapts(tmp_path: Path, weaker: float) -> None:
    """What is taken for rounding is rounding alone."""
    journal = begin(tmp_path, ADAPTIVE)
    journal.open_step(0, 1, at(1, 1.0))
    done = replace(at(1, 1.0), noise=replace(at(1, 1.0).noise, std=30.0 * (1 - weaker)))
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 1, done, 0.5)
    (event,) = journal.history.charged()
    assert event.sigma == done.event().sigma < ADAPTIVE.effective_noise_multiplier


def test_a_trajectory_is_what_a_loop_over_the_shares_gives(tmp_path: Path) -> None:
    journal = begin(tmp_path, ADAPTIVE)
    last = trained(journal, 1.0, range(1, 7))
    expected = [1.0]
    for share in SHARES:
        expected.append(expected[-1] * math.exp(0.5 * (min(1, max(0, share)) - 0.4)))
    told = [entry.fields["facts"]["noise"]["std"] / 30.0 for entry in journal.ledger.entries if entry.kind == "open"]
    assert told == pytest.approx(expected[:-1], rel=1e-14) and last == pytest.approx(expected[-1], rel=1e-14)
    used = expected[:-1]
    extremes = {"first": used[0], "last": used[-1], "lowest": min(used), "highest": max(used)}
    assert journal.history.trails[0].norms == pytest.approx(extremes, rel=1e-14)
    journal.checkpointed(0, 6, "digest")
    assert journal.clip_norm_after(0, 6, "digest") == last and journal.clip_norm_after(0, 0, None) == 1.0
    (phase,) = document_of(journal)["phases"]
    assert phase["clip_norms"] == pytest.approx(
        {"first": 1.0, "last": expected[-2], "lowest": min(expected[:-1]), "highest": max(expected[:-1])}
    )
    journal.ledger.close()
    assert verify(tmp_path).opened == 6


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, Event(1.0, 1.0, 6)), ({"sampling": RandomAllocation(4)}, Event(0.25, 1.0, 2, slots=4)),
     ({"records": 101, "sampling": CyclicPoisson(2**32, 4), "noise": best_banded(4, 40)}, Event(1.0, 1.0, 2))],
    ids=["Poisson", "allocation", "bands"],
)  # fmt: skip
def test_all_steps_are_one_mechanism_with_gradient_and_count_together(
    tmp_path: Path, changes: dict[str, Any], expected: Event
) -> None:
    plan = replace(ADAPTIVE, **changes)
    journal = begin(tmp_path, plan)
    trained(journal, 1.0, range(1, 7), plan)
    together = (30.0**-2 + (0.5 / 7.0) ** 2) ** -0.5
    (event,) = journal.history.charged()
    assert event.sigma == pytest.approx(together, rel=1e-12) and event == replace(expected, sigma=event.sigma)
    assert journal.history.epsilon() == pytest.approx(epsilon([replace(event, sigma=together)], PLAN.delta), rel=1e-9)
    assert journal.history.epsilon() > epsilon([replace(event, sigma=30.0)], PLAN.delta), "the count was not charged"


@pytest.mark.parametrize("wrong", [0.999999, 1 + 1e-9, 2.0])
@pytest.mark.parametrize("part", ["norm", "noise", "sensitivity"])
def test_a_step_with_another_norm_is_never_opened(tmp_path: Path, part: str, wrong: float) -> None:
    journal = begin(tmp_path, ADAPTIVE)
    norm = trained(journal, 1.0, range(1, 4))
    step = at(4, norm * wrong if part == "norm" else norm)
    if part == "noise":
        step = replace(step, noise=replace(step.noise, std=step.noise.std * wrong))
    if part == "sensitivity":
        step = replace(step, clipping=ClippingFact("flat", norm * wrong))
    length = journal.ledger.length
    with pytest.raises(LedgerError, match="what was released before it gives"):
        journal.open_step(0, 4, step)
    with pytest.raises(LedgerError, match="differ from its plan"):
        journal.open_step(0, 4, replace(at(4, norm), metrics=()))
    with pytest.raises(LedgerError, match="differ from its plan"):
        journal.open_step(0, 4, replace(at(4, norm), metrics=(MetricFact(METRIC, 0.5, 6.0),)))
    assert journal.ledger.length == length
    journal.open_step(0, 4, at(4, norm))
    for share in (None, math.nan, 1):
        with pytest.raises((LedgerError, ValueError), match=r"share|JSON compliant"):
            journal.commit_step(0, 4, at(4, norm), share)
    assert journal.ledger.length == length + 1


def of_step(number: int, change: Change) -> Change:
    return lambda line: change(line) if line.get("step") == number else None


def more(value: float) -> float:
    return 1.1 * value


FORGED: dict[str, Change] = {
    # The same ε, but not the released norm.
    "more C and σ·C": of_step(3, on("open commit", {"facts.clipping.sensitivity": more, "facts.noise.std": more})),
    "another share": of_step(2, on("commit", {"share": lambda share: share + 1e-6})),
    "no share": of_step(2, lambda line: line["kind"] == "commit" and line.pop("share")),
    "another rule": on("plan", {"plan.metrics.0.rule.quantile": 0.61}),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_ledger_with_another_norm_is_refused(tmp_path: Path, what: str) -> None:
    journal = begin(tmp_path, ADAPTIVE)
    trained(journal, 1.0, range(1, 7))
    journal.ledger.close()
    rewritten(tmp_path, lambda fields: None)
    assert verify(tmp_path).opened == 6
    rewritten(tmp_path, FORGED[what])
    with pytest.raises(LedgerError, match=r"released before it|share"):
        verify(tmp_path)


def test_a_replay_takes_the_share_that_was_released_the_first_time(tmp_path: Path) -> None:
    journal = begin(tmp_path, ADAPTIVE)
    journal.checkpointed(0, 0, "start")
    journal.open_step(0, 1, at(1, 1.0))
    assert journal.commit_step(0, 1, at(1, 1.0), 0.25) == 0.25
    journal.ledger.close()
    again = reopen(tmp_path)
    assert again.new_segment_reason(0, 0, CONFIG) is None
    again.open_step(0, 1, at(1, again.clip_norm_after(0, 0, "start")))
    assert again.commit_step(0, 1, at(1, 1.0), 0.3125) == 0.25
    assert sum(entry.kind == "commit" for entry in again.ledger.entries) == 1


def test_shares_from_weights_that_were_lost_end_the_segment(tmp_path: Path) -> None:
    """Made again, those weights would be rounded otherwise under the same noise: two releases of one draw."""
    journal = begin(tmp_path, ADAPTIVE)
    trained(journal, 1.0, range(1, 3))
    journal.checkpointed(0, 2, "two")
    norm = journal.clip_norm_after(0, 2, "two")
    third = trained(journal, norm, range(3, 4))
    assert journal.new_segment_reason(0, 2, CONFIG) is None, "step 3 counted with the checkpoint's weights"
    journal.open_step(0, 4, at(4, third))
    assert journal.new_segment_reason(0, 2, CONFIG) is None, "C of step 4 tells nothing but the share of step 3"
    journal.commit_step(0, 4, at(4, third), 0.5)
    assert "weights that were lost" in (journal.new_segment_reason(0, 2, CONFIG) or "")
    fixed = begin_other(tmp_path / "fixed")
    assert fixed.new_segment_reason(0, 2, CONFIG) is None, "with a fixed norm nothing was told"

    journal.begin_segment(0, CONFIG, DATA, 2, "lost")
    assert journal.clip_norm_after(0, 2, "two") == norm
    with pytest.raises(LedgerError, match="released before it"):
        journal.open_step(0, 3, at(3, third))
    trained(journal, norm, range(3, 5))
    assert journal.history.steps()[0] == 6 and sum(event.count for event in journal.history.charged()) == 6
    # Back to a checkpoint of the first segment: its norm, whatever the second one released at that step.
    assert journal.clip_norm_after(0, 2, "two") == norm


def begin_other(folder: Path) -> Journal:
    folder.mkdir()
    journal = begin(folder)
    for step in range(1, 5):
        journal.open_step(0, step, facts(step))
        journal.commit_step(0, step, facts(step))
        if step == 2:
            journal.checkpointed(0, 2, "two")
    return journal


def test_a_checkpoint_goes_on_with_the_norm_of_the_segment_that_made_it(tmp_path: Path) -> None:
    journal = begin(tmp_path, ADAPTIVE)
    norm = trained(journal, 1.0, range(1, 4))
    journal.checkpointed(0, 3, "first")
    journal.begin_segment(0, CONFIG, DATA, 0, "from the start")
    journal.checkpointed(0, 0, "start")
    other = 1.0
    for step, share in ((1, 0.0), (2, 0.0), (3, 0.0)):
        journal.open_step(0, step, at(step, other))
        journal.commit_step(0, step, at(step, other), share)
        other = RULE.following(other, share)
    assert journal.clip_norm_after(0, 3, "not marked yet") == other != norm
    journal.checkpointed(0, 3, "second")
    assert (journal.clip_norm_after(0, 3, "first"), journal.clip_norm_after(0, 3, "second")) == (norm, other)
    with pytest.raises(AdaptiveError, match="no clipping norm after step 5"):
        journal.clip_norm_after(0, 5, "second")


def test_a_plan_with_adaptive_clipping_goes_through_json_and_cannot_do_without_its_count() -> None:
    assert PrivacyPlan(**json.loads(json.dumps(ADAPTIVE.as_dict()))) == ADAPTIVE
    with pytest.raises(PlanError, match="is a ClippedShare"):
        PlannedMetric(METRIC, 0.5, 7.0)
    with pytest.raises(PlanError, match=r"by 0\.5, not by 1\.0"):
        replace(COUNT, bound=1.0)
    with pytest.raises(PlanError, match="outside the bounds"):
        replace(ADAPTIVE, clip_norm=1000.0)


def test_a_ledger_from_before_a_share_was_told_is_refused_and_declared_it_stays_charged(tmp_path: Path) -> None:
    """No checkpoint was made since, but whoever read the newer ledger has the share, and its noise is used up."""

    def opened(new_segment: str | None = None) -> OpenRun:
        folder, more = RunDir(tmp_path), {"record_digests": "hmac-sha256", "new_segment": new_segment}
        return open_run(folder, "run", start_ranks(), Keep(2), {}, **more)  # pyright: ignore[reportArgumentType]

    run, path = opened(), tmp_path / "ledger.jsonl"
    run.writer.declare_plan(0, "private", ADAPTIVE, describe("pld"))
    run.writer.begin_segment(0, CONFIG, DATA, 0, "first")
    norm = trained(run.writer, 1.0, range(1, 2))
    backup = path.read_bytes()
    trained(run.writer, norm, range(2, 4))
    run.writer.ledger.close()
    assert read_heads(tmp_path / "secret" / NAME) == [], "nobody outside learns of single steps"
    whole = path.read_bytes()
    path.write_bytes(backup)
    with pytest.raises(CertificateError, match="was restored from a backup"):
        verify(tmp_path)
    with pytest.raises(LedgerError, match="was restored from a backup"):
        opened()
    path.write_bytes(whole)
    run = opened()
    assert verify(tmp_path).opened == 3
    run.writer.ledger.close()
    path.write_bytes(backup)
    run = opened("the disk failed")
    assert sum(event.count for event in run.writer.history.charged()) == 1 + 3
    run.writer.ledger.close()
