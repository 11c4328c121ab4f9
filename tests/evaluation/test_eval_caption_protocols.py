"""The commands retrieval and aro: their numbers from losses that the model's own forward pass gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.session.answers import Answers
from murmuration.model.released import read_dpcap
from murmuration.model.weight_files import read_weights
from tests.evaluation.test_eval_evaluate import IMAGENET, prepared
from tests.support.evaluation_world import COLOURS, class_folders, evaluate, result, saved, shards, tokenizer
from tests.support.published import dpcap

SIDE = 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "pictures", 2)
    for path in (folder / "pictures").rglob("*.png"):
        path.rename(path.with_name(f"{path.parent.name}_{path.name}"))
    shards(folder / "shards", 10)
    tokenizer(folder)
    text = {"text_width": 48, "text_depth": 1, "length": 12, "vocabulary": 13}
    saved(folder / "dpcap.pth", dpcap(48, 2, grid=2, patch=8, **text))
    return folder


def asked(world: Path, protocol: str, data: str) -> list[Any]:
    return [protocol, world / "dpcap.pth", "--heads", 4, "--decoder-heads", 4, "--public", "--data", world / data,
            "--tokenizer", world / "tokenizer.json", "--micro-batch", 4]  # fmt: skip


def losses(world: Path, images: list[torch.Tensor], captions: list[str]) -> np.ndarray:
    """[pictures, captions] by the model's own forward pass, a pair at a time."""
    model, _ = read_dpcap(read_weights(world / "dpcap.pth"), heads=4, decoder_heads=4)
    text = TextEncoder(world / "tokenizer.json", 12)
    rows = [torch.tensor([text.encode(caption)]) for caption in captions]
    with torch.no_grad():
        found = [[float(model.eval()({"images": image[None], "tokens": row})) for row in rows] for image in images]
    return np.array(found)


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_recalls_are_those_of_the_models_own_losses(world: Path, tmp_path: Path) -> None:
    pictures = sorted((world / "pictures").rglob("*.png"))
    captions = [[f"a photo of a {path.parent.name} square", f"{path.parent.name} photo"] for path in pictures]
    karpathy = written(tmp_path / "captions.json", {"images": [
        {"filename": path.name, "filepath": path.parent.name, "split": "test" if number else "train",
         "sentences": [{"raw": caption} for caption in said]}
        for number, (path, said) in enumerate(zip(pictures, captions, strict=True))
    ]})  # fmt: skip
    split = ("--captions", karpathy, "--split", "test")
    assert evaluate(*asked(world, "retrieval", "pictures"), *split, "--out", tmp_path / "out") == 0
    numbers = result(tmp_path / "out")["numbers"]
    images = [prepared(path, SIDE, *IMAGENET) for path in pictures[1:]]
    table = losses(world, images, [caption for said in captions[1:] for caption in said])
    owner = np.repeat(np.arange(9), 2)
    for place in (1, 5, 10):
        found = [set(np.argsort(row, kind="stable")[:place]) & set(np.flatnonzero(owner == i))
                 for i, row in enumerate(table)]  # fmt: skip
        assert numbers[f"image to text R@{place}"]["value"] == pytest.approx(np.mean([bool(each) for each in found]))
        assert numbers[f"image to text R@{place}"]["n"] == 9
        right = [owner[j] in np.argsort(table[:, j], kind="stable")[:place] for j in range(18)]
        assert numbers[f"text to image R@{place}"]["value"] == pytest.approx(np.mean(right))
        assert numbers[f"text to image R@{place}"]["n"] == 18


def test_captions_beside_the_pictures_serve_as_well_and_a_list_already_split(world: Path, tmp_path: Path) -> None:
    assert evaluate(*asked(world, "retrieval", "shards"), "--out", tmp_path / "shards") == 0
    numbers = result(tmp_path / "shards")["numbers"]
    assert numbers["text to image R@10"] == numbers["image to text R@10"]
    assert numbers["text to image R@10"]["value"] == 1 and numbers["text to image R@1"]["value"] <= 1
    listed = [{"image": f"{colour}_000.png", "caption": [f"a {colour} square"]} for colour in COLOURS]
    more = ("--captions", written(tmp_path / "list.json", listed), "--out", tmp_path / "list")
    assert evaluate(*asked(world, "retrieval", "pictures"), *more) == 0
    assert result(tmp_path / "list")["data"]["test"]["records"] == 5


