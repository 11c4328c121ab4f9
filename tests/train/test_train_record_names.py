"""A name that no record has is refused before anything is computed, and a refusal tells nothing of a single record."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from murmuration.data.index.build import Wanted
from murmuration.data.index.census import CENSUS
from murmuration.data.index.folders import build_folder
from murmuration.data.index.shard_index import build
from murmuration.launch.prepare import main
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.ready_phase import prepare
from murmuration.train.recipe.record_check import spread
from tests.support.evaluation_world import tokenizer
from tests.support.launching import ROOT, environment
from tests.support.tars import png, tar
from tests.train.test_train_dry_run import command

RECORDS = 60
Members = dict[str, bytes]


def picture(number: int) -> bytes:
    return png(number % 256, 20, green=10)


def records(count: int = RECORDS, **fields: Any) -> Iterator[Members]:
    for number in range(count):
        yield {"png": picture(number), "json": json.dumps({"finding": number % 3, "width": 20} | fields).encode()}


def shards(folder: Path, *parts: Iterator[Members], index: bool = True) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts):
        named = ((f"{number}-{record:06d}", members) for record, members in enumerate(part))
        (folder / f"{number:06d}.tar").write_bytes(tar(named))
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


# `prepare.py check`: what a config's records look like to the trainer, told to their owner alone.


class Page(HTMLParser):
    """The pictures of a page and the texts below them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.pictures: list[np.ndarray] = []
        self.text = ""
        self.open: list[str] = []
        assert path.stat().st_mode & 0o777 == 0o600
        self.feed(path.read_text())
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            source = dict(attrs)["src"] or ""
            assert source.startswith("data:image/png;base64,"), "the page needs no other file"
            self.pictures.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))))
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(capsys: pytest.CaptureFixture[str], sets: Path, *arguments: str) -> list[str]:
    """The lines that the command prints, without their columns."""
    page = ["--out", str(sets / "page.html")]
    assert main(["check", "--config", str(sets / "config.json"), "--workers", "0", *page, *arguments]) == 0
    said = capsys.readouterr().out
    assert said.startswith("private: ")
    return [re.sub(" +", " ", line.strip()) for line in said.splitlines()]


def test_labels_beyond_the_classes_and_damaged_pictures_are_counted_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five = [{"png": picture(n), "json": b'{"finding": %d}' % (n % 5)} for n in range(20)]
    damaged = [{"png": b"no picture", "json": b'{"finding": 1}'}, {"json": b'{"finding": 1}'}, {"png": picture(0)}]
    shards(tmp_path / "private", iter(five), iter(damaged))
    config_of(tmp_path)
    said = checked(capsys, tmp_path)
    for line in (
        "looked at 23 of 23 records", "usable 12 of 23 (52.2%)", "picture 22 of 23 (95.7%)",
        "shorter side 20 to 20 (median 20) pixels; 0 of 21 (0.0%) are smaller than the model's 16",
        "caption 0 of 23 (0.0%)", "label 22 of 23 (95.7%) have a number under 'finding'", "1: 6", "4: 4",
        "8 of 22 (36.4%) have a number without an output; the model has 3", "bad 11 of 23 (47.8%)",
        "8 x the record's finding is not the number of a class; such as record 3 in 000000.tar",
        "1 x no image; such as record 21 in 000001.tar: the record contains ['json']",
        "1 x no readable .json for finding; such as record 22 in 000001.tar (KeyError)",
    ):  # fmt: skip
        assert line in said, (line, said)
    page = Page(tmp_path / "page.html")
    assert len(page.pictures) == 12 and "private: " in page.text and "bad: no image" in page.text
    for number, shown in zip((0, 1, 2, 5), page.pictures, strict=False):
        assert shown.shape == (16, 16, 3) and (shown == (number, 10, 0)).all(), "its own colours, not normalised ones"
    assert "class 2" in page.text


def test_captions_are_counted_as_the_text_encoder_cuts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captions = ["a photo of a red square"] * 6 + ["a photo of a red zebra"] * 3 + ["red " * 9]
    shards(tmp_path / "private", ({"png": picture(n), "txt": each.encode()} for n, each in enumerate(captions)))
    tokenizer(tmp_path)
    config_of(tmp_path, "caption")
    said = checked(capsys, tmp_path, "--records", "10")
    assert "caption 10 of 10 (100.0%)" in said
    assert (
        "tokens 8 to 11 (median 8) per caption, with start and end; 1 of 10 (10.0%) are cut to model.text_length = 8"
        in said
    )
    assert "unknown 3 of 63 (4.8%) tokens" in said and "usable 10 of 10 (100.0%)" in said
    page = Page(tmp_path / "page.html")
    assert len(page.pictures) == 10 and "a photo of a red <unk>" in page.text and "red " * 6 not in page.text


def test_a_sample_is_spread_over_all_records_and_a_page_shows_some_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards(tmp_path / "private", records(40), records(40))
    config_of(tmp_path, "mae", {"phases.0.data.augment": "random_resized_crop"})
    said = checked(capsys, tmp_path, "--sample", "8", "--records", "4")
    assert "looked at 8 of 80 records, spread evenly (--all looks at all)" in said
    assert len(Page(tmp_path / "page.html").pictures) == 4
    assert "looked at 80 of 80 records" in checked(capsys, tmp_path, "--all", "--records", "0")
    assert spread(80, 8).tolist() == list(range(0, 80, 10)) and spread(3, 8).tolist() == [0, 1, 2]


def test_what_training_refuses_is_shown_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a process of its own, which needs no DeepSpeed."""
    shards(tmp_path / "private", records(30))
    config_of(tmp_path)
    program = "import sys; from murmuration.launch.prepare import main; code = main(sys.argv[1:]); "
    program += "assert 'deepspeed' not in sys.modules; sys.exit(code)"
    arguments = ["check", "--config", str(tmp_path / "config.json"), "--set", "phases.0.data.label=findng"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--workers", "1"], cwd=tmp_path, capture_output=True, text=True,
        env=environment() | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "30 x no label findng in the record; such as record 0 in 000000.tar (KeyError)" in done.stdout
    assert "of 30 .json looked into, all have finding, all have width" in done.stdout
    assert (tmp_path / "config-check.html").stat().st_mode & 0o777 == 0o600
    assert "Records of config.json" in (tmp_path / "config-check.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--phase", "public"], "there are private"), (["--set", "phases.0.data.path=lost"], "phases.0.data.path: ")],
)
def test_what_is_not_there_is_answered_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    shards(tmp_path / "private", records(4))
    config_of(tmp_path)
    command: list[Any] = ["check", "--config", str(tmp_path / "config.json"), *arguments]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    shutil.rmtree(tmp_path / "private")
