"""Packing: every row is packed or listed, one image is one record, and the same input gives the same bytes, killed or
not."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.decode.class_list import ClassList, made_of_rows
from murmuration.data.index.open import open_units
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.pack.dicom import Window, as_png, is_dicom
from murmuration.data.pack.plan import Plan
from murmuration.data.pack.row import BadPicture, Fault, Row
from murmuration.data.synthetic.index import GRAMMAR_WORDS
from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from murmuration.launch.prepare import main

ROOT = Path(__file__).resolve().parents[2]
PREPARE = [sys.executable, str(ROOT / "launch" / "prepare.py"), "pack"]


@pytest.fixture
def pictures(tmp_path: Path, picture: Callable[..., bytes]) -> Path:
    """Twelve pictures of three forms, two of them with names that say nothing of the form."""
    folder = tmp_path / "pictures"
    (folder / "ward").mkdir(parents=True)
    for number in range(12):
        form = ("JPEG", "PNG", "WEBP")[number % 3]
        (folder / "ward" / f"scan {number}{'.jpg' if number > 1 else ''}").write_bytes(picture(number, form=form))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("scan*"))


def write_csv(path: Path, rows: list[list[Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def pack(*arguments: str | Path, workers: int = 1) -> None:
    assert main(["pack", *map(str, arguments), "--workers", str(workers)]) == 0


def records(folder: Path) -> list[dict[str, bytes]]:
    index = ShardIndex.open(folder)
    index.check_unchanged(contents=True)
    reader = ShardReader(index)
    return [reader.read(record) for record in range(index.records)]


def left_out(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "left_out.jsonl").read_text().splitlines()]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What is in a packed folder, but for what no two folders share: its salt, and times of files."""
    kept = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in kept.items() if not name.endswith(("salt.key", "stamps.json"))}


def test_rows_of_one_image_are_one_record_with_all_captions(pictures: Path, tmp_path: Path) -> None:
    files = names(pictures)
    rows = [["file_name", "caption"], *([f"./{name}", f"a red {n}"] for n in range(3) for name in files[:11])]
    rows += [[files[11], "alone"]]
    out = tmp_path / "out"
    pack(pictures, "--csv", write_csv(tmp_path / "captions.csv", rows), "--out", out, "--per-shard", "5")
    found = records(out)
    assert len(found) == 12 and len(list(out.glob("*.tar"))) == 3 and left_out(out) == []
    assert all(json.loads(each["json"]) == {"captions": ["a red 0", "a red 1", "a red 2"]} for each in found[:11])
    assert all("txt" not in each for each in found[:11]) and found[11]["txt"] == b"alone" and "json" not in found[11]
    for name, each in zip(files, found, strict=True):
        assert (
            next(value for key, value in each.items() if key in ("jpg", "png", "webp"))
            == (pictures / name).read_bytes()
        )
    assert {suffix for each in found for suffix in each} == {"jpg", "png", "webp", "json", "txt"}
    theirs = [dict(each) for path in sorted(out.glob("*.tar")) for each in _webdataset(path)]
    assert [each["__key__"].rsplit("-", 1)[0] for each in theirs] == [
        Path(name).stem.replace(" ", "_") for name in files
    ]


def _webdataset(path: Path) -> Iterator[dict[str, Any]]:
    yield from webdataset.WebDataset(str(path), shardshuffle=False)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def text(tmp_path: Path) -> TextEncoder:
    word_tokenizer(GRAMMAR_WORDS, tmp_path / "tokenizer.json")
    return TextEncoder(tmp_path / "tokenizer.json", 8)


def test_each_step_takes_one_caption_by_key(tmp_path: Path, write_tar: Callable[..., Path], picture, text) -> None:
    """From plain WebDataset tars: whoever wrote them."""
    colours = ["red", "green", "blue"]
    many = json.dumps({"captions": colours}).encode()
    samples = [{"__key__": f"{n:03d}", "jpg": picture(n), "json": many} for n in range(40)]
    write_tar(
        tmp_path / "tars" / "0.tar", [*samples, {"__key__": "one", "jpg": picture(1), "txt": b"red", "json": many}]
    )
    index = build(tmp_path / "tars")
    ids = np.arange(41)

    def tokens(key: bytes, step: int, ids: np.ndarray = ids) -> list[list[int]]:
        reader = BatchReader(index, DataSpec(8), text, augment_key=key)
        try:
            return reader.read(ids, step).inputs["tokens"].tolist()
        finally:
            reader.close()

    rows = {colour: text.encode(colour) for colour in colours}
    steps = np.array([tokens(b"a" * 32, step) for step in range(20)])
    assert (steps == [tokens(b"a" * 32, step, ids) for step in range(20)]).all(), "a step made again is the same"
    chosen = steps[:, :40].reshape(-1, 8).tolist()
    counts = [chosen.count(rows[colour]) for colour in colours]
    assert sum(counts) == 800 and min(counts) > 200, "each about as often"
    assert (steps[:, 40] == rows["red"]).all(), "a .txt is the caption, as it always was"
    assert (np.array(tokens(b"b" * 32, 0)) != steps[0]).any() and (steps[0] != steps[1]).any()
    # Neither neighbours nor the place in a batch matter.
    assert tokens(b"a" * 32, 3, np.array([7, 2])) == steps[3][[7, 2]].tolist()
    assert tokens(b"", 5) == [rows["red"]] * 41, "measurements take the first"


