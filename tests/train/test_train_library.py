"""What a program gives the library, and what it gets: data, optimizer, schedule, mechanisms, registry, start, loop."""

from __future__ import annotations

import copy
import doctest
import json
import math
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import murmuration
from murmuration import (
    AdaptiveClip,
    BandedNoise,
    Clip,
    LossProbes,
    Optimizer,
    Privacy,
    Public,
    ReleasedMetric,
    Schedule,
    Settings,
    Units,
)  # fmt: skip
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.epsilon.accountant import epsilon, round_up
from murmuration.accounting.errors import InputError, PlanError, RunError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.data.batch import function_reader
from murmuration.data.batch.function_reader import ReadFailsError
from murmuration.train.clip import compiled
from murmuration.train.clip.rule import rounding_allowance
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.stop import Stopped
from murmuration.train.library import records, settings
from murmuration.train.library import start as start_of
from murmuration.train.optim import rates
from murmuration.train.optim.rates import rates_of
from murmuration.train.optim.torch_optimizer import TorchOptimizer, UnfitOptimizerError
from murmuration.train.self_test.self_test import SelfTestError
from murmuration.train.storage.checkpoint import Checkpoints
from murmuration.train.storage.run_dir import RunDir
from murmuration.train.storage.sibling_runs import DataBudgetError, RunLog
from tests.support.own_module import RATE, RECORDS, SEED, WIDE, Regression, X, Y, read, run, synthetic, training
from tests.support.recorded_blocks import operation_by_operation


def random_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 1))


def squares(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def own(folder: Path, model: Any = random_net, **changes: Any) -> Any:
    """On a TensorDataset of tuples, with keys from the operating system. A given σ need not be calibrated."""
    given: dict[str, Any] = dict(
        reader=TensorDataset(X, Y), records=None, synthetic=None, example=(X[0], Y[0]), loss=squares, debug_seed=None,
        optimizer=partial(optim.SGD, lr=RATE), schedule=None, noise_multiplier=1.0,
    )  # fmt: skip
    return training(folder, model, **(given | changes))


def finished(folder: Path, **changes: Any) -> dict[str, Any]:
    """The certificate of a whole run, which verifies."""
    with own(folder, **changes) as found:
        for _ in found:
            pass
        verdict = found.finish()  # which verifies it from the ledger alone
    assert verdict.certified == verdict.epsilon and verdict.committed == found.plan.steps
    return json.loads((folder / "certificate.json").read_text())


class Placed(nn.Module):
    """As a ViT's positions, a weight is added to what is computed of a record, so that each record gets a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.place, self.head = nn.Linear(1, 240), nn.Parameter(torch.zeros(5, 240)), nn.Linear(240, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.into(x[..., None]) + self.place).mean(1))


def test_a_loss_that_refuses_the_self_tests_labels_leaves_nothing_behind(tmp_path: Path) -> None:
    """The self-test takes labels that are no class. A pass that ends so holds no record, as one that returns."""
    classes = (Y > 0).long()
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")  # noqa: E731
    made = own(tmp_path, Placed, reader=TensorDataset(X, classes), example=(X[0], classes[0]), loss=loss)
    with made as found:
        found.prove()


class ReadBothWays(nn.Module):
    """An LSTM lists its weights a second time. Of its way back only the first place is used, where no state came
    before, so that weights of the state have a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 31, batch_first=True, bidirectional=True), nn.Linear(62, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[..., None])[0][:, -1])


@pytest.mark.parametrize(
    ("model", "engine"), [(ReadBothWays, "book-keeping"), (random_net, "reference"), (random_net, "opacus")]
)
def test_a_whole_run_of_other_layers_and_clip_engines(tmp_path: Path, model: Any, engine: Any) -> None:
    finished(tmp_path, model=model, computation=murmuration.Computation(engine))


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("engine", ["book-keeping", "reference", "opacus"])
def test_a_weight_that_the_loss_does_not_use_is_refused(tmp_path: Path, engine: Any) -> None:
    made = own(tmp_path, Idle, computation=murmuration.Computation(engine))
    with made as found, pytest.raises(SelfTestError, match=r"not use inner.idle|inner.idle.* get no gradient"):
        found.prove()


