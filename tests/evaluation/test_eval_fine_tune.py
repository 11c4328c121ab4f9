"""The command that fine-tunes: it learns, continues after a kill, and leaves a classifier that can be evaluated."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.models._hub import save_for_hf

from murmuration.data.batch.reader import DataSpec
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.folders import build_folder
from murmuration.data.index.keyed_digest import every_ledger_digest
from murmuration.evaluation.measures.fine_tuning import FineTuneSettings
from murmuration.evaluation.protocols.augmented import AugmentedPictures, mixed_batches
from murmuration.evaluation.protocols.draws import draw_percent, draw_shots
from murmuration.evaluation.protocols.fine_tune import FineTuning, MixedPictures
from murmuration.evaluation.session.session import Chosen
from murmuration.evaluation.session.sharing import Sharing
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.recipe.pixels import NAMED, of_weights
from murmuration.train.recipe.warm_start import WarmStart
from tests.support import forking
from tests.support.evaluation_world import COLOURS, class_folders, evaluate, result, saved
from tests.support.foreign_models import timm_vit
from tests.support.launching import ROOT, environment
from tests.support.published import vip_mae

QUICK = ["--epochs", 20, "--warmup", 2, "--batch", 20, "--base-rate", 0.03, "--layer-decay", 0.9, "--micro-batch", 8,
         "--mixup", 0.1, "--cutmix", 0, "--rand-augment", "", "--erase", 0]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "train", 12)
    class_folders(folder / "test", 5, seed=500)
    saved(folder / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    return folder


def asked(world: Path, *more: Any) -> list[Any]:
    return ["fine-tune", world / "vip.pth", "--heads", 4, "--decoder-heads", 4, "--public", "--data", world / "train",
            "--test", world / "test", *more]  # fmt: skip


def test_all_weights_learn_and_the_classifier_can_be_evaluated(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(*asked(world, *QUICK), "--out", out) == 0
    found = result(out)["numbers"]
    assert found["top-1"]["low"] > 0.4 and found["top-1"]["n"] == 25, "chance is 0.2"
    assert not (out / "fine_tune.pt").exists()
    assert evaluate("classify", out, "--public", "--data", world / "test", "--out", tmp_path / "again") == 0
    assert result(tmp_path / "again")["numbers"].items() >= found.items()
    seen = WarmStart.at(out).without_noise
    assert every_ledger_digest(build_folder(world / "train", tmp_path / "index")) & seen, "which no run may protect"
    start = torch.load(world / "vip.pth", weights_only=True)["model"]
    moved = load_file(out / "model.safetensors")
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.bias", "norm.weight"):
        assert not torch.allclose(moved[name].flatten(), start[name].flatten(), atol=1e-5), name


def test_the_classifier_keeps_the_pixels_of_the_weights_it_started_from(world: Path, tmp_path: Path) -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}
    save_for_hf(timm_vit(), tmp_path / "vit", model_args=sizes)
    common = ["--public", "--data", world / "train", "--test", world / "test", "--epochs", 1, "--warmup", 0]
    assert evaluate("fine-tune", tmp_path / "vit", *common, "--out", tmp_path / "out") == 0
    out, again = tmp_path / "out", tmp_path / "again"
    assert evaluate("classify", out, "--public", "--data", world / "test", "--out", again) == 0
    started, kept = (result(tmp_path / name) for name in ("out", "again"))
    assert started["model"]["pixels"] == kept["model"]["pixels"] == "half"
    assert kept["numbers"].items() >= started["numbers"].items()
    (tmp_path / "out" / "export.json").unlink()
    assert of_weights(tmp_path / "out").pixels == NAMED["half"], "the file alone says so, too"


KILL = """
import os, signal, sys
import torch
torch.set_num_threads(int(sys.argv.pop(1)))
from murmuration.launch.evaluate import main
from murmuration.train.distributed.ranks import Ranks
from murmuration.evaluation.protocols.fine_tune import MixedPictures
backward, done = MixedPictures.backward, []
def counted(*given):
    if len(done) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(backward(*given))
    return done[-1]
