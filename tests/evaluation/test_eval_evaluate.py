"""The command that evaluates trained models: every form of weights and records, resumes, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, recall_score, roc_auc_score
from timm.models._hub import save_for_hf
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

from murmuration.data.index.folders import build_folder
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.store.place import RecordIndex
from murmuration.data.text.encoder import word_tokenizer
from murmuration.evaluation.measures.logistic import normalised
from murmuration.evaluation.models.weights import Evaluated, features_of
from murmuration.evaluation.protocols.caption import caption_metrics
from murmuration.evaluation.session.answers import Answers, MicroBatchAnswers
from murmuration.evaluation.session.compare import lines_of
from murmuration.model.released import read_dpcap, read_vip_mae
from murmuration.model.weight_files import read_weights
from murmuration.train.storage.feature_store import PRESENT
from murmuration.train.storage.sibling_runs import RunLog
from tests.support import forking
from tests.support.evaluation_world import (
    COLOURS,
    class_folders,
    class_list,
    evaluate,
    picture,
    result,
    saved,
    shards,
    table,
    tokenizer,
)
from tests.support.foreign_models import hugging_face, moved, timm_vit
from tests.support.launching import ROOT, environment
from tests.support.published import dpcap, vip_mae
from tests.support.tars import indexed

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALVES = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 5 colours in folders (`train`, `test`) and in shards, a tokenizer, and published files."""
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "train", 12)
    class_folders(folder / "test", 5, seed=500)
    shards(folder / "shards", 20)
    tokenizer(folder)
    class_list(folder)
    saved(folder / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    text = {"text_width": 48, "text_depth": 1, "length": 12, "vocabulary": 13}
    saved(folder / "dpcap.pth", dpcap(48, 2, grid=2, patch=8, **text))
    return folder


def published(world: Path, name: str) -> list[Any]:
    heads = ["--heads", 4, "--decoder-heads", 4]
    return [world / name, *heads, "--public"]


def probe(world: Path, out: Path, *more: Any, weights: str = "vip.pth") -> int:
    return evaluate(
        "probe", *published(world, weights), "--data", world / "train", "--test", world / "test", "--out", out, *more
    )


@pytest.mark.parametrize(("weights", "objective"), [("vip.pth", "mae"), ("dpcap.pth", "caption")])
def test_a_probe_of_published_weights_is_scikit_learns_on_their_features(
    world: Path, tmp_path: Path, weights: str, objective: str
) -> None:
    from sklearn.linear_model import LogisticRegression

    assert probe(world, tmp_path / "out", weights=weights) == 0
    found = result(tmp_path / "out")
    read: Any = {"vip.pth": read_vip_mae, "dpcap.pth": read_dpcap}[weights]
    model, report = read(read_weights(world / weights), heads=4, decoder_heads=4)
    evaluated = Evaluated(model.eval(), objective, "", report)

    def rows(name: str) -> tuple[np.ndarray, np.ndarray]:
        pictures = sorted((world / name).rglob("*.png"))
        images = torch.stack([prepared(path, 16, *IMAGENET) for path in pictures])
        with torch.no_grad():
            features = normalised(features_of(evaluated, images, "dpcap")).numpy()
        return features, np.array([list(COLOURS).index(path.parent.name) for path in pictures])

    theirs = LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-9, max_iter=20_000).fit(*rows("train"))
    features, labels = rows("test")
    right = int((theirs.predict(features) == labels).sum())
    top1 = found["numbers"]["top-1"]
    assert abs(round(top1["value"] * 25) - right) <= 1 and top1["n"] == 25
    assert right > 10, "five colours are hardly told apart, so that the comparison says little"
    assert found["model"]["objective"] == objective and found["data"]["train"]["records"] == 60
    assert "ASSUMED" not in json.dumps(found["notes"])


def prepared(path: Path, side: int, mean: list[float], std: list[float]) -> torch.Tensor:
    """By torchvision: resize to 256/224 of the side, crop the middle."""
    steps = [Resize(int(side * 256 / 224), InterpolationMode.BICUBIC), CenterCrop(side), ToTensor()]
    return Compose([*steps, Normalize(mean, std)])(Image.open(path).convert("RGB"))