class Large(nn.Module):
    """Keeps 8 MiB of each record for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (x[:, :1].expand(-1, 1 << 20).exp().tanh() * self.layer(x)).sum(1, keepdim=True)


@pytest.mark.parametrize(("model", "least", "most"), [(Large, 1, 8), (random_net, 20, 50)])
def test_an_automatic_micro_batch_is_bounded_by_what_records_keep(
    tmp_path: Path, model: Any, least: int, most: int
) -> None:
    """64 MiB of activations, or a whole draw where records are small."""
    with own(tmp_path, model, micro_batch="auto"):
        pass
    chosen = json.loads((tmp_path / "micro_batch.json").read_text())["train_micro_batch_size_per_gpu"]
    assert least <= chosen <= most


# Data.


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"x": X[at], "y": Y[at]}


class Listed:
    """As Hugging Face's are: no class of PyTorch's, and items of lists and numbers."""

    column_names = ("x", "y")

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, at: int) -> dict[str, Any]:
        assert type(at) is int, "a NumPy integer is none to every dataset"
        return {"x": X[at].tolist(), "y": float(Y[at])}


class Callable_(Named):
    def __call__(self) -> None:
        raise AssertionError("a dataset is asked by its items")


@pytest.mark.parametrize(
    ("data", "example", "loss"),
    [
        (TensorDataset(X, Y), (X[0], Y[0]), lambda model, batch: model({"x": batch[0], "y": batch[1]})),
        (list(zip(X.tolist(), Y.tolist(), strict=True)), ([0.0] * 5, 0.0),
         lambda model, batch: model({"x": batch[0], "y": batch[1]})),
        (Named(), {"x": X[0], "y": Y[0]}, None),
        (Named(), {"x": X[0], "y": Y[0]}, lambda model, batch: model(batch)),
        (Callable_(), {"x": X[0], "y": Y[0]}, None),
        (Listed(), {"x": [0.0] * 5, "y": 0.0}, None),
    ],
    ids=["tuples", "lists", "dicts", "dicts and a loss", "callable", "like Hugging Face's"],
)  # fmt: skip
def test_a_dataset_trains_what_a_function_of_its_records_trains(
    tmp_path: Path, data: Any, example: Any, loss: Any
) -> None:
    expected = run(tmp_path / "function", 3)
    found = run(
        tmp_path / "dataset", 3, reader=data, records=None, synthetic=None, example=example, loss=loss
    )  # fmt: skip
    assert all(torch.equal(expected[name], found[name]) for name in expected) and len(found) == len(expected)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        raise AssertionError("it is refused as it is")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reader": Endless()}, r"with len\(\) and \[\], or a function .* is a Endless; an iterable one"),
        ({"reader": DataLoader(TensorDataset(X, Y))}, "but is a DataLoader"),
        ({"reader": {"x": X, "y": Y}}, "but is a dict"),
        ({"reader": X}, "but is a Tensor"),
        ({"reader": 5}, "but is a int"),
        ({"reader": read}, "give records="),
        ({"records": 7}, "records = 7, but the dataset has 60"),
        ({"example": X[0]}, "a dict or a tuple of tensors and numbers, but is a Tensor"),
        ({"example": (X[0], object())}, "an item's 1 is a object"),
        ({"example": (X[0], "a name")}, "an item's 1 is a str"),
        ({"reader": read, "records": RECORDS, "example": (X[0], Y[0])}, "what read.. returns, a dict, but is a tuple"),
        ({"example": None}, "either synthetic= or example="),
        ({"synthetic": synthetic}, "either synthetic= or example="),
        ({"units": Units("patient", ["a"] * 7)}, "units.of has 7 values for 60 records"),
    ],
)
def test_data_of_a_wrong_kind_are_refused_before_a_run_begins(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunError, match=said) as refused:
        own(tmp_path / "run", **changes)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_items_that_are_no_tensors_are_told_at_the_start(tmp_path: Path) -> None:
    broken = [(x, object()) for x in X]
    with pytest.raises(ReadFailsError, match="all of 8 records"):
        own(tmp_path, reader=broken)


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Draws for each item, and remembers what."""

    def __init__(self, missing: frozenset[int] = frozenset()) -> None:
        self.missing, self.drawn = missing, dict[int, float]()

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        if at in self.missing:
            raise ValueError("missing")
        self.drawn[at] = float(torch.rand(()))
        return X[at] + self.drawn[at], Y[at]

    def __len__(self) -> int:
        return RECORDS


def test_what_items_draw_is_that_of_the_run_and_of_no_other_record(tmp_path: Path) -> None:
    def drawn(name: str, seed: int, missing: frozenset[int] = frozenset()) -> dict[int, float]:
        data = Jittered(missing)
        with own(tmp_path / name, reader=data, debug_seed=seed, steps=1) as found:
            found.prove()
            data.drawn.clear()
            found.step(1)
            return dict(data.drawn)

    here, other = drawn("here", SEED), drawn("other", SEED + 1)
    assert len(here.keys() & other.keys()) > 2 and all(here[at] != other[at] for at in here.keys() & other.keys())
    gone = min(here)
    assert drawn("without", SEED, frozenset({gone})) == {at: value for at, value in here.items() if at != gone}


# Records that the model cannot compute.

LABELS = (Y > 0).long()


