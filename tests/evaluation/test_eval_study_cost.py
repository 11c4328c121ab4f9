"""What a study says that its runs cost the records together."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.signature import public_key
from murmuration.accounting.epsilon.accountant import epsilon, round_up
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.heads import note_logs
from murmuration.accounting.ledger.history import History
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.study.outcome import cost_in_words, cost_of, outcome_of
from murmuration.evaluation.study.plan_runs import plan_in_words
from murmuration.evaluation.study.study_file import Study, runs_of
from murmuration.evaluation.study.train_runs import Folder, Forked
from murmuration.train.distributed.process import describe_process
from murmuration.train.storage.sibling_runs import RunLog
from tests.support.acc_world import DATA, KEY, PLAN, begin, reopen, train, whole_run


def whole(folder: Path) -> Path:
    whole_run(folder, PLAN.steps).ledger.close()
    return folder


def test_a_run_counts_with_its_claim_whichever_comes_first(tmp_path: Path) -> None:
    """One that was ended early claims its budget, however little it has charged."""
    one, early = whole(tmp_path / "whole"), tmp_path / "early"
    journal = begin(early)
    train(journal, range(1, 4))
    journal.finish()
    journal.ledger.close()
    cost = cost_of([early, one])
    assert cost is not None and cost == cost_of([one, early]) and cost["runs"] == 2
    assert cost["epsilon_sum"] == pytest.approx(2 * PLAN.epsilon_budget) and cost["delta_sum"] == 2 * PLAN.delta


def test_all_runs_together_cost_their_composition(tmp_path: Path) -> None:
    plan = replace(PLAN, noise_multiplier=25.0)
    whole_run(tmp_path / "other", PLAN.steps, plan).ledger.close()
    cost = cost_of([whole(tmp_path / "whole"), tmp_path / "other"])
    assert cost is not None
    events = [Event(1.0, sigma, PLAN.steps) for sigma in (PLAN.noise_multiplier, 25.0)]
    assert cost["epsilon_together"] == pytest.approx(epsilon(events, PLAN.delta), rel=1e-6)
    assert cost["epsilon_together"] < cost["epsilon_sum"]
    told = cost_in_words(cost)
    assert "To choose among them" in told and f"ε = {round_up(cost['epsilon_together'], 2)}" in told
    assert f"ε = {cost['epsilon_sum']:g} at δ = {2 * PLAN.delta:g} in any case" in told, "a sum of claims sums δ too"


def study_of(*arms: str) -> Study:
    told = {"title": "A study", "config": "config.json", "measures": [{"label": "loss", "metric": "loss"}]}
    return Study.model_validate(told | {"arms": [{"name": name} for name in arms]})


def cost_in(out: Path, *arms: str) -> dict[str, Any]:
    study = study_of(*arms)
    return outcome_of(study, runs_of(study, out), [], Folder(out))["cost"]


def test_runs_that_a_study_no_longer_has_are_in_its_cost(tmp_path: Path) -> None:
    """Whoever leaves out an arm, or trains fewer seeds, has seen what the others gave."""
    for arm in ("one", "other"):
        whole(tmp_path / "runs" / f"{arm}-1")
    cost = cost_in(tmp_path, "one", "other")
    assert cost["runs"] == 2 and cost["epsilon_sum"] == pytest.approx(2 * PLAN.epsilon_budget)
    assert cost_in(tmp_path, "one") == cost


def test_runs_whose_folders_were_removed_are_in_a_studys_cost(tmp_path: Path) -> None:
    """A study says how to train an arm anew: by removing its folder."""
    log, kept = RunLog.at(tmp_path / "runs.jsonl"), whole(tmp_path / "runs" / "one-1")
    history, _ = History.read(kept / "ledger.jsonl")
    (kept / "secret").mkdir()
    note_logs(kept / "secret", log.files, None)
    removed = [("before", kept, 3.0), ("bare", kept.with_name("bare-1"), None), ("elsewhere", tmp_path / "x", 5.0)]
    for run, folder, budget in [(history.run_id, kept, PLAN.epsilon_budget), *removed]:
        log.register(run, "private", run, budget, None if budget is None else 1e-4, folder=str(folder.resolve()))
    log.claim("before", 3.5)
    cost = cost_in(tmp_path, "one")
    assert cost["runs"] == 2 and cost["without_noise"] == 1, "one run lay elsewhere, in no folder of this study"
    assert cost["epsilon_sum"] == pytest.approx(PLAN.epsilon_budget + 3.5)
    assert cost["delta_together"] == pytest.approx(PLAN.delta + 1e-4)


def test_two_runs_of_one_folder_are_refused(tmp_path: Path) -> None:
    """One of them would be trained, and its numbers shown for both."""
    with pytest.raises(EvaluationError, match=r"'a_b' and one of 'a b' have the same folder, runs/a_b-1; rename"):
        runs_of(study_of("a b", "a_b"), tmp_path)


def test_the_steps_of_a_run_that_has_not_ended_cost_no_more_than_it_claims(tmp_path: Path) -> None:
    """They count in whole steps, of which the last may end beyond the budget."""
    journal = begin(tmp_path / "begun")
    train(journal, range(1, 4))
    journal.ledger.close()
    cost = cost_of([tmp_path / "begun"])
    assert cost is not None and cost["epsilon_together"] > cost["epsilon_sum"] == PLAN.epsilon_budget
    assert f"costs a record ε = {PLAN.epsilon_budget:g} at δ = {PLAN.delta:g}." in cost_in_words(cost)


def test_no_number_is_given_where_one_run_keeps_no_promise(tmp_path: Path) -> None:
    one, debug = whole(tmp_path / "whole"), tmp_path / "debug"
    journal = begin(debug, debug=True)
    train(journal, range(1, PLAN.steps + 1))
    journal.finish()
    journal.ledger.close()
    for folders in ([one, debug], [debug, one], [debug]):
        cost = cost_of(folders)
        assert cost is not None and cost["epsilon_sum"] is None and "is not known" in cost_in_words(cost)


def test_a_run_whose_ledger_cannot_be_read_leaves_no_number(tmp_path: Path) -> None:
    damaged = whole(tmp_path / "damaged")
    (damaged / "ledger.jsonl").write_bytes((damaged / "ledger.jsonl").read_bytes()[100:])
    cost = cost_of([whole(tmp_path / "whole"), damaged, tmp_path / "not trained yet"])
    assert cost is not None and cost["runs"] == 2 and cost["epsilon_sum"] is None
    assert "is not known: the ledger of damaged cannot be read" in cost_in_words(cost)


def test_a_plan_of_private_runs_says_that_their_deltas_add_up() -> None:
    phases = [SimpleNamespace(privacy=SimpleNamespace(epsilon=8.0)), SimpleNamespace(privacy=None)]
    study, config = SimpleNamespace(title="A study", seeds=2), SimpleNamespace(phases=phases)
    runs: Any = [SimpleNamespace(weights=None, seed=2)] * 96
    told = plan_in_words(study, runs, [config] * 96)  # type: ignore[arg-type]
    assert "together spend at most ε = 768, at the sum of their δ" in told


@pytest.mark.parametrize("public", [True, False])
def test_runs_without_noise_on_private_records_are_named_beside_the_cost(tmp_path: Path, public: bool) -> None:
    journal = reopen(tmp_path / "bare")
    journal.start_run("bare", KEY.check_value(), False, {}, "hmac-sha256", public_key(KEY))
    journal.declare_nonprivate(0, "bare", public, DATA)
    journal.ledger.close()
    cost = cost_of([whole(tmp_path / "whole"), tmp_path / "bare"])
    assert ("1 more trained without noise" in cost_in_words(cost)) == (not public)
    assert cost_of([tmp_path / "bare"]) is None


def test_a_run_takes_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer gives a process that trains alone all of them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(Forked, "_context", get_context("fork"))
    monkeypatch.setattr(Forked._context, "set_forkserver_preload", lambda names: None)
    run = Forked(1, __name__, [], tmp_path / "log")
    while run.poll() is None:
        time.sleep(0.01)
    assert (tmp_path / "log").read_text() == "1\n"


def test_a_run_computes_in_as_many_threads_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait forever, had the process from which it is forked started such threads when it imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run = Forked(2, __name__, [], tmp_path / "log")
    end = time.monotonic() + 300
    while run.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    run.stop()
    assert (tmp_path / "log").read_text() == "2\n"


def main(arguments: list[str]) -> None:
    describe_process()
    torch.ones(1 << 20).abs()
    os.write(1, f"{torch.get_num_threads()}\n".encode())
