"""What one run protects stays protected: a public share is frozen, and private records are public for nobody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.data.index.open import open_index
from murmuration.data.index.public_cut import PublicSplit
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.launch import prepare as prepare_command
from murmuration.train.commands import train as train_command
from murmuration.train.commands.train import main as train
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare
from murmuration.train.storage.sibling_runs import BESIDE_SHARDS, LOG, RunLog
from tests.support.config_base import Change, put
from tests.support.range_server import RangeServer, serving

RECORDS = 60
PUBLIC: dict[str, Any] = {
    "name": "open", "data": {"path": "set", "public": True}, "objective": "mae", "batch": 4, "schedule": {"peak": 0.1},
    "steps": 1,
}  # fmt: skip
PRIVATE: dict[str, Any] = {
    "name": "private", "data": {"path": "set"}, "objective": "mae", "schedule": {"peak": 0.1}, "steps": 1,
    "privacy": {"epsilon": 8.0, "expected_batch": 8},
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Path:
    for seed, name in enumerate(("set", "other", "held")):
        write_shards(tmp_path / name, shape_samples(seed + 2, RECORDS, 32), 30)
        build(tmp_path / name)
    return tmp_path


def config_of(world: Path, *phases: dict[str, Any]) -> Config:
    raw = {
        "train_micro_batch_size_per_gpu": 4,
        "model": {"family": "mae", "size": "nano", "image_size": 16, "patch_size": 8},
        "phases": list(phases),
    }
    (world / "config.json").write_text(json.dumps(raw))
    return load(world / "config.json", [])


def ready(world: Path, *phases: dict[str, Any]) -> list[ReadyPhase]:
    return prepare(config_of(world, *phases))


def part(phase: dict[str, Any], fraction: float | None, **more: Any) -> dict[str, Any]:
    return phase | {"data": phase["data"] | {"public_fraction": fraction}} | more


def trained(world: Path, name: str = "set", folder: str = "index") -> None:
    """What a private run on these records leaves in their log."""
    index = open_index(world / name / folder)
    cuts = RunLog.of(index).splits()
    part = SplitIndex(index, cuts[0].public_fraction, public=False) if cuts else index
    assert RunLog.of(part).register("id", "private", "first", 8.0, 1e-5) is None


def frozen(world: Path) -> list[PublicSplit]:
    return RunLog.of(open_index(world / "set")).splits()


def test_another_share_of_the_same_records_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As two runs would have it: many records that the first protects would be trained on in the open by the second."""
    public, private = ready(world, part(PUBLIC, 0.1), part(PRIVATE, 0.1))
    trained(world)
    assert frozen(world) == [PublicSplit(RECORDS, 0.1)]
    whole = ShardIndex.open(world / "set")
    more = SplitIndex(whole, 0.5, True)
    protected = {private.index.locate(i) for i in range(private.index.records)}
    assert len(protected & {more.locate(i) for i in range(more.records)}) == 24
    config_of(world, part(PUBLIC, 0.5), part(PRIVATE, 0.5))
    assert train(["--config", str(world / "config.json")]) == 2
    said = capsys.readouterr().err
    assert "were cut with public_fraction 0.1 of 60 records, not with 0.5 of 60" in said
    again = ready(world, part(PUBLIC, 0.1), part(PRIVATE, 0.1))
    assert [phase.index.records for phase in again] == [public.index.records, private.index.records] == [6, 54]


def test_another_number_of_records_would_be_dealt_out_anew(world: Path) -> None:
    ready(world, part(PRIVATE, 0.1))
    write_shards(world / "more", shape_samples(9, 5, 32), 5)
    (world / "more" / "000000.tar").rename(world / "set" / "000009.tar")
    build(world / "set")
    with pytest.raises(RecipeError, match=r"with public_fraction 0\.1 of 60 records of another.*, not with 0\.1 of 65"):
        ready(world, part(PRIVATE, 0.1))


