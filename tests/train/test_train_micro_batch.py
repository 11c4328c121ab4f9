"""An "auto" micro-batch is the largest that the planner lets in, one number for all ranks, and kept by its run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import ROW_SHARE
from murmuration.model.build import build
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import ExactSums, trainable_shapes
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.core import Computation, kept_of_record
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines import micro_batch_graph
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.engines.micro_batch_graph import ALIKE, MOST_MISSES, MOST_RECORDINGS, MicroBatchGraph
from murmuration.train.engines.sharded_sums import ShardedSums
from murmuration.train.planner.forecast import counted, forecast
from murmuration.train.planner.memory import GIB, memory
from murmuration.train.planner.micro_batch import largest, on_this_machine, settled
from murmuration.train.planner.rows import FIXED, MOST_FIXED, OF_WEIGHTS, Batch
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.storage.micro_batch_file import KEY, NAME
from tests.support.planner_world import CLUSTER, SMALL
from tests.support.planner_world import config as written
from tests.support.tape import Tape
from tests.support.train_helpers import SHAPE, alone, nano_inputs
from tests.train.test_train_clip_together import BATCHES, CPU, RULE, Mixed, clip_of, far, mixed


def automatic(tmp_path: Path, **changes: Any) -> Config:
    return load(written(tmp_path, **{KEY: "auto", "model": SMALL} | changes), [])


@pytest.mark.parametrize("rows", [1, 30, 300])
def test_what_fits_is_taken_and_no_larger_one_would_need_fewer_rows(tmp_path: Path, rows: int) -> None:
    config = automatic(tmp_path)
    cost, weights = counted(config, config.phases[0])
    need = memory(weights, 1, 1, False)
    room = need.peak(rows, cost)
    found = largest(config, 1, room, gpus=True)
    privacy = config.phases[0].privacy
    assert privacy is not None and need.peak(found, cost) <= room and found >= 1
    most = privacy.expected_batch + 4 * privacy.expected_batch**0.5
    fitting = [size for size in range(found, int(most) + 1) if need.peak(size, cost) <= room]
    assert len({math.ceil(most / size) for size in fitting}) == 1


def test_processors_take_no_more_than_fits_and_no_room_is_refused(tmp_path: Path) -> None:
    config = automatic(tmp_path)
    cost, weights = counted(config, config.phases[0])
    need = memory(weights, 1, 1, False)
    room = need.stays + need.update
    fits = need.micro_batch(room, cost)
    assert 1 < largest(config, 1, room, gpus=False) <= fits < largest(config, 1, 1000 * GIB, gpus=False)
    for gpus in (True, False):
        with pytest.raises(RecipeError, match="has no room for one record"):
            largest(config, 1, 1000.0, gpus=gpus)


@pytest.mark.parametrize("gpus", [True, False])
def test_a_step_of_the_whole_data_set_has_no_more_rows_than_it_has_records(tmp_path: Path, gpus: bool) -> None:
    """Else a head that is solved in one pass is tested with tens of thousands of rows, for hundreds of records."""
    config = automatic(tmp_path, data={"expected_records": 300}, privacy={"expected_batch": "all"})
    assert largest(config, 1, 1000 * GIB, gpus) <= 300


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("record", [4e3, 56e3, 2.4e6, 1e8])
@pytest.mark.parametrize("mean", [1, 20, 128, 200, 3000])
def test_on_processors_no_size_within_the_bound_is_faster_on_drawn_batches(
    mean: int, record: float, ranks: int
) -> None:  # fmt: skip
    """The bound is on memory: 64 MiB and eight times the weights, or a single record."""
    trained = 26_000
    fixed = (FIXED + OF_WEIGHTS * 4 * trained) / record
    most = int(max(1, (64 * 2**20 + 8 * 4 * trained) / record))
    assert most == max(1, int(fixed / MOST_FIXED))
    draws = np.random.default_rng(0).poisson(mean, 20_000)

    def seconds(size: int) -> float:
        return float(np.maximum(1, -(-draws // (size * ranks))).mean()) * (size + fixed)

    batch = Batch(mean, math.sqrt(mean), public=False)
    found = batch.on_processors(ranks, record, trained)
    assert found <= most
    assert seconds(found) <= 1.03 * min(seconds(size) for size in range(1, min(most, 2 * mean + 10) + 1))
    assert batch.on_processors(ranks, record, trained, fitting=1) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_record_keeps_is_its_activations_and_no_weights(rows: int) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = nn.Linear(64, 50), nn.Linear(50, 2000).requires_grad_(False)

        def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
            return self.frozen(self.trained(inputs["x"])).relu().sum(1)

    records = SyntheticRecords.like({"x": torch.zeros(1, 64)}, rows)
    found = kept_of_record(Body(), RULE, Computation(), records)
    assert rows * 4 * 2000 <= found <= rows * 4 * (64 + 50 + 2000 + 10)


def test_a_run_keeps_its_number_and_its_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run_dir = automatic(tmp_path), tmp_path / "run"
    first = settled(config, run_dir, alone())
    assert f"{KEY}: {first.micro_batch} rows" in capsys.readouterr().out
    (run_dir / NAME).write_text(json.dumps({KEY: 3}))
    again = settled(config, run_dir, alone())
    assert again.micro_batch == on_this_machine(config, run_dir).micro_batch == 3
    given = load(written(tmp_path, **{KEY: 3, "model": SMALL}), [])
    assert again.digest(0, {}) == given.digest(0, {}) != first.digest(0, {})
    for damaged in ("", "[]", '{"train_micro_batch_size_per_gpu": 0}', '{"train_micro_batch_size_per_gpu": true}'):
        (run_dir / NAME).write_text(damaged)
        with pytest.raises(RecipeError, match=NAME):
            settled(config, run_dir, alone())


def test_a_number_that_is_given_is_left_alone_and_nothing_is_written(tmp_path: Path) -> None:
    config = automatic(tmp_path, **{KEY: 5})
    assert settled(config, tmp_path / "run", alone()) == config == on_this_machine(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_plan_for_a_cluster_answers_it_by_the_memory_of_its_gpus(tmp_path: Path) -> None:
    plan = forecast(automatic(tmp_path), CLUSTER)[0]
    assert plan.micro_batch == plan.batch.even(CLUSTER.gpus, plan.chosen.micro_batch) > 0
    assert not any("set train_micro_batch_size_per_gpu" in line for line in plan.advice)
    assert plan.chosen.peak_bytes <= CLUSTER.usable_bytes


# Micro-batches that are recorded and replayed, on a tape of operations in place of a CUDA graph (support/tape.py):
# every input reaches the replay, and whatever it cannot know of sends the micro-batch the ordinary way.


RECORDS = 130
SLOTS, ROWS = 40, 3


def forwarded(model: nn.Module, recorder: Tape | None) -> PrivateForward:
    forward = PrivateForward(model, clip_of(model), defer=True, recorder=recorder)
    forward.begin(CPU)
    return forward


def graph_of(forward: PrivateForward) -> MicroBatchGraph:
    assert forward.graph is not None
    return forward.graph


def same(one: PrivateForward, other: PrivateForward) -> bool:
    return all(torch.equal(one.sums.totals[name], other.sums.totals[name]) for name in one.sums.totals)


@pytest.fixture
def pair() -> tuple[PrivateForward, PrivateForward]:
    """With a recorder and without one."""
    return forwarded(Mixed(), Tape()), forwarded(Mixed(), None)


def seen_of(forward: PrivateForward, inputs: dict[str, Tensor], present: Tensor, rule: ClipRule | None = None) -> Any:
    forward(inputs, present, rule)
    return forward.observation()


def test_replays_give_every_bit_of_what_is_computed_without(pair: tuple[PrivateForward, PrivateForward]) -> None:
    """Over steps between which the weights move, with slots that are empty and records that are none."""
    tape, plain = pair
    seen = []
    for step in range(3):
        for inputs, present in BATCHES:
            seen.append((seen_of(tape, inputs, present), seen_of(plain, inputs, present)))
        tape()
        plain()
        assert same(tape, plain)
        for forward in pair:
            forward.clear()
            with torch.no_grad():
                for parameter in forward.model.parameters():
                    parameter.add_(0.01 * (step + 1))
    # Only now: an observation that a later replay had overwritten would show that one's numbers.
    for ours, theirs in seen:
        assert torch.equal(ours.losses.nan_to_num(-1.0), theirs.losses.nan_to_num(-1.0))
        assert torch.equal(ours.norms.nan_to_num(-1.0), theirs.norms.nan_to_num(-1.0))
    graph, recorder = graph_of(tape), tape._recorder
    assert isinstance(recorder, Tape) and graph.why_not is None
    assert recorder.recorded == 1 and graph.replays == 3 * len(BATCHES) and recorder.replayed == graph.replays + 1


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_what_is_dropped_follows_the_keys_of_the_records(objective: Any) -> None:
    """Keys are inputs as others are: with those of the recording, every micro-batch would drop the same."""
    shape = replace(SHAPE, dropout=0.3)
    forwards = [forwarded(build(shape, objective), recorder) for recorder in (Tape(), None)]
    present = torch.ones(6, dtype=torch.bool)
    losses = []
    for number in range(3):
        inputs = nano_inputs(objective, 6) | {"drop_key": torch.arange(6) + 100 * number}
        ours, theirs = (seen_of(forward, inputs, present) for forward in forwards)
        assert torch.equal(ours.losses, theirs.losses)
        losses.append(ours.losses)
    assert same(*forwards) and graph_of(forwards[0]).replays == 3
    assert not torch.equal(losses[0], losses[1])


def of_units(slots: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Units of up to three records, each with its own number of them, and some with none; a row
    without a share holds another record, of which nothing may be seen."""
    draw = torch.Generator().manual_seed(seed)
    usable = torch.rand(slots, ROWS, generator=draw) < 0.4
    share = (usable / usable.sum(1, keepdim=True).clamp(min=1)).flatten()
    inputs = {name: value.roll(seed) for name, value in mixed(slots * ROWS).items()}
    inputs["scale"] = torch.where(share > 0, inputs["scale"], 1e3)
    return inputs | {ROW_SHARE: share}, usable.any(1)


