"""What the library claims: weights of unknown origin are named, the same records are recognised, units are bounded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration import Units
from murmuration.accounting.errors import PlanError
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.sampling import RandomAllocation
from murmuration.data.store.place import ShardError
from murmuration.train.clip.rule import rounding_allowance
from murmuration.train.config.section import RecipeError
from murmuration.train.library.start import started
from murmuration.train.optim.rates import rates_of
from murmuration.train.optim.torch_optimizer import UnfitOptimizerError, described
from murmuration.train.self_test.self_test import SelfTestError
from tests.support.own_module import RECORDS, SEED, WIDE, Regression, X, read, run, training
from tests.support.train_helpers import alone

PEOPLE = [f"p{number * 7 % 20}" for number in range(RECORDS)]


class Net(Regression):
    """Random weights, as a function of the seed from outside."""

    def __init__(self, width: int = WIDE) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


class Wider(Net):
    def __init__(self) -> None:
        super().__init__(WIDE + 1)


class Centred(Net):
    """Knows a mean of the private records, which no checkpoint has."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)


class Prototypes(Net):
    """Begins with a few of the records, and with what some of them are like, which differs from seed to seed."""

    def __init__(self, bank: Any = None) -> None:
        super().__init__(8)
        some = torch.randperm(RECORDS)[: RECORDS // 2]
        self.prototypes = nn.Parameter(X[some[:8]].clone())
        self.offset = nn.Parameter(torch.zeros(2))
        with torch.no_grad():
            self.offset.copy_(X[some].mean(0)[:2])
        self.bank = bank


class ByHand(Net):
    """Random in ways of its own."""

    def __init__(self) -> None:
        super().__init__(8)
        self.old = nn.Parameter(torch.Tensor(5, 8))
        nn.init.orthogonal_(self.old)
        self.scaled = nn.Parameter(torch.empty(30, dtype=torch.float64).normal_().mul_(0.02).float() @ torch.eye(30))
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
        self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def fitted() -> nn.Module:
    """Trained without noise, from random weights."""
    net = Net(8)
    optimizer = torch.optim.Adam(net.parameters())
    net.layers(X).square().mean().backward()
    optimizer.step()
    return net


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Prototypes, {"prototypes", "offset"}),
        (partial(Prototypes, X), {"prototypes", "offset", "bank"}),
        (partial(Prototypes, [{"a": X.numpy()}]), {"prototypes", "offset", "bank[0]['a']"}),
        (fitted, {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}),
        (ByHand, set()),
    ],
    ids=["prototypes", "a bank", "an array in a list", "fitted", "random"],
)
def test_what_is_made_of_tensors_from_elsewhere_is_not_random_though_seeds_change_it(
    model: Any, named: set[str]
) -> None:  # fmt: skip
    assert set(started(model, None, alone()).unexplained) == named


def finished(folder: Path, model: Any = Net, **changes: Any) -> list[str]:
    """A whole run; the deviations of its certificate."""
    with training(folder, model, **{"debug_seed": None, "steps": 2, **changes}) as found:
        found.prove()
        for step in found.steps():
            found.step(step)
        found.finish()
    return json.loads((folder / "certificate.json").read_text())["known_deviations"]


def foreign(deviations: list[str]) -> bool:
    return any("FOREIGN WEIGHTS" in each for each in deviations)


OTHERS = torch.randn(1000, 5, generator=torch.Generator().manual_seed(3))


class Enlarged(Net):
    """A table from elsewhere, with random rows added."""

    def __init__(self, added: int, rows: int = 1000, pad: int | None = None) -> None:
        super().__init__(8)
        self.table = nn.Embedding(rows + added, 5, padding_idx=pad)
        with torch.no_grad():
            self.table.weight[:rows] = OTHERS[:rows]


def shaken(model: nn.Module, by: float) -> nn.Module:
    with torch.no_grad():
        for each in model.parameters():
            each.add_(by * torch.randn_like(each))
    return model


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (partial(Enlarged, 10), {"table.weight"}),
        (partial(Enlarged, 5000, 1), {"table.weight"}),
        (partial(Enlarged, 10, 0, 0), set()),
        (lambda: Enlarged(3000, 0, 0).bfloat16(), set()),
        (lambda: Enlarged(3000).bfloat16(), {"table.weight"}),
        (lambda: Enlarged(300_000, 0), set()),
        (lambda: shaken(Enlarged(0), 0.5), {"table.weight"}),
    ],
    ids=["rows added", "one row kept", "padding", "coarse", "coarse, rows added", "large", "shaken"],
)
def test_random_numbers_beside_others_do_not_hide_them(model: Any, named: set[str]) -> None:
    assert set(started(model, None, alone()).unexplained) == named


