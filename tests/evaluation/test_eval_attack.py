"""The command that attacks: it finds what a model learnt by heart, and is for the owner of stand-ins alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models._hub import save_for_hf

from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.index.folders import build_folder
from murmuration.model.weight_files import read_weights
from murmuration.train.recipe.pixels import IMAGENET
from murmuration.train.storage.sibling_runs import RunLog
from tests.evaluation.test_eval_evaluate import HALVES, prepared
from tests.support.evaluation_world import class_folders, evaluate, result, saved, table
from tests.support.foreign_models import timm_vit
from tests.support.published import vip_mae

EACH = 12
CLASSES = ("a", "b", "c", "d", "e")
FORM = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}


def noise(root: Path, seed: int) -> Path:
    """Pictures without anything to learn but by heart."""
    draw = np.random.default_rng(seed)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for place in range(EACH):
            pixels = draw.integers(0, 256, (18, 18, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{place:02}.png")
    return root


def images_of(root: Path) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    pictures = sorted(root.rglob("*.png"))
    names = [str(path.relative_to(root)) for path in pictures]
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in pictures])
    return names, torch.stack([prepared(path, 16, *HALVES) for path in pictures]), labels


def trained(folder: Path, images: torch.Tensor, labels: torch.Tensor, seed: int) -> Path:
    torch.manual_seed(seed)
    model = timm_vit()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    save_for_hf(model, folder, model_args=FORM)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learnt `members` by heart, and shadows that learnt a random half of `members` and `others` each."""
    folder = tmp_path_factory.mktemp("world")
    names, images, labels = images_of(noise(folder / "members", 1))
    trained(folder / "target", images, labels, 0)
    other_names, other_images, _ = images_of(noise(folder / "others", 2))
    everything = torch.cat([images, other_images]), torch.cat([labels, labels])
    named = [*(f"members/{name}" for name in names), *(f"others/{name}" for name in other_names)]
    for shadow in range(4):
        # Two complementary pairs, so that each record is in two of the four.
        half = np.random.default_rng(shadow // 2).permutation(len(named)) < len(named) // 2
        inside = half if shadow % 2 else ~half
        chosen = torch.from_numpy(np.flatnonzero(inside))
        trained(folder / f"shadow{shadow}", everything[0][chosen], everything[1][chosen], 10 + shadow)
        (folder / f"shadow{shadow}.txt").write_text("\n".join(named[number] for number in chosen.tolist()))
    return folder


def for_imagenets_pixels(shadow: Path, copy: Path) -> Path:
    """The same function of a picture, whose pixels are normalised by other statistics."""
    theirs = timm_vit()
    theirs.load_state_dict(read_weights(shadow))
    by_halves = Normalisation(*HALVES)
    mean, std = (
        torch.tensor(np.subtract(IMAGENET.mean, by_halves.mean) / by_halves.std, dtype=torch.float32),
        torch.tensor(np.divide(IMAGENET.std, by_halves.std), dtype=torch.float32),
    )
    first: Any = theirs.patch_embed.proj
    with torch.no_grad():
        first.bias += (first.weight * mean.view(1, 3, 1, 1)).sum((1, 2, 3))
        first.weight *= std.view(1, 3, 1, 1)
    save_for_hf(theirs, copy, model_args=FORM)
    told = json.loads((copy / "config.json").read_text())
    told["pretrained_cfg"] |= {"mean": IMAGENET.mean, "std": IMAGENET.std}
    (copy / "config.json").write_text(json.dumps(told))
    return copy


def attack(world: Path, out: Path, *more: Any, members: str = "members") -> int:
    data = ["--public", "--data", world / members, "--others", world / "others", "--label", "cls"]
    return evaluate("attack", world / "target", *data, "--out", out, *more)


def test_what_was_learnt_by_heart_is_found_and_the_result_is_the_owners(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shadows = [each for n in range(4) for each in ("--shadow", world / f"shadow{n}", world / f"shadow{n}.txt")]
    assert attack(world, out, *shadows) == 0
    found = result(out)
    for way in ("loss", "loss and logits", "LiRA"):
        assert found["numbers"][f"AUC, {way}"]["low"] > 0.7, way
    assert found["numbers"]["accuracy, loss"]["n"] == 2 * EACH * len(CLASSES)
    assert found["private"] is True and "PRIVATE" in (out / "result.html").read_text()
    said = capsys.readouterr().out
    assert "PRIVATE" in said and "AUC" not in said
    assert out.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in out.iterdir() if path.is_file()} == {
        "result.json": 0o600, "result.html": 0o600, "attack.csv": 0o600,
    }  # fmt: skip
    rows = table(out / "attack.csv")
    assert [row["member"] for row in rows] == ["1"] * 60 + ["0"] * 60
    assert evaluate("compare", out) == 2
    assert "is private" in capsys.readouterr().err


def test_a_shadow_sees_pixels_as_it_was_trained_itself(world: Path, tmp_path: Path) -> None:
    copies = [for_imagenets_pixels(world / f"shadow{n}", tmp_path / f"copy{n}") for n in range(4)]
    scores = []
    for out, folders in (("own", [world / f"shadow{n}" for n in range(4)]), ("copies", copies)):
        shadows = [each for n in range(4) for each in ("--shadow", folders[n], world / f"shadow{n}.txt")]
        assert attack(world, tmp_path / out, *shadows) == 0
        scores.append([float(row["score, LiRA"]) for row in table(tmp_path / out / "attack.csv")])
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-3)


