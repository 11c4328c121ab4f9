"""What a program may give the library as records and units, and which of them a step is made of."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from murmuration import Units
from murmuration.accounting.errors import RunError
from murmuration.accounting.ledger.history import History
from murmuration.data.batch.function_reader import ReadFailsError
from murmuration.train.clip.rule import rounding_allowance
from murmuration.train.distributed.ranks import Disagreement
from murmuration.train.distributed.stop import Stopped
from murmuration.train.library.records import OwnRecords
from murmuration.train.self_test.self_test import SelfTestError
from tests.support.own_module import (
    RECORDS,
    SEED,
    Regression,
    X,
    Y,
    first_step_by_hand,
    own,
    random_net,
    read,
    run,
    synthetic,
    training,
)
from tests.support.train_helpers import on_ranks

PEOPLE = [f"p{number * 7 % 20}" for number in range(RECORDS)]


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
        ({"units": Units("patient", [("clinic", name) for name in PEOPLE])}, "one text or number for each record"),
        ({"units": Units("patient", [None, *PEOPLE[1:]])}, "one text or number for each record"),
    ],
)
def test_data_of_a_wrong_kind_are_refused_before_a_run_begins(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunError, match=said) as refused:
        own(tmp_path / "run", **changes)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def gone(_: np.ndarray) -> Any:
    raise OSError("/patients")


IN_MEMORY = {"records": RECORDS, "example": None, "synthetic": synthetic, "model": Regression, "loss": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reader": [(x, object()) for x in X]}, "all of 8 records"),
        (IN_MEMORY | {"reader": gone}, "failed for all of 8 records"),
        (IN_MEMORY | {"reader": lambda n: {"x": X[n]}},
         r"returns \['x'\], but the synthetic records have \['x', 'y'\]; give one"),
    ],
    ids=["no tensors", "unreadable", "other names"],
)  # fmt: skip
def test_where_no_record_can_be_read_nothing_is_charged(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ReadFailsError, match=said):
        own(tmp_path, **changes)
    assert not (tmp_path / "ledger.jsonl").exists()


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


def fixed() -> nn.Module:
    torch.manual_seed(5)
    return random_net()


def test_a_run_with_processes_that_read_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def trained(name: str, workers: list[int]) -> dict[str, Tensor]:
        for count in workers:
            data = Jittered(frozenset({3, 5}))
            with own(tmp_path / name, fixed, reader=data, debug_seed=SEED, steps=4, workers=count) as found:
                for _ in found:
                    if count != workers[-1] and found.done == 2:
                        break
                weights = found.weights()
        return weights

    alone = trained("alone", [0])
    for name, workers in (("two", [2]), ("changed", [0, 3])):
        assert all(torch.equal(tensor, alone[each]) for each, tensor in trained(name, workers).items())


def test_the_death_of_a_process_that_reads_stops_the_run_which_goes_on_later(tmp_path: Path) -> None:
    here, dead = os.getpid(), tmp_path / "dead"

    class Deadly(Named):
        def __getitem__(self, at: int) -> dict[str, Tensor]:
            if os.getpid() != here and dead.exists() and at % 2:
                os._exit(3)
            return super().__getitem__(at)

    example = {"x": X[0], "y": Y[0]}
    changes: dict[str, Any] = dict(reader=Deadly(), records=None, synthetic=None, example=example, steps=6)
    with training(tmp_path / "run", workers=1, **changes) as found:
        with pytest.raises(Stopped, match=r"a process that reads records ended \(exit code 3\)"):
            for _ in found:
                dead.touch()
        assert 0 < found.done == found.saved < 6, "what is complete is saved"
    with training(tmp_path / "run", **changes) as found:
        for step in found:
            if step == 5:  # the step that was left stays charged, which costs the last one
                break


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


WHOLE = TensorDataset(X, Y)
PARTS = Subset(WHOLE, range(20)), Subset(WHOLE, range(20, RECORDS))


@pytest.mark.parametrize(
    ("data", "again"),
    [
        (Subset(WHOLE, [*range(RECORDS), 7, 7, -1]), 3),
        (Subset(Subset(WHOLE, [3, 4, 3]), [0, 2]), 1),
        (ConcatDataset([WHOLE, WHOLE]), RECORDS),
        (Subset(ConcatDataset([PARTS[0], PARTS[1], PARTS[0]]), range(65)), 5),
        (ConcatDataset(PARTS), 0),
        (ConcatDataset([WHOLE, TensorDataset(X, Y)]), 0),
        (Subset(Named(), [5, 1, 9, 2]), 0),
    ],
)
def test_a_record_that_a_dataset_has_several_times_is_refused(tmp_path: Path, data: Any, again: int) -> None:
    """As in a part that has rare classes more often. Each time it would be clipped for itself."""
    given: dict[str, Any] = {"expected_batch": 1, "loss": lambda model, batch: model(batch), "model": Regression}
    given["example"] = {"x": X[0], "y": Y[0]} if isinstance(data[0], dict) else (X[0], Y[0])
    if not again:
        own(tmp_path, reader=data, **given).close()
        return
    with pytest.raises(RunError, match=rf"{again} of the {len(data)} records are another one again"):
        own(tmp_path, reader=data, **given)
    own(tmp_path, reader=data, **given, units=Units("source", ["one"] * len(data))).close()


# Ranks that number the records differently.


@pytest.mark.parametrize("spoilt", ["", "labels", "draws", "one record", "rounding", "unreadable"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_ranks_that_have_the_records_in_different_orders_are_refused(shuffled: bool, spoilt: str) -> None:
    """One record would enter a step twice. What differs for another reason than the order is no reason."""

    def of_rank(ranks: Any) -> None:
        order = np.random.default_rng(ranks.rank if shuffled else 0).permutation(RECORDS)
        draw = np.random.default_rng()

        def read_here(numbers: np.ndarray) -> dict[str, Tensor]:
            found, number = read(order[numbers]), int(numbers[0])
            if spoilt == "unreadable" and number % 2:
                raise ValueError("gone")
            if spoilt == "draws":
                found["x"] = torch.from_numpy(draw.normal(size=(1, 5))).float()
            if spoilt == "rounding":
                found["x"] = found["x"] * (1 + 1e-6 * ranks.rank)
            if spoilt == "one record" and number == 0:
                found["x"] = found["x"] + ranks.rank
            if spoilt == "labels":
                found["x"] = torch.ones(1, 5)
            return found

        OwnRecords.of(read_here, RECORDS, None, 1, None, synthetic).require_readable(ranks)

    if shuffled and spoilt != "draws":
        with pytest.raises(Disagreement, match="different records under the same numbers"):
            on_ranks(3, of_rank)
    else:
        on_ranks(3, of_rank)


def test_ranks_that_have_different_numbers_of_records_are_refused() -> None:
    def of_rank(ranks: Any) -> None:
        OwnRecords.of(read, RECORDS - ranks.rank, None, 1, None, synthetic).require_readable(ranks)

    with pytest.raises(Disagreement, match="the number of records"):
        on_ranks(2, of_rank)


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


# Units of several records.


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_units_gradient_is_clipped_as_one(tmp_path: Path, reduce: Any) -> None:
    """Draw, sum and noise from the definition, for units of one, two and three records."""
    owner = [number % 25 for number in range(50)] + list(range(10))

    def loss(model: nn.Module, unit: int) -> Tensor:
        rows = [number for number, name in enumerate(owner) if name == unit]
        losses = torch.cat([model({"x": X[row : row + 1], "y": Y[row : row + 1]}) for row in rows])
        return losses.mean() if reduce == "mean" else losses.sum()

    with own(
        tmp_path, Regression(), reader=Named(), example={"x": X[0], "y": Y[0]}, loss=None, expected_batch=10,
        units=Units("patient", owner, rows=3, reduce=reduce), clip_norm=0.5,
    ) as found:  # fmt: skip
        assert found.plan.records == 25 and found.plan.divisor == pytest.approx(10)
        assert first_step_by_hand(found, 24, loss) > 2, "some are clipped"


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
