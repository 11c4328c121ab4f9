"""`init` writes a config that the dry run accepts at once, from what is public or named, and overwrites nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Sizes, open_model
from murmuration.launch.init import main
from murmuration.model.build import build as build_model
from murmuration.model.classifier import Classifier
from murmuration.model.warm_start import initialise_from
from murmuration.train.commands.train import main as train
from murmuration.train.config.data import CheckpointData
from murmuration.train.config.load import load, parse_with_comments
from murmuration.train.config.root import Config, Phase
from murmuration.train.recipe.warm_start import WarmStart
from tests.support.foreign_models import HF_TOYS, TIMM_TOYS, hugging_face, library_folder, timm_vit
from tests.support.tars import indexed, png

RECORDS = 60
NAMES = ["zebra", "class-of-one", "ostrich"]


def packed(folder: Path, **members: Callable[[int], str]) -> Path:
    """Pictures with these members, as one indexed shard."""
    told = ({name: make(number).encode() for name, make in members.items()} for number in range(RECORDS))
    indexed(folder, ({"png": png(number), **each} for number, each in enumerate(told)))
    return folder


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    folder = packed(tmp_path / "labelled", cls=lambda number: NAMES[0 if number else 1])
    (folder / "classes.txt").write_text("\n".join(NAMES))
    return folder


@pytest.fixture
def captioned(tmp_path: Path) -> Path:
    return packed(tmp_path / "captioned", txt=lambda number: f"a private picture {number}")


def saved(folder: Path, kind: str) -> Path:
    """Small weights with what timm or Hugging Face put beside them."""
    model = timm_vit() if kind == "timm" else hugging_face()
    folder.mkdir()
    assert isinstance(model, nn.Module)
    save_file(model.state_dict(), folder / "model.safetensors")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}
    half = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 16, 16]}
    told = {"architecture": "vit_base_patch16_224", "num_classes": 5, "model_args": sizes, "pretrained_cfg": half}
    if kind == "hugging-face":
        told = model.config.to_dict()  # pyright: ignore
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    (folder / "config.json").write_text(json.dumps(told))
    return folder / "model.safetensors"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return saved(tmp_path / "timm", "timm")


def written(goal: str, data: Path, out: Path, *options: str) -> Config:
    assert main([goal, "--data", str(data), "--out", str(out), *options]) == 0
    return load(out, [])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_classifier(
    tmp_path: Path, labelled: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    held_out = packed(tmp_path / "held", cls=lambda number: NAMES[2])
    out = tmp_path / "my.json"
    config = written(
        "classify",
        labelled,
        out,
        "--held-out",
        str(held_out),
        "--epsilon",
        "3",
        "--start",
        str(weights),
        "--public",
        "--trainable",
        "all",
    )
    assert "your word" in capsys.readouterr().out
    assert train(["--config", str(out), "--dry-run"]) == 0
    assert " of 3 (PLD)" in capsys.readouterr().out
    phase = config.phases[1]
    assert phase.label == "cls" and config.model.classes == len(NAMES) and phase.privacy is not None
    # 1,000 of 50,000 and 5 epochs in ds_configs/continual/finetune_cifar10.json
    assert phase.privacy.expected_batch == round(RECORDS * 1000 / 50_000)
    assert phase.steps * phase.privacy.expected_batch == pytest.approx(5 * RECORDS, abs=1)
    assert phase.evaluation is not None and phase.evaluation.path == str(held_out)


def test_what_is_trained_follows_from_records_budget_and_model(
    tmp_path: Path, labelled: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*more: str) -> Phase:
        (tmp_path / "my.json").unlink(missing_ok=True)
        return written("classify", labelled, tmp_path / "my.json", "--start", str(weights), "--public", *more).phases[1]

    phase, said = made("--epsilon", "3"), capsys.readouterr().out
    assert (phase.trainable, phase.steps) == ("statistics", 1) and phase.features is not None
    size = sum(each.numel() for each in timm_vit(num_classes=len(NAMES)).parameters())
    assert f"it trains the head alone: the noise on all {size:,} weights" in said and f"{RECORDS} records" in said
    ratio = float(re.search(r"is (\S+) times the most", said)[1])  # pyright: ignore
    written("classify", labelled, tmp_path / "all.json", "--epsilon", "3", "--trainable", "all")
    sigma = float(re.search(r"sigma = (\S+)", capsys.readouterr().out)[1])  # pyright: ignore
    assert ratio == pytest.approx(sigma * size**0.5 / 300**0.5, rel=0.05), "300 steps of one record"
    assert made("--features", str(tmp_path / "kept")).features.folder == str(tmp_path / "kept")  # pyright: ignore
    capsys.readouterr()
    phase, said = made("--trainable", "lora"), capsys.readouterr().out
    assert (phase.trainable, phase.steps) == ("lora", 300) and "it trains" not in said
    monkeypatch.setattr("murmuration.train.planner.drowned.USEFUL", ratio + 1)
    assert made("--epsilon", "3").trainable == "all" and "it trains all weights" in capsys.readouterr().out
    asked = ("classify", "--data", str(labelled), "--out", str(tmp_path / "no.json"))
    assert "needs --start" in refused(capsys, *asked, "--trainable", "head")
    started = (*asked, "--start", str(weights), "--public")
    assert "add --trainable head" in refused(capsys, *started, "--trainable", "all", "--features", "x")
    assert "--epsilon" in refused(capsys, *started, "--epsilon", "-1")


def test_nothing_of_the_records_but_their_number_is_in_the_file(
    labelled: Path, captioned: Path, weights: Path, tmp_path: Path
) -> None:
    for goal, data in (("classify", labelled), ("caption", captioned)):
        written(goal, data, tmp_path / f"{goal}.json", "--start", str(weights), "--public")
        text = (tmp_path / f"{goal}.json").read_text()
        assert not any(word in text for word in (*NAMES, "private picture")) and f" {RECORDS} private" in text


def test_a_captioner_and_an_autoencoder_with_relative_paths(
    tmp_path: Path, captioned: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = ("--start", str(weights.relative_to(tmp_path)), "--public")
    (tmp_path / "configs").mkdir()
    config = written("caption", Path(captioned.name), Path("configs/caption.json"), "--tokenizer", "clip:515", *start)
    assert config.phases[1].tokenizer == "clip:515" and config.model.vocabulary == 515
    assert config.phases[0].data.path == str(tmp_path / "configs" / ".." / start[1])  # pyright: ignore
    assert config.phases[1].data.path == str(tmp_path / "configs" / ".." / captioned.name)  # pyright: ignore
    toy = ("--image-size", "16", "--size", "nano")
    assert written("mae", Path(captioned.name), Path("mae.json"), *toy).phases[0].objective == "mae"
    raw = parse_with_comments(Path("mae.json").read_bytes())
    assert raw["train_micro_batch_size_per_gpu"] == "auto" and raw["phases"][0]["data"]["path"] == captioned.name  # pyright: ignore


@pytest.mark.parametrize("kind", ["timm", "hugging-face"])
def test_weights_to_start_from_give_the_model_its_shape(tmp_path: Path, labelled: Path, kind: str) -> None:
    start = saved(tmp_path / "weights", kind)
    config = written("classify", labelled, tmp_path / "my.json", "--start", str(start), "--public")
    shape = config.model.resolved()
    assert (shape.encoder.width, shape.encoder.depth, shape.encoder.heads) == (24, 2, 4)
    assert (shape.image_size, shape.patch_size, shape.head.classes) == (16, 4, len(NAMES))
    assert config.phases[0].data.source == "checkpoint" and config.phases[1].privacy is not None


@pytest.mark.parametrize("kind", [*HF_TOYS, *TIMM_TOYS])
def test_an_encoder_of_a_library_is_named_and_computes_what_it_computes_there(
    tmp_path: Path, labelled: Path, kind: str
) -> None:  # fmt: skip
    folder = library_folder(tmp_path / "weights", kind)
    config = written("classify", labelled, tmp_path / "my.json", "--start", str(folder), "--public")
    start, shape = config.phases[0].data, config.model.resolved()
    assert isinstance(start, CheckpointData) and shape.named is not None and shape.head.classes == len(NAMES)
    stated = {
        "timm convnext": "imagenet", "timm dinov2": "imagenet", "timm swin": "imagenet", "timm siglip": "half",
        **dict.fromkeys(HF_TOYS, "half"),
    }  # fmt: skip
    pixels = config.model.pixels
    assert pixels == stated[kind] if kind in stated else pixels.mean == (0.48145466, 0.4578275, 0.40821073)  # pyright: ignore
    model = build_model(config.model, "classify")
    assert isinstance(model, Classifier)
    report = initialise_from(model, start.path)
    assert set(report.left_as_initialised) == {"head.weight", "head.bias"}
    theirs = open_model(Subject.at(folder), Sizes(), headless=True)
    pictures = torch.randn(2, 3, shape.image_size, shape.image_size)
    with torch.no_grad():
        found, expected = model.eval().features(pictures), theirs.model.features(pictures)  # pyright: ignore
        if kind.startswith(("clip", "siglip")):  # transformers' classifiers read the mean of the patches
            tokens: Any = theirs.model.net(pixel_values=pictures).last_hidden_state  # pyright: ignore
            expected = tokens[:, kind.startswith("clip") :].mean(dim=1)
    assert expected.std() > 1e-3
    # DINOv2's classifier in transformers reads the patches' mean behind the class token, its plain model has the token.
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5)
    assert found.shape[1] == expected.shape[1] * (1 + (kind == "dinov2"))


@pytest.mark.parametrize("kind", ["dinov2", "siglip vision", "timm swin"])
def test_a_dry_run_reads_names_and_shapes_of_the_weights_alone(
    tmp_path: Path, labelled: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ("--start", str(library_folder(tmp_path / "weights", kind)), "--public")
    written("classify", labelled, tmp_path / "my.json", *start)
    dry = ["--config", str(tmp_path / "my.json"), "--dry-run"]
    with monkeypatch.context() as patch:
        patch.setattr("murmuration.model.weight_files.load_file", None)
        assert train(dry) == 0
    other = library_folder(tmp_path / "other", "convnext" if kind in HF_TOYS else "timm convnext")
    capsys.readouterr()
    assert train([*dry, "--set", f"phases.0.data.path={other}"]) == 2
    assert "phases.0.data.path" in (said := capsys.readouterr().err) and "set model.name" in said


@pytest.mark.parametrize(("kind", "asked", "whole"), [("dinov2", 50, 42), ("own", 15, 12), ("own", 3, 4)])
def test_pictures_are_of_whole_patches(
    kind: str, asked: int, whole: int, tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    start = library_folder(tmp_path / "weights", kind) if kind == "dinov2" else saved(tmp_path / "weights", "timm")
    capsys.readouterr()
    given = ("--start", str(start), "--public", "--image-size", str(asked), "--trainable", "all")
    config = written("classify", labelled, tmp_path / "my.json", *given)
    assert config.model.image_size == whole
    assert f"its pictures have {whole} px: {asked} is no multiple of the patches" in capsys.readouterr().out
    other = ("classify", "--data", str(labelled), *given[:-4], "--out", str(tmp_path / "other.json"))
    assert "--image-size 0 is no side of a picture" in refused(capsys, *other, "--image-size", "0")


def test_an_encoder_of_a_library_is_no_autoencoder(
    tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    start = str(library_folder(tmp_path / "weights", "swin"))
    capsys.readouterr()
    said = refused(capsys, "mae", "--data", str(labelled), "--start", start, "--public", "--out", str(tmp_path / "m"))
    assert "is trained by classify or caption" in said
    captions = packed(tmp_path / "captions", txt=lambda number: f"picture {number}")
    config = written("caption", captions, tmp_path / "c.json", "--tokenizer", "clip:515", "--start", start, "--public")
    assert config.model.family == "hf" and config.model.image_size == 56


def test_a_folder_that_training_cannot_name_is_named_by_its_file(tmp_path: Path, labelled: Path) -> None:
    """As timm writes one by default, and older versions of transformers did."""
    start = saved(tmp_path / "weights", "timm")
    torch.save(load_file(start), start.parent / "pytorch_model.bin")
    start.unlink()
    config = written("classify", labelled, tmp_path / "my.json", "--start", str(start.parent), "--public")
    named = config.phases[0].data
    assert isinstance(named, CheckpointData)
    assert WarmStart.at(Path(named.path)).path == start.parent / "pytorch_model.bin"


@pytest.mark.parametrize("kind", ["dinov2", "timm convnext", "ours"])
def test_a_word_says_how_pixels_are_normalised_where_no_file_does(
    tmp_path: Path, labelled: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = saved(tmp_path / "ours", "timm").parent if kind == "ours" else library_folder(tmp_path / "weights", kind)
    stated = start / "preprocessor_config.json"
    stated.unlink(missing_ok=True)
    told = json.loads((start / "config.json").read_text())
    told.get("pretrained_cfg", {}).update(mean=None, std=None)
    (start / "config.json").write_text(json.dumps(told))
    out = tmp_path / "my.json"
    asked = ("classify", "--data", str(labelled), "--start", str(start), "--public", "--out", str(out))
    capsys.readouterr()
    assert "set --pixels to what their model card says" in refused(capsys, *asked)
    assert "--pixels grey: write imagenet, half, or" in refused(capsys, *asked, "--pixels", "grey")
    spelt = '{"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}'
    for word in ("half", spelt):
        out.unlink(missing_ok=True)
        assert main([*asked, "--pixels", word]) == 0
        pixels = load(out, []).model.pixels
        assert pixels == word or pixels.model_dump(mode="json") == json.loads(spelt)  # pyright: ignore
        assert train(["--config", str(out), "--dry-run"]) == 0
    out.unlink()
    stated.write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    if kind == "dinov2":
        assert "preprocessor_config.json says that" in refused(capsys, *asked, "--pixels", "imagenet")


def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, labelled: Path, captioned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "my.json"))
    assert "has a .txt or a list" in refused(capsys, "caption", "--data", str(labelled), *out)
    assert "has a .cls" in refused(capsys, "classify", "--data", str(captioned), "--classes", "3", *out)
    assert "--classes is missing" in refused(capsys, "classify", "--data", str(captioned), "--label", "x", *out)
    assert "prepare.py index" in refused(capsys, "mae", "--data", str(tmp_path / "nowhere"), *out)
    assert "--start" in refused(
        capsys, "mae", "--data", str(captioned), "--start", str(tmp_path / "none"), "--public", *out
    )
    unsaid = refused(capsys, "mae", "--data", str(captioned), "--held-out", str(captioned), *out)
    assert "add --public" in unsaid and "private" in unsaid
    assert "--held-out" in refused(
        capsys, "mae", "--data", str(captioned), "--held-out", str(tmp_path), "--public", *out
    )
    assert "epsilon" in refused(capsys, "mae", "--data", str(captioned), "--epsilon", "-1", *out)
    assert not (tmp_path / "my.json").exists()
    started = ("classify", "--data", str(labelled), "--public", *out, "--trainable", "lora", "--start")
    convnext = str(library_folder(tmp_path / "convnext", "timm convnext"))
    assert 'timm\'s "convnext_atto" has no linear layer' in refused(capsys, *started, convnext)
    (tmp_path / "my.json").write_text("mine")
    assert "nothing is overwritten" in refused(capsys, "mae", "--data", str(captioned), *out)
    assert (tmp_path / "my.json").read_text() == "mine"
