"""Evaluations by the launchers: two processes write what one writes, and one that fails or is killed ends both."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models._hub import save_for_hf

from murmuration.evaluation.session.answers import MicroBatchAnswers
from murmuration.train.storage.feature_store import PRESENT, RowWriter
from tests.support import forking
from tests.support.evaluation_world import COLOURS, class_folders, evaluate, saved, shards, tokenizer
from tests.support.foreign_models import timm_vit
from tests.support.launching import ROOT, TIMEOUT, by_launcher, environment
from tests.support.published import dpcap, vip_mae

EVALUATE = ROOT / "launch" / "evaluate.py"
RANKS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "train", 12)
    class_folders(folder / "test", 5, seed=500)
    (folder / "test" / "blue" / "001.png").write_bytes(b"no picture")
    shards(folder / "shards", 22)
    tokenizer(folder)
    saved(folder / "vip.pth", vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1))
    text = {"text_width": 48, "text_depth": 1, "length": 12, "vocabulary": 13}
    saved(folder / "dpcap.pth", dpcap(48, 2, grid=2, patch=8, **text))
    return folder


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """As each of two processes has, because they decide how sums are rounded."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // RANKS))
    yield
    torch.set_num_threads(before)


def asked(world: Path, protocol: str, out: Path) -> list[Any]:
    weights = "vip.pth" if protocol == "probe" else "dpcap.pth"
    more: dict[str, list[Any]] = {
        "probe": ["--data", world / "train", "--test", world / "test"],
        "zero-shot": ["--data", world / "test", "--tokenizer", world / "tokenizer.json"],
        "caption": ["--data", world / "shards", "--tokenizer", world / "tokenizer.json", "--decode", "nucleus",
                    "--gallery", 10],
    }  # fmt: skip
    heads = ["--heads", 4, "--decoder-heads", 4, "--public", "--micro-batch", 4]
    return [protocol, world / weights, *heads, *more[protocol], "--out", out]


def by_two(launcher: str, arguments: list[Any], script: Path = EVALUATE) -> tuple[int, str]:
    return by_several(RANKS, launcher, arguments, script)


def by_several(ranks: int, launcher: str, arguments: list[Any], script: Path) -> tuple[int, str]:
    command = by_launcher(launcher, ranks, list(map(str, [script, *arguments, "--workers", 0])))
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if launcher == "forked":
        done = forking.run(command, ranks=ranks, env=env, timeout=TIMEOUT, **streams)
    else:
        done = subprocess.run(command, env=env, timeout=TIMEOUT, **streams)
    return done.returncode, done.stdout


def same(one: Path, two: Path) -> None:
    names = sorted(path.name for path in one.iterdir() if path.is_file())
    assert names == sorted(path.name for path in two.iterdir() if path.is_file()) and "result.json" in names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert not (two / "progress").exists()