class Absent(Dataset[tuple[Tensor, Tensor]]):
    """Of which some cannot be read."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        if at in self.missing:
            raise ValueError("missing")
        return X[at], LABELS[at]


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def caught(model: nn.Module, batch: Any) -> Tensor:
    """Would choose for all records how they are computed, as soon as one has an odd label."""
    try:
        return entropy(model, batch)
    except IndexError:
        return model(batch[0]).square().sum(1)


def classified(folder: Path, data: Any, **changes: Any) -> Any:
    net = lambda: nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 2))  # noqa: E731
    given: dict[str, Any] = {"example": (X[0], LABELS[0]), "loss": entropy, "debug_seed": SEED}
    return own(folder, net, reader=data, **(given | changes))


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 1}, {"units": Units("patient", [str(at // 3) for at in
                         range(RECORDS)], rows=2)}, {"loss": caught}],
                         ids=["records", "one at a time", "units", "caught"])  # fmt: skip
def test_a_record_that_the_model_cannot_compute_is_as_if_it_were_not_there(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A label out of range, of every second record. That it ended the run would tell of it."""
    odd = set(range(1, RECORDS, 2)) if "units" not in changes else {*range(3, 6), *range(30, 42)}
    labels = LABELS.clone()
    labels[list(odd)] = 4321
    found = []
    for name, data in {"read": TensorDataset(X, labels), "missing": Absent(odd)}.items():
        torch.manual_seed(0)
        with classified(tmp_path / name, data, **changes) as training:
            before = {name: tensor.clone() for name, tensor in training.weights().items()}
            for number, _ in enumerate(training):
                if number == 3:
                    break
            found.append(training.weights())
        told = (tmp_path / name / "logs" / "private" / "bad-records-rank0.jsonl").read_text()
        assert ("could not compute" in told) == (name == "read") and ("missing" in told) == (name == "missing")
    read_ones, missing = found
    assert all(torch.equal(read_ones[name], missing[name]) for name in missing)
    assert any(not torch.equal(before[name], missing[name]) for name in missing)


@pytest.mark.parametrize("data", [TensorDataset(X, LABELS + 2), TensorDataset(X * math.nan, LABELS)])
def test_a_model_that_can_compute_no_record_is_refused_before_a_step(tmp_path: Path, data: Any) -> None:
    with (
        classified(tmp_path, data) as found,
        pytest.raises(SelfTestError, match="fails for all of 8 records"),
    ):
        found.prove()


# Optimizers.

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AMSGrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.05),
    "Nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Rprop": partial(optim.Rprop, lr=0.01),
}


