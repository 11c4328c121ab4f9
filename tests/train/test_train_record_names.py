"""A name that no record has is refused before anything is computed, and a refusal tells nothing of a single record."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from murmuration.data.index.build import Wanted
from murmuration.data.index.folders import build_folder
from murmuration.data.index.kept_census import CENSUS
from murmuration.data.index.shard_index import build
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.ready_phase import prepare
from tests.support.evaluation_world import tokenizer
from tests.train.test_train_dry_run import command

RECORDS = 60
Members = dict[str, bytes]


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (number % 256, 10, 0)).save(file, "PNG")
    return file.getvalue()


def records(count: int = RECORDS, **fields: Any) -> Iterator[Members]:
    for number in range(count):
        yield {"png": picture(number), "json": json.dumps({"finding": number % 3, "width": 20} | fields).encode()}


def shards(folder: Path, *parts: Iterator[Members], index: bool = True) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts):
        with tarfile.open(folder / f"{number:06d}.tar", "w") as tar:
            for record, members in enumerate(part):
                for suffix, content in members.items():
                    info = tarfile.TarInfo(f"{number}-{record:06d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    if index:
        build(folder)
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    shards(tmp_path / "private", records())
    shards(tmp_path / "held", records(30, side="left"))
    tokenizer(tmp_path)
    return tmp_path


def config_of(sets: Path, objective: str = "classify", change: dict[str, Any] | None = None) -> Config:
    told = {"label": "finding"} if objective == "classify" else {"tokenizer": str(sets / "tokenizer.json")}
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "model": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2},
        "phases": [{
            "name": "private", "data": {"path": "private"} | (told if objective != "mae" else {}),
            "objective": objective, "privacy": {"epsilon": 8.0, "expected_batch": 4},
            "schedule": {"peak": 0.1}, "steps": 1,
        }],
    }  # fmt: skip
    raw["model"] |= (
        {"family": "classifier", "classes": 3, "classify_loss": "softmax"}
        if objective == "classify"
        else {"family": "captioner", "decoder_depth": 1, "text_length": 8, "vocabulary": 64}
    )
    (sets / "config.json").write_text(json.dumps(raw))
    return load(sets / "config.json", [f"{key}={json.dumps(value)}" for key, value in (change or {}).items()])


def refusal(config: Config) -> str:
    """What training says before its first step; a dry run must say the same."""
    with pytest.raises(RecipeError) as training:
        prepare(config)
    with pytest.raises(RecipeError) as trying:
        meaning(config)
    assert str(training.value) == str(trying.value)
    return str(training.value)


def test_a_config_that_asks_for_what_is_there_is_taken(sets: Path) -> None:
    held = {"phases.0.evaluation": {"path": str(sets / "held"), "public": True}}
    for objective in ("classify", "mae"):
        config = config_of(sets, objective, held)
        prepare(config)
        assert "note" not in as_text(meaning(config))


def test_a_misspelt_label_is_answered_with_the_nearest_name_and_no_count(sets: Path) -> None:
    said = refusal(config_of(sets, change={"phases.0.data.label": "findng"}))
    assert said == (
        f"phases.0.data.label: no record, or next to none, of {sets / 'private'} (phases.0.data.path) has a field "
        '"findng" in its .json; "finding" is the nearest name that they have'
    )
    assert str(RECORDS) not in said.replace(str(sets), "")
    done = command("--config", str(sets / "config.json"), "--set", "phases.0.data.label=findng", cwd=sets)
    assert done.returncode == 2 and done.stderr.strip() == f"error: {said}" and done.stdout == ""
    assert not (sets / "runs").exists()


def test_names_of_public_records_are_answered_with_their_counts(sets: Path) -> None:
    held = {"path": str(sets / "held"), "public": True}
    config = config_of(sets, "caption", {
        "phases.0.objective": "caption",
        "phases.0.data": {"path": str(shards(sets / "told", ({**r, "txt": b"a photo"} for r in records()))),
                          "tokenizer": str(sets / "tokenizer.json")},
        "phases.0.evaluation": held | {"zero_shot": {"axes": {"sides": ["left", "right"]}}},
    })  # fmt: skip
    said = refusal(config)
    assert said.startswith("phases.0.evaluation.zero_shot.axes: no record of ")
    assert said.endswith('has a field "sides" in its .json; "side" is in 30 of 30')


@pytest.mark.parametrize(
    ("objective", "change", "said"),
    [
        ("classify", {"phases.0.data.label": "cls"}, 'has a member .cls; their members are ".json", ".png"'),
        ("classify", {"phases.0.data.label": "zebra"}, 'a field "zebra" .*; their fields are "finding", "width"$'),
        ("classify", {"phases.0.data.weight": "withd"}, 'data.weight: .* field "withd" .*; "width" is the nearest'),
        ("caption", {}, r'0.data.path: .* has a caption \(.txt, or a list "captions" in its .json\); their fields are'),
        ("mae", {"phases.0.evaluation": {"path": "bare", "public": True}},
         r'0.evaluation.path: no record of bare has a picture \(.jpg .*\); their members are ".json"'),
        ("mae", {"phases.0.monitor": {"path": "bare", "public": True}}, "monitor.path: no record of bare has a pict"),
        ("mae", {"phases.0.mixing": {"data": {"path": "bare", "public": True}, "batch": 2}},
         r"0.mixing.data.path: no record of bare has a picture"),
    ],
)  # fmt: skip
def test_every_set_and_every_name_is_compared(
    sets: Path, objective: str, change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sets)
    shards(sets / "bare", ({"json": b'{"finding": 0}'} for _ in range(30)))
    with pytest.raises(RecipeError, match=said):
        prepare(config_of(sets, objective, change))


def test_captions_under_another_name_are_told(sets: Path) -> None:
    shutil.rmtree(sets / "private")
    shards(sets / "private", records(caption="a photo of a red square"))
    assert refusal(config_of(sets, "caption")).endswith('; "caption" is the nearest name that they have')
    shutil.rmtree(sets / "private")
    shards(sets / "private", records(captions=["a photo of a red square"]))
    prepare(config_of(sets, "caption"))


def test_one_private_record_decides_nothing_and_is_not_named(sets: Path) -> None:
    """Neighbouring sets, in which one record alone has the name, or none has it, get the same answer."""
    asked = {"phases.0.data.label": "smith_1970"}
    said = refusal(config_of(sets, change=asked))
    shutil.rmtree(sets / "private")
    shards(sets / "private", records(RECORDS - 1), records(1, smith_1970=1, smith_1971=1))
    assert refusal(config_of(sets, change=asked)) == said and "smith_1971" not in said


def test_the_census_of_a_set_that_is_cut_counts_its_private_part_too(sets: Path) -> None:
    """Neighbours get one answer about the public part, since the counts are those of all records."""
    asked = {
        "phases.0.data": {"path": str(sets / "private"), "label": "smith_1970", "public": True, "public_fraction": 0.5},
        "phases.0.privacy": None, "phases.0.batch": 4,
    }  # fmt: skip
    answers: list[str] = []
    for parts in ([records()], [records(RECORDS - 1), records(1, smith_1970=1)]):
        shutil.rmtree(sets / "private")
        shards(sets / "private", *parts)
        with pytest.raises(RecipeError) as raised:
            prepare(config_of(sets, change=asked))
        answers.append(str(raised.value))
    said, other = answers
    assert said == other and "or next to none" in said and str(RECORDS) not in said.replace(str(sets), "")


def test_of_a_handful_of_private_records_nothing_is_concluded(sets: Path) -> None:
    shutil.rmtree(sets / "private")
    shards(sets / "private", records(19))
    prepare(config_of(sets, change={"phases.0.data.label": "findng"}))


def test_images_have_class_folders_and_no_fields(sets: Path) -> None:
    shutil.rmtree(sets / "private")
    for number in range(4):
        (sets / "private").mkdir(exist_ok=True)
        (sets / "private" / f"{number}.png").write_bytes(picture(number))
    build_folder(sets / "private")
    assert "has single images, which have no field" in refusal(config_of(sets))
    assert "has no class folders" in refusal(config_of(sets, change={"phases.0.data.label": "cls"}))


def test_labels_beyond_the_classes_are_bad_records_and_no_refusal(sets: Path) -> None:
    """What single records hold decides nothing."""
    prepare(config_of(sets, change={"model.classes": 2}))


def test_an_index_without_a_census_refuses_nothing_and_says_how_to_make_one(sets: Path) -> None:
    (sets / "private" / "index" / CENSUS).unlink()
    config = config_of(sets, change={"phases.0.data.label": "findng"})
    prepare(config)
    assert f"prepare.py index {sets / 'private'} --rescan counts them" in as_text(meaning(config))
    told: list[str] = []
    time.sleep(0.1)  # a shard that was written just now is never taken as known
    build(sets / "private")
    (sets / "private" / "index" / CENSUS).unlink()
    build(sets / "private", tell=told.append)
    assert any("--rescan counts them" in each for each in told), "its shards are known, so they are not read"
    prepare(config)
    build(sets / "private", wanted=Wanted(rescan=True))
    assert '"finding" is the nearest' in refusal(config)


def test_a_census_is_kept_shard_by_shard_for_the_owner_alone(sets: Path) -> None:
    census = sets / "private" / "index" / CENSUS
    assert census.stat().st_mode & 0o777 == 0o600
    shards(sets / "more", records(30, extra=1), index=False)
    shutil.move(sets / "more" / "000000.tar", sets / "private" / "000001.tar")
    assert build(sets / "private").records == RECORDS + 30
    prepare(config_of(sets, change={"phases.0.data.label": "extra"}))
    whole = census.read_bytes()
    build(sets / "private", wanted=Wanted(rescan=True))
    assert census.read_bytes() == whole


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{", b'{"format": 1}', b"null", b'{"format": 1, "manifest": "", "shards": 3}']
)
def test_a_damaged_census_is_as_none(sets: Path, damage: bytes) -> None:
    (sets / "private" / "index" / CENSUS).write_bytes(damage)
    config = config_of(sets, change={"phases.0.data.label": "findng"})
    prepare(config)
    assert "--rescan counts them" in as_text(meaning(config))
