"""Private records below, above or behind what is used as public are found, in training and in `evaluate` alike."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from murmuration.data.index.open import open_index
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.launch import prepare as prepare_command
from murmuration.train.commands.train import main as train
from murmuration.train.config.load import load
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.private_around import Extent
from murmuration.train.recipe.ready_phase import prepare
from murmuration.train.storage.sibling_runs import RunLog
from tests.support.evaluation_world import class_folders, evaluate, saved
from tests.support.published import vip_mae

COLOURS = ("red", "blue")


def pictures(folder: Path, seed: int = 0) -> Path:
    return class_folders(folder, 3, seed, COLOURS)


def tars(folder: Path, seed: int = 1, each: int = 6) -> Path:
    write_shards(folder, shape_samples(seed, 12, 32), each)
    return folder


def indexed(source: Path | str, *more: str) -> None:
    assert prepare_command.main(["index", str(source), *more]) == 0


def protected(index: Path) -> None:
    """What a private run leaves: the log beside the index, and notes in the folders of the records."""
    assert RunLog.of(open_index(index)).register("id", "private", "clinic", 8.0, 1e-6) is None


def settings(**parts: Any) -> dict[str, Any]:
    phase = {"name": "open", "objective": "mae", "batch": 1, "schedule": {"peak": 0.1}, "steps": 1, **parts}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "model": {"family": "mae", "size": "nano", "image_size": 16, "patch_size": 8},
        "phases": [phase],
    }


def config_of(world: Path, raw: dict[str, Any]) -> Path:
    path = world / "config.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.fixture
def world(tmp_path: Path) -> Path:
    indexed(pictures(tmp_path / "fine", 70))
    return tmp_path / "data"


def below(data: Path) -> tuple[Path, Path]:
    private = pictures(data / "a" / "clinic" / "scans", 9)
    indexed(private)
    protected(private)
    indexed(pictures(data / "b"), "--out", str(data.parent / "index-of-b"))
    indexed(data, "--classes", "none")
    return data, data.with_name("data.index")


def below_as_shards(data: Path) -> tuple[Path, Path]:
    private = tars(data / "red" / "clinic" / "scans")
    indexed(private)
    protected(private)
    (data / "red" / "1.png").write_bytes(next(pictures(data.parent / "more").rglob("*.png")).read_bytes())
    indexed(data)
    return data, data.with_name("data.index")


def behind_a_link(data: Path) -> tuple[Path, Path]:
    private = pictures(data.parent / "elsewhere" / "scans", 9)
    indexed(private)
    protected(private)
    pictures(data)
    (data / "more").mkdir()
    (data / "more" / "year").symlink_to(private.parent)
    indexed(data)
    return data, data.with_name("data.index")


def behind_links_of_single_files(data: Path) -> tuple[Path, Path]:
    private = pictures(data.parent / "elsewhere" / "scans", 9)
    indexed(private)
    protected(private)
    pictures(data)
    first, second = data.parent / "first.png", data / "red" / "link.png"
    first.symlink_to(private / "red" / "000.png")
    second.symlink_to(first)
    indexed(data)
    return data, data.with_name("data.index")


def below_the_index_of_others(data: Path) -> tuple[Path, Path]:
    """Pictures are taken from below such a folder all the same."""
    private = pictures(data / "a" / "deep" / "scans", 9)
    indexed(private)
    protected(private)
    indexed(pictures(data.parent / "other"), "--out", str(data / "a"))
    indexed(data, "--classes", "none")
    return data, data.with_name("data.index")


def above(data: Path) -> tuple[Path, Path]:
    pictures(data / "red" / "open")
    (data / "blue").mkdir()
    (data / "blue" / "0.png").write_bytes(next(data.rglob("*.png")).read_bytes())
    indexed(data)
    protected(data)
    indexed(data / "red" / "open")
    return data / "red" / "open", data / "red" / "open.index"


def above_with_its_index_elsewhere(data: Path) -> tuple[Path, Path]:
    pictures(data / "deep" / "open")
    indexed(data, "--classes", "none", "--out", str(data.parent / "far"))
    protected(data.parent / "far")
    indexed(data / "deep" / "open")
    return data / "deep" / "open", data / "deep" / "open.index"


def one_of_a_brace_pattern(data: Path) -> tuple[Path, Path]:
    private = tars(data / "b" / "scans", 5)
    indexed(private)
    protected(private)
    tars(data / "a" / "open")
    indexed(f"{data}/{{a/open,b/scans}}/{{000000..000001}}.tar", "--out", str(data.parent / "both"))
    return data.parent / "both", data.parent / "both"


def the_same_shards_with_another_index(data: Path) -> tuple[Path, Path]:
    tars(data)
    indexed(data, "--out", str(data.parent / "far"))
    protected(data.parent / "far")
    indexed(data)
    return data, data / "index"


PLACES = [
    below, below_as_shards, below_the_index_of_others, behind_a_link, behind_links_of_single_files, above,
    above_with_its_index_elsewhere, one_of_a_brace_pattern, the_same_shards_with_another_index,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda each: each.__name__)
def test_neither_training_nor_evaluate_uses_private_records_as_public(
    world: Path, place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, index = place(world)
    fine = {"path": str(world.parent / "fine"), "public": True}
    named = {"path": str(data), "public": True}
    uses: dict[str, dict[str, Any]] = {
        "data": settings(data=named),
        "evaluation": settings(data=fine, evaluation=named),
        "monitor": settings(data=fine, monitor=named),
        "mixing.data": settings(
            data={"path": str(world.parent / "fine"), "classes": None}, batch=None,
            privacy={"epsilon": 8.0, "expected_batch": 3}, mixing={"data": named, "batch": 2},
        ),
    }  # fmt: skip
    for use, raw in uses.items():
        config = config_of(world.parent, raw)
        with pytest.raises(RecipeError, match=rf"phases\.0\.{use}: run 'clinic' protects these.*nobody may use"):
            prepare(load(config, []))
    assert train(["--config", str(config)]) == 2
    assert "run 'clinic' protects" in capsys.readouterr().err
    weights = saved(world.parent / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    common = ["reconstruct", weights, "--heads", 4, "--decoder-heads", 4, "--public"]
    for given in (data, index):
        assert evaluate(*common, "--data", given, "--out", world.parent / "out") == 2
        assert "'clinic' protects" in capsys.readouterr().err
    assert not (world.parent / "out" / "result.json").exists()


def test_naming_one_set_of_a_run_does_not_explain_its_other_one(world: Path) -> None:
    """The run that is known to be about others here may have left the note about these, in another phase."""
    one, other = tars(world / "one"), tars(world / "other", 7)
    indexed(one)
    indexed(other, "--out", str(world / "far"))
    for number, index in enumerate((open_index(one), open_index(world / "far"))):
        assert RunLog.of(index).register("id", f"phase {number}", "clinic", 8.0, 1e-6) is None
    indexed(other)
    raw = settings(data={"path": str(other), "public": True})
    private = {**raw["phases"][0], "name": "mine", "data": {"path": str(one)}}
    private |= {"batch": None, "privacy": {"epsilon": 8.0, "expected_batch": 3}}
    for phases in (raw["phases"], [private, *raw["phases"]]):
        with pytest.raises(RecipeError, match="run 'clinic' protects"):
            prepare(load(config_of(world, raw | {"phases": phases}), []))


def test_a_stream_of_links_to_private_shards_is_refused(world: Path) -> None:
    private = tars(world / "scans")
    indexed(private, "--out", str(world / "far"))
    protected(world / "far")
    (world / "open").mkdir()
    for shard in private.glob("*.tar"):
        (world / "open" / shard.name).symlink_to(shard)
    data = {"source": "webdataset", "path": str(world / "open"), "public": True, "lanes": 1}
    with pytest.raises(RecipeError, match=r"phases\.0\.data: run 'clinic' protects"):
        prepare(load(config_of(world, settings(data=data)), []))


def test_what_only_lies_near_private_records_stays_public(world: Path) -> None:
    """Public and private sets beside each other, and public shards below private ones, as their index shows."""
    indexed(pictures(world / "scans" / "train", 9))
    protected(world / "scans" / "train")
    indexed(pictures(world / "scans" / "val", 20))
    private = tars(world / "shards", 5)
    indexed(private)
    protected(private)
    indexed(tars(private / "deep" / "open", 6))
    for data in (world / "scans" / "val", private / "deep" / "open"):
        named = {"path": str(data), "public": True}
        assert len(prepare(load(config_of(world.parent, settings(data=named, evaluation=named)), []))) == 1


def test_before_there_is_a_log_the_config_itself_tells_and_a_resume_hears_the_same(world: Path) -> None:
    """The first start and the one after it, when the run's own note lies there, have the same answer."""
    private = pictures(world / "a" / "scans", 9)
    indexed(private)
    pictures(world / "b")
    indexed(world, "--classes", "none")
    raw = settings(data={"path": str(private)}, batch=None, privacy={"epsilon": 8.0, "expected_batch": 3})
    raw["phases"][0]["evaluation"] = {"path": str(world), "public": True}
    with pytest.raises(RecipeError, match=r"phases\.0\.evaluation: contains the folders of phases\.0\.data, which is"):
        prepare(load(config_of(world.parent, raw), []))
    shards = tars(world.parent / "shards", 5)
    indexed(shards, "--out", str(world.parent / "far"))
    indexed(tars(shards / "open", 6))
    raw["phases"][0] |= {"data": {"path": str(world.parent / "far")}}
    raw["phases"][0]["evaluation"] = {"path": str(shards / "open"), "public": True}
    for _ in range(2):
        prepare(load(config_of(world.parent, raw), []))
        protected(world.parent / "far")


