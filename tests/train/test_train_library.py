"""What a program asks of the library besides data, optimizer and weights: layers, mechanisms, runs, the loop."""

from __future__ import annotations

import doctest
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import murmuration
from murmuration import (
    AdaptiveClip,
    BandedNoise,
    Clip,
    LossProbes,
    Privacy,
    ReleasedMetric,
    Settings,
    Units,
)  # fmt: skip
from murmuration.accounting.epsilon.accountant import epsilon, round_up
from murmuration.accounting.errors import InputError, PlanError, RunError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.sampling import RandomAllocation
from murmuration.data.batch import function_reader
from murmuration.train.clip import compiled
from murmuration.train.distributed.stop import Stopped
from murmuration.train.library import records, settings
from murmuration.train.library import start as start_of
from murmuration.train.optim import rates
from murmuration.train.self_test.self_test import SelfTestError
from murmuration.train.storage.checkpoint import Checkpoints
from murmuration.train.storage.run_dir import RunDir
from murmuration.train.storage.sibling_runs import DataBudgetError, RunLog
from tests.support.own_module import RECORDS, SEED, WIDE, X, Y, finished, own, random_net, squares, training
from tests.support.recorded_blocks import operation_by_operation


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
        self.used, self.idle = nn.Linear(5, 2 * WIDE), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).mean(1, keepdim=True)


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
        ({"noise": BandedNoise(kind="banded", bands=2)}, "correlated"),
        ({"sampling": "allocation"}, "allocat"),
        ({"clip": Clip(groups="layer")}, "groups"),
    ],
    ids=["adaptive", "accuracy", "banded", "allocation", "groups"],
)  # fmt: skip
def test_each_mechanism_ends_in_a_certificate_that_verifies(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """Released losses and probes, units, views, and exact noise have tests of their own."""
    with own(tmp_path, **changes) as found:
        for _ in found:
            pass
        verdict = found.finish()
    assert verdict.committed == 6 and 0 < verdict.epsilon == verdict.certified <= 20
    assert told in (tmp_path / "certificate.md").read_text() + (tmp_path / "ledger.jsonl").read_text()


def fixed() -> nn.Module:
    torch.manual_seed(5)
    return random_net()


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
        own(tmp_path, loss_probes=LossProbes(), schedule=lambda step: 0.05 / step)


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
    for told, without in ((first, False), (alone, True)):
        assert ("has no log outside" in json.dumps(told["known_deviations"])) == without


# The loop.


def test_the_loop_shows_saves_and_writes_as_the_settings_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    with own(tmp_path, log_every=2, checkpoint_every=4, keep_checkpoints=1, schedule=lambda step: 0.05 / step) as found:
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
            if step == 3:
                break
    with own(tmp_path / "again", fixed, checkpoint_every=2, debug_seed=SEED) as found:
        assert list(found) == [4, 5, 6] and list(found) == [], "leaving it saves what was made"
        assert all(torch.equal(tensor, whole[name]) for name, tensor in found.weights().items())
        verdict = found.finish()
    assert verdict.opened == verdict.committed == 6


def test_a_loop_that_is_asked_to_stop_saves_what_is_complete(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    release = [ReleasedMetric(name="loss", bound=2, noise_multiplier=4)]
    with own(tmp_path, checkpoint_every=5, release=release) as found:
        with pytest.raises(Stopped, match="SIGINT"):
            for step in found:
                if step == 2:
                    os.kill(os.getpid(), signal.SIGINT)
        assert (found.done, found.saved) == (2, 2) and signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before, "does again what it did"
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": None}, "either steps or epochs"),
        ({"epochs": 2}, "either steps or epochs"),
        ({"steps": 0}, "steps must be a whole number from 1 up"),
        ({"workers": -1}, "workers must be a whole number from 0 up"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": None, "epochs": 0}, "epochs must be a finite number above 0"),
        ({"steps": None, "epochs": math.nan}, "epochs must be a finite number above 0"),
        ({"expected_batch": RECORDS + 1}, "expected_batch must lie in"),
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
    with own(tmp_path / "d", steps=None, epochs=2, expected_batch=28, sampling="allocation") as found:
        plan = found.plan
        assert (plan.steps, plan.sampling, plan.participations) == (4, RandomAllocation(2), 2), "not 4.3 steps"


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
