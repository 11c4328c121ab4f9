"""The command's few-shot classifiers: scikit-learn's on the same rows, and lists of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.evaluation.measures.logistic import normalised
from murmuration.evaluation.protocols.draws import draw_shots
from tests.support.evaluation_world import COLOURS, class_folders, evaluate, result, saved
from tests.support.published import vip_mae


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    for name, each, seed in (("train", 12, 0), ("test", 5, 500)):
        class_folders(folder / name, each, seed)
        for path in (folder / name).rglob("*.png"):  # one name for one file, as ImageNet's are
            path.rename(path.with_name(f"{path.parent.name}_{path.name}"))
    saved(folder / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    return folder


def few_shot(world: Path, out: Path, *more: Any) -> int:
    model = [world / "vip.pth", "--heads", 4, "--decoder-heads", 4]
    data = ["--public", "--data", world / "train", "--test", world / "test"]
    return evaluate("few-shot", *model, *data, "--out", out, *more)


def stored(out: Path, records: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalised features and labels of the set with so many records."""
    import torch

    (labels,) = (path for path in (out / "features").rglob("labels.i64") if path.stat().st_size == 8 * records)
    rows = torch.from_numpy(np.fromfile(labels.with_name("features.f32"), "<f4").reshape(records, -1))
    return normalised(rows).numpy(), np.fromfile(labels, "<i8")


def test_each_draw_is_scikit_learns_on_its_rows(world: Path, tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    out = tmp_path / "out"
    assert few_shot(world, out, "--shots", 1, 4, "--percent", 25, "--draws", 3) == 0
    found = result(out)["numbers"]
    (x, y), (tests, truth) = stored(out, 60), stored(out, 25)
    for shots in (1, 4):
        theirs = []
        for seed in range(3):
            rows = draw_shots(y, shots, seed, tuple(COLOURS))
            fit = LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-9, max_iter=20_000).fit(x[rows], y[rows])
            theirs.append(float((fit.predict(tests) == truth).mean()))
        ours = found[f"top-1, {shots} per class"]
        assert np.abs(np.array(ours["draws"]) - theirs).max() <= 1 / 25 + 1e-9
        assert ours["value"] == pytest.approx(np.mean(ours["draws"])) and ours["n"] == 3
        assert ours["std"] == pytest.approx(np.std(ours["draws"], ddof=1))
    assert found["top-1, 25 %"]["n"] == 3
    page = (out / "result.html").read_text()
    assert "By draw" in page and page.count("<td>seed 2</td>") == 3
    assert found["top-1, 4 per class"]["value"] > 0.4, "five colours are hardly told apart, so this says little"


def test_lists_are_draws_of_one_measure_and_only_their_records_are_encoded(world: Path, tmp_path: Path) -> None:
    lists = []
    for number in range(2):
        lists.append(tmp_path / f"{number}imgs.txt")
        lists[-1].write_text("".join(f"{colour}_{number:03}.JPEG\n" for colour in COLOURS))
    assert few_shot(world, tmp_path / "out", "--list", *lists) == 0
    found = result(tmp_path / "out")
    assert list(found["numbers"]) == ["top-1, lists", "top-5, lists"] and found["numbers"]["top-1, lists"]["n"] == 2
    assert found["data"]["train"]["records"] == 10
    assert len(stored(tmp_path / "out", 10)[0]) == 10
    assert few_shot(world, tmp_path / "both", "--list", *lists, "--shots", 1) == 0
    both = result(tmp_path / "both")["numbers"]
    assert both["top-1, lists"] == found["numbers"]["top-1, lists"], "whether or not other rows are there"


def test_vips_way_learns_from_few_records_too(world: Path, tmp_path: Path) -> None:
    quick = ("--way", "vip", "--epochs", 3, "--warmup", 1, "--draws", 2, "--views", 2)
    assert few_shot(world, tmp_path / "out", "--shots", 3, *quick) == 0
    assert result(tmp_path / "out")["numbers"]["top-1, 3 per class"]["n"] == 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((), "pass --shots, --percent or --list"),
        (("--shots", 13), "has 12 readable training records, fewer than 13 shots"),
        (("--list", "{world}/none.txt"), "none.txt does not exist"),
        (("--list", "{world}/train/red/red_000.png"), "--list"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    world: Path, tmp_path: Path, more: tuple[Any, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert few_shot(world, tmp_path / "out", *(str(each).format(world=world) for each in more)) == 2
    assert reason in capsys.readouterr().err