def falling(step: int) -> float:
    return 0.05 / step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_move_as_the_optimizer_moves_them_by_the_noised_mean_gradients(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gradient is also the one by which plain SGD moves the weights at the same keys."""
    make, noised = OPTIMIZERS[name], list[list[Tensor]]()
    with training(tmp_path / "run", optimizer=make, schedule=falling) as found:
        found.prove()
        inner = TorchOptimizer.update

        def watched(self: TorchOptimizer, flats: Any) -> None:
            noised.append([flat.gradient.clone() for flat in flats])
            inner(self, flats)

        monkeypatch.setattr(TorchOptimizer, "update", watched)
        for step in found.steps():
            found.step(step)
        weights = found.weights()
    hand = Regression()
    before = copy.deepcopy(hand.state_dict())
    theirs = make(list(hand.parameters()))
    for step, gradients in enumerate(noised, 1):
        for parameter, gradient in zip(hand.parameters(), gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        for group in theirs.param_groups:
            group["lr"] = falling(step)
        theirs.step()
    assert len(noised) == 6
    for key, expected in hand.state_dict().items():
        assert torch.equal(weights[key], expected) and not torch.equal(expected, before[key]), key
    plain = run(tmp_path / "plain", 1)
    for (key, start), gradient in zip(before.items(), noised[0], strict=True):
        assert torch.allclose((start - plain[key]) / RATE, gradient.view_as(start), rtol=1e-4, atol=1e-5), key


# Of each kind of state one: moments and their maxima, velocity, products of rates, sums, signs with steps of their own.
@pytest.mark.parametrize("name", ["AMSGrad", "Nesterov", "NAdam", "Adagrad", "Rprop"])
def test_a_torch_optimizer_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    settings = {"optimizer": OPTIMIZERS[name], "noise_multiplier": 1.0}
    whole = run(tmp_path / "whole", 5, **settings)
    for steps in (1, 2, 2):
        parts = run(tmp_path / "parts", steps, **settings)
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


class Whitened(optim.Optimizer):
    """Moves a parameter by its gradient over that's norm, for which it must see all of it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each -= group["lr"] * each.grad / each.grad.norm().clamp(min=1e-12)


def test_an_optimizer_that_looks_at_whole_parameters_sees_them_on_one_process(tmp_path: Path) -> None:
    with training(tmp_path, optimizer=Whitened, schedule=0.01) as found:
        before = {name: tensor.clone() for name, tensor in found.weights().items()}
        found.prove()
        found.step(1)
        for name, after in found.weights().items():
            assert float((after - before[name]).norm()) == pytest.approx(0.01, rel=1e-4)


def test_an_optimizer_that_moves_at_another_rate_than_it_is_given_is_refused(tmp_path: Path) -> None:
    """ASGD moves at the rate of the step before."""
    with (
        training(tmp_path, optimizer=partial(optim.ASGD, lr=0.01)) as found,
        pytest.raises(SelfTestError, match="the optimizer moves at learning rate 0"),
    ):
        found.prove()


class Grouped(optim.SGD):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__([{"params": params}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1)


class Sketching(optim.SGD):
    """Keeps something of another shape than the weights."""

    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["row"] = each.grad.sum(0)


class Counting(optim.SGD):
    """Counts its own calls, and moves by the number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self._calls = 0

    def step(self, closure: Any = None) -> None:
        self._calls += 1
        for each in self.param_groups[0]["params"]:
            each.data -= self._calls * each.grad


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Counting, "Counting keeps _calls, which a checkpoint of shards cannot hold"),
        (optim.LBFGS, "step.. needs no closure, but failed"),
        (optim.SparseAdam, "failed"),
        (lambda parameters: None, "must return a torch.optim optimizer"),
        (lambda: None, "called with a list of parameters"),
        (Grouped, "groups of parameters"),
        (Sketching, "Sketching keeps row, which a checkpoint of shards cannot hold"),
        (optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), "called with a list of parameters"),
    ],
)
def test_optimizers_that_cannot_work_here_are_refused(tmp_path: Path, optimizer: Any, said: str) -> None:
    with pytest.raises(UnfitOptimizerError, match=said):
        training(tmp_path / "run", optimizer=optimizer)


def test_another_optimizer_does_not_continue_a_run(tmp_path: Path) -> None:
    run(tmp_path, 1, optimizer=partial(optim.SGD, lr=0.1, momentum=0.9))
    with pytest.raises(LedgerError, match="configured differently"):
        training(tmp_path, optimizer=partial(optim.SGD, lr=0.1, momentum=0.8))


# Schedules.


@pytest.mark.parametrize(
    "make",
    [
        partial(lr_scheduler.CosineAnnealingLR, T_max=12),
        partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=12),
        partial(lr_scheduler.StepLR, step_size=3),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5),
    ],
    ids=lambda make: make.func.__name__,
)
def test_a_schedulers_rates_are_those_that_torch_gives_in_a_loop_of_its_own(make: Any) -> None:
    found = rates_of(make, partial(optim.SGD, lr=0.2, momentum=0.9), 12)
    theirs = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.2, momentum=0.9)
    scheduler, expected = make(theirs), list[float]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            expected.append(theirs.param_groups[0]["lr"])
            theirs.step()
            scheduler.step()
    assert [found(step) for step in range(1, 13)] == expected and len(set(expected)) > 2


def test_numbers_functions_and_our_schedules() -> None:
    sgd = partial(optim.SGD, lr=0.2)
    assert [rates_of(None, sgd, 9)(step) for step in (1, 9)] == [0.2, 0.2], "the optimizer's own"
    assert [rates_of(1, sgd, 9)(step) for step in (1, 9)] == [1.0, 1.0]
    assert [rates_of(falling, sgd, 9)(step) for step in (1, 5)] == [0.05, 0.01]
    ours = rates_of(Schedule(peak=0.4, warmup=2, shape="linear"), sgd, 10)
    assert [round(ours(step), 6) for step in (1, 2, 3, 7)] == [0.2, 0.4, 0.4, 0.2]


@pytest.mark.parametrize(
    ("schedule", "optimizer", "said"),
    [
        (lr_scheduler.ReduceLROnPlateau, optim.SGD, "that of private records is private"),
        (partial(lr_scheduler.ReduceLROnPlateau, patience=3), optim.SGD, "that of private records is private"),
        (math.nan, optim.SGD, "learning rate of step 1 is nan"),
        (-0.1, optim.SGD, "learning rate of step 1 is -0.1"),
        (lambda step: math.inf, optim.SGD, "learning rate of step 1 is inf"),
        (None, Optimizer(type="SGD"), "no learning rate of its own"),
        (Schedule(peak=0.1, warmup_epochs=2), optim.SGD, "give warmup instead of warmup_epochs"),
        ("cosine", optim.SGD, "schedule= must be"),
        (lr_scheduler.CosineAnnealingLR, optim.SGD, "CosineAnnealingLR.* failed"),
        (lr_scheduler.ConstantLR(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)), optim.SGD, "schedule= must be"),
    ],
)
def test_schedules_that_give_no_rates_are_refused(schedule: Any, optimizer: Any, said: str) -> None:
    with pytest.raises(UnfitOptimizerError, match=said):
        rates_of(schedule, optimizer, 5)(1)


def test_a_step_at_no_number_moves_nothing_and_may_be_made_again(tmp_path: Path) -> None:
    with training(tmp_path, schedule=lambda step: math.nan if step == 2 else RATE) as found:
        found.prove()
        found.step(1)
        with pytest.raises(UnfitOptimizerError, match="step 2 is nan"):
            found.step(2)
        with pytest.raises(UnfitOptimizerError, match="step 2 is nan"):
            found.step(2, math.nan)
        assert found.done == 1
        found.step(2, RATE)


# Mechanisms.


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 2))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layer(inputs["x"]), inputs["y"], reduction="none")

    def right(self, inputs: Any) -> Tensor:
        x, y = (inputs["x"], inputs["y"]) if isinstance(inputs, dict) else inputs
        return (self.layer(x).argmax(1) == y).float()


def entropies(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model.layer(batch[0]), batch[1], reduction="none")


SIGNS = (Y > 0).long()
CLASSES = {"reader": TensorDataset(X, SIGNS), "example": (torch.zeros(5), torch.tensor(1))}
ACCURACY = {"release": [ReleasedMetric(name="accuracy", noise_multiplier=4, share=0.3)]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clip": Clip(adaptive=AdaptiveClip())}, "quantile"),
        ({**CLASSES, **ACCURACY, "model": Classifier, "loss": entropies}, "accuracy"),
        ({"views": 3}, "each drawn record is seen 3 times in a step"),
        ({"noise": BandedNoise(kind="banded", bands=2)}, "correlated"),
        ({"sampling": "allocation"}, "allocat"),
        ({"clip": Clip(groups="layer")}, "groups"),
    ],
    ids=["adaptive", "accuracy", "views", "banded", "allocation", "groups"],
)  # fmt: skip
def test_each_mechanism_ends_in_a_certificate_that_verifies(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """Released losses and probes, units, and exact noise have tests of their own."""
    with own(tmp_path, **changes) as found:
        for _ in found:
            pass
        verdict = found.finish()
    assert verdict.committed == 6 and 0 < verdict.epsilon == verdict.certified <= 20
    assert told in (tmp_path / "certificate.md").read_text() + (tmp_path / "ledger.jsonl").read_text()


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_units_gradient_is_clipped_as_one(tmp_path: Path, reduce: Any) -> None:
    """Draw, sum and noise from the definition, for units of one, two and three records."""
    owner = [number % 25 for number in range(50)] + list(range(10))
    units = Units("patient", owner, rows=3, reduce=reduce)
    with own(tmp_path, Regression(), reader=Named(), example={"x": X[0], "y": Y[0]}, loss=None, units=units,
             expected_batch=10, clip_norm=0.5) as found:  # fmt: skip
        assert found.plan.records == 25 and found.plan.divisor == pytest.approx(10)
        found.prove()
        before = {name: tensor.clone() for name, tensor in found.weights().items()}
        ids, noise = found.phase.core.sampler().draw(1).ids, found.phase.core.noise("noise")
        draws = [noise.draw(1, index, 0, each.numel(), np.float64) for index, each in enumerate(before.values())]
        found.step(1)
        after, plan = found.weights(), found.plan
    model, bound = Regression(), plan.clip_norm / (1 + rounding_allowance(24))
    model.load_state_dict(before)
    total, clipped = [torch.zeros_like(each, dtype=torch.float64) for each in before.values()], 0
    for unit in ids:
        losses = [model(Named_row(number)).sum() for number, name in enumerate(owner) if name == unit]
        loss = torch.stack(losses).mean() if reduce == "mean" else torch.stack(losses).sum()
        gradients = [each.double() for each in torch.autograd.grad(loss, list(model.parameters()))]
        norm = float(torch.cat([each.flatten() for each in gradients]).norm())
        clipped += norm > bound
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * min(1.0, bound / norm)
    assert clipped > len(ids) / 2 > 0
    for (name, start), sum_, draw in zip(before.items(), total, draws, strict=True):
        expected = start.double() - RATE * (sum_ + torch.from_numpy(draw).view(sum_.shape)) / plan.divisor
        assert torch.allclose(after[name].double(), expected, rtol=1e-5, atol=1e-6), name


def Named_row(number: int) -> dict[str, Tensor]:
    return {"x": X[number : number + 1], "y": Y[number : number + 1]}


def test_a_dataset_is_asked_once_for_each_view(tmp_path: Path) -> None:
    asked: list[int] = []

    class Shaken(Named):
        def __getitem__(self, at: int) -> dict[str, Tensor]:
            asked.append(at)
            return {"x": X[at] + len(asked), "y": Y[at]}

    with training(tmp_path, reader=Shaken(), records=None, synthetic=None, example={"x": X[0], "y": Y[0]}, views=3,
                  expected_batch=RECORDS) as found:  # fmt: skip
        found.prove()
        fetched = found._reader.fetch(np.array([4]), 1)
    assert asked.count(4) >= 3
    assert len(set(fetched.batch.inputs["x"][:, 0].tolist())) == 3, "three views of it"


def test_released_numbers_are_shown_and_a_probed_rate_moves_and_goes_on(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(
        loss_probes=LossProbes(every=2, bound=1, noise_multiplier=3), debug_seed=SEED, checkpoint_every=3, model=fixed,
        release=[ReleasedMetric(name="loss", bound=2, noise_multiplier=4)],
    )  # fmt: skip
    with own(tmp_path / "whole", **changes) as found:
        list(found)
        whole, rate = found.weights(), found.phase.rate
    assert rate is not None and rate.factor != 1
    for last in (3, 6):
        with own(tmp_path / "parts", **changes) as found:
            for step in found:
                if step == last:
                    break
            parts = found.weights()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "logs" / "public.jsonl").read_text().splitlines()]
    told = [line for line in lines if "noised_loss" in line]
    assert len(told) == 6 and any("learning_rate_factor" in line for line in told)


def test_probes_of_the_loss_need_one_rate(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="give schedule= one number"):
        own(tmp_path, loss_probes=LossProbes(), schedule=falling)


# Compiled blocks.


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Scaled(Residual):
    """By a number, which a recording would keep while the weights move."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.layer.weight.detach().abs().mean())


def deep() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Sequential(*(Residual() for _ in range(3))), nn.Sequential(Scaled(), Scaled()),
        nn.Linear(8, 1),
    )  # fmt: skip


def test_compiled_blocks_train_as_written_ones_do_and_the_owner_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "by_inductor", operation_by_operation)  # the compiler itself has tests of its own
    begun, weights = deep().state_dict(), []
    for how in ("off", "blocks"):
        with own(
            tmp_path / how, deep, computation=murmuration.Computation(compile=how), debug_seed=SEED, steps=3
        ) as found:
            list(found)
            weights.append(found.weights())
    for name, written in weights[0].items():
        moved = float((written - begun[name]).abs().max())
        assert float((weights[1][name] - written).abs().max()) < 1e-4 * moved, name
    notes = [(tmp_path / how / "logs" / "private" / "notes.jsonl").read_text() for how in ("off", "blocks")]
    assert "compiled" not in notes[0] and "core dumps" in notes[0]
    assert "3 of 5 blocks run as compiled code; as written run inner.2.0, inner.2.1: " in notes[1]