MixedPictures.backward = counted
main(sys.argv[1:])
"""


def test_killed_between_two_steps_and_run_again_gives_the_same_weights_but_for_rounding(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = asked(world, "--epochs", 4, "--batch", 20, "--warmup", 1)
    command = [*map(str, arguments), "--out", str(tmp_path / "killed"), "--workers", "0"]
    threads = str(torch.get_num_threads())  # sums are rounded by how many threads share them
    done = forking.run(
        [sys.executable, "-c", KILL, threads, *command], cwd=ROOT, env=environment(), capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert torch.load(tmp_path / "killed" / "fine_tune.pt", weights_only=True)["epoch"] == 1
    assert evaluate(*asked(world, "--epochs", 5, "--batch", 20), "--out", tmp_path / "killed") == 2
    assert "begun by a command with other settings" in capsys.readouterr().err
    assert evaluate(*arguments, "--out", tmp_path / "killed") == 0
    assert evaluate(*arguments, "--out", tmp_path / "whole") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)
    assert result(tmp_path / "killed")["settings"] == result(tmp_path / "whole")["settings"]


def pictures(world: Path, tmp_path: Path, **more: Any) -> tuple[AugmentedPictures, FineTuneSettings]:
    index = build_folder(world / "train", tmp_path / "index")
    settings = FineTuneSettings(batch=16, **more)
    spec = DataSpec(16, labels=("cls",), target="cls", classes=5, class_list=ClassList(tuple(COLOURS)))
    return AugmentedPictures(index, spec, settings), settings


def test_pictures_do_not_depend_on_the_processes_that_read_them(world: Path, tmp_path: Path) -> None:
    read, settings = pictures(world, tmp_path)
    alone, shared = (list(mixed_batches(read, settings, np.arange(60), 3, workers, Sharing())) for workers in (0, 2))
    assert len(alone) == len(shared) == 3
    for one, other in zip(alone, shared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    other_epoch = next(mixed_batches(read, settings, np.arange(60), 4, 0, Sharing()))
    assert not torch.equal(other_epoch[0], alone[0][0])


def test_ranks_take_parts_of_the_same_mixed_batches(world: Path, tmp_path: Path) -> None:
    """Whatever cannot be read: a pair that one rank leaves out moves no picture of another."""
    class_folders(tmp_path / "train", 12)
    (tmp_path / "train" / "blue" / "003.png").write_bytes(b"no picture")
    read, settings = pictures(tmp_path, tmp_path)
    whole = list(mixed_batches(read, settings, np.arange(60), 1, 0, Sharing()))
    for world_size in (2, 3, 11):  # of eight pairs in a batch
        ranks = [Sharing(Ranks(rank, world_size, torch.device("cpu"))) for rank in range(world_size)]
        parts = [list(mixed_batches(read, settings, np.arange(60), 1, 0, each)) for each in ranks]
        assert all(len(part) == len(whole) for part in parts)
        for number, (images, shares, keys) in enumerate(whole):
            of_key = {int(key): place for part in parts for place, key in enumerate(part[number][2])}
            assert len(of_key) == len(keys) == sum(len(part[number][2]) for part in parts)
            for part in parts:
                for image, share, key in zip(*part[number], strict=True):
                    place = keys.tolist().index(int(key))
                    assert torch.equal(image, images[place]) and torch.equal(share, shares[place])
    assert sorted(len(keys) for *_, keys in whole) == [14, 16, 16], "without the unreadable picture and its mate"


def test_mixed_classes_are_shares_and_unmixed_ones_are_smoothed(world: Path, tmp_path: Path) -> None:
    read, settings = pictures(world, tmp_path)
    for _, shares, _ in mixed_batches(read, settings, np.arange(60), 0, 0, Sharing()):
        torch.testing.assert_close(shares.sum(dim=1), torch.ones(16))
        assert float(shares.min()) == pytest.approx(0.1 / 5)
    plain, settings = pictures(world, tmp_path / "plain", mixup=0.0, cutmix=0.0)
    order = settings.order(60, 0)
    _, shares, _ = next(mixed_batches(plain, settings, np.arange(60), 0, 0, Sharing()))
    assert shares.argmax(dim=1).tolist() == [int(record) // 12 for record in order[:16]]
    assert float(shares.max()) == pytest.approx(0.9 + 0.1 / 5)


@pytest.mark.parametrize(
    ("more", "reason"), [(("--precision", "fp16"), "fp16 gradients underflow"), (("--mixup", 2), "from 0 to 1")]
)
def test_what_cannot_be_learnt_is_refused(
    world: Path, tmp_path: Path, more: tuple[Any, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert evaluate(*asked(world, *more), "--out", tmp_path / "out") == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert reason in capsys.readouterr().err


@pytest.fixture
def learnt_from(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The records of each training that begins."""
    trained, seen = FineTuning.trained, []

    def noted(self: FineTuning, train: Chosen, state: Path) -> Any:
        seen.append(train.ids.tolist())
        return trained(self, train, state)

    monkeypatch.setattr(FineTuning, "trained", noted)
    return seen


