"""`prepare.py check`: what a config's records look like to the trainer, told to their owner alone."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from murmuration.launch.prepare import main
from murmuration.train.recipe.record_check import spread
from tests.support.launching import ROOT, environment
from tests.train.test_train_record_names import config_of, picture, records, shards, tokenizer


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
