"""A run that starts from weights of timm reads pixels as they were trained, and what it exports says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from timm.models._hub import save_for_hf

from murmuration.data.index.folders import build_folder
from murmuration.train.commands import export
from murmuration.train.storage.checkpoint import Checkpoints
from tests.support.evaluation_world import class_folders, class_list, evaluate, result
from tests.support.foreign_models import ENCODER, timm_vit
from tests.support.launching import Launch

HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}


def config(tmp_path: Path) -> dict[str, Any]:
    build_folder(class_folders(tmp_path / "private", 20))
    build_folder(class_folders(tmp_path / "public", 4, seed=100))
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}
    save_for_hf(timm_vit(), tmp_path / "vit", model_args=sizes)
    classes = str(class_list(tmp_path))
    weights = {"source": "checkpoint", "path": str(tmp_path / "vit" / "pytorch_model.bin"), "public": True}
    private = {
        "name": "private", "objective": "classify",
        "data": {"path": str(tmp_path / "private"), "label": "cls", "classes": classes},
        "privacy": {"epsilon": 8.0, "expected_batch": 10, "noise_multiplier": 2.0, "clip": {"norm": 1.0}},
        "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": 2,
        "evaluation": {"path": str(tmp_path / "public"), "public": True, "resize": 256, "crop": 224},
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 8, "model": {"family": "classifier", "classes": 5, **ENCODER},
        "phases": [{"name": "imported", "objective": "classify", "data": weights}, private],
        "run": {"engine": "local", "debug_seed": 7},
    }  # fmt: skip


def test_statistics_go_from_weights_of_timm_through_a_run_to_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, run_dir = Launch.written(config(tmp_path), tmp_path, "tuned", launcher="python")
    code, output = job.run()
    assert code == 0, output
    assert "imported  pixels are normalised by half" in output
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    assert loaded is not None and loaded.manifest["pixels"] == HALF

    out = tmp_path / "export"
    monkeypatch.setattr("sys.argv", ["export.py", str(run_dir), str(out)])
    assert export.main() == 0
    assert json.loads((out / "export.json").read_text())["pixels"] == HALF
    common = ["--public", "--data", tmp_path / "public", "--config", job.config]
    rows: list[str] = []
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(out / "model.safetensors", alone)
    for number, subject in enumerate((run_dir, out, alone / "model.safetensors")):
        scored = tmp_path / f"of {number}"
        assert evaluate("classify", subject, *common, "--out", scored) == 0
        assert result(scored)["model"]["pixels"] == "half"
        rows.append((scored / "predictions.csv").read_text())
    assert rows[0] == rows[1] == rows[2]
    capsys.readouterr()
    assert evaluate("classify", out, *common, "--set", 'model.pixels="imagenet"', "--out", tmp_path / "no") == 2
    assert "model.pixels is imagenet, but" in capsys.readouterr().err

    # Without what the weights say, the config must say it; the run then continues as the same one.
    (tmp_path / "vit" / "config.json").unlink()
    code, output = job.run()
    assert code == 2 and "set model.pixels" in output
    raw = json.loads(job.config.read_text())
    raw["model"]["pixels"] = "half"
    job.config.write_text(json.dumps(raw))
    code, output = job.run()
    assert code == 0, output
