"""What DeepSpeed compiles at the start of a run, and where.

That is at most its Adam for offloaded optimizers (`zero_optimization.offload_optimizer.adam`). torch compiles under a
lock that it never considers stale, so a killed run may not harm the next one.

torch compiles for all environments of a home directory into one folder, and ninja recompiles where a command has
changed. The commands name the folders of the environment, so two checkouts would undo each other's work at every start.
Therefore each environment, compiler and processor has a folder of its own here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import torch

# Whether other machines that share the cache are still compiling cannot be seen from here; it takes about a minute.
MOST_COMPILING = 300.0


def make_ready() -> None:
    """Call this before DeepSpeed joins the ranks."""
    cache = own_cache()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache)
    # Only one rank of a machine: a second might mistake the live lock of the first for a stale one.
    if os.environ["LOCAL_RANK"] == "0":
        drop_dead_locks(cache, _alone())


def drop_dead_locks(cache: Path, alone: bool) -> None:
    """Removes the locks of processes that were killed while compiling: every later start would wait for them forever.

    A live holder keeps the file open, so a lock that nobody has open belongs to a dead process or to another machine.
    """
    for lock in cache.glob("**/lock"):
        try:
            age = time.time() - lock.stat().st_mtime
            if not _open_somewhere(lock) and (alone or age > MOST_COMPILING):
                lock.unlink()
                print(f"removed {lock}, which a killed process had left there", flush=True)
        except FileNotFoundError:
            continue  # released meanwhile, or another rank was quicker


def own_cache() -> Path:
    """The user's TORCH_EXTENSIONS_DIR, or a folder keyed by everything that shapes the compiled code and ninja's
    commands."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    from torch.utils.cpp_extension import get_default_build_root

    deepspeed = importlib.util.find_spec("deepspeed")
    shaping = [
        torch.__file__, torch.__version__, str(deepspeed.origin if deepspeed else None), version("deepspeed"),
        sys.version, sysconfig.get_path("include"), os.environ.get("CXX", "c++"), _processor(),
    ]  # fmt: skip
    return Path(get_default_build_root()) / hashlib.sha256("\n".join(shaping).encode()).hexdigest()[:16]


def _processor() -> str:
    """What DeepSpeed's `-march=native` depends on: machines of several kinds may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.lower().startswith(("flags", "features", "model name"))}
    return platform.machine() + "".join(sorted(kinds))


def _alone() -> bool:
    """Whether all ranks of the run are on this machine; DeepSpeed's launcher and torchrun use different variables."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"]
    return here == os.environ["WORLD_SIZE"]


def _open_somewhere(file: Path) -> bool:
    wanted = file.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = descriptor.stat()
        except OSError:  # gone meanwhile, or hidden from us
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
