"""Where the weights come from with which the library begins: random, known, public by a reason, or named as foreign."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from murmuration import Public, Units
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.errors import RunError
from murmuration.accounting.ledger.history import History
from murmuration.model.build import build
from murmuration.model.classifier import Classifier
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import Trainable, select
from murmuration.train.config.section import RecipeError
from murmuration.train.library.start import started
from murmuration.train.self_test.self_test import SelfTestError
from murmuration.train.storage.checkpoint import Checkpoints
from murmuration.train.storage.run_dir import RunDir
from tests.support.own_module import (
    RECORDS,
    WIDE,
    Regression,
    X,
    Y,
    finished,
    own,
    random_net,
    squares,
    training,
)
from tests.support.train_helpers import alone


class Net(Regression):
    """Random weights, as a function of the seed from outside."""

    def __init__(self, width: int = WIDE) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


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


OTHERS = torch.randn(1000, 5, generator=torch.Generator().manual_seed(3))


def fixed_below() -> nn.Module:
    net = Net(8)
    net.layers[0].weight = nn.Parameter(OTHERS[:8].clone())
    return net


OF_NET = {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Net, set()),
        (ByHand, set()),
        (Net(), OF_NET),
        (Regression, OF_NET),  # seeds by itself
        (fixed_below, {"layers.0.weight"}),
        (fitted, OF_NET),
        (Prototypes, {"prototypes", "offset"}),
        (partial(Prototypes, X), {"prototypes", "offset", "bank"}),
        (partial(Prototypes, [{"a": X.numpy()}]), {"prototypes", "offset", "bank[0]['a']"}),
        (partial(Centred, X.mean(0)), {"mean"}),
        (partial(Centred, X.mean().reshape(1)), {"mean"}),
        (partial(Centred, torch.full((5,), 0.5)), set()),
    ],
    ids=["random", "by hand", "a module", "seeded", "fixed in part", "fitted", "prototypes", "a bank",
         "an array in a list", "means", "one mean", "a number"],
)  # fmt: skip
def test_only_what_differs_with_the_seed_and_is_made_of_nothing_else_is_random(model: Any, named: set[str]) -> None:
    assert set(started(model, None, alone()).unexplained) == named


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


def deviations(folder: Path, **changes: Any) -> str:
    return json.dumps(finished(folder, **{"dataset": "B", "steps": 1} | changes)["known_deviations"])


@pytest.mark.parametrize(
    ("model", "start", "foreign"),
    [(random_net, None, False), (random_net(), None, True), (random_net(), Public("published with a paper"), False)],
    ids=["random", "a module", "a module, public"],
)
def test_a_certificate_says_where_the_weights_come_from(tmp_path: Path, model: Any, start: Any, foreign: bool) -> None:
    told = deviations(tmp_path, model=model, start=start)
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
    finished(folder, dataset="A", steps=2, public={"evaluation": "the test set"})
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "trained on the very records of this run"),
        ({"reader": TensorDataset(X[1:], Y[1:])}, "trained on the very records of this run"),
        ({"units": Units("person", [number // 2 for number in range(RECORDS)], rows=2), "expected_batch": 8},
         "trained on the very records of this run"),
        ({"dataset": "the test set"}, "used records without noise"),
    ],
    ids=["the same", "all but one", "as units", "its test set"],
)  # fmt: skip
def test_weights_of_a_run_on_records_of_that_name_are_refused(
    tmp_path: Path, earlier: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        own(tmp_path, start=earlier, **{"dataset": "A"} | changes)


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


def test_checkpoints_of_another_run_do_not_come_with_the_promise_of_this_one(tmp_path: Path, earlier: Path) -> None:
    finished(tmp_path / "other", dataset="B", steps=2)
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    shutil.copytree(earlier / "checkpoints", tmp_path / "other" / "checkpoints")
    with pytest.raises(RunError, match=r"its ledger names no such checkpoint as phase00-step00000002, so that may be"):
        own(tmp_path / "again", dataset="A", start=tmp_path / "other")


def test_what_a_run_does_not_fill_must_be_random_too(tmp_path: Path, earlier: Path) -> None:
    """Else one tensor of a known run would vouch for all others."""

    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 2), nn.Linear(2, 1))

    assert "FOREIGN WEIGHTS" not in deviations(tmp_path / "random", model=wider, start=earlier)
    assert "FOREIGN WEIGHTS" in deviations(tmp_path / "given", model=wider(), start=earlier)
    assert "FOREIGN WEIGHTS" not in deviations(tmp_path / "all", model=random_net(), start=earlier), "all are the run's"


def test_unknown_weights_stay_unknown_in_the_runs_that_begin_from_them(tmp_path: Path) -> None:
    finished(tmp_path / "first", model=random_net(), dataset="A", steps=1)
    assert "FOREIGN WEIGHTS" in deviations(tmp_path / "second", start=tmp_path / "first")
    assert "FOREIGN WEIGHTS" in deviations(tmp_path / "third", start=tmp_path / "second", dataset="C")


@pytest.mark.parametrize("word", ["lora", "statistics", "whitened"])
def test_adapters_and_sums_of_a_recipe_are_part_of_the_weights(tmp_path: Path, word: Trainable) -> None:
    settings = ModelSettings(family="classifier", image_size=16, patch_size=8, width=16, depth=1, heads=2, classes=3)
    trained = build(settings, "classify")
    select(trained, word)
    with torch.no_grad():
        for name, tensor in trained.state_dict().items():
            if name.startswith(("head.", "blocks.")):
                tensor.uniform_(-0.1, 0.1)
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    model = started(lambda: build(settings, "classify"), tmp_path / "weights.safetensors", alone()).model
    images = torch.rand(4, 3, 16, 16)
    assert isinstance(trained, Classifier) and isinstance(model, Classifier)
    torch.testing.assert_close(model.eval().logits(images), trained.eval().logits(images))


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


def test_what_another_model_holds_keeps_nobody_from_saving_before_the_proof(tmp_path: Path) -> None:
    held = list[Tensor]()

    class Keeps(Net):
        def forward(self, inputs: Any) -> Tensor:
            held.append(inputs["x"])
            return super().forward(inputs)

    with training(tmp_path / "first", Keeps()) as first, pytest.raises(SelfTestError, match="still holds tensors"):
        first.prove()
    with training(tmp_path / "second") as second:
        second.save()
    assert held
