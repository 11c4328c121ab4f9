"""Mask R-CNN on an encoder: it learns miniatures of COCO's layout, is scored as pycocotools does, and continues."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.contrib.dense.coco_objects import read_objects
from murmuration.contrib.dense.detect import PicturedObjects, found_by
from murmuration.data.index.folders import build_folder
from murmuration.evaluation.errors import EvaluationError
from murmuration.train.storage.sibling_runs import RunLog
from tests.support import forking
from tests.support.evaluation_world import evaluate, result, saved
from tests.support.launching import ROOT, environment
from tests.support.published import vip_mae

pytest.importorskip("pycocotools")

CATEGORIES = [{"id": 3, "name": "red"}, {"id": 7, "name": "blue"}]  # ids need not be consecutive
COLOURS = ((220, 30, 30), (30, 30, 220))
QUICK = ["--epochs", 10, "--warmup", 1, "--batch", 4, "--base-rate", 0.06, "--channels", 16, "--layer-decay", 1,
         "--micro-batch", 4]  # fmt: skip


def coco(root: Path, name: str, pictures: int, seed: int) -> None:
    """Grey pictures, each with one or two coloured rectangles."""
    draws = np.random.default_rng(seed)
    (root / name).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    images, annotations = [], []
    for number in range(pictures):
        width, height = (48, 40) if number % 2 else (40, 48)
        pixels = np.full((height, width, 3), 128, np.uint8)
        images.append({"id": 100 + number, "file_name": f"{number:04}.png", "width": width, "height": height})
        for place in range(1 + number % 2):
            kind = int(draws.integers(2))
            across, down = (int(each) for each in draws.integers(14, 19, 2))
            left = int(draws.integers(0, width // 2 - across + 4)) + place * (width // 2 - 4)
            left, top = min(left, width - across), int(draws.integers(0, height - down))
            pixels[top : top + down, left : left + across] = COLOURS[kind]
            right, bottom = left + across, top + down
            annotations.append({
                "id": len(annotations) + 1, "image_id": 100 + number, "category_id": CATEGORIES[kind]["id"],
                "bbox": [left, top, across, down], "area": across * down, "iscrowd": 0,
                "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
            })  # fmt: skip
        Image.fromarray(pixels).save(root / name / f"{number:04}.png")
    document = {"info": {"year": 2017}, "images": images, "annotations": annotations, "categories": CATEGORIES}
    (root / "annotations" / f"instances_{name}.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    coco(folder / "coco", "train2017", 16, 1)
    coco(folder / "coco", "val2017", 6, 2)
    saved(folder / "vip.pth", vip_mae(48, 2, grid=8, patch=8, decoder_width=32, decoder_depth=1))
    return folder


def asked(world: Path, *more: Any) -> list[Any]:
    return ["detect", world / "vip.pth", "--heads", 4, "--decoder-heads", 4, "--public", "--data",
            world / "coco" / "train2017", "--test", world / "coco" / "val2017", *more]  # fmt: skip


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    assert evaluate(*asked(world, *QUICK), "--out", out) == 0
    return out


def test_it_learns_and_its_numbers_are_pycocotools(world: Path, trained: Path) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    numbers = result(trained)["numbers"]
    found = json.loads((trained / "detections.json").read_text())
    ids = {each["file_name"]: each["id"] for each in COCO(
        world / "coco" / "annotations" / "instances_val2017.json").dataset["images"]}  # fmt: skip
    categories = {each["name"]: each["id"] for each in CATEGORIES}
    for kind, title in (("bbox", "box"), ("segm", "mask")):
        truth = COCO(world / "coco" / "annotations" / "instances_val2017.json")
        results = truth.loadRes([
            {**each, "image_id": ids[each["file_name"]], "category_id": categories[each["category"]]} for each in found
        ])  # fmt: skip
        scoring = COCOeval(truth, results, kind)
        scoring.evaluate()
        scoring.accumulate()
        scoring.summarize()
        for place, name in enumerate(("AP", "AP50", "AP75")):
            number = numbers[f"{title} {name}"]
            assert number["value"] == pytest.approx(float(scoring.stats[place]), abs=1e-12)
            assert number["low"] <= number["value"] <= number["high"] and number["n"] == 6
    assert numbers["box AP50"]["value"] > 0.1 and numbers["mask AP50"]["value"] > 0.1, "by chance, hardly anything fits"
    assert not (trained / "fine_tune.pt").exists() and not (trained / "progress").exists()
    page = (trained / "result.html").read_text()
    assert "By category" in page and "<td>blue</td>" in page


KILL = """
import os, signal, sys
import torch
torch.set_num_threads(int(sys.argv.pop(1)))
from murmuration.launch.evaluate import main
from murmuration.contrib.dense import detect, training as dense
backward, found, done = dense.DensePictures.backward, detect.found_by, []
def counted(kind, limit, run):
    def counting(*given):
        if sys.argv[1] == kind and len(done) == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(run(*given))
        return done[-1]
    return counting