def test_of_sets_that_overlap_and_are_equally_large_the_second_is_not_cut_by_its_numbers(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of 60 records each, of shards that both have one of: some that the first protects are public in the
    second."""
    write_shards(world / "three", shape_samples(5, 90, 32), 30)
    for name, numbers in (("one", (0, 1)), ("two", (1, 2))):
        build([world / "three" / f"{number:06d}.tar" for number in numbers], world / name)
    private, public = (SplitIndex(open_index(world / name), 0.5, name == "two") for name in ("one", "two"))
    places = [{(str(at[0].resolve()), *at[1:]) for at in map(each.locate, range(30))} for each in (private, public)]
    assert places[0] & places[1] and private.cut == public.cut
    ready(world, part(PRIVATE | {"data": {"path": "one"}}, 0.5))
    with pytest.raises(RecipeError, match="of 60 records of another set"):
        ready(world, part(PUBLIC | {"data": {"path": "two", "public": True}}, 0.5))
    assert train(["--config", str(world / "config.json")]) == 2
    assert "0.5 of 60 records of another set" in capsys.readouterr().err
    with pytest.raises(ShardError, match="of another set"):
        RunLog.of(public).freeze()
    ready(world, part(PRIVATE | {"data": {"path": "one"}}, 0.5))


OTHER = {"path": "other", "public": True}
OPEN_USES: list[tuple[str, list[dict[str, Any]]]] = [
    ("phases.0.data", [PUBLIC]),
    ("phases.0.evaluation", [PUBLIC | {"data": OTHER, "evaluation": {"path": "set", "public": True}}]),
    ("phases.0.monitor", [PUBLIC | {"data": OTHER, "monitor": {"path": "set", "public": True}}]),
    ("phases.0.mixing.data", [
        PRIVATE | {"data": {"path": "other"}, "mixing": {"data": {"path": "set", "public": True}, "batch": 2}},
    ]),
    ("phases.0.data", [
        PUBLIC | {"data": {"source": "webdataset", "path": "set", "public": True, "lanes": 1, "buffer": 4}},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("where", "phases"), OPEN_USES)
def test_records_that_a_run_protects_are_public_for_nobody(
    world: Path, where: str, phases: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    ready(world, *phases)
    trained(world)
    with pytest.raises(
        RecipeError, match=rf"{where}: run 'first' protects these records.*nobody may use them as public"
    ):
        ready(world, *phases)
    assert train(["--config", str(world / "config.json")]) == 2
    assert "nobody may use them as public" in capsys.readouterr().err
    ready(world, PRIVATE)


def test_the_public_part_of_the_frozen_cut_may_be_used_beside_private_runs(world: Path) -> None:
    ready(world, part(PUBLIC, 0.1), part(PRIVATE, 0.1))
    trained(world)
    mixing = {"data": {"path": "set", "public": True, "public_fraction": 0.1}, "batch": 2}
    ready(world, part(PUBLIC, 0.1), part(PRIVATE, 0.1, mixing=mixing))
    with pytest.raises(RecipeError, match="nobody may use them as public"):
        ready(world, part(PUBLIC, 0.1) | {"evaluation": {"path": "set", "public": True}})


@pytest.mark.parametrize("gone", [True, False], ids=["the index removed", "another index"])
def test_no_other_index_moves_the_share(world: Path, gone: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Frozen beside the index alone, 24 of the 54 records that the first run protects would be public in the second."""
    first, other = ({"path": name, "public_fraction": 0.1} for name in ("set", "set" if gone else "second"))
    ready(world, PRIVATE | {"data": first})
    trained(world)
    if gone:
        shutil.rmtree(world / "set" / "index")
    assert prepare_command.main(["index", str(world / "set"), *([] if gone else ["--out", str(world / "second")])]) == 0
    ready(world, PRIVATE | {"data": other})
    config_of(world, PRIVATE | {"data": other | {"public_fraction": 0.5}})
    assert train(["--config", str(world / "config.json")]) == 2
    assert "were cut with public_fraction 0.1 of 60 records, not with 0.5" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"0\.1 of 60 records, not with none"):
        ready(world, PRIVATE | {"data": {"path": other["path"]}})


def test_of_two_runs_that_start_at_once_the_second_keeps_the_cut_of_the_first(world: Path) -> None:
    """Both found nothing frozen; the second is refused as it freezes, or as it registers what it protects."""
    index = open_index(world / "set")
    one, other = (SplitIndex(index, fraction, public=False) for fraction in (0.1, 0.5))
    RunLog.of(one).freeze()
    with pytest.raises(ShardError, match=r"cut with public_fraction 0\.1 of 60 records, not with"):
        RunLog.of(other).freeze()
    for late in (other, index):
        with pytest.raises(ShardError, match=r"cut with public_fraction 0\.1 of 60 records, not with"):
            RunLog.of(late).register("id", "private", "late", 8.0, 1e-5)
    whole = open_index(world / "other")
    RunLog.of(whole).register("id", "private", "whole", 8.0, 1e-5)
    with pytest.raises(ShardError, match="run 'whole' protects all of these records"):
        RunLog.of(SplitIndex(whole, 0.1, public=True)).freeze()


def test_a_cut_of_records_behind_a_url_stands_in_the_registry(world: Path) -> None:
    (world / "registry").mkdir()
    with serving(RangeServer(world / "set")) as server:
        for name in ("one", "two"):
            build([f"{server.url}/{number:06d}.tar" for number in range(2)], world / name)
    one, two = (SplitIndex(open_index(world / name), 0.1, public=False) for name in ("one", "two"))
    with pytest.raises(ShardError, match=r"the log lies in the index alone.*name a writable folder in run\.registry"):
        RunLog.of(one).freeze()
    assert RunLog.of(one).splits() == []
    RunLog.of(one, str(world / "registry")).freeze()
    assert RunLog.of(two).splits() == [] and RunLog.of(two, str(world / "registry")).splits() == [one.cut]


