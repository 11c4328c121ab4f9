"""What a killed run leaves behind does not stop the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.file_baton import FileBaton

from murmuration.train.engines import deepspeed_cpu as cpu_operation
from murmuration.train.engines.deepspeed_cpu import (
    MOST_COMPILING,
    SHARED,
    SHARED_BYTES,
    drop_dead_locks,
    free_shared_names,
    make_ready,
    own_cache,
    require_shared_memory,
)  # fmt: skip

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
from murmuration.train.engines.deepspeed_cpu import make_ready
from murmuration.train.distributed.process import quiet_libraries
quiet_libraries()
make_ready()
load("small", [sys.argv[1]], is_python_module=False)
"""


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


def test_only_this_rank_s_buffer_loses_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    mine, other = (Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_192.0.2.1_9_{rank}") for rank in (1, 0))
    try:
        for file in (mine, other):
            file.touch()
        free_shared_names()
        assert not mine.exists() and other.exists()
        free_shared_names()
    finally:
        other.unlink()


def test_too_little_shared_memory_is_named_with_the_mend(tmp_path: Path) -> None:
    require_shared_memory(tmp_path)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("this machine permits no mounts")
    try:
        with pytest.raises(OSError, match="1 MiB free, and every rank on a CPU needs 66 MiB"):
            require_shared_memory(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_room_is_what_is_free_and_not_what_the_folder_holds_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    room = SimpleNamespace(f_frsize=4096, f_blocks=1 << 30, f_bfree=1 << 30, f_bavail=SHARED_BYTES // 4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    require_shared_memory(tmp_path)
    room.f_bavail -= 1
    with pytest.raises(OSError, match="65 MiB free, and every rank on a CPU needs 66 MiB"):
        require_shared_memory(tmp_path)


@pytest.mark.parametrize(
    ("told", "alone"),
    [
        ({}, True), ({"LOCAL_WORLD_SIZE": "2"}, True), ({"LOCAL_SIZE": "2"}, True), ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({"LOCAL_SIZE": "1"}, False),
    ],
)  # fmt: skip
def test_a_start_looks_for_room_and_drops_young_locks_where_all_ranks_are_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], alone: bool
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    here = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    for name, value in (here | told).items():
        monkeypatch.setenv(name, value)
    looked: list[Path] = []
    monkeypatch.setattr(cpu_operation, "require_shared_memory", looked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "lock").touch()
    make_ready()
    assert looked == [SHARED] and (tmp_path / "lock").exists(), "one rank of a machine looks after its locks"
    monkeypatch.setenv("LOCAL_RANK", "0")
    make_ready()
    assert (tmp_path / "lock").exists() != alone