def test_units_of_uneven_numbers_of_records_are_replayed_to_the_last_bit(
    pair: tuple[PrivateForward, PrivateForward],
) -> None:
    """One recording serves them all: how many records a unit has is a number on the device, and no shape tells it."""
    tape, plain = pair
    for seed in range(4):
        inputs, present = of_units(SLOTS, seed)
        ours, theirs = (seen_of(forward, inputs, present) for forward in pair)
        assert torch.equal(ours.norms, theirs.norms) and torch.equal(ours.losses, theirs.losses)
        assert len(ours.norms) == SLOTS and 0 < int(present.sum()) < SLOTS
    assert same(tape, plain) and graph_of(tape).replays == 4 and graph_of(tape).recordings == 1
    one_by_one = clip_of(plain.model)
    expected = ExactSums(trainable_shapes(plain.model), CPU)
    for seed in range(4):
        inputs, present = of_units(SLOTS, seed)
        for unit in torch.nonzero(present).flatten().tolist():
            alone = {name: value.unflatten(0, (SLOTS, ROWS))[unit] for name, value in inputs.items()}
            one_by_one.add_clipped(plain.model, alone, torch.ones(1, dtype=torch.bool), expected)
    assert far(tape.sums.totals, expected.totals) < 1e-6


@pytest.mark.parametrize("left_out", ["words", "scale", "weight", "present", ROW_SHARE])
def test_an_input_that_is_not_copied_is_found(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    whole = micro_batch_graph._Recording.run

    def stale(self: Any, inputs: Mapping[str, Tensor], present: Tensor) -> Any:
        own = {name: self.inputs[name] if name == left_out else value for name, value in inputs.items()}
        return whole(self, own, self.present if left_out == "present" else present)

    monkeypatch.setattr(micro_batch_graph._Recording, "run", stale)
    draw = torch.Generator().manual_seed(1)
    inputs, present = mixed(RECORDS), torch.arange(RECORDS) < 99
    inputs |= {name: torch.rand(RECORDS, generator=draw) + 0.5 for name in ("scale", "weight")}
    if left_out == ROW_SHARE:
        inputs, present = of_units(SLOTS, 1)
    tape, plain = forwarded(Mixed(), Tape()), forwarded(Mixed(), None)
    for forward in (tape, plain):
        forward(inputs, present)
    assert same(tape, plain), "nothing of the proof stays in the totals"
    why = graph_of(tape).why_not
    assert why is not None and why.startswith("a replayed micro-batch had other ")


class OnTheHost(Mixed):
    """Its loss depends on how often it was called."""

    calls = 0

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().forward(inputs) * (1.0 + 0.5 * self.calls)


class FromElsewhere(Mixed):
    """It reads a tensor that nobody passes to it, another one at each call."""

    places = torch.arange(1.0, RECORDS + 1)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.places = self.places.roll(1)
        return super().forward(inputs) * self.places[:1]


class Asking(Mixed):
    """It asks the device for a number that is no record's."""

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        losses = super().forward(inputs)
        return losses if float(next(self.parameters()).detach().sum()) > -1e9 else losses * 2


@pytest.mark.parametrize(
    ("model", "why"), [(OnTheHost, "other losses"), (FromElsewhere, "other losses"), (Asking, "capturing)")]
)
def test_a_model_that_cannot_be_replayed_is_not(model: Callable[[], nn.Module], why: str) -> None:
    forward = forwarded(model(), Tape())
    forward(*BATCHES[0])
    graph = graph_of(forward)
    assert graph.replays == 0 and graph.why_not is not None and why in graph.why_not
    assert graph.why_not in forward.about_graph()
    recorder = forward._recorder
    assert isinstance(recorder, Tape)
    before = recorder.recorded, recorder.replayed
    forward(*BATCHES[0])
    assert (recorder.recorded, recorder.replayed) == before, "nor tried again"


def test_without_room_for_a_recording_nothing_is_lost() -> None:
    class Full(Tape):
        def record(self, run: Callable[[], Any]) -> Any:
            run()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    forwards = forwarded(Mixed(), Full()), forwarded(Mixed(), None)
    for forward in forwards:
        forward(*BATCHES[0])
    why = graph_of(forwards[0]).why_not
    assert same(*forwards) and why is not None and "out of memory" in why


def other_rule(forward: PrivateForward) -> dict[str, Any]:
    return {"rule": RULE.at(RULE.bound / 3)}


def other_mode(forward: PrivateForward) -> dict[str, Any]:
    assert isinstance(forward.model, Mixed)
    forward.model.norm.eval()
    return {}


def other_memory(forward: PrivateForward) -> dict[str, Any]:
    for parameter in forward.model.parameters():
        parameter.data = parameter.data.clone() * 1.5
    return {}


def other_training(forward: PrivateForward) -> dict[str, Any]:
    next(forward.model.parameters()).requires_grad_(False)
    return {}


@pytest.mark.parametrize("change", [other_rule, other_mode, other_memory, other_training])
def test_what_a_recording_does_not_know_of_is_computed_without_it(
    pair: tuple[PrivateForward, PrivateForward], change: Callable[[PrivateForward], dict[str, Any]]
) -> None:
    for forward in pair:
        forward(*BATCHES[0])
        more = change(forward)
        forward(*BATCHES[0], **more)
    assert same(*pair) and graph_of(pair[0]).replays == 1


def test_weights_that_moved_for_good_are_recorded_anew(pair: tuple[PrivateForward, PrivateForward]) -> None:
    """As where a checkpoint is restored into other memory."""
    for forward in pair:
        forward(*BATCHES[0])
        other_memory(forward)
        for inputs, present in BATCHES:
            forward(inputs, present)
        forward()
    graph = graph_of(pair[0])
    assert same(*pair) and graph.recordings == 2 and graph.replays == 1 + len(BATCHES) - ALIKE


def test_another_number_of_records_is_computed_without_it(pair: tuple[PrivateForward, PrivateForward]) -> None:
    for forward in pair:
        for records in (RECORDS, 7, RECORDS):
            forward(mixed(records), torch.ones(records, dtype=torch.bool))
    assert same(*pair) and graph_of(pair[0]).replays == 2


def test_a_recording_that_never_fits_gives_its_memory_back(pair: tuple[PrivateForward, PrivateForward]) -> None:
    tape, _ = pair
    for step in range(MOST_MISSES + 2):
        tape(mixed(3), torch.ones(3, dtype=torch.bool), RULE.at(RULE.bound / (step + 1)))
    graph = graph_of(tape)
    assert graph._recording is None and graph.why_not is not None and "keep changing" in graph.why_not
    assert graph.recordings <= MOST_RECORDINGS


def test_a_measurement_records_nothing(pair: tuple[PrivateForward, PrivateForward]) -> None:
    tape, plain = pair
    for forward in pair:
        forward.model.eval()
        forward(*BATCHES[0])
    recorder = tape._recorder
    assert same(tape, plain) and isinstance(recorder, Tape) and recorder.recorded == 0


def test_an_engine_says_why_nothing_is_replayed() -> None:
    model = Mixed()
    off = PrivateForward(model, clip_of(model), defer=True, graph=False, recorder=Tape())
    off.begin(CPU)
    assert off.graph is None and off.about_graph().endswith('run.cuda_graph = "off"')
    sharded = PrivateForward(Mixed(), clip_of(model), defer=True, recorder=Tape())
    fragments = [
        Fragment(name, number, 0, shape.numel(), 0) for number, (name, shape) in enumerate(sharded.shapes.items())
    ]
    sharded.begin(CPU, sharded=ShardedSums(sharded.shapes, fragments, alone(), 8))
    assert sharded.graph is None and "sharded" in sharded.about_graph()