def test_what_a_run_has_protected_whole_is_never_cut(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six of the sixty records that the first run protects would be public in the second, by whatever word."""
    trained(world)
    command = ["split", str(world / "set"), "--public-fraction", "0.1"]
    assert prepare_command.main(command) == 2
    assert "run 'first' protects all of these records" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="run 'first' protects all of these records"):
        ready(world, part(PRIVATE, 0.1))
    (world / "set" / BESIDE_SHARDS).write_text(
        (world / "set" / BESIDE_SHARDS).read_text()
        + json.dumps({"public_split": {"records": RECORDS, "public_fraction": 0.1}})
        + "\n"
    )
    with pytest.raises(RecipeError, match="run 'first' protects all of these records"):
        ready(world, part(PUBLIC, 0.1))


def test_a_cut_is_frozen_by_a_command_too(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["split", str(world / "set"), "--public-fraction"]
    assert prepare_command.main([*command, "0.1"]) == 0
    assert "6 of 60 records are public" in capsys.readouterr().out
    ready(world, part(PRIVATE, 0.1))
    trained(world)
    assert prepare_command.main([*command, "0.1"]) == 0
    assert prepare_command.main([*command, "0.2"]) == 2
    assert prepare_command.main([*command, "1"]) == 2
    (world / "registry").mkdir()
    assert prepare_command.main([*command, "0.1", "--registry", str(world / "registry")]) == 0
    assert "public_split" in (world / "registry" / LOG).read_text()
    assert frozen(world) == [PublicSplit(RECORDS, 0.1)]


def test_a_refused_config_freezes_nothing_and_where_nothing_can_be_written_the_run_is_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(world, "held")
    with pytest.raises(RecipeError, match="nobody may use them as public"):
        ready(world, part(PRIVATE, 0.1, evaluation={"path": "held", "public": True}))
    assert frozen(world) == []

    def refuse(*_args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("murmuration.train.storage.sibling_runs.append", refuse)
    with pytest.raises(RecipeError, match=r"Read-only file system.*run\.registry, the same one.*split --registry"):
        ready(world, part(PRIVATE, 0.1))


@pytest.mark.parametrize(
    "cut", [None, 1, {}, {"records": 60, "public_fraction": 2}, {"records": 60.5, "public_fraction": 0.1},
            {"records": 60, "public_fraction": 0.1, "unit": 1}, {"records": 60, "public_fraction": 0.1, "more": 1}],
)  # fmt: skip
def test_a_damaged_cut_is_refused_and_not_made_anew(world: Path, cut: object) -> None:
    (log := world / "set" / BESIDE_SHARDS).write_text(json.dumps({"public_split": cut}))
    with pytest.raises(RecipeError, match="which records are public; restore it"):
        ready(world, part(PRIVATE, 0.1))
    assert log.read_text() == json.dumps({"public_split": cut})


# What is used without noise is public by somebody's word, and the word stands in the config.


EVALUATION, MONITOR = {"path": "held"}, {"path": "held", "records": 8}
START = {"name": "start", "data": {"source": "checkpoint", "path": "weights"}, "objective": "mae"}


def mixing(**more: Any) -> dict[str, Any]:
    return {"data": {"source": "shards", "path": "open", **more}, "batch": 4}


def with_start(**more: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        raw["phases"].insert(0, START | {"data": START["data"] | more})

    return change


@pytest.mark.parametrize("word", [{}, {"public": False}, {"public": None}, {"public": "true"}, {"public": 1}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda word: put("phases.1.evaluation", EVALUATION | word), "records to evaluate on are used without noise"),
        (lambda word: put("phases.1.monitor", MONITOR | word), "the monitor's records are used without noise"),
        (lambda word: put("phases.1.mixing", mixing(**word)), "mix in are not declared public|public"),
        (lambda word: with_start(**word), "weights to start from are used without noise|public"),
    ],
    ids=["evaluation", "monitor", "mixing", "weights"],
)
def test_nothing_is_public_because_nobody_said_anything(
    loaded: Callable[..., Config], change: Callable[[dict[str, Any]], Change], message: str, word: dict[str, Any]
) -> None:
    if word == {"public": False} and message.startswith("weights"):
        return  # said, and the run is marked for it
    with pytest.raises(ConfigError, match=message):
        loaded(change(word))
    loaded(change({"public": True}))


def test_weights_may_be_said_to_be_nobodys_but_public(loaded: Callable[..., Config]) -> None:
    assert not loaded(with_start(public=False)).phases[0].data.public


def test_a_start_warns_of_a_private_phase_that_measures_nothing_on_public_records(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_command, "_run", lambda *_: None)
    monkeypatch.chdir(world)  # a run under `runs` that has a ledger is warned of nothing
    warned = "warning: phases.0: nothing is measured while it trains, so nobody will see whether it learns"
    held_out = {"evaluation": {"path": "held", "public": True}}
    for phase, told in ((PRIVATE, 1), (PRIVATE | held_out, 0)):
        config_of(world, phase)
        train(["--config", str(world / "config.json")])
        assert capsys.readouterr().err.count(warned) == told
