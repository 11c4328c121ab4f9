"""Generated data and the command that prepares it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.synthetic.index import generator, shape_sample, shape_samples, write_shards
from murmuration.data.synthetic.shapes import (
    BACKGROUNDS,
    COLOURS,
    FAINT,
    GRAMMAR_WORDS,
    SHAPES,
    SIZES,
    Scene,
    caption,
    class_names,
    render,
)
from murmuration.data.synthetic.textures import textures
from murmuration.data.synthetic.write import Request, make
from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from murmuration.launch import prepare
from tests.support import forking

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--private", "60", "--held-out", "40", "--textures", "10", "--size", "16", "--workers", "1"]


def _prepare(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), *arguments]
    return forking.run(command, capture_output=True, text=True, cwd=cwd, timeout=600)


def test_samples_are_a_pure_function_of_seed_and_index(tmp_path: Path) -> None:
    stream = list(shape_samples(5, 6, 32))
    assert shape_sample(5, 4, 32) == stream[4] != shape_sample(6, 4, 32)
    assert len({sample.jpg for sample in stream}) == 6
    digests = []
    for name in ("a", "b"):
        write_shards(tmp_path / name, shape_samples(5, 6, 32), 4)
        digests.append(build(tmp_path / name).manifest_digest)
    assert digests[0] == digests[1], "the same request yields the same bytes"


def test_a_tint_colours_backgrounds_alone() -> None:
    big_circle = Scene(0, 0, 2, 0)
    faint, strong = (
        np.stack([render(big_circle, 32, generator(7, i), tint=tint).astype(float) for i in range(40)])
        for tint in (FAINT, 60.0)
    )
    assert np.abs(faint[:, 16, 16] - strong[:, 16, 16]).max() <= 1, "the shape"
    spreads = [np.ptp(images[:, 0, 0], axis=1) for images in (faint, strong)]
    assert spreads[0].max() <= 2 * FAINT + 1 and spreads[1].mean() > 40
    assert shape_sample(5, 4, 32) == shape_sample(5, 4, 32, tint=6.0) != shape_sample(5, 4, 32, tint=60.0)


def test_captions_stay_inside_the_grammar(tmp_path: Path) -> None:
    text = TextEncoder(word_tokenizer(GRAMMAR_WORDS, tmp_path / "tokenizer.json"), 16)
    used: set[str] = set()
    prompted = 0
    for index in range(3000):
        rng = generator(9, index)
        scene = Scene(*(int(rng.integers(n)) for n in (len(COLOURS), len(SHAPES), len(SIZES), len(BACKGROUNDS))))
        words = caption(scene, rng)
        row = text.encode(words)
        assert text.unk not in row and text.end in row and text.decode(row) == words
        name = class_names()[scene.labels()["label"]]
        assert name in words, "colour and shape are always named, next to each other"
        prompted += words.startswith(f"a photo of a {name}")
        used.update(words.split())
    assert prompted / 3000 >= 0.6
    assert used == set(GRAMMAR_WORDS), "no word in the list that never occurs, and none missing"


@pytest.mark.parametrize("colour", range(len(COLOURS)))
def test_colours_are_unambiguous(colour: int) -> None:
    """The middle of a big shape is nearest to its own colour, and backgrounds are nearly grey."""
    table = np.array(list(COLOURS.values()), float)
    for index in range(40):
        pixels = render(Scene(colour, 0, 2, index % 5), 32, generator(1, index)).astype(float)
        vivid = np.ptp(pixels, axis=-1) > 90
        assert vivid.mean() > 0.25
        assert np.argmin(((pixels[vivid].mean(axis=0) - table) ** 2).sum(axis=1)) == colour
        assert np.median(np.ptp(pixels[~vivid], axis=-1)) < 40


def test_shapes_are_distinguishable_sized_and_smooth() -> None:
    shares = np.array([
        [np.mean([_cover(shape, size, i) for i in range(10)]) for size in range(3)] for shape in range(4)
    ])  # fmt: skip
    assert np.all(shares[:, 0] < 0.75 * shares[:, 1]) and np.all(shares[:, 1] < 0.75 * shares[:, 2])
    plain = render(Scene(0, 0, 2, 0), 32, generator(3, 3)).astype(int)
    assert len(np.unique(plain[..., 1] // 8)) > 6, "an anti-aliased edge has values in between"


def _cover(shape: int, size: int, index: int) -> float:
    pixels = render(Scene(0, shape, size, 0), 64, generator(2, index)).astype(int)
    return float((pixels[..., 0] - pixels[..., 1] > 90).mean())


def test_written_shards_are_readable(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shape_samples(5, 7, 24, labels=True), 3)
    assert [path.name for path in paths] == ["000000.tar", "000001.tar", "000002.tar"]
    index = build(tmp_path)
    assert [shard.records for shard in index.shards] == [3, 3, 1]
    members = ShardReader(index).read(6)
    sample = shape_sample(5, 6, 24, labels=True)
    assert members["jpg"] == sample.jpg and members["txt"].decode() == sample.caption
    assert json.loads(members["json"]) == sample.labels
    assert Image.open(io.BytesIO(members["jpg"])).size == (24, 24)


def test_demo_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    first = _prepare("demo", "--out", str(out), *SMALL, cwd=ROOT / "launch")
    assert first.returncode == 0, first.stderr
    assert "next:" in first.stdout and "launch/train.py" in first.stdout
    sets = {name: ShardIndex.open(out / name) for name in ("private", "held_out", "textures")}
    assert {name: index.records for name, index in sets.items()} == {"private": 60, "held_out": 40, "textures": 10}
    text = TextEncoder(out / "tokenizer.json", 16)
    held_out = BatchReader(sets["held_out"], DataSpec(16, labels=("colour", "shape", "label")), text)
    batch = held_out.read(np.arange(40), 0)
    assert batch.present.all() and not (batch.inputs["tokens"] == text.unk).any()
    assert batch.inputs["label"].max() < 32 and batch.inputs["label"].unique().numel() > 10
    private = ShardReader(sets["private"])
    assert set(private.read(0)) == {"jpg", "txt"}, "labels of the private set are not written"
    assert set(ShardReader(sets["textures"]).read(0)) == {"jpg"}
    pictures = {private.read(i)["jpg"] for i in range(60)}
    assert not pictures & {ShardReader(sets["held_out"]).read(i)["jpg"] for i in range(40)}

    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    again = _prepare("demo", "--out", str(out), *SMALL)
    assert again.returncode == 0 and again.stdout.count("there already") == 3
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}

    other = [*SMALL[:1], "70", *SMALL[2:]]
    refused = _prepare("demo", "--out", str(out), *other)
    assert refused.returncode == 2 and "--force" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert ShardIndex.open(out / "private").manifest_digest == sets["private"].manifest_digest
    tinted = _prepare("demo", "--out", str(out), *SMALL, "--tint", "60")
    assert tinted.returncode == 2 and "--force" in tinted.stderr, "other pictures than those that are there"
    assert "choose 0 to 95" in _prepare("demo", "--out", str(out), *SMALL, "--tint", "96").stderr
    forced = _prepare("demo", "--out", str(out), *other, "--force")
    assert forced.returncode == 0 and ShardIndex.open(out / "private").records == 70


def test_demo_after_a_kill_and_beside_foreign_folders(tmp_path: Path) -> None:
    (tmp_path / ".private.partial").mkdir()
    (tmp_path / ".private.partial" / "000000.tar").write_bytes(b"half")
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "mine.txt").write_text("keep")
    refused = _prepare("demo", "--out", str(tmp_path), *SMALL, "--force")
    assert refused.returncode == 2 and "not made by prepare.py" in refused.stderr
    assert (tmp_path / "held_out" / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "private").exists(), "refused before anything is drawn"
    (tmp_path / "held_out").rename(tmp_path / "mine")
    made = _prepare("demo", "--out", str(tmp_path), *SMALL, "--workers", "2")
    assert made.returncode == 0, made.stderr
    assert ShardIndex.open(tmp_path / "private").records == 60
    assert not (tmp_path / ".private.partial").exists()
    # Damage is noticed although the receipt still says what was wanted.
    shard = tmp_path / "private" / "000000.tar"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert "private: holds other or damaged" in _prepare("demo", "--out", str(tmp_path), *SMALL).stderr


def test_index_command(tmp_path: Path) -> None:
    write_shards(tmp_path, shape_samples(5, 7, 16), 3)
    done = _prepare("index", str(tmp_path / "{000000..000002}.tar"), "--workers", "2")
    assert done.returncode == 0 and "7 records in 3 shards" in done.stdout
    assert ShardIndex.open(tmp_path).manifest_digest in done.stdout
    shard = tmp_path / "000001.tar"
    shard.write_bytes(shard.read_bytes()[:-10_000])
    failed = _prepare("index", str(tmp_path))
    assert failed.returncode == 2 and "000001.tar" in failed.stderr and len(failed.stderr.splitlines()) == 1
    assert _prepare("index", str(tmp_path / "nowhere")).returncode == 2
    assert _prepare("demo", "--size", "2").returncode == 2


# Pictures made by rule as shards: the same however they are made, going on after a kill.


def _silent(done: int, total: int) -> None:
    pass


def test_shards_are_the_same_however_they_are_made(tmp_path: Path) -> None:
    request = Request("mixed", 10, 16, per_shard=4)
    one = make(request, tmp_path / "one", 1, _silent)
    two = make(request, tmp_path / "two", 2, _silent)
    assert one.manifest_digest == two.manifest_digest and one.records == 10
    assert [shard.records for shard in one.shards] == [4, 4, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}, "nothing half-made is left"
    picture = np.asarray(Image.open(io.BytesIO(ShardReader(one).read(9)["jpg"]))).astype(int)
    assert np.abs(picture - textures("mixed", 1, [9], 16)[0].numpy()).mean() < 8
    assert make(request, tmp_path / "one", 1, _silent).manifest_digest == one.manifest_digest
    with pytest.raises(ValueError, match="contains other data"):
        make(Request("mixed", 11, 16, per_shard=4), tmp_path / "one", 1, _silent)
    captioned = ShardReader(make(Request("shapes", 3, 16), tmp_path / "three", 1, _silent))
    assert captioned.read(0)["txt"].startswith(b"a ") or captioned.read(0)["txt"].startswith(b"there ")


def test_making_shards_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = make(Request("spectrum", 480, 48, per_shard=8), tmp_path / "whole", 1, _silent)
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "synthetic", "--kind", "spectrum",
               "--records", "480", "--size", "48", "--per-shard", "8", "--workers", "1",
               "--out", str(tmp_path / "out")]  # fmt: skip
    partial = tmp_path / ".out.partial"
    for _ in range(10):  # a job that is over before it is killed is begun anew
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = forking.start(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while not (partial / "000002.tar").exists() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() and not (tmp_path / "out").exists():
            break
    assert not (tmp_path / "out").exists(), "it never was killed in the middle"
    stamps = {path.name: path.stat().st_mtime_ns for path in partial.glob("0*.tar")}
    assert 3 <= len(stamps) < 60
    first: list[int] = []
    made = make(Request("spectrum", 480, 48, per_shard=8), tmp_path / "out", 1, lambda done, total: first.append(done))
    assert first[0] == len(stamps) and made.manifest_digest == whole.manifest_digest
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    assert ShardIndex.open(tmp_path / "out").records == 480


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--records", "0"], "at least 1"),
        (["--records", "5", "--size", "4"], "8 to 1024"),
        pytest.param(
            ["--records", "5", "--device", "cuda"],
            "omit --device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path: Path, options: list[str], message: str, capsys) -> None:
    assert prepare.main(["synthetic", "--out", str(tmp_path / "x"), *options]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