def test_each_draw_learns_from_the_records_of_its_seed_and_from_nothing_else(
    world: Path, tmp_path: Path, learnt_from: list[list[int]]
) -> None:
    draws = ("--shots", 2, "--percent", 50, "--draws", 2)
    assert evaluate(*asked(world, *QUICK, *draws), "--out", tmp_path / "all") == 0
    labels, names = np.repeat(np.arange(5), 12), tuple(COLOURS)
    expected = [draw_shots(labels, 2, seed, names).tolist() for seed in (0, 1)]
    expected += [draw_percent(labels, 50, seed, 5).tolist() for seed in (0, 1)]
    assert learnt_from == expected and [len(each) for each in expected] == [10, 10, 30, 30]
    found = result(tmp_path / "all")
    assert found["settings"]["seeds"] == [0, 1] and found["settings"]["shots"] == [2]
    assert found["data"]["train"] | {"digest": ""} == {"digest": "", "records": 60, "unreadable": 0}
    half = found["numbers"]["top-1, 50 %"]
    assert half["n"] == 2 and half["std"] == pytest.approx(np.std(half["draws"], ddof=1))
    assert half["value"] > 0.4, "chance is 0.2"
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["index", "result.html", "result.json"]
    # A draw begins anew: what was learnt before it changes nothing, and neither does the way its records are named.
    assert evaluate(*asked(world, *QUICK, *draws[2:]), "--out", tmp_path / "half") == 0
    assert result(tmp_path / "half")["numbers"]["top-1, 50 %"] == half
    plain = asked(world, "--epochs", 2, "--warmup", 0, "--batch", 20, "--base-rate", 0.03)
    assert evaluate(*plain, "--percent", 100, "--draws", 1, "--out", tmp_path / "every") == 0
    assert evaluate(*plain, "--out", tmp_path / "whole") == 0
    every, whole = (result(tmp_path / name)["numbers"] for name in ("every", "whole"))
    assert every["top-1, 100 %"]["value"] == whole["top-1"]["value"]


def test_a_list_is_a_draw_whatever_else_is_drawn_and_its_records_alone_are_read(
    tmp_path: Path, learnt_from: list[list[int]]
) -> None:
    for name, each, seed in (("train", 3, 0), ("test", 2, 500)):
        class_folders(tmp_path / name, each, seed)
        for path in (tmp_path / name).rglob("*.png"):
            path.rename(path.with_name(f"{path.parent.name}_{path.name}"))
    saved(tmp_path / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{colour}_00{place}.JPEG\n" for colour in COLOURS for place in (0, 2)))
    quick = ["--epochs", 2, "--warmup", 0, "--batch", 4, "--list", listed]
    assert evaluate(*asked(tmp_path, *quick), "--out", tmp_path / "alone") == 0
    assert evaluate(*asked(tmp_path, *quick, "--shots", 1, "--draws", 1), "--out", tmp_path / "both") == 0
    assert learnt_from[0] == learnt_from[2] == [0, 2, 3, 5, 6, 8, 9, 11, 12, 14]
    alone, both = (result(tmp_path / name) for name in ("alone", "both"))
    assert alone["numbers"]["top-1, lists"] == both["numbers"]["top-1, lists"]
    assert alone["data"]["train"]["records"] == 10 and both["data"]["train"]["records"] == 15


def test_draws_that_are_done_are_not_made_again_after_a_stop(
    world: Path, tmp_path: Path, learnt_from: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = asked(world, "--epochs", 3, "--warmup", 0, "--batch", 10, "--shots", 2, "--draws", 3)
    backward, done = MixedPictures.backward, []

    def counted(*given: Any) -> float:
        done.append(backward(*given))
        return done[-1]

    def stopping(*given: Any) -> float:
        if len(done) == 5:  # in the last epoch of the second of three trainings of three steps
            raise KeyboardInterrupt
        return counted(*given)

    monkeypatch.setattr(MixedPictures, "backward", stopping)
    assert evaluate(*arguments, "--out", tmp_path / "stopped") == 75
    assert len(learnt_from) == 2
    monkeypatch.setattr(MixedPictures, "backward", counted)
    assert evaluate(*arguments, "--out", tmp_path / "stopped") == 0
    assert len(done) == 9 and learnt_from[2] == learnt_from[1] and len(learnt_from) == 4
    assert evaluate(*arguments, "--out", tmp_path / "whole") == 0
    one, other = (result(tmp_path / name) for name in ("stopped", "whole"))
    assert one == other
