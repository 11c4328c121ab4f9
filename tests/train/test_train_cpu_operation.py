"""What DeepSpeed compiles: nothing at an ordinary start; and a killed compiler does not stop the next run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.file_baton import FileBaton

from murmuration.train.distributed.ranks import Alone
from murmuration.train.engines import deepspeed_zero
from murmuration.train.engines import deepspeed_zero as cpu_operation
from murmuration.train.engines.deepspeed_zero import MOST_COMPILING, drop_dead_locks, make_ready, own_cache  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


COMPILER = """#!/bin/sh
echo "$@" >> {log}
exec c++ "$@"
"""
BUILD = """
import sys
from torch.utils.cpp_extension import load
from murmuration.train.engines.deepspeed_zero import make_ready
from murmuration.train.distributed.process import quiet_libraries
quiet_libraries()
make_ready()
load("small", [sys.argv[1]], is_python_module=False)
"""
JOIN = """
from murmuration.train.engines.deepspeed_zero import start_ranks
ranks = start_ranks()
print(f"joined {ranks.rank + 1} of {ranks.world}")
"""


def test_joining_ranks_on_a_processor_compiles_nothing_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = os.environ | alone | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", JOIN], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "joined 1 of 1" in done.stdout and not list(tmp_path.rglob("*"))
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_127.0.0.1_0_*"))


def test_deepspeed_takes_the_gpu_that_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's --gpus-per-task shows the third process of a machine its own GPU alone, as number 0."""
    asked: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(deepspeed_zero, "describe_process", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(deepspeed_zero, "make_ready", lambda: None)
    monkeypatch.setattr(deepspeed_zero, "Ranks", lambda *_: Alone(torch.device("cpu")))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    join = lambda **_: asked.append(os.environ["LOCAL_RANK"])  # noqa: E731
    monkeypatch.setattr(deepspeed_zero.deepspeed, "init_distributed", join)
    deepspeed_zero.start_ranks()
    assert asked == ["0"] and os.environ["LOCAL_RANK"] == "3", "paths that name a rank of the machine keep theirs"


def test_checkouts_that_share_a_home_do_not_undo_each_others_compilation(tmp_path: Path) -> None:
    """The commands name the folders of torch and DeepSpeed, which lie in each checkout's own environment."""
    source, log, compiler = tmp_path / "small.cpp", tmp_path / "compiled", tmp_path / "compiler"
    source.write_text("int main_of_small() { return 1; }\n")
    log.touch()
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    env |= {"HOME": str(tmp_path), "CXX": str(compiler), **ranks}
    counts = []
    for checkout in ("one", "two", "one"):
        environment = tmp_path / checkout / ".venv"
        if not environment.exists():
            environment.parent.mkdir()
            environment.symlink_to(sys.prefix)
        command = [str(environment / "bin" / "python"), "-c", BUILD, str(source)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts.append(sum(" -c " in line for line in log.read_text().splitlines()))
    assert counts == [1, 2, 2], "the first checkout's operation was compiled anew"


@pytest.mark.parametrize("what", ["CXX", "processor"])
def test_another_compiler_or_processor_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    before = own_cache()
    assert before == own_cache()
    if what == "CXX":
        monkeypatch.setenv("CXX", "another-compiler")
    else:
        monkeypatch.setattr(cpu_operation, "_processor", lambda: "another processor")
    assert own_cache() != before and own_cache().parent == before.parent
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen/by/hand")
    assert own_cache() == Path("/chosen/by/hand")


def test_the_lock_of_a_killed_compiler_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    drop_dead_locks(tmp_path, alone=True)
    assert lock.exists(), "somebody is compiling"
    holder.kill()
    holder.wait()
    assert lock.exists(), "torch's own lock outlives its holder"
    drop_dead_locks(tmp_path, alone=False)
    assert lock.exists(), "perhaps another machine is compiling"
    drop_dead_locks(tmp_path, alone=True)
    assert FileBaton(str(lock)).try_acquire()


def test_a_lock_on_a_shared_disk_is_removed_once_it_is_old(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    past = time.time() - MOST_COMPILING - 1
    os.utime(lock, (past, past))
    drop_dead_locks(tmp_path, alone=False)
    assert not lock.exists()


@pytest.mark.parametrize(
    ("told", "alone"),
    [
        ({}, True), ({"LOCAL_WORLD_SIZE": "2"}, True), ({"LOCAL_SIZE": "2"}, True), ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({"LOCAL_SIZE": "1"}, False),
    ],
)  # fmt: skip
def test_a_start_drops_young_locks_where_all_ranks_are_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], alone: bool
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    here = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    for name, value in (here | told).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "lock").touch()
    make_ready()
    assert (tmp_path / "lock").exists(), "one rank of a machine looks after its locks"
    monkeypatch.setenv("LOCAL_RANK", "0")
    make_ready()
    assert (tmp_path / "lock").exists() != alone
