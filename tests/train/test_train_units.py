"""A unit's contribution, end to end: drawn from an index, read into rows, clipped as one, noised, and audited."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.audit_evidence import ACCUSED, Claim, Evidence
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, MicroBatch, slots
from murmuration.data.index.open import open_units
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.index.unit_table import UnitTable
from murmuration.train.audit.audit import Shown, Sightings, WatchedEngine, charged_claim
from murmuration.train.audit.canaries import Coordinates, toss
from murmuration.train.audit.turns import SeenSegment
from murmuration.train.clip.engine import ClipEngine, Clipped, Precision
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import GradientSums
from murmuration.train.core import PrivateCore
from murmuration.train.step import Records
from tests.end_to_end.audit_toy import MICRO_BATCH, NoStop, toy_plan
from tests.support.clip_world import size
from tests.support.parity_engines import ENGINES, prepared, summed
from tests.support.tars import numbered
from tests.support.train_helpers import Toy, alone, private_engine

SIDE, BOUND = 4, 0.5
KEYS = b"a" * 32, b"m" * 32, b"d" * 32
OWNERS = [*["large"] * 500, "single", *[f"p{number % 7}" for number in range(20)]]


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardIndex, UnitTable]:
    """One patient with 500 pictures, over several shards, one with a single picture, and seven others."""
    folder = tmp_path_factory.mktemp("patients")
    draw, records = np.random.default_rng(3), list[dict[str, bytes]]()
    for owner in OWNERS:
        picture = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(picture, "PNG")
        records.append({"png": picture.getvalue(), "json": json.dumps({"patient_id": owner}).encode()})
    for shard, start in enumerate(range(0, len(records), 150)):
        (folder / f"{shard:03d}.tar").write_bytes(numbered(records[start : start + 150], start))
    index = build(folder, wanted=Wanted(unit="patient_id"))
    return index, open_units(index, "patient_id")


def read(patients: tuple[ShardIndex, UnitTable], ids: list[int], rows: int, reduce: Any) -> MicroBatch:
    index, units = patients
    reader = BatchReader(index, DataSpec(SIDE), None, *KEYS, slots=SlotRows(units, rows, reduce, key=b"u" * 32))
    return reader.read(np.array(ids), 5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("rows", [2, 500])
def test_a_patient_of_500_records_moves_the_sum_no_more_than_one_with_a_single_record(
    patients: tuple[ShardIndex, UnitTable], engine: str, reduce: str, rows: int
) -> None:
    large, single = 0, 1
    assert patients[1].sizes[[large, single]].tolist() == [500, 1]
    model = Toy()
    clip = prepared(engine, ClipRule("flat", BOUND, 0.0), model)

    def clipped(ids: list[int]) -> dict[str, Tensor]:
        batch = read(patients, ids, rows, reduce)
        return summed(clip, model, [(batch.inputs, batch.present)])[0]

    everyone = clipped([large, single, 2, 3])
    for unit, others in ((large, [EMPTY, single, 2, 3]), (single, [large, EMPTY, 2, 3])):
        without = clipped(others)
        moved = size({name: everyone[name].double() - without[name].double() for name in everyone})
        assert moved <= BOUND * (1 + 1e-5), unit
        assert moved > 0.99 * BOUND, "both reach the bound, so that nothing else limits them"


def test_rows_that_are_clipped_one_by_one_would_move_it_by_more(patients: tuple[ShardIndex, UnitTable]) -> None:
    """The planted fault of the audit below, and the power of the test above."""
    model = Toy()
    clip = RowByRow(prepared("book-keeping", ClipRule("flat", BOUND, 0.0), model))
    batch = read(patients, [0], 50, "mean")
    total = summed(clip, model, [(batch.inputs, batch.present)])[0]
    assert size(total) > 5 * BOUND


class RowByRow:
    """A clip engine that forgets whose the rows are: each is clipped by itself, and a unit adds all of them."""

    def __init__(self, inner: ClipEngine) -> None:
        self.inner = inner
        self.rule = inner.rule
        self.precision: Precision = inner.precision

    def prepare(self, model: nn.Module) -> None:
        self.inner.prepare(model)

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        rest, slots = dict(inputs), len(present)
        if ROW_SHARE in rest:
            present = rest.pop(ROW_SHARE) > 0
        found = self.inner.add_clipped(model, rest, present, sums, rule)
        # What is told of a slot has the shape that it should have, so that nothing but the sum shows the fault.
        first = {name: getattr(found, name).view(slots, -1)[:, 0] for name in ("losses", "norms", "factors")}
        return replace(found, **first)


# A one-run audit with canaries that are patients: each has four records, all of which push along one coordinate of its
# own, by far more than the bound.

CANARIES, ROWS, STEPS, CLAIM = 600, 4, 4, 2.0


class OneHot(nn.Module):
    """The gradient of a row is the row itself; pictures for the self-test of the shape that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, CANARIES))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.linear(inputs["images"].flatten(1), self.weight).squeeze(1)