def test_a_probe_that_one_process_began_is_ended_by_two(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = RowWriter.put, []

    def stopping(self: RowWriter, *rows: Any) -> None:
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(put(self, *rows))

    monkeypatch.setattr(RowWriter, "put", stopping)
    assert evaluate(*asked(world, "probe", tmp_path / "two")) == 75
    monkeypatch.setattr(RowWriter, "put", put)
    (states,) = (tmp_path / "two" / "features").rglob("state.u8")
    assert np.count_nonzero(np.fromfile(states, "u1") == PRESENT) == 20
    code, output = by_two("forked", asked(world, "probe", tmp_path / "two"))
    assert code == 0, output
    assert output.count("top-1: ") == 1, "told by both"
    assert evaluate(*asked(world, "probe", tmp_path / "one")) == 0
    same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("launcher", ["forked", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_names_by_two_processes_are_those_of_one(world: Path, tmp_path: Path, launcher: str) -> None:
    """The pictures have no index yet, which one process makes for both; one picture is unreadable."""
    code, output = by_two(launcher, asked(world, "zero-shot", tmp_path / "two"))
    assert code == 0, output
    assert evaluate(*asked(world, "zero-shot", tmp_path / "one")) == 0
    same(tmp_path / "one", tmp_path / "two")


SEVERAL = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from murmuration.launch import evaluate
def left(code):
    assert code == 0
begin = dist.init_process_group
evaluate.leave, dist.init_process_group = left, lambda *a, **b: dist.is_initialized() or begin(*a, **b)
for command in json.loads(open(sys.argv[1]).read()):
    evaluate.main([*command, "--workers", "0"])
sys.stdout.flush()
os._exit(0)  # as leaving does: a process group that is torn down may abort
"""


def other_protocols(world: Path, out: Path) -> dict[str, list[str]]:
    """What the tests above leave out, each with an --out of its own."""
    cases = [{"image": f"{colour}/000.png", "options": [f"a {colour} square", "square a"], "true": 0}
             for colour in COLOURS] * 3  # fmt: skip
    (out.parent / "cases.json").write_text(json.dumps(cases))
    written = [world / "dpcap.pth", "--heads", 4, "--decoder-heads", 4, "--tokenizer", world / "tokenizer.json"]
    drawn = [world / "vip.pth", "--heads", 4, "--decoder-heads", 4]
    learning = ["--data", world / "train", "--test", world / "test"]
    commands: dict[str, list[Any]] = {
        "retrieval": [*written, "--data", world / "shards"],
        "aro": [*written, "--data", world / "test", "--cases", out.parent / "cases.json"],
        "reconstruct": [*drawn, "--data", world / "test", "--gallery", 9],
        "classify": [world / "vit", "--data", world / "test", "--gallery", 6],
        "attack": [world / "vit", "--data", world / "train", "--others", world / "test", "--label", "cls",
                   "--shadow", world / "vit", world / "list.txt", "--shadow", world / "vit", world / "none.txt",
                   "--shadow", world / "vit", world / "none.txt"],
        "few-shot": [*drawn, *learning, "--shots", 2, "--way", "vip", "--epochs", 2, "--warmup", 0, "--views", 2],
    }  # fmt: skip
    ends = ["--public", "--micro-batch", 4]
    return {name: list(map(str, [name, *words, *ends, "--out", out / name])) for name, words in commands.items()}


def test_every_other_protocol_of_two_processes_is_that_of_one(world: Path, tmp_path: Path) -> None:
    """One launch for all of them, which a command by itself does not allow: it ends its process."""
    save_for_hf(timm_vit(), str(world / "vit"), model_args={"img_size": 16, "patch_size": 4, "embed_dim": 24,
                                                            "depth": 2, "num_heads": 4})  # fmt: skip
    (world / "list.txt").write_text("members/red/000.png\n")
    (world / "none.txt").write_text("")
    (tmp_path / "several.py").write_text(SEVERAL)
    commands = other_protocols(world, tmp_path / "two")
    (tmp_path / "commands.json").write_text(json.dumps(list(commands.values())))
    code, output = by_two("forked", [tmp_path / "commands.json"], tmp_path / "several.py")
    assert code == 0, output
    for name, command in other_protocols(world, tmp_path / "one").items():
        assert evaluate(*command) == 0
        same(tmp_path / "one" / name, tmp_path / "two" / name)


SABOTAGE = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from murmuration.launch.evaluate import main
from murmuration.evaluation.session.answers import Answers
from murmuration.evaluation.errors import EvaluationError
kept, done, how = Answers.add, [], sys.argv.pop(1)
def add(self, part):
    if os.environ["RANK"] == "1" and len(done) == 2:
        if how == "killed":
            os.write(self.descriptor, part.as_line()[:-3])
            os.kill(os.getpid(), signal.SIGKILL)
        raise EvaluationError("this rank's disk is on fire; put it out")
    done.append(kept(self, part))
Answers.add = add
sys.exit(main(sys.argv[1:]))
"""


def test_captions_of_two_processes_of_which_one_is_killed_are_ended_by_one(world: Path, tmp_path: Path) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    code, output = by_two("forked", ["killed", *asked(world, "caption", tmp_path / "two")], tmp_path / "sabotage.py")
    assert code != 0 and not (tmp_path / "two" / "result.json").exists(), output
    files = sorted((tmp_path / "two" / "progress").iterdir())
    assert [path.suffixes[0] for path in files] == [".0", ".1"]
    assert not files[1].read_bytes().endswith(b"\n"), "the kill came between two lines, which proves less"
    lines = [line for path in files for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    numbers = [MicroBatchAnswers.of_line(line).number for line in lines]
    assert 1 in numbers and 3 in numbers and len(numbers) == len(set(numbers)) < 6
    assert evaluate(*asked(world, "caption", tmp_path / "two")) == 0
    assert evaluate(*asked(world, "caption", tmp_path / "one")) == 0
    same(tmp_path / "one", tmp_path / "two")


def test_a_rank_that_fails_ends_both_with_its_sentence(world: Path, tmp_path: Path) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    code, output = by_two("forked", ["fails", *asked(world, "caption", tmp_path / "two")], tmp_path / "sabotage.py")
    assert code != 0 and not (tmp_path / "two" / "result.json").exists()
    assert output.count("error: this rank's disk is on fire; put it out") == 1, output
    assert "line" not in output.partition("torch/distributed/elastic")[0], "a traceback of ours"