# The log of runs.


def test_runs_of_one_registry_know_of_each_other_and_share_a_budget(tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    first = finished(tmp_path / "first", registry=registry, epsilon=3, noise_multiplier=None)
    assert first["siblings"] == []
    second = finished(tmp_path / "second", registry=registry, epsilon=2, noise_multiplier=None)
    assert [each["run"] for each in second["siblings"]] == ["first"]
    # What it claims, once it is finished, and no longer what it may still spend.
    assert second["siblings"][0]["claimed"] == first["claim"]["epsilon_claimed"]
    together, claims = second["composition"]["epsilon_together"], [each["claim"]["epsilon"] for each in (first, second)]
    plans = [History.read(tmp_path / name / "ledger.jsonl")[0].plans[0] for name in ("first", "second")]
    events = [Event(plan.sampling_rate, plan.noise_multiplier, plan.steps) for plan in plans]
    assert max(claims) < together < sum(claims) + 1e-9
    assert together == pytest.approx(epsilon(events, plans[0].delta), rel=1e-3)
    assert "those that were told the same `registry`" in json.dumps(second["known_deviations"])
    RunLog.beside(registry).set_budget(6)
    with pytest.raises(DataBudgetError, match="budget of ε = 6 for all runs"):
        own(tmp_path / "third", registry=registry, epsilon=2, noise_multiplier=None)
    alone = finished(tmp_path / "alone")
    assert alone["siblings"] == [] and "other runs on them are not known" in json.dumps(alone["known_deviations"])


# Where the weights come from.

SOME = random_net().state_dict()


def fixed() -> nn.Module:
    model = random_net()
    model.load_state_dict(SOME)
    return model


def fixed_below() -> nn.Module:
    model = random_net()
    model.load_state_dict({**model.state_dict(), "0.weight": SOME["0.weight"]})
    return model


@pytest.mark.parametrize(
    ("model", "start", "foreign"),
    [
        (random_net, None, False),
        (random_net(), None, True),
        (fixed, None, True),
        (fixed_below, None, True),
        (fixed, Public("published with a paper"), False),
        (random_net(), Public("published with a paper"), False),
    ],
    ids=["random", "a module", "fixed", "fixed in part", "fixed and public", "a module, public"],
)
def test_a_certificate_says_where_the_weights_come_from(tmp_path: Path, model: Any, start: Any, foreign: bool) -> None:
    told = json.dumps(finished(tmp_path, model=model, start=start, steps=2)["known_deviations"])
    assert ("FOREIGN WEIGHTS" in told) == foreign
    assert ("The initial weights are public because: published with a paper" in told) == (start is not None)
    assert ("may have been trained on the very records" in told) == (foreign or start is not None)


@pytest.mark.parametrize("why", ["", "  ", "two\nlines", "a \x1b[2K clean line"])
def test_a_word_that_weights_are_public_needs_a_reason(why: str) -> None:
    with pytest.raises(RecipeError, match="needs a reason that can be printed"):
        Public(why)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier") / "run"
    finished(folder, dataset="A", steps=2)
    return folder


def test_weights_of_a_run_on_the_same_records_are_refused(tmp_path: Path, earlier: Path) -> None:
    with pytest.raises(RecipeError, match="trained on the very records of this run"):
        own(tmp_path, dataset="A", start=earlier)


@pytest.mark.parametrize("loss", [squares, None], ids=["with a loss", "a module of losses"])
def test_weights_of_a_run_on_other_records_bring_its_promise_along(tmp_path: Path, earlier: Path, loss: Any) -> None:
    class WithLoss(nn.Sequential):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return (super().forward(inputs["0"]).squeeze(1) - inputs["1"]).square()

    make = random_net if loss is not None else lambda: WithLoss(*random_net())
    loaded = Checkpoints.newest(RunDir(earlier).checkpoints)
    assert loaded is not None
    with own(tmp_path / "b", make, dataset="B", start=earlier, steps=2, loss=loss) as found:
        for name, tensor in loaded.weights().items():
            assert torch.equal(found.weights()[name.removeprefix("inner.")], tensor), name
        for _ in found:
            pass
        found.finish()
    certificate = json.loads((tmp_path / "b" / "certificate.json").read_text())
    assert "FOREIGN WEIGHTS" not in json.dumps(certificate)
    (origin,) = History.read(tmp_path / "b" / "ledger.jsonl")[0].origins
    assert origin.run == "run" and verify(earlier).epsilon <= origin.epsilon
    assert origin.deviation(found.plan.unit) in certificate["known_deviations"]
    with pytest.raises(RecipeError, match="trained on the very records of this run"):
        own(tmp_path / "c", dataset="A", start=tmp_path / "b")


def test_what_a_run_does_not_fill_must_be_random_too(tmp_path: Path, earlier: Path) -> None:
    """Else one tensor of a known run would vouch for all others."""

    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 2), nn.Linear(2, 1))

    told = json.dumps(finished(tmp_path / "random", model=wider, dataset="B", start=earlier, steps=1))
    assert "FOREIGN WEIGHTS" not in told
    told = json.dumps(finished(tmp_path / "given", model=wider(), dataset="B", start=earlier, steps=1))
    assert "FOREIGN WEIGHTS" in told
    told = json.dumps(finished(tmp_path / "all", model=random_net(), dataset="B", start=earlier, steps=1))
    assert "FOREIGN WEIGHTS" not in told, "every tensor is the run's"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": "nowhere"}, "does not exist"),
        ({"model": lambda: nn.Linear(3, 3), "start": "earlier"}, "no tensor of a name and shape"),
        ({"model": lambda: 5}, "a function that makes one, but made a int"),
        ({"model": 5}, "model= must be a module"),
    ],
)
def test_starts_that_cannot_be(tmp_path: Path, earlier: Path, change: dict[str, Any], said: str) -> None:
    change = {**change, "start": earlier} if change.get("start") == "earlier" else change
    with pytest.raises(RunError, match=said):
        own(tmp_path / "run", **{"dataset": "B", **change})