@pytest.mark.parametrize("captions", [[], "red", ["red", 3], None, {"0": "red"}])
def test_what_is_no_list_of_captions_is_a_bad_record(tmp_path: Path, write_tar, picture, text, captions: Any) -> None:
    more = {"json": json.dumps({"captions": captions}).encode()}
    write_tar(tmp_path / "0.tar", [{"__key__": "a", "jpg": picture(1), **more}, {"__key__": "b", "jpg": picture(2)}])
    reader = BatchReader(build(tmp_path), DataSpec(8), text, augment_key=b"a" * 32)
    assert reader.read(np.array([0, 1]), 0).present.tolist() == [False, False]
    assert "captions are not a list of texts" in reader.bad_reasons[0] and "no caption" in reader.bad_reasons[1]


def test_every_bad_row_is_listed_and_counted(pictures: Path, tmp_path: Path, capsys) -> None:
    files = names(pictures)
    (pictures / "ward" / "scan 5.jpg").write_bytes((pictures / "ward" / "scan 6.jpg").read_bytes()[:700])
    (pictures / "ward" / "scan 7.jpg").write_bytes(b"not a picture")
    os.mkfifo(pictures / "ward" / "pipe.jpg")
    table = tmp_path / "t.csv"
    rows = [["image", "text", "finding"]]
    rows += [[name, f"caption of {name}", "clear" if n % 2 else "mass"] for n, name in enumerate(files)]
    rows += [["gone.jpg", "x", "mass"], ["gone.jpg", "y", "mass"], ["ward/pipe.jpg", "x", "mass"], ["", "x", "mass"]]
    rows += [[files[0], " ", "mass"], ["../pictures/" + files[1], "again", "clear"], [files[2], "z", "clear"]]
    write_csv(table, rows)
    with table.open("ab") as file:
        file.write(b"too,many,cells,here\r\n" + files[3].encode() + b",\xff,\r\n")
        file.write(b"nul.jpg\0,b,mass\r\n")
    out = tmp_path / "out"
    asked = ["pack", str(pictures), "--csv", str(table), "--label", "finding", "--out", str(out)]
    assert main(asked) == 2 and not out.exists()
    assert "name a public one with --classes, or have those that occur listed" in capsys.readouterr().err
    pack(pictures, "--csv", table, "--label", "finding", "--classes-from-rows", "--out", out)
    said = capsys.readouterr().out
    reasons = [(each["row"], each["reason"]) for each in left_out(out)]
    assert sorted(reasons) == sorted(
        [
            ("t.csv:14", "missing file"), ("t.csv:16", "missing file"), ("t.csv:17", "no image named"),
            ("t.csv:18", "empty caption"), ("t.csv:20", "rows of one image disagree"), ("t.csv:21", "unreadable row"),
            ("t.csv:22", "empty caption"), ("t.csv:23", "missing file"),
            *((f"t.csv:{2 + files.index(f'ward/scan {n}.jpg')}", "undecodable image") for n in (5, 7)),
        ]
    )  # fmt: skip
    assert (out / "left_out.jsonl").stat().st_mode & 0o077 == 0
    assert "left out: 3 × missing file" in said and "2 × undecodable image" in said
    found = records(out)
    assert len(found) == 9, "twelve, two of which are no pictures, and one with two labels"
    assert (out / "classes.txt").read_text() == "clear\nmass\n" and {each["cls"] for each in found} == {
        b"clear",
        b"mass",
    }
    assert "pack them with a public list (--classes)" in said
    assert made_of_rows(out) == ClassList(("clear", "mass")).digest
    assert sum("captions" in json.loads(each.get("json", b"{}")) for each in found) == 1, "one file by two names"


