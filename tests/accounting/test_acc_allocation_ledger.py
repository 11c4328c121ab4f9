"""What a ledger charges for random allocation: every epoch that was begun, whole, and anew in each segment."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.banded import best_banded
from murmuration.accounting.certificate.composition import total
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.ledger.facts import Charge, Head, StepFacts, StepId
from murmuration.accounting.ledger.heads import lost_charges, uncharged
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import RandomAllocation, slots_for
from murmuration.accounting.strict_json import parse, read
from tests.support import acc_world
from tests.support.acc_world import CONFIG, DATA, KEY, begin, certified, facts, rewritten, train

SLOTS = 4
PLAN = replace(
    acc_world.PLAN, records=101, sampling=RandomAllocation(SLOTS), noise_multiplier=2.0, steps=12,
    epsilon_budget=8.0,
)  # fmt: skip
EPOCH = Event(1 / SLOTS, 2.0, 1, slots=SLOTS)


def epochs(journal: Journal) -> int:
    return sum(event.count for event in journal.history.charged())


def test_an_epoch_is_charged_whole_when_its_first_step_is_opened(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    for step, expected in zip(range(1, 10), (1, 1, 1, 1, 2, 2, 2, 2, 3), strict=True):
        assert journal.history.charges_more(StepId(0, 0, step), EPOCH) == (step % SLOTS == 1)
        journal.open_step(0, step, facts(step, PLAN))
        assert journal.history.charged() == [replace(EPOCH, count=expected)]
        journal.commit_step(0, step, facts(step, PLAN))
        for more in (1, 3, 9):
            ahead = math.ceil((step + more) / SLOTS) - math.ceil(step / SLOTS)
            assert journal.history.charges_of_next(more) == ahead
    assert journal.history.epsilon() == epsilon([replace(EPOCH, count=3)], PLAN.delta)
    again = History.of(journal.ledger.entries)
    assert again.charged() == journal.history.charged()


def test_a_replayed_step_costs_nothing_and_a_segment_within_an_epoch_costs_that_epoch_again(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    train(journal, range(1, 7), PLAN)
    train(journal, range(5, 7), PLAN)  # as after a kill
    assert epochs(journal) == 2
    journal.begin_segment(0, CONFIG, DATA, 6, "new keys")
    assert epochs(journal) == 2
    train(journal, range(7, 9), PLAN)
    assert epochs(journal) == 3, "the records were allocated anew"
    train(journal, range(9, 10), PLAN)
    assert epochs(journal) == 4
    journal.begin_segment(0, CONFIG, DATA, 4, "rolled back")
    train(journal, range(5, 10), PLAN)
    assert epochs(journal) == 6


def test_the_budget_ends_before_an_epoch_and_never_within_one(tmp_path: Path) -> None:
    two = epsilon([replace(EPOCH, count=2)], PLAN.delta)
    journal = begin(tmp_path, replace(PLAN, epsilon_budget=two * 1.01))
    train(journal, range(1, 9), PLAN)
    with pytest.raises(BudgetSpent):
        journal.open_step(0, 9, facts(9, PLAN))
    assert journal.history.epsilon() == two


def test_a_step_of_less_noise_makes_its_whole_epoch_dearer(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    train(journal, range(1, 6), PLAN)
    journal.open_step(0, 6, facts(6, PLAN))
    with pytest.raises(LedgerError, match="charges the weaker"):
        journal.commit_step(0, 6, facts(6, PLAN, std=1.9))
    assert journal.history.charged() == [replace(EPOCH, sigma=1.9), EPOCH]
    assert journal.history.charges_more(StepId(0, 0, 7), EPOCH), "unknown, so it is asked"


def finished(folder: Path) -> dict[str, Any]:
    journal = begin(folder, PLAN)
    train(journal, range(1, 13), PLAN)
    journal.checkpointed(0, 12, "digest")
    journal.finish()
    certified(journal)
    return json.loads((folder / "certificate.json").read_text())


def test_verify_recomputes_it_from_the_ledger_and_finds_a_charge_as_poisson(tmp_path: Path) -> None:
    told = finished(tmp_path)
    claim = told["claim"]["epsilon"]
    assert verify(tmp_path).epsilon == claim == epsilon([replace(EPOCH, count=3)], PLAN.delta)
    (phase,) = told["phases"]
    assert phase["events"] == [{"mechanism": phase["events"][0]["mechanism"], **replace(EPOCH, count=3).as_dict()}]
    assert "each record in one of them" in phase["events"][0]["mechanism"] and phase["plan"]["sampling"] == {
        "kind": "allocation",
        "slots": SLOTS,
    }
    assert "every record takes part in one step" in told["mechanism"]
    assert any("key of that allocation" in text for text in told["known_deviations"])
    unproved = [*told["limits"]["groups"], told["limits"]["replacement"]]
    assert all(row["epsilon"] is None and "random allocation" in row["reason"] for row in unproved)
    assert told["claim"]["epsilon_rdp"].startswith("refused")
    page = (tmp_path / "certificate.md").read_text()
    assert "sampling: random allocation" in page and "3 epochs of 4)" in page

    phase["events"] = [{**phase["events"][0], "mechanism": "Poisson-subsampled Gaussian", "count": 12}]
    del phase["events"][0]["slots"]
    (tmp_path / "certificate.json").write_text(json.dumps(signed(told, KEY)))
    with pytest.raises(CertificateError):
        verify(tmp_path)


def test_a_ledger_rewritten_as_poisson_is_charged_as_that_and_no_longer_fits_its_certificate(tmp_path: Path) -> None:
    """Where Poisson sampling would be cheaper, as with this delta of a thousandth it is not, and where it would not."""
    finished(tmp_path)

    def poisson(fields: dict[str, Any]) -> None:
        rule = {"kind": "poisson", "threshold": 2**32 // SLOTS}
        if "plan" in fields:
            fields["plan"]["sampling"] = rule
        if "facts" in fields:
            fields["facts"]["sampling"]["rule"] = rule

    rewritten(tmp_path, poisson)
    with pytest.raises((CertificateError, LedgerError)):
        verify(tmp_path)


def test_a_lost_part_of_the_ledger_is_charged_by_epochs(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    train(journal, range(1, 4), PLAN)
    common = journal.head()
    lost = Head(journal.history.run_id, 99, "f" * 64, (Charge.of(0, replace(EPOCH, count=2)),))
    found = lost_charges(journal.ledger.entries, [common, lost])
    assert found is not None and found[1] == [Charge.of(0, EPOCH)]
    assert uncharged(journal.history.charges(), [lost]) == lost
    poisson = Charge(0, 1 / SLOTS, 2.0, 99)
    assert uncharged((poisson,), [lost]) == lost, "Poisson steps make up for no epoch"
    assert read(Head, parse(json.dumps(lost.as_dict()).encode())) == lost
    journal.admit_lost(found, "restored")
    journal.begin_segment(0, CONFIG, DATA, 3, "restored")
    train(journal, range(4, 5), PLAN)
    assert epochs(journal) == 3
    assert epochs(journal) == sum(event.count for event in History.of(journal.ledger.entries).charged())


def test_a_plan_is_frozen_with_its_epochs() -> None:
    assert PrivacyPlan(**PLAN.as_dict()) == PLAN  # pyright: ignore[reportArgumentType]
    assert (PLAN.sampling_rate, PLAN.divisor, PLAN.participations) == (1 / 4, 101 / 4, 3)
    assert replace(PLAN, steps=13).participations == 4, "a cut epoch is charged whole"
    for changes, said in (
        ({"sampling": RandomAllocation(13)}, "longer than all 12 steps"),
        ({"noise": best_banded(4, 12)}, "do not go together"),
    ):
        with pytest.raises(PlanError, match=said):
            replace(PLAN, **changes)  # pyright: ignore[reportArgumentType]
    assert read(StepFacts, facts(1, PLAN).as_dict()) == facts(1, PLAN)
    assert "slots" not in Charge.of(0, Event(0.5, 1.0, 3)).as_dict() and asdict(Charge.of(0, EPOCH))["slots"] == SLOTS


@pytest.mark.parametrize(
    ("records", "batch", "steps", "slots"),
    [
        (233_804_767, 1_310_720, 5708, 179),
        (233_804_767, 1_310_720, 2854, 179),
        (64, 16, 8, 4),
        (64, 64, 8, 1),
        (100, 25, 11, 4),
    ],
)
def test_epochs_that_fit_the_steps(records: int, batch: float, steps: int, slots: int) -> None:
    assert slots_for(records, batch, steps) == slots
    assert -(-steps // slots) == max(1, round(steps * batch / records))


def test_runs_on_the_same_records_compose_by_epochs() -> None:
    events = [replace(EPOCH, count=3), Event(0.25, 2.0, 12)]
    found = total([], [event.as_dict() for event in events], 1e-5)
    assert found["epsilon_together"] == epsilon(events, 1e-5)