@pytest.mark.parametrize(
    "model, unknown",
    [
        (Net, False),
        (Net(), True),
        (Regression, True),  # seeds by itself
        (partial(Centred, X.mean(0)), True),
        (partial(Centred, X.mean().reshape(1)), True),
        (partial(Centred, torch.full((5,), 0.5)), False),
    ],
)
def test_what_is_not_shown_to_be_random_is_named(tmp_path: Path, model: Any, unknown: bool) -> None:
    assert foreign(finished(tmp_path / "run", model)) == unknown


def test_one_tensor_of_a_known_run_does_not_vouch_for_the_others(tmp_path: Path) -> None:
    finished(tmp_path / "known")
    start, other = tmp_path / "known", "another set"
    assert not foreign(finished(tmp_path / "all", start=start, dataset=other))
    assert not foreign(finished(tmp_path / "random", Wider, start=start, dataset=other))
    assert foreign(finished(tmp_path / "trained", Wider(), start=start, dataset=other))


def test_unknown_weights_stay_unknown_in_the_runs_that_begin_from_them(tmp_path: Path) -> None:
    finished(tmp_path / "first", Net())
    assert foreign(finished(tmp_path / "second", start=tmp_path / "first", dataset="another set"))
    assert foreign(finished(tmp_path / "third", start=tmp_path / "second", dataset="a third set"))


def test_records_are_known_by_their_name_whatever_is_taken_of_them(tmp_path: Path) -> None:
    start = tmp_path / "first"
    finished(start, public={"evaluation": "the test set"})
    units = Units("person", PEOPLE, rows=2)
    for number, changes in enumerate([{}, {"records": RECORDS - 1}, {"units": units, "expected_batch": 8}]):
        with pytest.raises(RecipeError, match="the very records of this run"):
            finished(tmp_path / str(number), start=start, **changes)
    with pytest.raises(RecipeError, match="used records without noise"):
        finished(tmp_path / "tested", start=start, dataset="the test set")


def test_a_run_whose_loss_is_a_function_can_be_started_from(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).squeeze(1) - batch["y"]).square()

    make = partial(nn.Sequential, nn.Flatten())

    def net() -> nn.Module:
        return make(nn.Linear(5, WIDE), nn.Linear(WIDE, 1))

    finished(tmp_path / "first", net, loss=loss)
    told = finished(tmp_path / "second", net, loss=loss, start=tmp_path / "first", dataset="another set")
    assert any("run 'first'" in each for each in told) and not foreign(told)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_unit_of_several_records_moves_the_sum_by_at_most_c(tmp_path: Path, reduce: Any) -> None:
    """Two runs of the same keys, in which one unit has other records or none: the weights differ by at most one clipped
    gradient over the constant divisor, whatever its records are."""
    units = Units("person", PEOPLE, rows=2, reduce=reduce)

    def hostile(numbers: np.ndarray) -> dict[str, Tensor]:
        found = read(numbers)
        return {name: tensor * 1e6 for name, tensor in found.items()} if PEOPLE[int(numbers[0])] == "p0" else found

    def absent(numbers: np.ndarray) -> dict[str, Tensor]:
        if PEOPLE[int(numbers[0])] == "p0":
            raise ValueError("gone")
        return read(numbers)

    common: dict[str, Any] = dict(units=units, expected_batch=20, steps=1, schedule=1.0)

    def moved(name: str, reader: Any) -> Tensor:
        with training(tmp_path / name, reader=reader, **common) as found:
            found.prove()
            found.step(1)
            return torch.cat([tensor.flatten() for _, tensor in sorted(found.weights().items())])

    plan = training(tmp_path / "hostile", reader=hostile, **common)
    plan.close()
    assert (plan.plan.records, plan.plan.divisor) == (20, 20)  # every unit takes part
    apart = float((moved("hostile", hostile) - moved("absent", absent)).norm()) * plan.plan.divisor
    assert 0.9 < apart <= 1 + rounding_allowance(8)
    assert History.read(tmp_path / "hostile" / "ledger.jsonl")[0].plans[0].units.table


