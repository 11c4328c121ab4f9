"""Encoders of timm and Hugging Face by name: trained privately from a file of weights, exported, and evaluated where
the library's own files are no longer at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Dinov2Config, Dinov2ForImageClassification

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.certificate.weights import metadata_of
from murmuration.data.index.folders import build_folder
from murmuration.train.commands import export
from murmuration.train.storage.checkpoint import Checkpoints
from tests.support.evaluation_world import class_folders, class_list, evaluate, result
from tests.support.launching import Launch

DINO = {"embed_dim": 32, "depth": 2, "num_heads": 2}
CONVNEXT = {"dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "ls_init_value": 0.5}
SIDE = 32
HEAD = {"head.weight", "head.bias"}


def config(tmp_path: Path, model: dict[str, Any], weights: Path, **private: Any) -> dict[str, Any]:
    build_folder(class_folders(tmp_path / "private", 20))
    build_folder(class_folders(tmp_path / "public", 4, seed=100))
    phase = {
        "name": "private", "objective": "classify",
        "data": {"path": str(tmp_path / "private"), "label": "cls", "classes": str(class_list(tmp_path))},
        "privacy": {"epsilon": 8.0, "expected_batch": 10, "noise_multiplier": 2.0, "clip": {"norm": 1.0}},
        "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": 2,
        "evaluation": {"path": str(tmp_path / "public"), "public": True},
    }  # fmt: skip
    start = {"source": "checkpoint", "path": str(weights), "public": True}
    return {
        "train_micro_batch_size_per_gpu": 8, "model": {"classes": 5, **model},
        "phases": [{"name": "imported", "objective": "classify", "data": start}, phase | private],
        "run": {"engine": "local", "debug_seed": 7},
    }  # fmt: skip


def weights_of(name: str, path: Path, **args: Any) -> nn.Module:
    model = timm.create_model(name, pretrained=False, num_classes=7, **args)
    save_file(model.state_dict(), path)
    return model


def trained(job: Launch, run_dir: Path) -> dict[str, torch.Tensor]:
    code, output = job.run()
    assert code == 0, output
    assert verify(run_dir).committed == 2
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    assert loaded is not None
    return loaded.weights()


def in_form(monkeypatch: pytest.MonkeyPatch, run_dir: Path, out: Path, form: str) -> Path:
    monkeypatch.setattr("sys.argv", ["export.py", str(run_dir), str(out), "--form", form])
    assert export.main() == 0
    return out


def must_agree(scored: list[Path]) -> None:
    """A run, and its weights in any form, are seen and certified alike."""
    assert len({(place / "predictions.csv").read_text() for place in scored}) == 1
    found = [result(place) for place in scored]
    assert found[0]["certificate"] is not None and found[0]["settings"]["view"] == "center"
    for other in found[1:]:
        assert (other["certificate"], other["settings"]) == (found[0]["certificate"], found[0]["settings"])


def test_a_dinov2_of_timm_is_trained_exported_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's positions belong to larger pictures, and are interpolated as timm does."""
    weights_of("vit_small_patch14_dinov2", tmp_path / "dino.safetensors", img_size=56, **DINO)
    model = {"family": "timm", "name": "vit_small_patch14_dinov2.lvd142m", "model_args": DINO, "image_size": 28}
    job, run_dir = Launch.written(
        config(tmp_path, model, tmp_path / "dino.safetensors"), tmp_path, "tuned", launcher="python"
    )
    after = trained(job, run_dir)
    assert after["body.net.pos_embed"].shape == (1, 1 + 4, 32)

    out = tmp_path / "export"
    monkeypatch.setattr("sys.argv", ["export.py", str(run_dir), str(out)])
    assert export.main() == 0
    theirs = in_form(monkeypatch, run_dir, tmp_path / "theirs", "timm")
    for number, subject in enumerate((run_dir, out, theirs)):
        for what in ("classify", "probe"):
            scored = tmp_path / f"{what} of {number}"
            given = ["--test", tmp_path / "public"] if what == "probe" else []
            assert evaluate(what, subject, "--public", "--data", tmp_path / "public", *given, "--out", scored) == 0
    must_agree([tmp_path / f"classify of {number}" for number in range(3)])
    assert result(tmp_path / "classify of 1")["model"]["pixels"] == "imagenet", "as timm states for the name"


