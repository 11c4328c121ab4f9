"""Phases in one run: what begins them, what they hand over, and a set cut in a public and a protected part."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from murmuration.data.index.public_split import SplitIndex, apart, public_share
from murmuration.data.synthetic.index import SyntheticIndex
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.train.config.data import CheckpointData
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.engines.forward import PlainForward
from murmuration.train.noise.update import PlainUpdate
from murmuration.train.recipe.open_data import open_start
from murmuration.train.recipe.ready_phase import with_steps
from murmuration.train.recipe.warm_start import NoRecords, WarmStart, WarmStartError, hand_over
from murmuration.train.run.phase import StillEngine, carry_over
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Loaded, Position
from tests.support.config_base import Change, drop, put
from tests.support.train_helpers import LocalEngine, Toy, alone, toy_batch

Read = Callable[..., Config]
START = {"name": "start", "data": {"source": "checkpoint", "path": "weights", "public": True}}


def first(phase: dict[str, Any]) -> Change:
    def change(raw: dict[str, Any]) -> None:
        raw["phases"].insert(0, copy.deepcopy(phase))

    return change


def test_a_start_has_no_steps_and_the_objective_of_what_follows(loaded: Read, tmp_path: Path) -> None:
    config = loaded(first(START))
    assert not config.phases[0].trains and config.phases[0].objective == "mae" and config.phases[0].steps == 0
    assert config.phases[0].data.path == str(tmp_path / "weights")  # pyright: ignore[reportAttributeAccessIssue]


def test_steps_follow_from_epochs(loaded: Read) -> None:
    passes = loaded(drop("phases.0.steps"), put("phases.0.epochs", 2.5), put("phases.0.schedule.warmup_epochs", 0.5))
    resolved = with_steps(passes.phases[0], 100, "phases.0")
    assert (resolved.steps, resolved.schedule.warmup) == (16, 3), "16 records a step: 15.6 and 3.1 steps"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ([drop("phases.1.steps"), put("phases.1.epochs", 1e6)], "epochs"),
        (
            [drop("phases.1.steps"), put("phases.1.epochs", 1e6), put("phases.1.privacy.sampling", "allocation")],
            "epochs",
        ),
        ([put("phases.1.schedule.warmup_epochs", 1e308)], "schedule.warmup_epochs"),
    ],
)
def test_more_steps_than_a_phase_may_have_are_refused(loaded: Read, changes: list[Change], key: str) -> None:
    config = loaded(*changes, put("phases.1.privacy.expected_batch", 1e-305))
    with pytest.raises(RecipeError, match=rf"^phases\.1\.{key}: .* are inf steps, .*; make fewer passes"):
        with_steps(config.phases[1], 400, "phases.1")


def plain_engine() -> LocalEngine:
    return LocalEngine(PlainForward(Toy()), alone(), replicated=True)


def saved(engine: LocalEngine, folder: Path) -> Loaded:
    Checkpoints(folder, alone(), Keep()).save(Position(0, engine.optimizer_step()), engine, 1, {})
    loaded = Checkpoints(folder, alone(), Keep()).latest()
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("how", ["second-moment", "all"])
def test_a_phase_that_ended_before_its_first_step_has_no_state_to_hand_over(how: Any, tmp_path: Path) -> None:
    after = plain_engine()
    carry_over(saved(plain_engine(), tmp_path), after, how)
    assert after.optimizer_step() == 0 and not any(shard.state for shard in after.shards())


@pytest.mark.parametrize("probes", [False, True])
@pytest.mark.parametrize("how", ["none", "second-moment", "all"])
def test_optimizer_state_is_handed_over_as_the_config_says(how: Any, probes: bool, tmp_path: Path) -> None:
    """From a checkpoint, also to a phase that probes the loss and keeps more state; by DeepSpeed and FSDP2:
    tests/end_to_end/test_e2e_transfers.py."""
    before, after = plain_engine(), plain_engine()
    after.base.keeps_before = probes
    for step in (1, 2):
        before.accumulate(toy_batch(4, seed=step))
        before.update(PlainUpdate(4), 1e-3)
    carry_over(saved(before, tmp_path), after, how)
    assert after.optimizer_step() == (0 if how == "none" else 2), "bias corrections go on, or begin anew"
    for mine, theirs in zip(after.shards(), before.shards(), strict=True):
        if how == "none":
            assert not mine.state
            continue
        assert torch.equal(mine.state["exp_avg_sq"], theirs.state["exp_avg_sq"])
        expected = theirs.state["exp_avg"] if how == "all" else torch.zeros_like(theirs.state["exp_avg"])
        assert torch.equal(mine.state["exp_avg"], expected)


@pytest.mark.parametrize(("records", "fraction"), [(2, 0.9), (10, 0.1), (1000, 0.1), (1001, 1e-9), (37, 0.5)])
def test_the_two_parts_of_a_set_share_no_record_and_miss_none(records: int, fraction: float) -> None:
    whole = SyntheticIndex("shapes", records, 1, 8)
    public, rest = SplitIndex(whole, fraction, True), SplitIndex(whole, fraction, False)
    ids = [[part.original(i) for i in range(part.records)] for part in (public, rest)]
    assert sorted(ids[0] + ids[1]) == list(range(records))
    assert public.records == public_share(records, fraction) >= 1 and rest.records >= 1
    assert apart(public, rest) and apart(rest, public) and not apart(public, public) and not apart(whole, rest)
    assert not apart(public, SplitIndex(whole, 0.25, False)), "another cut overlaps"
    assert len({public.manifest_digest, rest.manifest_digest, whole.manifest_digest}) == 3
    again = SplitIndex(SyntheticIndex("shapes", records, 1, 8), fraction, True)
    assert [again.original(i) for i in range(again.records)] == ids[0], "the cut is no run's own"
    with pytest.raises(IndexError):
        rest.original(rest.records)


def test_the_public_part_is_drawn_from_everywhere() -> None:
    part = SplitIndex(SyntheticIndex("shapes", 10_000, 1, 8), 0.1, True)
    ids = np.array([part.original(i) for i in range(part.records)])
    counts = np.histogram(ids, bins=10, range=(0, 10_000))[0]
    assert ((counts > 60) & (counts < 140)).all(), counts


def test_weights_that_are_not_there_or_tell_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match="does not exist"):
        WarmStart.at(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WarmStartError, match="has neither checkpoints nor"):
        WarmStart.at(tmp_path / "empty")


@pytest.mark.parametrize("source", ["run", "export"])
@pytest.mark.parametrize(("take_head", "bias"), [(None, 0.5), (True, 0.5), (False, -10.0)])
def test_a_head_is_taken_from_own_weights_unless_the_config_says_otherwise(
    tmp_path: Path, source: str, take_head: bool | None, bias: float
) -> None:
    sizes = {"size": "custom", "image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "heads": 2, "classes": 3}
    shape = ModelSettings.model_validate({"family": "classifier", "classify_loss": "sigmoid", **sizes})
    given, taken = build(shape, "classify"), build(shape, "classify")
    torch.nn.init.constant_(given.head.bias, 0.5)
    if source == "run":
        engine = StillEngine(given, torch.device("cpu"))
        Checkpoints(tmp_path / "checkpoints", alone(), Keep()).save(Position(0, 0), engine, 1, {})
    else:
        save_file(given.state_dict(), tmp_path / "model.safetensors")
        (tmp_path / "export.json").write_text(json.dumps({"objective": "classify", "shapes": {}}))
    open_start(
        CheckpointData(source="checkpoint", path=str(tmp_path), public=True, take_head=take_head), "phases.0"
    ).fill(taken)
    assert bool((taken.head.bias == bias).all())
    assert torch.equal(taken.state_dict()["norm.weight"], given.state_dict()["norm.weight"])


def test_between_models_alike_every_tensor_is_handed_over() -> None:
    given, taken = Toy(), Toy()
    with torch.no_grad():
        for tensor in given.state_dict().values():
            tensor.add_(1.0)
    assert hand_over(given.state_dict(), taken) == f"all {len(given.state_dict())} tensors"
    assert all(torch.equal(tensor, taken.state_dict()[name]) for name, tensor in given.state_dict().items())


def test_a_phase_without_steps_refuses_to_train() -> None:
    engine = StillEngine(Toy(), torch.device("cpu"))
    assert engine.shards() == [] and engine.whole_weights().keys() == Toy().state_dict().keys()
    with pytest.raises(RuntimeError, match="without steps"):
        engine.accumulate(toy_batch(2))
    with pytest.raises(IndexError):
        NoRecords("x").locate(0)
