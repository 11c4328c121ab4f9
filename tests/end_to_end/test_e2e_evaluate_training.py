"""Trainings on public records by two processes: what one makes of them, but for rounding, also after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from murmuration.evaluation.protocols.shared_training import TrainingState
from tests.contrib.test_contrib_detect import coco
from tests.contrib.test_contrib_segment import ade
from tests.end_to_end.test_e2e_evaluate_ranks import as_many_threads, by_several, by_two  # noqa: F401
from tests.support.evaluation_world import class_folders, evaluate, result, saved
from tests.support.launching import ROOT
from tests.support.published import vip_mae

FEW = ["--epochs", 3, "--warmup", 1, "--seed", 3]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "train", 12)
    class_folders(folder / "test", 5, seed=500)
    (folder / "train" / "blue" / "003.png").write_bytes(b"no picture")
    (folder / "test" / "blue" / "001.png").write_bytes(b"no picture")
    coco(folder / "coco", "train2017", 9, 1)
    coco(folder / "coco", "val2017", 4, 2)
    ade(folder / "ade", "training", 9, 1)
    ade(folder / "ade", "validation", 3, 2)
    for grid in (2, 4, 8):
        saved(folder / f"vip{grid}.pth", vip_mae(48, 2, grid=grid, patch=8, decoder_width=32, decoder_depth=1))
    return folder


def asked(world: Path, protocol: str, *more: Any) -> list[Any]:
    grid, data, test = {
        "fine-tune": (2, "train", "test"), "detect": (8, "coco/train2017", "coco/val2017"),
        "segment": (4, "ade/images/training", "ade/images/validation"),
    }[protocol]  # fmt: skip
    return [protocol, world / f"vip{grid}.pth", "--heads", 4, "--decoder-heads", 4, "--public", "--data", world / data,
            "--test", world / test, *FEW, *more]  # fmt: skip


def apart(begun: dict[str, Any], one: dict[str, Any], two: dict[str, Any], names: list[str]) -> float:
    """In units of how far the weights moved."""
    moved = torch.cat([(one[name] - begun[name]).flatten() for name in names])
    return float(torch.cat([(two[name] - one[name]).flatten() for name in names]).norm() / moved.norm())


def test_two_processes_fine_tune_what_one_does_and_continue_what_one_began(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = asked(world, "fine-tune", "--batch", 22, "--micro-batch", 8, "--base-rate", 0.03)
    assert evaluate(*arguments, "--out", tmp_path / "one") == 0
    save = TrainingState.save

    def stopping(*given: Any) -> None:
        save(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingState, "save", stopping)
    assert evaluate(*arguments, "--out", tmp_path / "two") == 75
    assert torch.load(tmp_path / "two" / "fine_tune.pt", weights_only=True)["epoch"] == 1
    code, output = by_two("forked", [*arguments, "--out", tmp_path / "two"])
    assert code == 0 and output.count("top-1: ") == 1, output
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert result(tmp_path / "one")["numbers"].keys() == result(tmp_path / "two")["numbers"].keys()
    assert result(tmp_path / "two")["data"]["test"]["unreadable"] == 1
    begun = torch.load(world / "vip2.pth", weights_only=True)["model"]
    names = [name for name in one if name in begun and one[name].shape == begun[name].shape]
    assert len(names) > 20
    assert apart(begun, one, two, names) < 0.02


@pytest.mark.slow
def test_draws_of_two_processes_are_those_of_one(world: Path, tmp_path: Path) -> None:
    arguments = asked(world, "fine-tune", "--batch", 10, "--shots", 2, "--draws", 2)
    code, output = by_two("forked", [*arguments, "--out", tmp_path / "two"])
    assert code == 0, output
    assert evaluate(*arguments, "--out", tmp_path / "one") == 0
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    assert one["settings"] == two["settings"] and one["data"] == two["data"]


KEEPING = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from murmuration.launch.evaluate import main
from murmuration.contrib.dense import training as dense
answers, train = dense.answers, dense.train
def training(session, model, *more):
    if session.sharing.main:
        torch.save(model.state_dict(), session.out / "begun.pt")
    train(session, model, *more)
def scoring(session, result, model, *more):
    if session.sharing.main:
        torch.save(model.state_dict(), session.out / "trained.pt")
    return answers(session, result, model, *more)
dense.answers, dense.train = scoring, training
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["detect", "segment"])
def test_two_processes_train_what_one_does(world: Path, tmp_path: Path, protocol: str) -> None:
    """Statistics of BatchNorm apart, which are those of each process's own micro-batches, averaged."""
    if protocol == "detect":
        pytest.importorskip("pycocotools")
    (script := tmp_path / "keeping.py").write_text(KEEPING)
    # Five pictures in micro-batches of two: one process has more than the other, and the last picture is left out.
    arguments = asked(world, protocol, "--batch", 7, "--micro-batch", 2, "--channels", 16)
    for name, ranks in (("one", 1), ("two", 2)):
        code, output = by_several(ranks, "forked", [*arguments, "--out", tmp_path / name], script)
        assert code == 0, output
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    assert one["settings"] == two["settings"] and one["numbers"].keys() == two["numbers"].keys()
    begun, *ended = (
        torch.load(tmp_path / name / file, weights_only=True)
        for name, file in (("one", "begun.pt"), ("one", "trained.pt"), ("two", "trained.pt"))
    )
    names = [name for name, tensor in begun.items() if tensor.is_floating_point() and "running" not in name]
    assert apart(begun, *ended, names) < 0.02