dense.DensePictures.backward, detect.found_by = counted("step", 5, backward), counted("found", 8, found)
main(sys.argv[2:])
"""


def test_killed_in_training_and_in_scoring_it_continues_and_ends_alike(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [*QUICK, "--epochs", 2, "--micro-batch", 2]
    command = [*map(str, asked(world, *short)), "--out", str(tmp_path / "killed"), "--workers", "0"]
    threads = str(torch.get_num_threads())  # sums are rounded by how many threads share them
    # In the second step of the second epoch, and while the third pair of pictures is scored, after the last four steps.
    for kind, epochs in (("step", 1), ("found", 2)):
        done = forking.run(
            [sys.executable, "-c", KILL, threads, kind, *command], cwd=ROOT, env=environment(), capture_output=True
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert torch.load(tmp_path / "killed" / "fine_tune.pt", weights_only=True)["epoch"] == epochs
    scored: list[Any] = []

    def counting(*given: Any) -> list[dict[str, Any]]:
        scored.append(found_by(*given))
        return scored[-1]

    monkeypatch.setattr("murmuration.contrib.dense.detect.found_by", counting)
    assert evaluate(*asked(world, *short), "--out", tmp_path / "killed") == 0
    assert len(scored) == 2, "four pictures had been scored"
    assert evaluate(*asked(world, *short), "--out", tmp_path / "whole") == 0
    assert len(scored) == 2 + 6
    one, other = (json.loads((tmp_path / name / "detections.json").read_text()) for name in ("killed", "whole"))
    assert [each["file_name"] for each in one] == [each["file_name"] for each in other]
    scores = [[each["score"] for each in found] for found in (one, other)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3, abs=1e-4)
    assert result(tmp_path / "killed")["settings"] == result(tmp_path / "whole")["settings"]


def test_mirrored_pictures_keep_their_objects_and_crowds_are_not_learnt(world: Path, tmp_path: Path) -> None:
    index = build_folder(world / "coco" / "train2017", tmp_path / "index")
    path = world / "coco" / "annotations" / "instances_train2017.json"
    objects = read_objects(path, [f"{number:04}.png" for number in range(16)], "--objects")
    pictures, seen = PicturedObjects(index, 0, objects), set()
    for epoch in range(8):
        image, target = pictures[epoch, 1][1]
        for box, mask in zip(target["boxes"].int(), target["masks"], strict=True):
            left, top, right, bottom = box.tolist()
            assert int(mask.sum()) == int(mask[top:bottom, left:right].sum()) == (right - left) * (bottom - top)
        # The last object was painted over the others.
        colour = torch.tensor(COLOURS[int(target["labels"][-1]) - 1]) / 255
        torch.testing.assert_close(image[:, mask.bool()], colour[:, None].expand(3, int(mask.sum())))
        seen.add(left)
    assert len(seen) == 2, "some are mirrored and some are not"
    document = json.loads(path.read_text())
    for each in document["annotations"]:
        each["iscrowd"] = int(each["image_id"] == 101)
    (tmp_path / "crowd.json").write_text(json.dumps(document))
    objects = read_objects(tmp_path / "crowd.json", [f"{number:04}.png" for number in range(16)], "--objects")
    assert len(PicturedObjects(index, 0, objects)[0, 1][1][1]["labels"]) == 0
    assert [each["iscrowd"] for each in objects.as_truth([1])["annotations"]] == [1, 1]


def changed(document: dict[str, Any], fault: str) -> dict[str, Any]:
    first = document["annotations"][0]
    if fault == "no picture":
        document["images"].pop(0)
    elif fault == "category":
        first["category_id"] = 4
    elif fault == "bbox":
        first["bbox"] = [1, 2]
    elif fault == "field":
        del document["images"][3]["width"]
    elif fault == "other file":
        document["images"][2]["file_name"] = "elsewhere.png"
    elif fault == "twice":
        document["images"].append(document["images"][0] | {"id": 7})
    else:
        document["categories"] = []
    return document


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("no picture", "have no picture"), ("category", "another category"), ("bbox", "annotation 0 cannot be used"),
     ("field", "images 3 needs"), ("other file", "elsewhere.png is none of"), ("twice", "a picture twice"),
     ("empty", "lists no categories")],
)  # fmt: skip
def test_annotations_that_do_not_fit_are_refused_in_one_sentence(
    world: Path, tmp_path: Path, fault: str, reason: str
) -> None:
    document = json.loads((world / "coco" / "annotations" / "instances_val2017.json").read_text())
    (tmp_path / "changed.json").write_text(json.dumps(changed(document, fault)))
    with pytest.raises(EvaluationError, match=reason):
        read_objects(tmp_path / "changed.json", [f"{number:04}.png" for number in range(6)], "--objects")


def test_a_picture_of_another_size_than_its_annotation_is_unreadable(world: Path, tmp_path: Path) -> None:
    index = build_folder(world / "coco" / "val2017", tmp_path / "index")
    document = json.loads((world / "coco" / "annotations" / "instances_val2017.json").read_text())
    document["images"][0]["width"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(document))
    objects = read_objects(tmp_path / "changed.json", [f"{number:04}.png" for number in range(6)], "--objects")
    assert "its annotation says 41 × 48" in str(PicturedObjects(index, 0, objects)[-1, 0][2])


def test_what_cannot_be_a_backbone_and_what_has_no_annotations_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    Image.new("RGB", (40, 40)).save(lonely / "a.png")
    assert evaluate(*asked(world), "--test", lonely, "--out", tmp_path / "out") == 2
    assert "instances_lonely.json does not exist" in capsys.readouterr().err
    assert evaluate(*asked(world, "--precision", "fp16"), "--out", tmp_path / "out") == 2
    assert "fp16 gradients underflow" in capsys.readouterr().err
    without = [each for each in asked(world) if each != "--public"]
    assert evaluate(*without, "--out", tmp_path / "out") == 2
    assert "pass --public" in capsys.readouterr().err
    monkeypatch.setattr("murmuration.contrib.dense.detect.find_spec", lambda name: None)
    assert evaluate(*asked(world), "--out", tmp_path / "out") == 2
    assert "pip install 'murmuration[detect]'" in capsys.readouterr().err


def test_pictures_of_a_private_run_are_public_for_nobody(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train2017", "val2017"):
        coco(tmp_path / "coco", name, 3, 3)
    index = build_folder(tmp_path / "coco" / "val2017", tmp_path / "far" / "index")
    RunLog.of(index).register("id", "private", "clinic", 8.0, 1e-6, folder="elsewhere")
    for data, test in (("train2017", "val2017"), ("val2017", "train2017")):
        folders = ["--data", tmp_path / "coco" / data, "--test", tmp_path / "coco" / test]
        assert evaluate(*asked(world), *folders, "--out", tmp_path / "out") == 2
        assert "'clinic' protects" in capsys.readouterr().err
    assert not (tmp_path / "out" / "result.json").exists()