def test_a_convnext_of_timm_is_trained_whole(tmp_path: Path) -> None:
    args = {key: tuple(value) if isinstance(value, list) else value for key, value in CONVNEXT.items()}
    before = weights_of("convnext_tiny", tmp_path / "convnext.safetensors", **args).state_dict()
    model = {"family": "timm", "name": "convnext_tiny", "model_args": CONVNEXT, "image_size": SIDE}
    raw = config(tmp_path, model, tmp_path / "convnext.safetensors")
    job, run_dir = Launch.written(raw, tmp_path, "tuned", launcher="python")
    after = trained(job, run_dir)
    # The head of the file has other classes, so ours starts anew.
    assert after.keys() == {f"body.net.{name}" for name in before if not name.startswith("head.fc.")} | HEAD
    same = [name for name in after.keys() - HEAD if torch.equal(after[name], before[name.removeprefix("body.net.")])]
    assert same == []


def test_a_folder_of_hugging_face_is_needed_only_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Dinov2Config(image_size=56, patch_size=14, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    Dinov2ForImageClassification(made).save_pretrained(tmp_path / "dino")
    stated = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "crop_size": {"height": 28, "width": 28}}
    (tmp_path / "dino" / "preprocessor_config.json").write_text(json.dumps(stated | {"do_center_crop": True}))
    raw = config(tmp_path, {"family": "hf", "name": "dino"}, tmp_path / "dino")  # a path beside the config
    job, run_dir = Launch.written(raw, tmp_path, "tuned", launcher="python")
    trained(job, run_dir)
    out = tmp_path / "export"
    monkeypatch.setattr("sys.argv", ["export.py", str(run_dir), str(out)])
    assert export.main() == 0
    note = (out / "export.json").read_text()
    assert str(tmp_path) not in note and json.loads(note)["model"]["image_size"] == 28

    theirs = in_form(monkeypatch, run_dir, tmp_path / "theirs", "hf")
    shutil.rmtree(tmp_path / "dino")
    scored = [tmp_path / "scored" / subject.name for subject in (run_dir, out, theirs)]
    for subject, place in zip((run_dir, out, theirs), scored, strict=True):
        assert evaluate("classify", subject, "--public", "--data", tmp_path / "public", "--out", place) == 0
        assert result(place)["model"]["pixels"] == "half"
    must_agree(scored)
    # The certificate speaks of no other weights, whatever renamed.json says.
    state = load_file(theirs / "model.safetensors")
    told = metadata_of(theirs / "model.safetensors")
    for number, odd in enumerate(({"classifier.bias": state["classifier.bias"] + 1e-6}, {"more": torch.ones(1)})):
        save_file(state | odd, theirs / "model.safetensors", told)
        place = tmp_path / "scored" / f"odd {number}"
        assert evaluate("classify", theirs, "--public", "--data", tmp_path / "public", "--out", place) == 0
        assert result(place)["certificate"] is None


@pytest.mark.parametrize("trainable", ["head", "all"])
def test_batch_norm_keeps_the_statistics_of_its_weights(tmp_path: Path, trainable: str) -> None:
    sizes = {"channels": [8, 16, 24, 32], "layers": [1, 1, 1, 1]}
    theirs = timm.create_model("resnet18", num_classes=7, zero_init_last=False, **sizes)
    for name, stored in theirs.named_buffers():
        if "running" in name:
            stored.add_(0.1 * torch.rand(stored.shape))
    save_file(theirs.state_dict(), tmp_path / "resnet.safetensors")
    model = {"family": "timm", "name": "resnet18", "model_args": sizes, "image_size": SIDE}
    given = config(tmp_path, model, tmp_path / "resnet.safetensors", trainable=trainable)
    given["phases"][1] |= {"features": {}} if trainable == "head" else {}
    job, run_dir = Launch.written(given, tmp_path, "tuned", launcher="python")
    after, before = trained(job, run_dir), theirs.state_dict()
    body = {name: tensor for name, tensor in after.items() if name.startswith("body.net.")}
    moved = {name for name, tensor in body.items() if not torch.equal(tensor, before[name.removeprefix("body.net.")])}
    assert not [name for name in moved if "running" in name] and bool(moved) == (trainable == "all")
    assert export.main([str(run_dir), str(tmp_path / "timm"), "--form", "timm"]) == 0
    assert "model.safetensors holds certified weights" in verify(tmp_path / "timm").attached.checked