def test_only_the_owner_can_read_what_was_packed(pictures: Path, tmp_path: Path, capsys) -> None:
    """Pictures and captions that only their owner could read."""
    for path in pictures.rglob("scan*"):
        path.chmod(0o600)
    table = write_csv(tmp_path / "t.csv", [["file_name", "caption"], *([name, "ill"] for name in names(pictures))])
    table.chmod(0o600)
    old = os.umask(0)
    try:
        pack(pictures, "--csv", table, "--out", tmp_path / "out", "--hold-out", "0.3")
    finally:
        os.umask(old)
    assert f"chmod -R a+rX {tmp_path / 'out'} {tmp_path / 'out-held-out'}\n" in capsys.readouterr().out
    for out in (tmp_path / "out", tmp_path / "out-held-out"):
        modes = {path.name: path.stat().st_mode & 0o777 for path in [out, *out.rglob("*")]}
        assert {mode for name, mode in modes.items() if name in (out.name, "index")} == {0o700}
        assert {mode for name, mode in modes.items() if name not in (out.name, "index")} == {0o600}


def test_a_folder_that_somebody_else_made_is_not_packed_into(pictures: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / ".out.partial").symlink_to(tmp_path / "theirs")
    assert main(["pack", str(pictures), "--out", str(tmp_path / "out")]) == 2
    assert "somebody else made it and could read what is packed; remove it" in capsys.readouterr().err
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("way", ["../secret.jpg", "ward/../../secret.jpg", "{tmp}/secret.jpg", "..\\secret.jpg"])
def test_a_table_names_no_file_outside_of_its_folder(pictures: Path, tmp_path: Path, picture, way: str, capsys) -> None:
    (tmp_path / "secret.jpg").write_bytes(picture(99))
    own = [names(pictures)[0], str(pictures / names(pictures)[1])]
    table = write_csv(tmp_path / "t.csv", [["file_name"], *([name] for name in (*own, way.format(tmp=tmp_path)))])
    pack(pictures, "--csv", table, "--out", tmp_path / "out")
    assert "left out: 1 × file name outside SOURCE" in capsys.readouterr().out
    assert len(records(tmp_path / "out")) == 2
    table = write_csv(table, [["file_name"], [way.format(tmp=tmp_path)]])
    assert main(["pack", str(pictures), "--csv", str(table), "--out", str(tmp_path / "other")]) == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{0},"open', *["{1},text"] * 3000], "t.csv:2: a quote that begins in this row takes 3000 more lines"),
        (['{0},"open', "{1},text", '{2},"a, b"'], "t.csv:2: a quote that begins in this row takes 2 more lines"),
        (['{0},"open', *["{1},text"] * 2000, '"'], "t.csv:2: a quote that begins in this row takes 2001 more lines"),
        (['{0},"' + "x" * (17 << 20) + '"'], "t.csv:2: field larger than field limit"),
        (['{0},"two', 'lines"', '{1},"a "b" c"', '{2},5" nail'], ""),
    ],
)
def test_a_quote_that_is_not_closed_takes_no_rows_for_text(
    pictures: Path, tmp_path: Path, lines: list[str], said: str, capsys
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["file_name,caption", *lines]).format(*names(pictures)) + "\n")
    code = main(["pack", str(pictures), "--csv", str(table), "--out", str(tmp_path / "out"), "--workers", "1"])
    assert code == (2 if said else 0) and said in capsys.readouterr().err
    if not said:
        assert [each["txt"] for each in records(tmp_path / "out")] == [b"two\nlines", b'a b" c"', b'5" nail']


@pytest.mark.parametrize("window", [("nan", "inf"), ("0", "nan"), ("inf", "5"), ("0", "inf"), ("0", "0.5")])
def test_a_window_is_two_numbers(pictures: Path, tmp_path: Path, window: tuple[str, str], capsys) -> None:
    assert main(["pack", str(pictures), "--out", str(tmp_path / "out"), "--window", *window]) == 2
    assert "both are finite, and the width is at least 1" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


