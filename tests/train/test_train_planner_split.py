"""How the planner splits one ε between private phases: against other splits, and by another accountant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.train.commands.forecast import main
from murmuration.train.config.load import load
from murmuration.train.planner.drowned import noise_over_signal
from murmuration.train.planner.split import Split, split
from tests.support.planner_world import SMALL

TOTAL = 4.0
RECORDS = 20_000


def written(tmp_path: Path, **head: Any) -> Path:
    """A body in 40 steps, then its head in one."""
    data = {"path": "nowhere", "expected_records": RECORDS, "label": "cls"}
    body = {
        "name": "body", "objective": "classify", "data": data, "schedule": {"peak": 1e-3}, "steps": 40,
        "privacy": {"epsilon": 1.0, "delta": 1e-5, "expected_batch": 400},
    }  # fmt: skip
    last = {"name": "head", "objective": "head", "data": data, "privacy": {"epsilon": 1.0, "delta": 1e-5} | head}
    model = {key: size for key, size in SMALL.items() if not key.startswith("mae_")}
    whole = {
        "train_micro_batch_size_per_gpu": 8, "model": {**model, "family": "classifier", "classes": 10},
        "phases": [body, last], "run": {"engine": "local"},
    }  # fmt: skip
    path = tmp_path / "two.json"
    path.write_text(json.dumps(whole))
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return split(load(written(tmp_path_factory.mktemp("split")), []), TOTAL)


def test_both_phases_together_cost_at_most_what_was_asked_by_another_accountant(found: Split) -> None:
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for plan in found.plans:
        step = dp_accounting.GaussianDpEvent(plan.noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(plan.sampling.rate, step), plan.steps)
    spent = accountant.get_epsilon(1e-5)
    assert spent <= TOTAL and found.epsilon == pytest.approx(spent, rel=1e-3)
    assert spent > 0.99 * TOTAL, "nothing is left over"
    body, head = (plan.epsilon_budget for plan in found.plans)
    assert body + head > TOTAL * 1.05, "what each costs alone adds up to more"


@pytest.mark.parametrize("times", [0.4, 2.0])
def test_another_split_of_the_same_budget_has_more_noise(found: Split, times: float) -> None:
    def total(plans: list[Any]) -> float:
        return sum(noise_over_signal(plan, part.weights) for plan, part in zip(plans, found.parts, strict=True))

    body, head = found.parts
    other = head.plan(times * found.plans[1].epsilon_budget)
    low, high = 0.0, TOTAL
    while high - low > 0.02:
        middle = (low + high) / 2
        plans = [body.plan(middle), other]
        low, high = (middle, high) if epsilon([plan.event() for plan in plans], 1e-5) <= TOTAL else (low, middle)
    assert total([body.plan(high), other]) > 1.01 * total(found.plans), "though its body has a little too much"


def test_it_prints_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    assert main(["--config", str(path), "--together", str(TOTAL), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["--config", str(path), "--together", str(TOTAL)]) == 0
    text = capsys.readouterr().out
    assert [each["name"] for each in told["phases"]] == ["body", "head"] and told["epsilon"] <= TOTAL
    for number, each in enumerate(told["phases"]):
        assert f"--set phases.{number}.privacy.epsilon={each['epsilon']:g}\n" in text


REFUSED = {
    "a config with noise_multiplier": ({"noise_multiplier": 2.0}, "4", "decides what the phase spends; leave it out"),
    "two deltas": ({"delta": 1e-6}, "4", "different δ"),
    "no budget": ({}, "0", "--together must be above 0"),
    "too much": ({}, "1e9", "at most 100"),
}


@pytest.mark.parametrize(("head", "asked", "said"), REFUSED.values(), ids=REFUSED)
def test_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: dict[str, Any], asked: str, said: str
) -> None:
    assert main(["--config", str(written(tmp_path, **head)), "--together", asked]) == 2
    assert said in capsys.readouterr().err


def test_one_private_phase_has_nothing_to_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    assert main(["--config", str(path), "--set", "phases.1.privacy=null", "--together", "4"]) == 2
    assert "fewer than two" in capsys.readouterr().err