def test_a_folder_is_listed_once_whatever_is_in_it(world: Path) -> None:
    """Work grows with folders, not with files: no file is asked for its state, and a loop of links ends."""
    for folder in ("red", "blue", "blue/deep"):
        (world / folder).mkdir(parents=True)
        for number in range(300):
            (world / folder / f"{number}.png").touch()
    (world / "blue" / "deep" / "loop").symlink_to(world)
    asked: Counter[str] = Counter()

    def count(_frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__module__", "") in ("posix", None):
            asked[called.__name__] += 1

    sys.setprofile(count)
    try:
        found = Extent.of(world)
    finally:
        sys.setprofile(None)
    real = os.path.realpath(world)
    assert found.folders == {real, f"{real}/red", f"{real}/blue", f"{real}/blue/deep"}
    assert asked["scandir"] == 4
    assert sum(asked[name] for name in ("stat", "lstat", "open", "readlink")) < 60, asked


def test_a_folder_that_cannot_be_searched_is_no_public_data(world: Path) -> None:
    pictures(world)
    (world / "broken").symlink_to("broken")
    with pytest.raises(ShardError, match="cannot be searched for private records"):
        Extent.of(world)


def test_a_public_part_stays_usable_beside_runs_on_the_rest_but_not_over_another_private_index(world: Path) -> None:
    indexed(pictures(world))
    raw = settings(data={"path": str(world), "public": True, "public_fraction": 0.5}, batch=1)
    config = config_of(world.parent, raw)
    [open_part] = prepare(load(config, []))
    RunLog.of(open_part.index).register("id", "private", "clinic", 8.0, 1e-6)
    prepare(load(config, []))
    indexed(world / "red", "--out", str(world.parent / "far"))
    RunLog.of(open_index(world.parent / "far")).register("id", "private", "another", 8.0, 1e-6)
    with pytest.raises(RecipeError, match="run 'another' protects"):
        prepare(load(config, []))