def test_nothing_is_packed_of_names_that_lead_nowhere(pictures: Path, tmp_path: Path, capsys) -> None:
    table = write_csv(tmp_path / "t.csv", [["path", "caption"], *([f"elsewhere/{n}.jpg", "x"] for n in range(5))])
    assert main(["pack", str(pictures), "--csv", str(table), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        "nothing can be packed: 5 × missing file, first elsewhere/0.jpg" in said
        and "from which their names start" in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures", "t.csv"], "nothing is left"


def test_units_stay_whole_when_some_are_held_out(pictures: Path, tmp_path: Path, capsys) -> None:
    rows = [[name, n % 6, f"p{n // 2}"] for n, name in enumerate(names(pictures))]
    table = write_csv(tmp_path / "t.csv", [["file_name", "finding", "patient_id"], *rows])
    settings = ("--csv", table, "--label", "finding", "--unit", "patient_id", "--hold-out", "0.4")
    pack(pictures, *settings, "--out", tmp_path / "out")
    said = capsys.readouterr().out
    sides = [
        {json.loads(each["json"])["patient_id"] for each in records(tmp_path / name)}
        for name in ("out", "out-held-out")
    ]
    assert sides[0] and sides[1] and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 6
    assert len(records(tmp_path / "out")) + len(records(tmp_path / "out-held-out")) == 12
    assert "6 units" in said and "what private runs protect, unless their config says" in said
    known = [open_units(ShardIndex.open(tmp_path / name), "patient_id") for name in ("out", "out-held-out")]
    assert [units.count for units in known] == [len(side) for side in sides], "the indexes know them"
    assert {each["cls"] for each in records(tmp_path / "out")} <= {str(n).encode() for n in range(6)}
    assert not (tmp_path / "out" / "classes.txt").exists(), "numbers are kept"
    # More rows move nobody to the other side, and without a unit the images are split.
    write_csv(table, [["file_name", "finding", "patient_id"], *rows[3:], [rows[0][0], 0, "p0"]])
    pack(pictures, *settings, "--out", tmp_path / "fewer")
    fewer = {json.loads(each["json"])["patient_id"] for each in records(tmp_path / "fewer")}
    assert fewer <= sides[0]
    pack(pictures, "--csv", table, "--hold-out", "0.4", "--out", tmp_path / "images")
    assert len(records(tmp_path / "images")) + len(records(tmp_path / "images-held-out")) == 10


def test_labels_are_held_to_a_public_list(pictures: Path, tmp_path: Path, capsys) -> None:
    labels = ["mass", "clear", "rare"]
    rows = [[name, labels[min(n, 2) if n < 4 else n % 2]] for n, name in enumerate(names(pictures))]
    table = write_csv(tmp_path / "t.csv", [["file_name", "label"], *rows])
    public = tmp_path / "public.txt"
    public.write_text("mass\nclear\n")
    pack(pictures, "--csv", table, "--label", "label", "--classes", public, "--out", tmp_path / "out")
    said = capsys.readouterr().out
    assert "labels outside the list of classes: 2;" in said and "public list with" not in said
    assert (tmp_path / "out" / "classes.txt").read_text() == "mass\nclear\n" and len(records(tmp_path / "out")) == 12
    write_csv(table, [["file_name", "label"], *rows, [rows[0][0], ""], [names(pictures)[0], "mass"]])
    mixed = write_csv(
        tmp_path / "mixed.csv", [["file_name", "label"], *([each[0], n or "x"] for n, each in enumerate(rows))]
    )
    assert main(["pack", str(pictures), "--csv", str(mixed), "--label", "label", "--out", str(tmp_path / "no")]) == 2
    assert "some are numbers and others names" in capsys.readouterr().err


@pytest.mark.parametrize("several", [False, True])
def test_names_that_are_whole_numbers_are_no_numbers_of_classes(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], several: bool
) -> None:
    """Grades from 1 to 3 would all be taken for the grade above them, and the last one for none."""
    cells = ["1", "3", "2.0", "0", "1"]
    rows = [["file_name", "grade"], *map(list, zip(names(pictures), cells, strict=False))]
    table = write_csv(tmp_path / "t.csv", rows)
    (tmp_path / "grades.txt").write_text("1\n2\n3\n")
    asked = ["--csv", table, "--label", "grade", *(["--separator", "|"] if several else [])]
    pack(pictures, *asked, "--classes", tmp_path / "grades.txt", "--out", tmp_path / "out")
    assert "labels outside the list of classes: 1;" in capsys.readouterr().out
    spec = DataSpec(16, classes=3, class_list=ClassList.read(tmp_path / "out" / "classes.txt"))
    spec = replace(spec, listed="grade") if several else replace(spec, labels=("cls",), target="cls")
    batch = BatchReader(ShardIndex.open(tmp_path / "out"), spec).read(np.arange(5), 0)
    right = batch.inputs["labels"].int().argmax(1) if several else batch.inputs["labels"]
    assert batch.present.tolist() == [True, True, True, False, True] and right.tolist() == [0, 2, 1, 0, 0]
    pack(pictures, *asked, "--classes-from-rows", "--out", tmp_path / "listed")
    assert (tmp_path / "listed" / "classes.txt").read_text() == "0\n1\n2.0\n3\n", "which numbers mean by themselves"
    pack(pictures, *asked, "--out", tmp_path / "numbers")
    assert not (tmp_path / "numbers" / "classes.txt").exists()


def test_files_beside_the_images_of_class_folders_are_counted(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(names(pictures)[2:6]):
        folder = tmp_path / "set" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(pictures / name, folder)
        (folder / f"{number}.tiff").write_bytes(b"II*\0")
    pack(tmp_path / "set", "--classes-from-rows", "--out", tmp_path / "out")
    assert "set: 2 folders of classes; not used: 4 files (4 .tiff)" in capsys.readouterr().out


def test_names_of_files_and_class_folders_need_not_be_text(pictures: Path, tmp_path: Path) -> None:
    """As in archives of older systems."""
    for number, (name, folder) in enumerate(zip(names(pictures), (b"cheese", b"K\xe4se"), strict=False)):
        (tmp_path / "set" / os.fsdecode(folder)).mkdir(parents=True)
        shutil.copy(pictures / name, tmp_path / "set" / os.fsdecode(folder) / os.fsdecode(b"\xe4%d.jpg" % number))
    pack(tmp_path / "set", "--classes-from-rows", "--out", tmp_path / "out")
    assert [each["cls"] for each in records(tmp_path / "out")] == [b"cheese"]
    (left,) = left_out(tmp_path / "out")
    assert left["row"] == "K\\udce4se/\\udce41.jpg" and left["detail"] == "its label or its unit is not UTF-8"


@pytest.mark.parametrize("kind", ["jsonl", "json", "tsv", "tabs.csv", "semicolons.csv", "metadata", "parquet"])
def test_tables_of_all_kinds_give_the_same_records(pictures: Path, tmp_path: Path, kind: str) -> None:
    rows = [{"file_name": name, "text": f'caption {n}, "quoted"'} for n, name in enumerate(names(pictures))]
    lists = [["file_name", "text"], *(list(row.values()) for row in rows)]
    pack(pictures, "--csv", write_csv(tmp_path / "t.csv", lists), "--out", tmp_path / "csv")
    table = tmp_path / f"t.{kind}"
    if kind == "jsonl":
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        table.write_text(json.dumps(rows))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    elif kind == "metadata":
        write_csv(pictures / "metadata.csv", lists)
    else:
        write_csv(table, lists, ";" if kind == "semicolons.csv" else "\t")
    pack(pictures, *(() if kind == "metadata" else ("--csv", table)), "--out", tmp_path / "other")
    assert bytes_of(tmp_path / "csv") == bytes_of(tmp_path / "other")


@pytest.fixture
def many(tmp_path: Path, picture: Callable[..., bytes]) -> list[str]:
    """Arguments for a pack of 30 shards, whose last pictures are bad."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number:04d}.jpg").write_bytes(picture(number) if number % 50 else b"bad")
    rows = [[f"{n % 310:04d}.jpg", f"caption {n}", f"u{n % 31}"] for n in range(620)]
    table = write_csv(tmp_path / "many.csv", [["file_name", "caption", "unit"], *rows])
    return [str(folder), "--csv", str(table), "--hold-out", "0.3", "--per-shard", "10", "--workers", "2"]


def test_killed_again_and_again_it_gives_the_same_bytes(many: list[str], tmp_path: Path) -> None:
    assert main(["pack", *many, "--out", str(tmp_path / "whole" / "set")]) == 0
    out = tmp_path / "killed" / "set"
    command = [*PREPARE, *many, "--out", str(out)]
    chance = random.Random(5)
    kills, lost, made = 0, 0, dict[str, int]()
    while kills < 4:
        goal = len(made) + chance.randint(1, 6)
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while job.poll() is None and len(_shards(out)) < goal:
            time.sleep(0.002)
        job.send_signal(signal.SIGKILL)
        if job.wait() == 0 or out.exists():  # a busy machine: it was done before this process came to look
            if kills:
                break
            lost += 1
            assert lost < 10, "it never was killed in the middle"
            for folder in (out, out.with_name("set-held-out")):
                shutil.rmtree(folder, ignore_errors=True)
            continue
        now = _shards(out)
        assert made.items() <= now.items(), "a finished shard is kept"
        kills, made = kills + 1, now
        # As a kill in mid-write leaves it.
        (out.parent / ".set.partial" / "records" / f".000019.tar.{'0' * 16}.tmp").write_bytes(b"half")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("set", "set-held-out"):
        assert bytes_of(out.with_name(name)) == bytes_of(tmp_path / "whole" / name)
        assert bytes_of(out.with_name(name))["000000.tar"]
    assert made.items() <= _shards(out).items(), "none was made twice"
    assert not (out.parent / ".set.partial").exists() and len(left_out(out)) == 6 + 10
    # Once more, there is nothing to do; with other rows, the folder is left alone.
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout == done.stdout
    other = subprocess.run([*command, "--per-shard", "11"], capture_output=True, text=True)
    assert other.returncode == 2 and "contains other data; remove it or use another --out" in other.stderr
    assert bytes_of(out) == bytes_of(tmp_path / "whole" / "set")


def _shards(out: Path) -> dict[str, int]:
    """The complete shards of a pack that has begun, and when each was written."""
    work, held_out = out.with_name(f".{out.name}.partial"), out.with_name(f"{out.name}-held-out")
    folders = {"records": (work / "records", out), "held out": (work / "held_out", held_out)}
    found = {}
    for part, places in folders.items():
        for path in (path for place in places for path in place.glob("[0-9]*.tar")):
            with suppress(FileNotFoundError):  # the folder gets its name in this moment
                found[f"{part} {path.name}"] = path.stat().st_mtime_ns
    return found


def _caught(many: list[str], out: Path, by: signal.Signals) -> subprocess.Popen[bytes]:
    """A pack that got the signal between its first shard and its end; one that was quicker is begun anew."""
    for _ in range(10):
        command = [*PREPARE, *many, "--out", str(out)]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while job.poll() is None and not _shards(out):
            time.sleep(0.002)
        job.send_signal(by)
        if not out.exists():
            return job
        job.send_signal(signal.SIGCONT)
        job.wait()
        for folder in (out, out.with_name(f"{out.name}-held-out")):
            shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("it was always over before it could be stopped")


def test_what_was_begun_from_another_input_is_begun_anew(many: list[str], tmp_path: Path) -> None:
    out = tmp_path / "set"
    job = _caught(many, out, signal.SIGKILL)
    job.wait()
    table = Path(many[2])
    table.write_text(table.read_text().replace("caption 1,", "another,"))
    assert main(["pack", *many, "--out", str(out)]) == 0
    assert main(["pack", *many, "--out", str(tmp_path / "fresh" / "set")]) == 0
    assert bytes_of(out) == bytes_of(tmp_path / "fresh" / "set")


def test_the_plan_of_ten_times_as_many_rows_takes_no_more_memory(tmp_path: Path) -> None:
    class Made:
        classes, told = (), ""

        def __init__(self, rows: int) -> None:
            self.count = rows

        def rows(self) -> Iterator[Row | Fault]:
            for number in range(self.count):
                yield Row(
                    str(number), f"{number // 2}.jpg", "", [f"caption {number} " * 20], "a", f"unit {number // 9}"
                )

        def identity(self, row: Row) -> tuple[str, int]:
            return row.image, 1

        def picture(self, at: str) -> bytes:
            raise BadPicture("", "")

    def peak(rows: int) -> int:
        tracemalloc.start()
        plan = Plan(tmp_path / "plan.sqlite", Made(rows), "unit", 0.1)
        assert plan.images == rows // 2 and sum(1 for _ in plan.records(0)) == plan.planned(0)
        plan.digest({})
        plan.close()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(20_000) < 1.5 * peak(2_000) + 100_000


def test_two_at_once_do_not_mix(many: list[str], tmp_path: Path) -> None:
    out = tmp_path / "set"
    job = _caught(many, out, signal.SIGSTOP)
    try:
        refused = subprocess.run([*PREPARE, *many, "--out", str(out)], capture_output=True, text=True)
        assert refused.returncode == 2 and "another prepare.py is packing here" in refused.stderr
    finally:
        job.send_signal(signal.SIGCONT)
    assert job.wait() == 0 and ShardIndex.open(out).records > 0
    shutil.rmtree(out)


@pytest.mark.parametrize("blocks", [40, 150])
def test_a_full_disk_is_told_and_the_command_goes_on(pictures: Path, tmp_path: Path, blocks: int) -> None:
    """A limit on the size of files: the smaller one stops the plan, the larger one a shard."""
    rows = [["file_name", "caption"], *([name, f"{n} " * 90] for n in range(30) for name in names(pictures))]
    for number in range(30):
        shutil.copy(pictures / names(pictures)[0], pictures / f"copy {number}.jpg")
        rows.append([f"copy {number}.jpg", "x"])
    large = b"\xff\xd8" + b"\xff\xfe\xff\xff" + b"x" * 65533  # a JPEG with a long comment
    for path in pictures.glob("copy*"):
        path.write_bytes(large + (pictures / "ward" / "scan 3.jpg").read_bytes()[2:])
    command = [
        *PREPARE,
        str(pictures),
        "--csv",
        str(write_csv(tmp_path / "t.csv", rows)),
        "--out",
        str(tmp_path / "out"),
    ]
    limited = ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "-", *command]
    stopped = subprocess.run(limited, capture_output=True, text=True)
    assert stopped.returncode == 2 and stopped.stderr.count("\n") == 1, stopped.stderr
    assert (
        "plan.sqlite: the plan cannot be written" if blocks == 40 else "000000.tar: cannot be written"
    ) in stopped.stderr
    assert not (tmp_path / "out").exists()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert len(records(tmp_path / "out")) == 42


def test_cells_that_list_classes_become_lists_and_rows_of_one_image_add_up(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = names(pictures)
    cells = ["mass|effusion", "No Finding", "", " mass | mass ", "nodule", "mass||nodule", "oedema"]
    rows = [["file_name", "findings"], *map(list, zip(files, cells, strict=False)), [files[0], "nodule"]]
    (tmp_path / "list.txt").write_text("mass\nnodule\neffusion\n")
    asked = ["--label", "findings", "--separator", "|", "--no-class", "No Finding", "--classes", tmp_path / "list.txt"]
    table = write_csv(tmp_path / "findings.csv", rows)
    pack(pictures, "--csv", table, *asked, "--out", tmp_path / "out")
    said = capsys.readouterr().out
    expected = [["effusion", "mass", "nodule"], [], ["mass"], ["nodule"], ["oedema"]]
    found = records(tmp_path / "out")
    assert [json.loads(each["json"]) for each in found] == [{"findings": listed} for listed in expected]
    assert all("cls" not in each for each in found)
    assert [(each["image"], each["reason"]) for each in left_out(tmp_path / "out")] == [
        (files[2], "no label"), (files[5], "no label")
    ]  # fmt: skip
    assert "lists its classes as 'findings'" in said and "labels outside the list of classes: 1;" in said
    with (tmp_path / "findings.jsonl").open("w") as file:
        for name, listed in zip(files, ([2, 0], [], ["1"]), strict=False):
            file.write(json.dumps({"image": name, "findings": listed}) + "\n")
    again = ["--label", "findings", "--separator", "|", "--out", tmp_path / "numbers"]
    pack(pictures, "--csv", tmp_path / "findings.jsonl", *again)
    assert [json.loads(each["json"])["findings"] for each in records(tmp_path / "numbers")] == [[0, 2], [], [1]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-class", "none"], "--no-class goes with --separator"),
        (["--separator", "|"], "their column with --label"),
        (["--separator", "", "--label", "a"], "name the text between two classes"),
        (["--separator", "|", "--label", "a", "--unit", "a"], "'a' cannot be"),
        (["--separator", "|", "--label", "captions"], "'captions' cannot be"),
    ],
)  # fmt: skip
def test_options_of_lists_that_mean_nothing_are_refused(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    table = write_csv(tmp_path / "a.csv", [["file_name", "a", "captions"], [names(pictures)[0], "x", "y"]])
    assert main(["pack", str(pictures), "--csv", str(table), "--out", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


# DICOM files are packed as PNG whose grey values are those of the standard's formula, worked out value by value.


def dicom(pixels: np.ndarray, kind: str = "MONOCHROME2", **tags: Any) -> bytes:
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = SecondaryCaptureImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = generate_uid(entropy_srcs=["test"])
    colours = 3 if kind == "RGB" else 1
    frames = pixels.ndim - 2 - (colours == 3)
    made.Rows, made.Columns = pixels.shape[frames : frames + 2]
    made.SamplesPerPixel, made.PhotometricInterpretation = colours, kind
    made.BitsAllocated = made.BitsStored = 8 * pixels.dtype.itemsize
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(pixels.dtype.kind == "i")
    if frames:
        made.NumberOfFrames = len(pixels)
    if colours == 3:
        made.PlanarConfiguration = 0
    for name, value in tags.items():
        setattr(made, name, value)
    made.PixelData = pixels.tobytes()
    out = io.BytesIO()
    made.save_as(out, enforce_file_format=True)
    return out.getvalue()


def shown(raw: bytes, window: Window | None = None) -> np.ndarray:
    with Image.open(io.BytesIO(as_png(raw, window))) as image:
        return np.asarray(image)


def by_hand(value: float, centre: float, width: float) -> int:
    """PS3.3 C.11.2.1.2.1 as it is printed there, for ymin 0 and ymax 255."""
    if value <= centre - 0.5 - (width - 1) / 2:
        return 0
    if value > centre - 0.5 + (width - 1) / 2:
        return 255
    return round(((value - (centre - 0.5)) / (width - 1) + 0.5) * 255)


VALUES = np.arange(-400, 800, 24, dtype=np.int16).reshape(5, 10)


@pytest.mark.parametrize("kind", ["MONOCHROME2", "MONOCHROME1"])
@pytest.mark.parametrize("given", [None, (40.0, 400.0)])
def test_grey_values_are_those_of_the_standards_formula(kind: str, given: tuple[float, float] | None) -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": [300, 50], "WindowWidth": [600, 20]}
    found = shown(dicom(VALUES, kind, **tags), Window(*given) if given else None)
    centre, width = given or (300.0, 600.0)
    expected = [[by_hand(2 * int(value) - 100, centre, width) for value in row] for row in VALUES]
    turned = 255 - np.array(expected) if kind == "MONOCHROME1" else np.array(expected)
    assert found.dtype == np.uint8 and (found == turned).all() and 0 < np.unique(found).size > 5


def test_without_a_window_the_whole_range_is_shown_and_one_value_is_no_error() -> None:
    found = shown(dicom(VALUES))
    assert found.min() == 0 and found.max() == 255 and (np.diff(found.flatten().astype(int)) > 0).all()
    assert np.unique(shown(dicom(np.full((4, 4), 7, dtype=np.uint16)))).size == 1
    odd = dicom(VALUES, WindowCenter=100, WindowWidth=0)
    assert (shown(odd) == found).all(), "a window of no width is none"


def test_colours_stay_and_of_several_frames_the_first_is_taken() -> None:
    colours = np.random.default_rng(1).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    assert (shown(dicom(colours, "RGB")) == colours).all()
    frames = np.stack([VALUES, VALUES[::-1]])
    assert (shown(dicom(frames)) == shown(dicom(VALUES))).all()


@pytest.mark.parametrize("cut", [200, 400, -3])
def test_damaged_and_foreign_files_are_bad_pictures(cut: int) -> None:
    with pytest.raises(BadPicture):
        as_png(dicom(VALUES)[:cut], None)
    with pytest.raises(BadPicture):
        as_png(dicom(VALUES.astype(np.uint16), "PALETTE COLOR"), None)
    assert not is_dicom(b"") and not is_dicom(b"\x89PNG" * 40) and is_dicom(dicom(VALUES))


def test_a_table_may_name_dicom_files(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    for number in range(3):
        (tmp_path / "scans" / f"{number}.dcm").write_bytes(dicom(VALUES + number, WindowCenter=0, WindowWidth=300))
    (tmp_path / "scans" / "3.dcm").write_bytes(dicom(VALUES)[:400])
    rows = [["file_name", "caption"], *([f"{number}.dcm", f"scan {number}"] for number in range(4))]
    table = write_csv(tmp_path / "a.csv", rows)
    pack(tmp_path / "scans", "--csv", table, "--out", tmp_path / "out", "--window", "40", "400")
    found = records(tmp_path / "out")
    assert [each["txt"] for each in found] == [b"scan 0", b"scan 1", b"scan 2"]
    for number, each in enumerate(found):
        assert each["png"] == as_png(dicom(VALUES + number), Window(40, 400))
    assert [each["reason"] for each in left_out(tmp_path / "out")] == ["undecodable image"]


def test_without_pydicom_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "0.dcm").write_bytes(dicom(VALUES))
    table = write_csv(tmp_path / "a.csv", [["file_name", "caption"], ["0.dcm", "a scan"]])
    program = "import sys; sys.modules['pydicom'] = None; from murmuration.launch.prepare import main; sys.exit(main())"
    command = ["pack", str(tmp_path), "--csv", str(table), "--out", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'murmuration[dicom]'" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists() and json.dumps(done.stderr).count("error") <= 1
