"""`privacy.views`: what the config, the plan and the parts around the step make of several views of a record."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.errors import PlanError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.function_reader import FunctionReader
from murmuration.data.batch.held_out import HELD_OUT
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, MicroBatch
from murmuration.model.build import build
from murmuration.model.inputs import DROP_KEY, RECORD_WEIGHT
from murmuration.train.audit.canaries import CanaryBatches
from murmuration.train.audit.replay import digests_of_slots
from murmuration.train.clip.losses import slot_losses
from murmuration.train.config.root import Config
from murmuration.train.engines.forward import PlainForward
from murmuration.train.library.own_run import PHASE
from murmuration.train.planner.forecast import counted
from murmuration.train.planner.micro_batch import _fitting
from murmuration.train.recipe.ready_phase import plan_of_phase
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestError, self_test
from tests.support.config_base import drop, put, refusal
from tests.support.own_module import X, Y, first_step_by_hand, training
from tests.support.train_helpers import SHAPE, alone, nano_inputs, plan_for, private_engine
from tests.train.test_train_held_out import SHARE, batch_of, quiet_plan, through

Make = Callable[..., Config]
VIEWS = put("phases.1.privacy.views", 4)
CROPS = put("phases.1.data.augment", "random_resized_crop")


def test_the_plan_has_the_views_and_one_view_is_nowhere_said(loaded: Make) -> None:
    for config, views in ((loaded(), 1), (loaded(CROPS, VIEWS), 4)):
        phase = config.phases[1]
        assert phase.privacy is not None
        plan = plan_of_phase(phase, 400, "phases.1")
        assert plan.views == views == phase.rows_of_a_slot and config.phases[0].rows_of_a_slot == 1
        assert plan.as_dict().get("views") == (None if views == 1 else 4)
        assert PrivacyPlan(**plan.as_dict()) == plan  # pyright: ignore[reportArgumentType]
        assert plan.noise_std == 1.5 and plan.divisor == pytest.approx(20), "neither C, noise nor divisor know of it"
    with pytest.raises(PlanError, match="at least one view"):
        plan_for(views=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put("phases.1.privacy.views", 0)], "greater than or equal to 1"),
        ([put("phases.1.objective", "classify"), put("phases.1.data.label", "cls"), put("model.family", "classifier"),
          drop("phases.1.data.tokenizer"), drop("phases.1.evaluation"), VIEWS], "all its views are the same"),
        ([put("phases.1.objective", "classify"), put("phases.1.data.label", "cls"), put("model.family", "classifier"),
          drop("phases.1.data.tokenizer"), drop("phases.1.evaluation"), put("phases.1.trainable", "head"),
          put("phases.1.features", {}), VIEWS], "one row for each record"),
        ([put("phases.0.views", 4)], "unknown key"),
        ([put("phases.1.privacy", None), put("phases.1.views", 4), put("phases.1.batch", 4)], "unknown key"),
    ],
)  # fmt: skip
def test_views_that_would_mean_nothing_are_refused(loaded: Make, changes: list[Any], message: str) -> None:
    assert message in refusal(loaded, *changes)


def test_masks_captions_dropout_and_crops_make_views_differ(loaded: Make) -> None:
    classify = [
        put("phases.1.objective", "classify"), put("phases.1.data.label", "cls"), put("model.family", "classifier"),
        drop("phases.1.data.tokenizer"), drop("phases.1.evaluation"),
    ]  # fmt: skip
    for change in ([CROPS], [put("model.dropout", 0.1)]):
        assert loaded(*classify, *change, VIEWS).phases[1].rows_of_a_slot == 4
    assert loaded(VIEWS).phases[1].random_inputs, "a record may have several captions"


def test_the_planner_counts_every_row(loaded: Make) -> None:
    one, four = loaded(CROPS), loaded(CROPS, VIEWS)
    costs = [counted(config, config.phases[1])[0] for config in (one, four)]
    for field in ("forward_flops", "step_flops", "kept_bytes"):
        assert getattr(costs[1], field) == pytest.approx(4 * getattr(costs[0], field), rel=0.01), field
    assert costs[1].clipping_flops >= 4 * costs[0].clipping_flops
    found = [_fitting(config, config.phases[1], 1, 1 << 30) for config in (one, four)]
    fits, kept = [fitting for fitting, _, _ in found], [record for _, record, _ in found]
    assert kept == [cost.kept_bytes for cost in costs], "what a processor's micro-batch is bounded by"
    assert fits[0] / 4 <= fits[1] < fits[0] / 2, "records of a micro-batch: only scratch for norms is none of a row"


# What is done for every record is done for a slot of rows.


@pytest.mark.parametrize("objective", ["caption", "mae"])
def test_the_self_test_passes_and_names_what_one_row_may_do(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SHAPE, objective)  # pyright: ignore[reportArgumentType]
    engine, clip, noise = private_engine(alone(), plan_for(), False, model)
    records = SyntheticRecords.of(SHAPE, objective, rows=3)
    report = self_test(engine, clip, noise, 0, records, 4, alone())
    assert 0 < report.largest_hostile <= 1
    places = [where for where, _ in records.scaled(records.batch(4, 0).inputs, 1e3)]
    one = SyntheticRecords.of(SHAPE, objective)
    assert places == ["", ", in one row"] and len(list(one.scaled(one.batch(4, 0).inputs, 1.0))) == 1
    for _, inputs in records.scaled(records.batch(4, 0).inputs, 1e3):
        changed = (inputs["images"] != records.batch(4, 0).inputs["images"]).flatten(1).any(1)
        assert not changed[3:].any() and changed[2], "of the first record alone"
    inner = clip.add_clipped

    def row_by_row(model, inputs, present, sums, rule=None):
        if ROW_SHARE not in inputs:
            return inner(model, inputs, present, sums, rule)
        rest = {name: tensor for name, tensor in inputs.items() if name != ROW_SHARE}
        seen = inner(model, rest, present.repeat_interleave(3), sums, rule)
        return replace(seen, **{n: getattr(seen, n).view(-1, 3).sum(1) for n in ("losses", "norms", "factors")})

    monkeypatch.setattr(clip, "add_clipped", row_by_row)
    engine, _, noise = private_engine(alone(), plan_for(), False, build(SHAPE, objective))  # pyright: ignore
    engine.forward.clip = clip
    with pytest.raises(SelfTestError, match="clipping does not hold"):
        self_test(engine, clip, noise, 0, records, 4, alone())


def test_a_plain_step_sums_the_losses_of_slots() -> None:
    model, rows = build(SHAPE, "mae"), nano_inputs("mae", 6)
    share = torch.tensor([0.5, 0.5, 1.0, 0.0, 0.5, 0.5])
    forward = PlainForward(model)
    total = forward({**rows, ROW_SHARE: share}, torch.tensor([True, True, False]))
    losses = torch.cat([model({n: t[i : i + 1] for n, t in rows.items()}) for i in range(6)]).detach()
    assert float(total.detach()) == pytest.approx(float((losses * share)[:4].sum()), rel=1e-5)
    assert forward.observation().losses.shape == (3,)


def test_a_row_without_a_share_counts_for_nothing_whatever_its_loss() -> None:
    rows = {"x": torch.tensor([1.0, math.nan, 3.0, math.inf]), ROW_SHARE: torch.tensor([1.0, 0.0, 0.5, 0.0])}
    assert slot_losses(lambda rest: rest["x"], rows, 2).tolist() == [1.0, 1.5]


def test_a_held_out_record_counts_as_the_share_of_its_views_that_are_right() -> None:
    plan = quiet_plan()
    held = [True, False, True]
    rows = batch_of([0, 0, 1, 1, 2, 0], [0, 1, 1, 1, 2, 2], [True] * 6, [True] * 6)
    rows.inputs[ROW_SHARE] = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25, 0.0])
    rows.inputs[HELD_OUT] = torch.tensor(held)
    rest, released = through(MicroBatch(rows.inputs, torch.ones(3, dtype=torch.bool)), plan)
    assert released["noised_accuracy"] * plan.divisor * SHARE == pytest.approx(0.5 + 1.0, abs=1e-5)
    assert rest.present.tolist() == [False, True, False]
    for name, tensor in rest.inputs.items():
        assert not tensor[:2].any() and not tensor[4:].any() and tensor[2:4].any(), name


class RowReader:
    """Two rows for each record; each has its number and its view in it."""

    def read(self, row: np.ndarray, step: int) -> MicroBatch:
        there = torch.from_numpy(row != EMPTY)
        images = torch.from_numpy(row).float().repeat_interleave(2).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).clone()
        share = there.repeat_interleave(2) * 0.5
        keys, weights = torch.zeros(2 * len(row), dtype=torch.int64), 0.5 * there.repeat_interleave(2)
        inputs = {"images": images, DROP_KEY: keys, ROW_SHARE: share, RECORD_WEIGHT: weights}
        return MicroBatch(inputs, there)

    def drop_key(self, record: int, step: int, view: int = 0) -> int:
        return 1000 * step + 10 * record + view


def test_an_input_canary_has_as_many_rows_as_a_record_or_a_unit_and_weighs_1() -> None:
    own = {"images": torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 4, 4) + 100, ROW_SHARE: torch.full((6,), 0.5)}
    coins = np.array([True, False, True])
    batches = CanaryBatches(RowReader(), alone(), 4, 10, coins, own)  # pyright: ignore
    (batch,) = batches(np.array([9, 10, 11, 12]), 1)
    assert batch.present.tolist() == [True, True, False, True]
    assert batch.inputs["images"][:, 0, 0, 0].tolist() == [9, 9, 100, 101, -1, -1, 104, 105]
    assert batch.inputs[ROW_SHARE].tolist() == [0.5, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5]
    assert batch.inputs[DROP_KEY].tolist() == [0, 0, 1100, 1101, 0, 0, 1120, 1121]
    assert batch.inputs[RECORD_WEIGHT].tolist() == [0.5, 0.5, 1, 1, 0, 0, 1, 1], "a weight of its own, 1"


def test_a_replay_compares_all_rows_of_a_slot() -> None:
    batch = RowReader().read(np.array([1, 2, 3]), 1)
    before = digests_of_slots(batch)
    changed = copy.deepcopy(batch)
    changed.inputs["images"][3, 0, 0, 0] += 1
    assert [a == b for a, b in zip(before, digests_of_slots(changed), strict=True)] == [True, False, True]


# The library: `read` gives up to so many rows.


def three_views(numbers: np.ndarray) -> dict[str, Tensor]:
    """One row of record 7, rows of record 9 that do not fit together, and three of every other record."""
    number = int(numbers[0])
    count = 1 if number == 7 else 3
    draw = torch.Generator().manual_seed(number)
    rows = X[numbers] + 0.3 * torch.randn(count, 5, generator=draw)
    return {"x": rows, "y": Y[numbers].repeat(2 if number == 9 else count)}


def test_a_reader_of_functions_takes_up_to_so_many_rows() -> None:
    like = {"x": X[:1], "y": Y[:1]}
    found = FunctionReader(three_views, like, SlotRows(views=3)).fetch(np.array([4, 7, EMPTY, 9]), 1)
    assert found.batch.present.tolist() == [True, True, False, False] and set(found.bad) == {9}
    shares = found.batch.inputs[ROW_SHARE].view(4, 3)
    assert shares[0].tolist() == pytest.approx([1 / 3] * 3) and shares[1].tolist() == [1, 0, 0]
    assert not shares[2:].any() and not found.batch.inputs["x"][4:].any()
    assert torch.equal(found.batch.inputs["x"][:3], three_views(np.array([4]))["x"])
    more = FunctionReader(three_views, like, SlotRows(views=2)).fetch(np.array([4]), 1)
    assert "not [2, 5]" in more.bad[4], "more rows than were announced"


def test_the_weights_are_those_of_the_mean_gradients_by_hand(tmp_path: Path) -> None:
    def loss(model: nn.Module, number: int) -> Tensor:
        rows = three_views(np.array([number]))
        return torch.cat([model({n: t[i : i + 1] for n, t in rows.items()}) for i in range(len(rows["y"]))]).mean()

    with training(tmp_path / "run", reader=three_views, views=3) as run:
        first_step_by_hand(run, 8, loss, bad=(9,))
        run.finish()
    history = History.read(tmp_path / "run" / "ledger.jsonl")[0]
    assert history.plans[PHASE].views == 3 and verify(tmp_path / "run").epsilon > 0
    said = (tmp_path / "run" / "certificate.md").read_text()
    assert "each drawn record is seen 3 times in a step" in said


def test_dropout_has_a_mask_of_its_own_for_each_row() -> None:
    """Rows that differ in their drop key alone have different losses, and the slot's loss is their mean."""
    model = build(replace(SHAPE, dropout=0.3), "caption").train()
    rows = {name: tensor[:1].repeat(4, *[1] * (tensor.dim() - 1)) for name, tensor in nano_inputs("caption", 1).items()}
    rows[DROP_KEY] = torch.tensor([5, 6, 7, 8])
    own = model(rows)
    assert len(set(own.tolist())) == 4
    found = slot_losses(model, {**rows, ROW_SHARE: torch.full((4,), 0.25)}, 1)
    assert float(found.detach()) == pytest.approx(float(own.mean().detach()), rel=1e-6)