def test_units_continue_as_if_the_run_had_not_been_closed(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(units=Units("person", PEOPLE, rows=2), expected_batch=8)
    whole = run(tmp_path / "whole", 6, **changes)
    run(tmp_path / "parts", 2, **changes)
    parts = run(tmp_path / "parts", 4, **changes)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with training(tmp_path / "parts", **changes) as found:  # all steps are made
        found.prove()
    other = Units("person", [PEOPLE[1], PEOPLE[0], *PEOPLE[2:]], rows=2)
    with pytest.raises(LedgerError, match="units changed"):
        training(tmp_path / "parts", **{**changes, "units": other})


@pytest.mark.parametrize("of", [[("clinic", name) for name in PEOPLE], [None, *PEOPLE[1:]]])
def test_names_of_units_that_could_split_one_are_refused(tmp_path: Path, of: Any) -> None:
    with pytest.raises(ShardError, match="one text or number for each record"):
        training(tmp_path, units=Units("person", of, rows=2), expected_batch=8)


def test_a_batch_larger_than_the_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected_batch must lie in"):
        training(tmp_path, expected_batch=RECORDS + 1)


def test_whole_epochs_of_allocation_are_not_cut(tmp_path: Path) -> None:
    with training(tmp_path, steps=None, epochs=2, expected_batch=22, sampling="allocation") as found:
        assert (found.plan.steps, found.plan.sampling, found.plan.participations) == (6, RandomAllocation(3), 2)


class Counting(torch.optim.SGD):
    """Counts its steps where no state of a parameter is."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


class Slow(torch.optim.SGD):
    """Begins to keep something at its second step."""

    def step(self, closure: Any = None) -> Any:
        (weights,) = self.param_groups[0]["params"]
        state = self.state[weights]
        if "seen" in state:
            state["late"] = torch.zeros_like(weights)
        state["seen"] = torch.zeros_like(weights)
        return super().step(closure)


@pytest.mark.parametrize(
    "make, why",
    [
        (Counting, "keeps count"),
        (Slow, "keeps late"),
        (torch.optim.Muon, "only supports 2D"),
        (torch.optim.LBFGS, "needs no closure"),
        ("AdamW", "'str' object is not callable"),
        (lambda _: 3, "it is a int"),
    ],
)
def test_an_optimizer_whose_state_would_be_lost_or_that_is_none_is_refused(tmp_path: Path, make: Any, why: str) -> None:
    with pytest.raises(UnfitOptimizerError, match=why):
        training(tmp_path, optimizer=make)


def test_settings_of_an_optimizers_group_are_part_of_what_it_is() -> None:
    def make(momentum: float) -> Any:
        return lambda weights: torch.optim.SGD([{"params": weights, "momentum": momentum}], lr=0.1)

    assert described(make(0.1)) != described(make(0.9)) == described(make(0.9))


@pytest.mark.parametrize(
    "schedule",
    [
        "cosine",
        torch.optim.lr_scheduler.StepLR,
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 2),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    ],
)
def test_what_is_no_schedule_is_refused_before_the_first_step(schedule: Any) -> None:
    with pytest.raises(UnfitOptimizerError, match="schedule="):
        rates_of(schedule, torch.optim.AdamW, 10)


def test_a_closed_training_says_so(tmp_path: Path) -> None:
    with training(tmp_path) as found:
        found.prove()
        found.step(1)
        found.save()
    found.close()
    for act in (lambda: found.step(2), found.save, found.finish, found.weights, found.prove):
        with pytest.raises(LedgerError, match="closed"):
            act()
    with training(tmp_path) as found:
        assert found.done == 1


def test_evaluation_needs_the_word_that_its_records_are_public(tmp_path: Path) -> None:
    with training(tmp_path) as found, pytest.raises(PlanError, match="your word that they are public"):
        found.evaluate(lambda model: {})


def test_a_debug_run_says_so_before_it_prints_an_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path, debug_seed=SEED).close()
    assert "NOT PRIVATE (debug)" in capsys.readouterr().out


def test_a_run_that_is_logged_does_not_say_that_it_has_no_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    logged = finished(tmp_path / "logged", registry=tmp_path / "log")
    alone = finished(tmp_path / "alone")
    said = [any("has no log outside" in each for each in told) for told in (logged, alone)]
    assert said == [False, True]


class Tabled(nn.Module):
    """Has a table that no checkpoint keeps."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(5, WIDE)
        self.register_buffer("table", table, persistent=False)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return (self.layer(inputs["x"]).mean(1) + self.table.sum() - inputs["y"]).square()


def test_a_table_that_comes_with_a_later_start_is_foreign(tmp_path: Path) -> None:
    for table, steps in ((torch.zeros(3), 1), (torch.tensor([0.3, 0.1, 0.7]), 2)):
        with training(tmp_path / "run", lambda table=table: Tabled(table)) as found:
            found.prove()
            found.step(steps)
            found.save()
        history, _ = History.read(tmp_path / "run" / "ledger.jsonl")
        assert [line.use for line in history.public_uses] == ["unknown-weights"] * (steps - 1)


def test_weights_that_are_exchanged_before_the_proof_are_noticed(tmp_path: Path) -> None:
    with training(tmp_path, lambda: Tabled(torch.zeros(3))) as found:
        with torch.no_grad():
            found.model.layer.weight.add_(1)
        with pytest.raises(SelfTestError, match=r"layer.weight changed since the training was opened"):
            found.prove()
