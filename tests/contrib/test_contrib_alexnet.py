"""torchvision's AlexNet gives what the library gives, through the command's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from murmuration.contrib.alexnet import read_alexnet
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Evaluated, Sizes, features_of, open_model
from tests.evaluation.test_eval_library import pictures, same
from tests.support.evaluation_world import class_folders, evaluate, result, saved


def opened(path: Path) -> Evaluated:
    return open_model(Subject.at(path), Sizes(image_size=64), "half", readers=(read_alexnet,))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "train", 6)
    class_folders(folder / "test", 3, seed=500)
    return folder


@pytest.fixture(scope="module")
def alexnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    theirs = torchvision.models.alexnet(weights=None, num_classes=5).eval()
    path = tmp_path_factory.mktemp("alexnet") / "alexnet.pth"
    torch.save(theirs.state_dict(), path)
    return path, theirs


def test_torchvisions_alexnet_is_classified_and_probed(
    world: Path, tmp_path: Path, alexnet: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, theirs = alexnet
    found, images = opened(path), pictures(64)
    with torch.no_grad():
        same(found.model.logits(images), theirs(images))
        tokens = theirs.avgpool(theirs.features(images)).flatten(1)
        fc6 = torch.relu(theirs.classifier[1](tokens))
        same(features_of(found, images, "dpcap"), torch.relu(theirs.classifier[4](fc6)))
    common = [path, "--public", "--image-size", 64, "--micro-batch", 8]
    assert evaluate("classify", *common, "--data", world / "test", "--out", tmp_path / "no") == 2
    assert "set --pixels to what their model card says" in capsys.readouterr().err
    common += ["--pixels", "imagenet"]
    assert evaluate("classify", *common, "--data", world / "test", "--out", tmp_path / "classify") == 0
    assert (
        evaluate(
            "few-shot",
            *common,
            "--data",
            world / "train",
            "--test",
            world / "test",
            "--shots",
            2,
            "--out",
            tmp_path / "few",
        )
        == 0
    )
    learning = ["--data", world / "train", "--test", world / "test"]
    assert evaluate("probe", *common, *learning, "--out", tmp_path / "probe") == 0
    told = result(tmp_path / "probe")
    assert told["model"]["architecture"] == 'torchvision\'s "alexnet"' and told["model"]["width"] == 4096
    assert told["numbers"]["top-1"]["n"] == 15


@pytest.mark.parametrize("wrapped", ["module.", "features.module."])
def test_an_alexnet_that_several_gpus_trained_is_the_same(
    tmp_path: Path, alexnet: tuple[Path, Any], wrapped: str
) -> None:
    path, theirs = alexnet
    named = {
        wrapped + name if wrapped == "module." else name.replace("features.", wrapped): tensor
        for name, tensor in torch.load(path, weights_only=True).items()
    }
    found, images = opened(saved(tmp_path / "parallel.pth", named)), pictures(64)
    with torch.no_grad():
        same(found.model.logits(images), theirs(images))


def test_files_with_alexnets_names_and_other_shapes_are_refused(tmp_path: Path) -> None:
    vgg = torchvision.models.vgg11(weights=None, num_classes=2, init_weights=False)
    state = {name: tensor[:1] for name, tensor in vgg.state_dict().items()}
    with pytest.raises(EvaluationError, match="no published file that can be read here"):
        opened(saved(tmp_path / "vgg.pth", state))