# The loop.


def test_the_loop_shows_saves_and_writes_as_the_settings_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    with own(tmp_path, log_every=2, checkpoint_every=4, keep_checkpoints=1, schedule=falling) as found:
        for step in found:
            seen.append((step, found.done, found.saved))
        spent = found.epsilon()
    assert seen == [(1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 4), (5, 5, 4), (6, 6, 6)]
    told = capsys.readouterr().out
    assert "self-test passed" in told
    lines = [line for line in told.splitlines() if line.startswith("training  step ")]
    assert [line.split()[2] for line in lines] == ["2/6", "4/6", "6/6"]
    assert f"lr 8.33e-03  ε {round_up(spent, 3):.3f} of 20" in lines[-1]
    board = EventAccumulator(str(tmp_path / "tb" / "public"))
    board.Reload()
    by_name = {tag.split("/")[-1]: board.Scalars(tag) for tag in board.Tags()["scalars"]}
    assert [(each.step, round(each.value, 6)) for each in by_name["lr"]] == [(2, 0.025), (4, 0.0125), (6, 0.008333)]
    assert by_name["epsilon"][-1].value == pytest.approx(spent) and len(by_name["epsilon"]) == 3
    ledger = History.read(tmp_path / "ledger.jsonl")[1]
    assert [entry.fields["step"] for entry in ledger if entry.kind == "checkpoint"] == [4, 6]
    assert len([each for each in (tmp_path / "checkpoints").iterdir() if each.is_dir()]) == 1


