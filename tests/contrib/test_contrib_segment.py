"""UPerNet on an encoder: it learns miniatures of ADE20K's layout, and is scored as a count of pixels says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix

from murmuration.contrib.dense.segment import UNMARKED, mean_overlap, overlaps_of, read_marks, windows
from murmuration.contrib.dense.training import DenseSettings, backbone_of
from murmuration.data.decode.decode import BadRecord
from murmuration.evaluation.errors import EvaluationError
from tests.support.evaluation_world import evaluate, result, saved
from tests.support.foreign_models import resnet
from tests.support.published import vip_mae

NAMES = ("sky", "grass", "house")
COLOURS = ((90, 140, 230), (40, 170, 50), (200, 60, 40))
QUICK = ["--epochs", 12, "--warmup", 1, "--batch", 4, "--base-rate", 0.3, "--channels", 16, "--layer-decay", 1,
         "--micro-batch", 4]  # fmt: skip


def ade(root: Path, name: str, pictures: int, seed: int) -> None:
    """Sky above grass, a house, and a border without a class."""
    draws = np.random.default_rng(seed)
    images, marks = root / "images" / name, root / "annotations" / name
    images.mkdir(parents=True)
    marks.mkdir(parents=True)
    (root / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n"
        + "".join(f"{k}\t.1\t1\t1\t1\t{each}\n" for k, each in enumerate(NAMES, 1))
    )
    for number in range(pictures):
        height, width = (40, 56) if number % 2 else (48, 40)
        truth = np.ones((height, width), np.uint8)
        truth[height // 2 + int(draws.integers(-6, 6)) :] = 2
        left, top = int(draws.integers(2, width - 22)), int(draws.integers(2, height - 22))
        truth[top : top + 20, left : left + 20] = 3
        truth[:2] = 0
        pixels = np.array([(0, 0, 0), *COLOURS])[truth] + draws.normal(0, 8, (height, width, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(images / f"ADE_{number:04}.jpg", quality=95)
        Image.fromarray(truth).save(marks / f"ADE_{number:04}.png")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    ade(folder / "ade", "training", 12, 1)
    ade(folder / "ade", "validation", 5, 2)
    saved(folder / "vip.pth", vip_mae(48, 2, grid=4, patch=8, decoder_width=32, decoder_depth=1))
    return folder


def asked(world: Path, *more: Any) -> list[Any]:
    images = world / "ade" / "images"
    return ["segment", world / "vip.pth", "--heads", 4, "--decoder-heads", 4, "--public", "--data",
            images / "training", "--test", images / "validation", *more]  # fmt: skip


def test_it_learns_which_pixels_are_what(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def noted(found: np.ndarray, truth: np.ndarray, classes: int) -> np.ndarray:
        seen.append((found, truth))
        return overlaps_of(found, truth, classes)

    monkeypatch.setattr("murmuration.contrib.dense.segment.overlaps_of", noted)
    assert evaluate(*asked(world, *QUICK), "--out", tmp_path / "out") == 0
    numbers = result(tmp_path / "out")["numbers"]
    assert len(seen) == 5
    for number, (found, truth) in enumerate(seen):
        with Image.open(world / "ade" / "annotations" / "validation" / f"ADE_{number:04}.png") as file:
            stored = np.array(file)
        assert found.shape == stored.shape and (truth == np.where(stored == 0, UNMARKED, stored - 1.0)).all()
    found, truth = (np.concatenate([pair[place].ravel() for pair in seen]) for place in (0, 1))
    table = confusion_matrix(truth[truth != UNMARKED], found[truth != UNMARKED], labels=range(3))
    ious = np.diag(table) / (table.sum(axis=0) + table.sum(axis=1) - np.diag(table))
    assert numbers["mIoU"]["value"] == pytest.approx(ious.mean(), abs=1e-12)
    assert numbers["pixel accuracy"]["value"] == pytest.approx(np.trace(table) / table.sum(), abs=1e-12)
    assert numbers["mIoU"]["low"] <= numbers["mIoU"]["value"] <= numbers["mIoU"]["high"]
    assert numbers["mIoU"]["value"] > 0.6, "always one class would be at most 0.2"
    assert "<td>grass</td>" in (tmp_path / "out" / "result.html").read_text()


def test_overlaps_of_a_table_by_hand() -> None:
    truth = np.array([[0, 0, 1], [1, 2, UNMARKED]])
    found = np.array([[0, 1, 1], [1, 1, 2]])
    counted = overlaps_of(found, truth, 4)
    assert counted.tolist() == [[1, 2, 0, 0], [1, 4, 0, 0], [2, 2, 1, 0]]
    overlap, right, by_class = mean_overlap(counted[None])
    # 1 / 2, 2 / 4, 0 / 1; the fourth class is nowhere, and so not in the mean.
    assert by_class == {0: 0.5, 1: 0.5, 2: 0.0}
    assert overlap.value == pytest.approx(1 / 3) and right.value == pytest.approx(3 / 5)
    assert overlap.low == overlap.high == overlap.value, "one picture, drawn again and again"


def test_intervals_are_of_pictures() -> None:
    good, bad = (overlaps_of(np.full(4, each), np.zeros(4, int), 2) for each in (0, 1))
    _, right, _ = mean_overlap(np.stack([good, bad] * 8))
    assert 0.2 < right.low < 0.35 and 0.65 < right.high < 0.8, "0.5 ± 2 · 0.125"


@pytest.mark.parametrize(("length", "side"), [(8, 8), (9, 8), (31, 8), (5, 8), (100, 32)])
def test_windows_cover_everything_and_overlap(length: int, side: int) -> None:
    found = windows(length, side)
    covered = {place for first in found for place in range(first, first + side)}
    assert covered >= set(range(length)) and (length < side or max(covered) == length - 1)
    assert all(later - first <= side * 2 // 3 for first, later in pairwise(found))


def test_marks_that_cannot_be_used(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 1], [2, 4]], np.uint8)).save(tmp_path / "a.png")
    assert read_marks(tmp_path / "a.png", 4).tolist() == [[UNMARKED, 0], [1, 3]]
    with pytest.raises(BadRecord, match="class 4 of 3"):
        read_marks(tmp_path / "a.png", 3)
    Image.new("RGB", (2, 2)).save(tmp_path / "b.png")
    with pytest.raises(BadRecord, match="one number per pixel"):
        read_marks(tmp_path / "b.png", 3)
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BadRecord, match="cannot be read"):
        read_marks(tmp_path / "c.png", 3)


def test_what_is_not_laid_out_so_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ade(tmp_path / "ade", "training", 2, 3)
    images = tmp_path / "ade" / "images" / "training"
    common = [*asked(world), "--data", images, "--out", tmp_path / "out"]
    (tmp_path / "ade" / "annotations" / "training" / "ADE_0001.png").unlink()
    assert evaluate(*common) == 2
    assert "1 pictures have no PNG file" in capsys.readouterr().err
    assert evaluate(*common, "--marks", tmp_path / "nowhere") == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    (tmp_path / "ade" / "images" / "training" / "ADE_0001.jpg").unlink()
    (tmp_path / "ade" / "objectInfo150.txt").unlink()
    assert evaluate(*common) == 2
    assert "one class per line with --class-names" in capsys.readouterr().err


def test_a_resnet_has_no_patches_for_a_pyramid() -> None:
    model: Any = SimpleNamespace(model=resnet(), shape=resnet().shape)
    session: Any = SimpleNamespace(model=model, subject=SimpleNamespace(path="bit"))
    with pytest.raises(EvaluationError, match="bit is a ResNet, and the pyramid is built on"):
        backbone_of(session, DenseSettings())