def canary_patients(included: np.ndarray) -> Any:
    def batches(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        del step
        for row in slots(ids, 0, 1, MICRO_BATCH):
            there = (row != EMPTY) & included[row]
            pushes = torch.zeros(len(row), ROWS, CANARIES)
            pushes[np.flatnonzero(there), :, row[there]] = 1e3
            share = torch.from_numpy(there).repeat_interleave(ROWS).float() / ROWS
            yield MicroBatch({"images": pushes.flatten(0, 1), ROW_SHARE: share}, torch.from_numpy(there))

    return batches


def audited(folder: Path, around: Any = lambda clip: clip) -> tuple[Evidence, Claim]:
    """What the canaries show, and what the ledger charges: with the real step, draws, noise and ledger."""
    folder.mkdir()
    plan, included, model = toy_plan(CANARIES, 1.0, STEPS, CLAIM), toss(CANARIES), OneHot()
    coordinates = Coordinates(("weight",), np.array([0, CANARIES]), np.arange(CANARIES))
    journal = Journal(Ledger.open(folder / "ledger.jsonl"))
    journal.start_run("toy audit", "-", False, {}, "hmac-sha256", "signer")
    journal.declare_plan(0, "private", plan, describe("pld"))
    journal.begin_segment(0, "config", "data", 0, "first")
    inner, clip, _ = private_engine(alone(), plan, False, model, MICRO_BATCH, around_clip=around)
    engine = WatchedEngine(inner)
    engine.watcher = seen = Sightings(coordinates)
    keys = {"sampling": b"s" * 32, "sampling-digest": b"d" * 32, "noise": toss(32).tobytes()}
    core = PrivateCore(plan, clip, engine, keys.__getitem__, alone())
    stop: Any = NoStop()
    step = core.step(0, journal, Records(core.sampler().draw, canary_patients(included)), stop,
                     noise=core.noise("noise"))  # fmt: skip
    took_part = []
    for t in range(1, STEPS + 1):
        step.run(t, 0.0)
        drawn = np.zeros(CANARIES, dtype=bool)
        drawn[step.records.draw(t).ids] = True
        took_part.append(drawn & included)
    values = seen.values([np.zeros(CANARIES)] * STEPS, plan.divisor, alone(), False)
    shown = SeenSegment(1, values, np.array(took_part))
    return Shown.by([shown], plan, np.arange(CANARIES), included, clip.rule.bound).evidence, charged_claim(journal)


def test_canary_patients_stay_below_the_claim_and_rows_clipped_one_by_one_do_not(tmp_path: Path) -> None:
    honest, claim = audited(tmp_path / "honest")
    faulty, same = audited(tmp_path / "faulty", RowByRow)
    assert claim.epsilon == same.epsilon and CLAIM - 1e-3 < claim.epsilon <= CLAIM, "the ledger does not see the fault"
    assert faulty.p_value(claim) < ACCUSED <= honest.p_value(claim)
    # At this confidence, an honest run's bound exceeds its claim once in a million runs.
    low, high = (each.bound(claim, 1 - 1e-6) for each in (honest, faulty))
    assert low.epsilon <= claim.epsilon < high.epsilon
    assert math.isfinite(high.epsilon)