def test_a_loop_that_was_left_goes_on_where_it_saved(tmp_path: Path) -> None:
    with own(tmp_path, fixed, checkpoint_every=2, debug_seed=SEED) as found:
        for step in found:
            if step == 4:
                break
        assert [step for step in found] == [5, 6], "or in the same program"
        whole = found.weights()
    with own(tmp_path / "again", fixed, checkpoint_every=2, debug_seed=SEED) as found:
        for step in found:
            if step == 2:
                break
    with own(tmp_path / "again", fixed, checkpoint_every=2, debug_seed=SEED) as found:
        assert list(found) == [3, 4, 5, 6] and list(found) == []
        assert all(torch.equal(tensor, whole[name]) for name, tensor in found.weights().items())


def test_a_loop_that_is_asked_to_stop_saves_what_is_complete(tmp_path: Path) -> None:
    release = [ReleasedMetric(name="loss", bound=2, noise_multiplier=4)]
    with own(tmp_path, checkpoint_every=5, release=release) as found:
        with pytest.raises(Stopped, match="SIGINT"):
            for step in found:
                if step == 2:
                    os.kill(os.getpid(), signal.SIGINT)
        assert (found.done, found.saved) == (2, 2)
    last = History.read(tmp_path / "ledger.jsonl")[0].last_checkpoint()
    assert last is not None and last.step == 2
    shown = [json.loads(line) for line in (tmp_path / "logs" / "public.jsonl").read_text().splitlines()]
    assert [line["step"] for line in shown if "noised_loss" in line] == [1, 2], "durable, so they are told"