def case(path: Path, box: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    left, top, width, height = box
    return {"image_path": path.name, "bbox_x": left, "bbox_y": top, "bbox_w": width, "bbox_h": height, **more}


def test_relations_are_read_from_their_box(world: Path, tmp_path: Path) -> None:
    pictures = sorted((world / "pictures").rglob("*.png"))
    boxes = [(0, 0, 10, 10), (4, 2, 16, 16), (10, 0, 16, 20)]
    cases, expected = [], []
    for number in range(15):
        path, box = pictures[number % 10], boxes[number % 3]
        truth, wrong = f"a photo of a {path.parent.name} square", f"a square {path.parent.name} of a photo"
        relation = "on" if number % 4 else "under"
        cases.append(case(path, box, relation_name=relation, true_caption=truth, false_caption=wrong))
        left, top, width, height = box
        Image.open(path).crop((left, top, left + width, top + height)).save(tmp_path / "part.png")
        false, true = losses(world, [prepared(tmp_path / "part.png", SIDE, *IMAGENET)], [wrong, truth])[0]
        expected.append((relation, true < false))
    file = written(tmp_path / "visual_genome_relation.json", cases)
    assert evaluate(*asked(world, "aro", "pictures"), "--cases", file, "--out", tmp_path / "out") == 0
    found = result(tmp_path / "out")
    assert found["settings"]["set"] == "VG-Relation"
    assert found["numbers"]["accuracy"]["value"] == pytest.approx(np.mean([right for _, right in expected]))
    each = [np.mean([right for name, right in expected if name == relation]) for relation in ("on", "under")]
    assert found["numbers"]["accuracy, mean over relations"]["value"] == pytest.approx(np.mean(each))
    assert "By relation" in (tmp_path / "out" / "result.html").read_text()


def test_attributes_are_counted_by_pairs_of_25_and_orders_have_no_groups(world: Path, tmp_path: Path) -> None:
    path = min((world / "pictures").rglob("*.png"))
    say = {"true_caption": "a red square", "false_caption": "square red a"}
    cases = [case(path, (0, 0, 9, 9), attributes=["old", "red"], **say)] * 26
    cases += [case(path, (0, 0, 9, 9), attributes=["red", "old"], **say)] * 3
    more = ("--cases", written(tmp_path / "attribution.json", cases), "--out", tmp_path / "attribution")
    assert evaluate(*asked(world, "aro", "pictures"), *more) == 0
    found = result(tmp_path / "attribution")["numbers"]
    assert found["accuracy"]["n"] == 29 and found["accuracy, mean over pairs of attributes"]["n"] == 1
    options = ["a red square", "square a red", "red a square"]
    order = written(tmp_path / "order.json", [{"image": path.name, "options": options, "true": 2}])
    assert evaluate(*asked(world, "aro", "pictures"), "--cases", order, "--out", tmp_path / "order") == 0
    best = int(losses(world, [prepared(path, SIDE, *IMAGENET)], options)[0].argmin())
    assert result(tmp_path / "order")["numbers"]["accuracy"]["value"] == (best == 2)
    assert list(result(tmp_path / "order")["numbers"]) == ["accuracy"]


def test_orders_are_made_of_captions_and_read_again(world: Path, tmp_path: Path) -> None:
    paths = sorted((world / "pictures").rglob("*.png"))
    said = [{"image": path.name, "caption": ["a photo of a red square", "red"]} for path in paths]
    captions = written(tmp_path / "captions.json", said)
    tags = [{"caption": "a photo of a red square", "words": ["a", "photo", "of", "a", "red", "square"],
             "tags": ["DT", "NN", "IN", "DT", "JJ", "NN"]},
            {"caption": "red", "words": ["red"], "tags": ["JJ"]}]  # fmt: skip
    tagged = ["--tags", written(tmp_path / "tags.json", tags)]
    made, again, other, plain = (tmp_path / name for name in ("made", "again", "other", "plain"))
    aro = [*asked(world, "aro", "pictures"), "--captions", captions]
    for out, more in ((made, tagged), (again, [*tagged, "--seed", 0]), (other, [*tagged, "--seed", 1]), (plain, [])):
        assert evaluate(*aro, *more, "--out", out) == 0
    assert (made / "result.json").read_bytes() == (again / "result.json").read_bytes()
    cases = [json.loads((out / "cases.json").read_text()) for out in (made, other, plain)]
    assert [{len(case["options"]) for case in each} for each in cases] == [{5}, {5}, {3}] and cases[0] != cases[1]
    assert [case["image"] for case in cases[0]] == [path.name for path in paths for _ in range(2)]
    images = [prepared(path, SIDE, *IMAGENET) for path in paths]
    for each, out in zip(cases, (made, other, plain), strict=True):
        best = [
            int(losses(world, [images[number // 2]], case["options"])[0].argmin()) for number, case in enumerate(each)
        ]
        told = result(out)
        assert told["numbers"]["accuracy"]["value"] == pytest.approx(best.count(0) / len(best))
        assert told["settings"]["chance"] == pytest.approx(
            sum(1 / len(set(case["options"])) for case in each) / len(each)
        )
        assert [bool("no tags were given" in note) for note in told["notes"]].count(True) == (out == plain)
    read = tmp_path / "read"
    assert evaluate(*asked(world, "aro", "pictures"), "--cases", made / "cases.json", "--out", read) == 0
    assert result(read)["numbers"] == result(made)["numbers"]
    assert result(read)["settings"]["cases_sha256"] == result(made)["settings"]["cases_sha256"]


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        (None, "either --cases or --captions"),
        ([], "has no tags for 'a red square'"),
        ({"caption": "a"}, "is no list"),
        ([{"caption": "a red square", "words": ["a", "red"], "tags": ["DT", "JJ"]}], "are not those of its caption"),
        ([{"caption": "a red square", "words": ["a", "red", "square"], "tags": ["DT"]}], "entry 0 cannot be used"),
    ],
)
def test_tags_that_do_not_fit_are_refused(
    world: Path, tmp_path: Path, tags: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = min((world / "pictures").rglob("*.png"))
    captions = written(tmp_path / "captions.json", [{"image": path.name, "caption": "a red square"}])
    more = ["--captions", captions, "--tags", written(tmp_path / "tags.json", tags)] if tags is not None else []
    assert evaluate(*asked(world, "aro", "pictures"), *more, "--out", tmp_path / "out") == 2
    assert reason in capsys.readouterr().err


def test_both_continue_after_a_stop(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from murmuration.train.storage.feature_store import RowWriter

    path = min((world / "pictures").rglob("*.png"))
    cases = written(tmp_path / "o.json", [{"image": path.name, "options": ["a red", "red a"], "true": 0}] * 10)
    commands = {
        "aro": ([*asked(world, "aro", "pictures"), "--cases", cases], Answers, "add"),
        "retrieval": (asked(world, "retrieval", "shards"), RowWriter, "put"),
    }
    for name, (arguments, kind, method) in commands.items():
        kept, calls = getattr(kind, method), []

        def stopping(self: Any, *given: Any, kept: Any = kept, calls: list[int] = calls) -> None:
            if len(calls) == 2:
                raise KeyboardInterrupt
            calls.append(1)
            kept(self, *given)

        monkeypatch.setattr(kind, method, stopping)
        assert evaluate(*arguments, "--out", tmp_path / name) == 75
        monkeypatch.setattr(kind, method, kept)
        assert evaluate(*arguments, "--out", tmp_path / name) == 0
        assert evaluate(*arguments, "--out", tmp_path / f"whole-{name}") == 0
        assert (tmp_path / name / "result.json").read_bytes() == (tmp_path / f"whole-{name}/result.json").read_bytes()


@pytest.mark.parametrize(
    ("protocol", "option", "content", "reason"),
    [
        ("aro", "--cases", [], "is no list of cases"),
        ("aro", "--cases", [{"image": "x"}], "have neither relation_name"),
        ("aro", "--cases", [{"image": "x.png", "options": ["a", "b"], "true": 0}], "x.png is none of the 10 pictures"),
        ("aro", "--cases", [{"image": "x.png", "options": ["a"], "true": 0}], "entry 0 cannot be used"),
        ("aro", "--cases", [{"relation_name": "on", "bbox_x": 0, "bbox_y": 0, "bbox_w": 1 << 20, "bbox_h": 1 << 20}],
         "its box has"),
        ("aro", "--cases", [{"relation_name": "on", "bbox_x": 0}], "entry 0 lacks 'bbox_y'"),
        ("retrieval", "--captions", {"images": []}, "lists no pictures"),
        ("retrieval", "--captions", [{"image": "blue_000.png", "caption": []}], "it has no caption"),
        ("retrieval", "--captions", [{"image": "blue_000.png", "caption": "a"}] * 2, "lists a picture twice"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_in_one_sentence(
    world: Path, tmp_path: Path, protocol: str, option: str, content: Any, reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = written(tmp_path / "file.json", content)
    assert evaluate(*asked(world, protocol, "pictures"), option, file, "--out", tmp_path / "out") == 2
    assert reason in capsys.readouterr().err