def test_vips_probe_reads_all_blocks_and_new_views_are_other_features(world: Path, tmp_path: Path) -> None:
    quick = ("--way", "vip", "--epochs", 3, "--warmup", 1)
    assert probe(world, tmp_path / "one", *quick) == 0
    assert probe(world, tmp_path / "two", *quick, "--views", 2) == 0
    one, two = result(tmp_path / "one"), result(tmp_path / "two")
    assert any("crops anew" in note for note in one["notes"]) and not any("crops anew" in n for n in two["notes"])
    sizes = {path.stat().st_size // 4 for path in (tmp_path / "two" / "features").rglob("features.f32")}
    assert sizes == {2 * 60 * 2 * 48, 25 * 2 * 48}, "views × records × blocks × width, and the test records"
    stored = next(p for p in (tmp_path / "two" / "features").rglob("features.f32") if p.stat().st_size // 4 == 11520)
    first, second = np.fromfile(stored, "<f4").reshape(2, 60, 96)
    assert not np.allclose(first, second)


KILLED_AFTER = 3
KILL = f"""
import os, signal, sys
from murmuration.launch.evaluate import main
from murmuration.train.storage.feature_store import RowWriter
put, done = RowWriter.put, []
def counted(self, *rows):
    done.append(put(self, *rows))
    if len(done) == {KILLED_AFTER}:
        os.kill(os.getpid(), signal.SIGKILL)
RowWriter.put = counted
main(sys.argv[1:])
"""


def test_killed_during_extraction_and_run_again_gives_the_same_result(world: Path, tmp_path: Path) -> None:
    arguments = [
        "probe", *published(world, "vip.pth"), "--data", world / "train", "--test", world / "test", "--micro-batch", 8,
    ]  # fmt: skip
    command = [*map(str, arguments), "--out", str(tmp_path / "killed"), "--workers", "0"]
    done = forking.run([sys.executable, "-c", KILL, *command], cwd=ROOT, env=environment(), capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "killed" / "result.json").exists()
    states = next((tmp_path / "killed" / "features").rglob("state.u8"))
    assert np.count_nonzero(np.fromfile(states, "u1") == PRESENT) == 8 * KILLED_AFTER
    before = states.with_name("features.f32").read_bytes()[: 8 * KILLED_AFTER * 48 * 4]
    assert evaluate(*arguments, "--out", tmp_path / "killed") == 0
    assert evaluate(*arguments, "--out", tmp_path / "whole") == 0
    assert (tmp_path / "killed" / "result.json").read_bytes() == (tmp_path / "whole" / "result.json").read_bytes()
    assert states.with_name("features.f32").read_bytes()[: len(before)] == before, "what was there was kept"


KILL_ANSWERS = """
import os, signal, sys
from murmuration.launch.evaluate import main
from murmuration.evaluation.session.answers import Answers
add, done = Answers.add, []
def counted(self, part):
    if len(done) == 2:
        os.write(self.descriptor, part.as_line()[:-3])
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(add(self, part))
Answers.add = counted
main(sys.argv[1:])
"""


def asked_of(world: Path, protocol: str) -> list[Any]:
    model = "vip.pth" if protocol == "reconstruct" else "dpcap.pth"
    written = [] if protocol == "reconstruct" else ["--tokenizer", world / "tokenizer.json"]
    zero_shot = ["--label", "colour", "--classes", world / "classes.txt", "--template", "a photo of a {}"]
    more = {"caption": ["--decode", "nucleus"], "zero-shot": zero_shot}
    return [protocol, *published(world, model), "--data", world / "shards", "--micro-batch", 4, *written,
            *more.get(protocol, [])]  # fmt: skip


def test_a_caption_run_killed_in_the_middle_of_a_line_gives_the_same_result(world: Path, tmp_path: Path) -> None:
    arguments = asked_of(world, "caption")
    command = [*map(str, arguments), "--out", str(tmp_path / "killed"), "--workers", "0"]
    done = forking.run([sys.executable, "-c", KILL_ANSWERS, *command], cwd=ROOT, env=environment())
    assert done.returncode == -signal.SIGKILL
    (kept,) = (tmp_path / "killed" / "progress").iterdir()
    assert kept.read_bytes().count(b"\n") == 2 and not kept.read_bytes().endswith(b"\n")
    assert evaluate(*arguments, "--out", tmp_path / "killed") == 0
    assert evaluate(*arguments, "--out", tmp_path / "whole") == 0
    for name in ("result.json", "result.html", "captions.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "killed" / "progress").exists()


@pytest.mark.parametrize("protocol", ["zero-shot", "reconstruct"])
def test_a_stopped_command_computes_only_what_is_missing(
    world: Path, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = asked_of(world, protocol)
    add = Answers.add
    counted: list[int] = []

    def stopping(self: Answers, part: MicroBatchAnswers) -> None:
        if len(counted) == 3:
            raise KeyboardInterrupt
        counted.append(len(part.answers))
        add(self, part)

    monkeypatch.setattr(Answers, "add", stopping)
    assert evaluate(*arguments, "--out", tmp_path / "stopped") == 75
    monkeypatch.setattr(Answers, "add", lambda self, part: (counted.append(len(part.answers)), add(self, part)))
    assert evaluate(*arguments, "--out", tmp_path / "stopped") == 0
    assert counted == [4] * 5, "each of 20 records once"
    assert evaluate(*arguments, "--out", tmp_path / "whole") == 0
    for name in ("result.json", "result.html"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_answers_of_another_question_are_not_taken_over(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command with other names for the classes, after a stop before the end."""
    arguments = asked_of(world, "zero-shot")
    add = Answers.add
    monkeypatch.setattr(Answers, "add", lambda self, part: (_ for _ in ()).throw(KeyboardInterrupt()) if
                        part.number == 4 else add(self, part))  # fmt: skip
    assert evaluate(*arguments, "--out", tmp_path / "out") == 75
    monkeypatch.setattr(Answers, "add", add)
    names = tmp_path / "names.json"
    names.write_text(json.dumps({name: [f"{name} square"] for name in COLOURS}))
    for out in ("out", "whole"):
        assert evaluate(*arguments, "--names", names, "--out", tmp_path / out) == 0
    assert result(tmp_path / "out") == result(tmp_path / "whole")


def test_a_classifier_of_hugging_face_predicts_as_it_does_there(world: Path, tmp_path: Path) -> None:
    theirs = hugging_face()
    theirs.config.id2label = dict(enumerate(COLOURS))
    theirs.save_pretrained(tmp_path / "vit")
    of_halves(tmp_path / "vit")
    classified(world, tmp_path, "vit", "hugging-face", lambda images: theirs(images).logits)


def of_halves(folder: Path) -> None:
    told = {"image_mean": HALVES[0], "image_std": HALVES[1]}
    (folder / "preprocessor_config.json").write_text(json.dumps(told))


def test_a_classifier_of_timm_predicts_as_it_does_there(world: Path, tmp_path: Path) -> None:
    theirs = timm_vit()
    save_for_hf(theirs, tmp_path / "vit", model_args={"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2,
                                                      "num_heads": 4})  # fmt: skip
    classified(world, tmp_path, "vit", "timm", theirs)


OTHERS: dict[str, dict[str, Any]] = {
    # SimCLR's and others' body, whose BatchNorm couples records in training.
    "resnet18": {"channels": [8, 16, 24, 32], "layers": [1, 1, 1, 1]},
    "mobilenetv3_small_050": {},
    "vit_small_patch14_dinov2": {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_classifiers_of_timm_are_computed_as_timm_does(world: Path, tmp_path: Path, name: str) -> None:
    pixels = {"mean": HALVES[0], "std": HALVES[1], "input_size": (3, 16, 16)}
    theirs: Any = moved(timm.create_model(name, num_classes=5, pretrained_cfg_overlay=pixels, **OTHERS[name]))
    for number, part in enumerate(theirs.modules()):
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_var = torch.rand_like(part.bias) + 0.5 + number % 3
    save_for_hf(theirs, str(tmp_path / "other"), model_args=OTHERS[name])
    classified(world, tmp_path, "other", "timm", theirs)
    assert probe(world, tmp_path / "probed", "--pixels", "half", weights=str(tmp_path / "other")) == 0
    (features,) = (path for path in (tmp_path / "probed" / "features").rglob("features.f32")
                   if path.with_name("state.u8").stat().st_size == 25)  # fmt: skip
    images = torch.stack([prepared(path, 16, *HALVES) for path in sorted((world / "test").rglob("*.png"))])
    with torch.no_grad():
        expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    torch.testing.assert_close(torch.from_numpy(np.fromfile(features, "<f4").reshape(25, -1)), expected)


def test_a_file_of_timm_that_lacks_a_tensor_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = {"mean": HALVES[0], "std": HALVES[1], "input_size": (3, 16, 16)}
    theirs = timm.create_model("resnet18", num_classes=5, pretrained_cfg_overlay=pixels, **OTHERS["resnet18"])
    save_for_hf(theirs, str(tmp_path / "other"), model_args=OTHERS["resnet18"])
    weights = tmp_path / "other" / "pytorch_model.bin"
    kept = torch.load(weights, weights_only=True)
    asked = ["--public", "--data", world / "test", "--out", tmp_path / "out"]
    for name, code in (("layer2.0.bn1.running_mean", 2), ("fc.weight", 2), ("bn1.num_batches_tracked", 0)):
        torch.save({key: tensor for key, tensor in kept.items() if key != name}, weights)
        assert evaluate("classify", tmp_path / "other", *asked) == code
        assert code == 0 or f"lacks {name.replace('fc.', 'head.')}" in capsys.readouterr().err
    torch.save({key: tensor for key, tensor in kept.items() if not key.startswith("fc.")}, weights)
    assert probe(world, tmp_path / "probed", weights=str(tmp_path / "other")) == 0, "needs no head"


def classified(world: Path, tmp_path: Path, name: str, form: str, theirs: Any) -> None:
    out = tmp_path / "out"
    arguments = ["classify", tmp_path / name, "--public", "--data", world / "test", "--out", out, "--gallery", 3]
    pictures = sorted((world / "test").rglob("*.png"))
    # Every second picture shows red, too; the others show nothing that anybody named.
    asked = {str(path.relative_to(world / "test")): [path.parent.name, "red"] for path in pictures[::2]}
    (tmp_path / "right.json").write_text(json.dumps(asked))
    assert evaluate(*arguments, "--real", tmp_path / "right.json") == 0
    with torch.no_grad():
        likely = theirs(torch.stack([prepared(path, 16, *HALVES) for path in pictures])).softmax(1)
    found = result(out)
    assert found["model"]["form"] == form
    right = sum(COLOURS_LIST[int(row.argmax())] == path.parent.name for row, path in zip(likely, pictures, strict=True))
    assert round(found["numbers"]["top-1"]["value"] * len(pictures)) == right
    assert found["numbers"]["top-5"]["value"] == 1, "of five classes"
    firsts = [COLOURS_LIST[int(row.argmax())] for row in likely[::2]]
    real = sum(first in (path.parent.name, "red") for first, path in zip(firsts, pictures[::2], strict=True))
    assert found["numbers"]["ReaL"]["n"] == len(firsts)
    assert round(found["numbers"]["ReaL"]["value"] * len(firsts)) == real
    rows = table(out / "predictions.csv")
    assert [row["record"] for row in rows] == [str(path.relative_to(world / "test")) for path in pictures]
    printed: list[list[float]] = []
    for row, values in zip(rows, likely, strict=True):
        told = {row[f"class_{place}"]: float(row[f"probability_{place}"]) for place in range(1, 6)}
        # Their logarithms are the logits, but for a number that is the same for all classes.
        printed.append([told[name] for name in COLOURS_LIST])
        logits = torch.tensor(printed[-1]).log()
        torch.testing.assert_close(logits, values.log(), rtol=0, atol=1e-5)
    assert (out / "result.html").read_text().count("data:image/png") == 3
    truth = [COLOURS_LIST.index(path.parent.name) for path in pictures]
    counted = [list(row.values()) for row in table(out / "confusion.csv")]
    expected = confusion_matrix(truth, likely.argmax(1), labels=range(5)).tolist()
    assert counted == [[name, *map(str, row)] for name, row in zip(COLOURS_LIST, expected, strict=True)]
    # Of the printed numbers: two pictures may be as likely up to rounding, and kernels round as the processor does.
    areas = [roc_auc_score([each == number for each in truth], scores)
             for number, scores in enumerate(zip(*printed, strict=True))]  # fmt: skip
    assert found["numbers"]["mean AUC"]["value"] == pytest.approx(np.mean(areas), abs=1e-6)
    assert found["numbers"]["balanced accuracy"]["value"] == pytest.approx(
        recall_score(truth, likely.argmax(1), average="macro")
    )


COLOURS_LIST = list(COLOURS)


def test_one_picture_is_classified_without_a_truth(world: Path, tmp_path: Path) -> None:
    hugging_face().save_pretrained(tmp_path / "vit")
    of_halves(tmp_path / "vit")
    picture = world / "test" / "red" / "001.png"
    assert evaluate("classify", tmp_path / "vit", "--public", "--data", picture, "--out", tmp_path / "out") == 0
    assert result(tmp_path / "out")["numbers"] == {}
    assert [row["record"] for row in table(tmp_path / "out" / "predictions.csv")] == ["001.png"]


def test_labels_that_were_not_asked_for_are_pointed_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face().save_pretrained(tmp_path / "vit")
    of_halves(tmp_path / "vit")
    records = ({"png": picture(name, number), "cls": str(number).encode()} for number, name in enumerate(COLOURS))
    indexed(tmp_path / "shards", records)
    asked = ["classify", tmp_path / "vit", "--public", "--data", tmp_path / "shards", "--out"]
    assert evaluate(*asked, tmp_path / "out") == 0
    assert "note: These records have a .cls; --label cls measures accuracy by it." in capsys.readouterr().out
    assert evaluate(*asked, tmp_path / "scored", "--label", "cls") == 0
    assert "top-1: " in (said := capsys.readouterr().out) and "have a .cls" not in said


def test_zero_shot_by_label_and_by_trie(world: Path, tmp_path: Path) -> None:
    common = [*published(world, "dpcap.pth"), "--tokenizer", world / "tokenizer.json", "--template", "a photo of a {}"]
    names = tmp_path / "names.json"
    names.write_text(json.dumps({name: [name, f"{name} square"] for name in COLOURS}))
    for way in ("label", "trie"):
        out = tmp_path / way
        assert evaluate("zero-shot", *common, "--way", way, "--names", names, "--data", world / "shards", "--label",
                        "colour", "--classes", world / "classes.txt", "--out", out) == 0  # fmt: skip
        found = result(out)
        assert found["numbers"]["accuracy"]["n"] == 20 and found["settings"]["names"] == 10
    usual = common[: common.index("--template")]
    assert evaluate("zero-shot", *usual, "--data", world / "test", "--out", tmp_path / "folders") == 0
    found = result(tmp_path / "folders")
    assert found["data"]["test"]["records"] == 25
    assert found["settings"]["templates"] == ["a photo of a {}"], "the tokenizer does not know 'this' and 'is'"


def test_captions_of_shards_come_with_a_loss_and_those_of_folders_without(world: Path, tmp_path: Path) -> None:
    common = [*published(world, "dpcap.pth"), "--tokenizer", world / "tokenizer.json"]
    for decode in ("greedy", "beam", "nucleus"):
        out = tmp_path / decode
        assert evaluate("caption", *common, "--data", world / "shards", "--decode", decode, "--out", out) == 0
        rows = table(out / "captions.csv")
        assert len(rows) == 20 and rows[1]["true caption"] == "a photo of a green square"
    losses = [result(tmp_path / decode)["numbers"] for decode in ("greedy", "beam", "nucleus")]
    true = [found.pop("loss per token of the true captions") for found in losses]
    assert true[0] == true[1] == true[2] and true[0]["n"] == 20
    for decode, found in zip(("greedy", "beam", "nucleus"), losses, strict=True):
        rows = table(tmp_path / decode / "captions.csv")
        expected = caption_metrics([row["caption"] for row in rows], [[row["true caption"]] for row in rows])
        assert {name: number["value"] for name, number in found.items()} == {
            name: pytest.approx(number.value) for name, number in expected.items()
        }
    listed = [{"image": f"red/{number:03}.png", "caption": ["a red square", "red"]} for number in (3, 1)]
    (tmp_path / "captions.json").write_text(json.dumps(listed))
    more = ["--data", world / "test", "--captions", tmp_path / "captions.json", "--out", tmp_path / "listed"]
    assert evaluate("caption", *common, *more) == 0
    assert [row["record"] for row in table(tmp_path / "listed" / "captions.csv")] == ["red/001.png", "red/003.png"]
    assert set(result(tmp_path / "listed")["numbers"]) == {"BLEU-4", "ROUGE-L", "CIDEr-D"}
    assert evaluate("caption", *common, "--data", world / "test", "--records", 7, "--out", tmp_path / "folder") == 0
    assert result(tmp_path / "folder")["numbers"] == {} and len(table(tmp_path / "folder" / "captions.csv")) == 7
    assert (tmp_path / "folder" / "result.html").read_text().count("data:image/png") == 7


def test_reconstruct_has_the_models_own_loss(world: Path, tmp_path: Path) -> None:
    common = ["reconstruct", *published(world, "vip.pth"), "--data", world / "test"]
    assert evaluate(*common, "--gallery", 4, "--out", tmp_path / "one") == 0
    assert evaluate(*common, "--gallery", 0, "--micro-batch", 3, "--out", tmp_path / "two") == 0
    one, two = (result(tmp_path / name)["numbers"] for name in ("one", "two"))
    (name,) = one
    assert one[name]["n"] == 25 and one[name]["value"] == pytest.approx(two[name]["value"], rel=1e-5), "same masks"
    page = (tmp_path / "one" / "result.html").read_text()
    assert page.count("data:image/png") == 4 and "blue/000.png" in page


def test_compare_prints_a_table_and_warns_of_different_records(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, epsilon, digest in (("one", 8.0, "a"), ("two", None, "b")):
        planned = {"batch": 512, "records": 20_000}
        certificate = None if epsilon is None else {"private": True, "epsilon": epsilon, "delta": 1e-6, **planned}
        number = {"value": 0.5, "n": 100, "low": 0.4, "high": 0.6}
        content = {
            "format": "murmuration-evaluation/1", "protocol": "probe", "settings": {"way": "dpcap"},
            "model": {"what": f"model-{name}", "parameters": 1000 if name == "one" else 2000},
            "certificate": certificate, "data": {"test": {"digest": digest}}, "numbers": {"top-1": number},
        }  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    plot = tmp_path / "plot.svg"
    assert evaluate("compare", tmp_path / "one", tmp_path / "two" / "result.json", "--plot", plot) == 0
    said = capsys.readouterr().out
    assert "model-one" in said and "ε = 8" in said and "no certificate" in said
    assert "0.5000 (0.4000 … 0.6000, n = 100)" in said
    assert "probe (dpcap) were measured on different records" in said
    drawn = plot.read_text()
    assert "model-one" in drawn and "model-two" in drawn
    for axis, words in (("parameters", "parameters of the model"), ("batch", "expected batch")):
        assert evaluate("compare", tmp_path / "one", tmp_path / "two", "--plot", plot, "--by", axis) == 0
        assert words in plot.read_text()
    places = {line.model: line.places for line in lines_of([tmp_path / "one", tmp_path / "two"])}
    assert places["model-one"] == {"epsilon": 8, "parameters": 1000, "batch": 512, "records": 20_000}
    assert places["model-two"] == {"epsilon": None, "parameters": 2000, "batch": None, "records": None}
    (tmp_path / "two" / "result.json").write_text("{}")
    assert evaluate("compare", tmp_path / "two") == 2
    assert "no result of an evaluation" in capsys.readouterr().err


def logged(index: RecordIndex) -> None:
    RunLog.of(index).register("id", "private", "clinic", 8.0, 1e-6, folder="elsewhere")


@pytest.mark.parametrize("named", ["index", "", "red/000.png", "red", "..", "../..", "an index elsewhere"])
def test_records_of_a_private_run_are_public_for_nobody(
    world: Path, tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whichever place they are named; what protects them is noted in their index, wherever that lies."""
    folder, out = class_folders(tmp_path / "here" / "records", 2, colours=("red", "blue")), tmp_path / "out"
    elsewhere = named == "an index elsewhere"
    index = build_folder(folder, tmp_path / "far" / "index" if elsewhere else None)
    logged(index)
    data = {"index": index.folder, "an index elsewhere": folder}.get(named, (folder / named).resolve())
    (folder / "red" / "deeper").mkdir()
    assert evaluate("reconstruct", *published(world, "vip.pth"), "--data", data, "--out", out) == 2
    assert "'clinic' protects" in capsys.readouterr().err
    assert not (out / "result.json").exists()


def test_the_part_that_was_made_public_is_scored_alone(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = build_folder(class_folders(tmp_path / "records", 10, colours=("red", "blue")))
    common = ["reconstruct", *published(world, "vip.pth"), "--data", index.folder, "--out", tmp_path / "out"]
    assert evaluate(*common, "--public-part") == 2
    assert "no part of" in capsys.readouterr().err and RunLog.of(index).splits() == []
    RunLog.of(SplitIndex(index, 0.3, public=True)).freeze()
    logged(SplitIndex(index, 0.3, public=False))
    assert evaluate(*common) == 2
    assert evaluate(*common, "--public-part") == 0
    found = result(tmp_path / "out")
    assert found["data"]["test"]["records"] == 6
    assert index.manifest_digest not in json.dumps(found), "a bare hash of private records"


REFUSED = {
    "pass --public": ["probe", "{vip}", "--data", "{train}", "--test", "{test}"],
    "nowhere does not exist": ["reconstruct", "{world}/nowhere", "--public", "--data", "{test}"],
    "there does not exist": ["reconstruct", "{vip}", "--public", "--data", "{world}/there"],
    "prepare.py index": ["reconstruct", "{vip}", "--public", "--data", "{world}/tars"],
    "index it into a folder": ["reconstruct", "{vip}", "--public", "--data", "s3://bucket/{{0..9}}.tar"],
    "--best chooses a checkpoint of a run": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--best"],
    "give --config as well": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--set", "a=1"],
    "holds a result": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--out", "{world}/done"],
    "pass --config": ["reconstruct", "{world}/export", "--public", "--data", "{test}"],
    "names.json does not exist": ["zero-shot", "{dpcap}", "--public", "--data", "{test}", "--names", "names.json"],
    "writes no captions": ["caption", "{vip}", "--public", "--data", "{test}", "--tokenizer", "{world}/tokenizer.json"],
    "fills in no patches": ["reconstruct", "{dpcap}", "--public", "--data", "{test}"],
    "names no classes": ["classify", "{vip}", "--public", "--data", "{test}"],
    "pass --tokenizer": ["caption", "{dpcap}", "--public", "--data", "{test}"],
    "must contain {} once": ["zero-shot", "{dpcap}", "--public", "--data", "{test}", "--tokenizer",
                             "{world}/tokenizer.json", "--template", "a photo"],
    "'albatross' of 'a albatross'": ["zero-shot", "{dpcap}", "--public", "--data", "{test}", "--tokenizer",
                          "{world}/tokenizer.json", "--names", "{world}/unknown.json", "--template", "a {{}}"],
    "does not know 'photo', 'of' of the usual": ["zero-shot", "{dpcap}", "--public", "--data", "{test}", "--tokenizer",
                                                 "{world}/few.json"],
    "give 1 ≤ crop ≤ resize": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--crop", "300"],
    "--view center neither resizes": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--view", "center",
                                      "--resize", "300"],
    "write imagenet, half, or": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--pixels", "grey"],
    "but the ViP-MAE checkpoint says": ["reconstruct", "{vip}", "--public", "--data", "{test}", "--pixels", "half"],
    "no class folders for the label": ["zero-shot", "{dpcap}", "--public", "--data", "{world}/shards", "--tokenizer",
                                       "{world}/tokenizer.json", "--label", "colour"],
}  # fmt: skip
BEFORE_TORCH = list(REFUSED)[:10]


@pytest.fixture(scope="module")
def faulty(world: Path) -> Path:
    (world / "tars").mkdir()
    (world / "tars" / "0.tar").write_bytes(b"")
    (world / "done").mkdir()
    (world / "done" / "result.json").write_text("{}")
    (world / "export").mkdir()
    (world / "export" / "export.json").write_text(json.dumps({"objective": "mae", "shapes": {}}))
    (world / "export" / "model.safetensors").write_bytes(b"")
    word_tokenizer(["a", *COLOURS], world / "few.json")
    (world / "unknown.json").write_text(json.dumps({name: ["albatross"] for name in COLOURS}))
    return world


def filled(world: Path, reason: str, out: Path) -> list[str]:
    known = {"vip": f"{world}/vip.pth", "dpcap": f"{world}/dpcap.pth", "world": str(world)}
    known |= {"train": f"{world}/train", "test": f"{world}/test"}
    arguments = [each.format(**known) for each in REFUSED[reason]]
    heads = [] if "--data" not in arguments else ["--heads", "4", "--decoder-heads", "4"]
    return [*arguments, *heads, *([] if "--out" in arguments else ["--out", str(out)])]


@pytest.mark.parametrize("reason", REFUSED)
def test_bad_input_is_refused_in_one_sentence(
    faulty: Path, tmp_path: Path, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(*filled(faulty, reason, tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert reason in said and [line.startswith("error: ") for line in said.splitlines()][-1:] == [True], said
    assert not (tmp_path / "out" / "result.json").exists()


def test_what_needs_no_model_is_refused_before_torch_is_imported(faulty: Path, tmp_path: Path) -> None:
    cases = [filled(faulty, reason, tmp_path / "out") for reason in BEFORE_TORCH]
    code = "import json, sys; from murmuration.launch.evaluate import main; " + (
        "print([main(each) for each in json.loads(sys.argv[1])], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == f"{[2] * len(cases)} False", done.stderr


def test_weights_of_other_private_runs_are_told_apart_from_their_own_records(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index copied without its log: the digest in the weights' metadata still names the records."""
    from safetensors.torch import save_file

    from murmuration.accounting.certificate.provenance import Provenance
    from murmuration.accounting.ledger.lines import Origin

    index = build_folder(class_folders(tmp_path / "records", 2, colours=("red", "blue")))
    origin = Origin("clinic", "0" * 64, 8.0, 1e-6, (index.manifest_digest,))
    weights = tmp_path / "vip.safetensors"
    save_file(read_weights(world / "vip.pth"), str(weights), Provenance((origin,), None).metadata())
    common = ["reconstruct", weights, "--heads", 4, "--decoder-heads", 4, "--public", "--out", tmp_path / "out"]
    assert evaluate(*common, "--data", tmp_path / "records") == 2
    assert "these weights were trained on" in capsys.readouterr().err
    assert evaluate(*common, "--data", world / "test") == 0


def test_pictures_whose_names_are_no_text_are_shown(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "test" / "red", tmp_path / "pictures")
    (tmp_path / "pictures" / "000.png").rename(tmp_path / "pictures" / os.fsdecode(b"\xff.png"))
    common = ["reconstruct", *published(world, "vip.pth"), "--data", tmp_path / "pictures"]
    assert evaluate(*common, "--gallery", 9, "--out", tmp_path / "out") == 0
    assert "\\udcff.png" in (tmp_path / "out" / "result.html").read_text()
    assert result(tmp_path / "out")["numbers"]


def test_a_result_that_lacks_a_part_is_told_in_one_sentence(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["reconstruct", *published(world, "vip.pth"), "--data", world / "test", "--gallery", 0]
    assert evaluate(*common, "--out", tmp_path / "out") == 0
    found = result(tmp_path / "out")
    one = {"value": 1.0, "low": 0.0, "high": 1.0, "n": 3}
    for part in (
        {"numbers": {"loss": {}}}, {"numbers": {"loss": {**one, "value": "1"}}}, {"numbers": {"loss": 3}},
        {"numbers": []}, {"numbers": {"loss": {**one, "low": 2.0}}}, 
        {"numbers": {"loss": {**one, "low": 10**400}}}, {"model": {"what": None}}, {"certificate": {"epsilon": "8"}},
        {"data": {"test": {"digest": []}}},
    ):  # fmt: skip
        (tmp_path / "out" / "result.json").write_text(json.dumps(found | part))
        capsys.readouterr()
        code, said = evaluate("compare", tmp_path / "out"), capsys.readouterr().err
        assert code == 2 and "is not what an evaluation writes" in said and said.count("\n") == 1, part