def test_nothing_is_measured_before_a_checkpoint_is_durable(tmp_path: Path) -> None:
    class Dropping(nn.Sequential):
        pass

    def measure(model: nn.Module) -> dict[str, float]:
        saved = History.read(tmp_path / "ledger.jsonl")[0].last_checkpoint()
        newest = Checkpoints.newest(RunDir(tmp_path).checkpoints)
        assert saved is not None and newest is not None and newest.digest == saved.digest
        assert not model.training and not torch.is_grad_enabled()
        assert isinstance(model, Dropping), "the program's own module"
        return {"error": float(squares(model, (X, Y)).mean()), "step": saved.step}

    make = lambda: Dropping(*random_net())  # noqa: E731
    measured = []
    with own(tmp_path, make, public={"evaluation": "the plane's other half"}) as found:
        for step in found:
            if step in (2, 5):
                measured.append(found.evaluate(measure))
                assert found.model.training and torch.is_grad_enabled()
        verdict = found.finish()
    assert [each["step"] for each in measured] == [2, 5] and verdict.committed == 6
    board = EventAccumulator(str(tmp_path / "tb" / "public"))
    board.Reload()
    (tag,) = [tag for tag in board.Tags()["scalars"] if tag.endswith("error")]
    assert [each.value for each in board.Scalars(tag)] == pytest.approx([each["error"] for each in measured])
    assert "evaluated in" in (tmp_path / "certificate.md").read_text()


def test_a_measurement_that_writes_into_the_model_ends_the_run(tmp_path: Path) -> None:
    with own(tmp_path, public={"evaluation": "the test set"}) as found:
        found.prove()
        found.step(1)
        found.evaluate(lambda model: {"sum": float(next(model.parameters()).add_(1).sum())})
        with pytest.raises(LedgerError, match="changed outside of the private step"):
            found.step(2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": None}, "either steps or epochs"),
        ({"epochs": 2}, "either steps or epochs"),
        ({"steps": 0}, "steps must be a whole number from 1 up"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": None, "epochs": 0}, "epochs must be a finite number above 0"),
        ({"steps": None, "epochs": math.nan}, "epochs must be a finite number above 0"),
        ({"micro_batch": 0}, "micro_batch must be"),
        ({"micro_batch": "large"}, "micro_batch must be"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be"),
        ({"log_every": 0}, "log_every must be"),
        ({"engine": "ddp"}, "engine 'ddp' is none of local, deepspeed, fsdp2"),
        ({"dataset": " "}, "dataset must be a name"),
        ({"public": {"weights": "mine"}}, "public: weights is none of evaluation"),
        ({"public": {"evaluation": "toy"}}, "'toy' is what this run protects"),
        ({"sampling": "allocation", "bands": 2}, "do not go together"),
        ({"sampling": "allocation", "keep_key": True}, "do not go together"),
        ({"bands": 2, "computation": murmuration.Computation(noise="exact")}, "do not go together"),
        ({"shard_over": 2}, "shard_over = 2: it is for engine"),
        ({"computation": murmuration.Computation("opacus", compile="blocks")}, "needs the book-keeping clip engine"),
    ],
)  # fmt: skip
def test_settings_are_refused_in_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said) as refused:
        own(tmp_path / "run", **changes)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path).rglob("checkpoint*/*"))


def test_epochs_and_every_record_are_counted_in_records_or_units(tmp_path: Path) -> None:
    with own(tmp_path / "a", steps=None, epochs=1.5) as found:
        assert found.plan.steps == 5, "60 · 1.5 records, 20 at a time"
    with own(tmp_path / "b", steps=None, epochs=2, expected_batch="all") as found:
        assert found.plan.steps == 2 and found.plan.divisor == RECORDS
    units = Units("patient", [number // 6 for number in range(RECORDS)], rows=6)
    with own(tmp_path / "c", steps=None, epochs=3, expected_batch=5, units=units) as found:
        assert (found.plan.records, found.plan.steps) == (10, 6)


@pytest.mark.parametrize(
    "module", [records, settings, start_of, rates, function_reader], ids=lambda module: module.__name__
)
def test_the_examples_of_the_docstrings_hold(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert not failed and tried


def test_everything_that_a_program_needs_has_one_name() -> None:
    assert all(getattr(murmuration, name) is not None for name in murmuration.__all__)
    assert sorted(murmuration.__all__) == murmuration.__all__
    with pytest.raises(AttributeError, match="no attribute 'train_privately'"):
        murmuration.__getattr__("train_privately")
    with pytest.raises(TypeError):
        Settings()  # pyright: ignore[reportCallIssue]
    assert Privacy(epsilon=1, expected_batch=2) == Privacy(epsilon=1, expected_batch=2)
    assert issubclass(PlanError, RunError) and issubclass(InputError, RunError)
