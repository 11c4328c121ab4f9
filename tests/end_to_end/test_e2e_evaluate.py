"""A finished run and what the product exports of it, evaluated by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.train.commands import export
from tests.support.evaluation_world import evaluate, result

COLOURS = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]


@pytest.fixture
def asked(finished: tuple[Path, str], small_data: Path, tmp_path: Path) -> list[Any]:
    """Zero-shot colours of the public held-out shards."""
    classes = tmp_path / "classes.txt"
    classes.write_text("\n".join(COLOURS))
    return ["--public", "--data", small_data / "held_out", "--label", "colour",
            "--classes", classes, "--template", "a photo of a {}"]  # fmt: skip


def test_a_run_and_its_exports_score_alike(
    finished: tuple[Path, str], asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = finished[0]
    subjects = [run_dir]
    for form in ("safetensors", "pytorch"):
        monkeypatch.setattr("sys.argv", ["export.py", str(run_dir), str(tmp_path / form), "--form", form])
        assert export.main() == 0
        subjects.append(tmp_path / form)
    found = []
    for number, subject in enumerate(subjects):
        out = tmp_path / f"out{number}"
        assert evaluate("zero-shot", subject, *asked, "--out", out) == 0
        found.append(result(out))
    assert found[0]["numbers"] == found[1]["numbers"] == found[2]["numbers"]
    assert found[0]["numbers"]["accuracy"]["n"] == 64
    assert [each["model"]["form"] for each in found] == ["run", "export", "export"]
    for each in found:
        # The run has a debug seed, so its certificate promises nothing.
        assert each["certificate"]["private"] is False and each["certificate"]["epsilon"] is None
        assert each["certificate"]["objection"].startswith("NOT PRIVATE")


def test_a_config_of_another_model_and_the_runs_private_records_are_refused(
    finished: tuple[Path, str], asked: list[Any], small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = finished[0]
    config = ["--config", run_dir.parents[1] / "whole.json", "--set"]
    for override, said in (("model.depth=2", "model.depth"), ("model.heads=4", "was trained with 2")):
        assert evaluate("zero-shot", run_dir, *asked, *config, override, "--out", tmp_path / "out") == 2
        assert said in capsys.readouterr().err
    swapped = [small_data / "private" if each == small_data / "held_out" else each for each in asked]
    assert evaluate("zero-shot", run_dir, *swapped, "--out", tmp_path / "out") == 2
    assert "protects these records" in capsys.readouterr().err


def test_what_lies_beside_the_weights_serves_for_the_config_and_others_ask_for_it(
    finished: tuple[Path, str], asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """An export, moved to where the run is unknown; then without its model, as that of a program of one's own."""
    run_dir, config = finished[0], finished[0].parents[1] / "whole.json"
    monkeypatch.setattr("sys.argv", ["export.py", str(run_dir), str(tmp_path / "moved")])
    assert export.main() == 0
    (tokenizer,) = (tmp_path / "moved").glob("tokenizer-*.json")
    named = json.loads(config.read_text())["phases"][1]["data"]["tokenizer"]
    assert tokenizer.read_bytes() == Path(named).read_bytes()
    assert str(Path(named).parent) not in (tmp_path / "moved" / "export.json").read_text(), "a path of the training"
    assert evaluate("zero-shot", run_dir, *asked, "--config", config, "--out", tmp_path / "given") == 0
    assert evaluate("zero-shot", tmp_path / "moved", *asked, "--out", tmp_path / "beside") == 0
    given, beside = result(tmp_path / "given"), result(tmp_path / "beside")
    assert given["numbers"] == beside["numbers"]
    assert given["model"]["heads"] == beside["model"]["heads"] == 2
    assert given["settings"]["tokenizer"] == beside["settings"]["tokenizer"]
    tokenizer.write_text("{}")
    assert evaluate("zero-shot", tmp_path / "moved", *asked, "--out", tmp_path / "other") == 2
    assert "is not the one of the training" in capsys.readouterr().err
    note = json.loads((tmp_path / "moved" / "export.json").read_text())
    (tmp_path / "moved" / "export.json").write_text(json.dumps({k: v for k, v in note.items() if k != "model"}))
    assert evaluate("zero-shot", tmp_path / "moved", *asked, "--out", tmp_path / "other") == 2
    assert "does not describe its model" in capsys.readouterr().err
    assert evaluate("zero-shot", tmp_path / "moved", *asked, "--config", config, "--out", tmp_path / "other") == 0
    assert result(tmp_path / "other")["numbers"] == given["numbers"]


def test_a_certificate_counts_only_for_the_tensors_that_it_names(
    finished: tuple[Path, str], asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file in the folder of an export, one tensor of which was moved a little."""
    monkeypatch.setattr("sys.argv", ["export.py", str(finished[0]), str(tmp_path / "out"), "--form", "pytorch"])
    assert export.main() == 0
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    state["norm.weight"] = state["norm.weight"] + 1e-6
    torch.save(state, tmp_path / "out" / "other.pt")
    for name, certified in (("model.pt", True), ("other.pt", False)):
        assert evaluate("zero-shot", tmp_path / "out" / name, *asked, "--out", tmp_path / f"of {name}") == 0
        assert (result(tmp_path / f"of {name}")["certificate"] is not None) == certified, name