def test_losses_are_those_of_the_model_elsewhere(world: Path, tmp_path: Path) -> None:
    assert attack(world, tmp_path / "out") == 0
    theirs = timm_vit()
    theirs.load_state_dict(read_weights(world / "target"))
    _, images, labels = images_of(world / "members")
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(theirs(images), labels, reduction="none")
    ours = [float(row["loss"]) for row in table(tmp_path / "out" / "attack.csv")[:60]]
    np.testing.assert_allclose(ours, losses.numpy(), atol=0.02)


def test_private_records_need_the_word_that_they_are_stand_ins_and_it_is_logged_with_them(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = build_folder(noise(tmp_path / "played", 1))
    log = RunLog.of(index)
    log.register("id", "private", "clinic", 8.0, 1e-6, folder="elsewhere")
    common = [world / "target", "--public", "--others", world / "others", "--label", "cls"]
    assert evaluate("attack", *common, "--data", tmp_path / "played", "--out", tmp_path / "out") == 2
    assert "'clinic' protects these records" in capsys.readouterr().err
    swapped = ["attack", world / "target", "--public", "--label", "cls", "--data", world / "members",
               "--others", tmp_path / "played", "--stand-in", "--out", tmp_path / "out"]  # fmt: skip
    assert evaluate(*swapped) == 2, "the word is for --data alone"
    assert "'clinic' protects these records" in capsys.readouterr().err
    for _ in range(2):
        assert evaluate("attack", *common, "--data", tmp_path / "played", "--stand-in", "--out", tmp_path / "out") == 0
        (tmp_path / "out" / "result.json").unlink()
    entries = [each for each in log.siblings(["id"]) if each["phase"] == "attack"]
    assert [(each["private"], each["run"]) for each in entries] == [(False, "an attack on target")]


def test_records_with_a_budget_are_not_attacked(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog.of(build_folder(noise(tmp_path / "played", 1)))
    log.set_budget(3.0)
    data = ["--public", "--data", tmp_path / "played", "--others", world / "others", "--label", "cls"]
    assert evaluate("attack", world / "target", *data, "--stand-in", "--out", tmp_path / "out") == 3
    assert "budget of ε = 3" in capsys.readouterr().err and not log.siblings()


def test_a_model_without_logits_is_attacked_by_its_losses(tmp_path: Path) -> None:
    for name, seed in (("members", 0), ("others", 77)):
        class_folders(tmp_path / name, 3, seed)
    saved(tmp_path / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    common = ["attack", tmp_path / "vip.pth", "--heads", 4, "--decoder-heads", 4, "--public"]
    data = ["--data", tmp_path / "members", "--others", tmp_path / "others", "--records", 10]
    assert evaluate(*common, *data, "--out", tmp_path / "out") == 0
    assert result(tmp_path / "out")["numbers"]["accuracy, loss"]["n"] == 20


def test_too_few_shadows_are_refused_and_so_are_lists_of_other_names(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attack(world, tmp_path / "one", "--shadow", world / "shadow0", world / "shadow0.txt") == 2
    assert "shadow models that were not trained on it" in capsys.readouterr().err
    (tmp_path / "list.txt").write_text("members/a/99.png")
    assert attack(world, tmp_path / "two", "--shadow", world / "shadow0", tmp_path / "list.txt") == 2
    assert "'members/a/99.png', which is none" in capsys.readouterr().err
    assert json.dumps(sorted(path.name for path in (tmp_path / "two").glob("result*"))) == "[]"
