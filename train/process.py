"""The process that a launcher started: its device, its threads, and libraries that talk too much."""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
import warnings
from pathlib import Path

import torch


def quiet_libraries() -> None:
    """To be called before DeepSpeed is imported: it guesses the accelerator with a warning otherwise."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # torch looks for ninja on the PATH, where it is not unless the environment was activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in ("torch.utils.cpp_extension", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def describe_process() -> torch.device:
    """Fills in what a launcher would have set, and gives this process its device and its share of the cores."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = _free_port()
    # A core dump would write un-noised gradients to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    if "OMP_NUM_THREADS" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        # Without this, every rank starts one thread per core and they fight; torchrun pins each to one thread.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    return torch.device("cpu")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def say_what_compiles() -> None:
    """Before DeepSpeed joins ranks on a CPU."""
    if not torch.cuda.is_available() and os.environ["RANK"] == "0" and not _compiled_before():
        print("DeepSpeed compiles one small operation now (about 50 s, once per machine) …", flush=True)


def free_shared_names() -> None:
    """After DeepSpeed joined ranks on a CPU and all of them met: its buffers lose their names, and live on as mapped.

    It leaves 66 MiB per rank in /dev/shm at every run, ended or killed; and the next run at the same port would open
    what the last one left there.
    """
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    Path("/dev/shm", f"{name}_{os.environ['RANK']}").unlink(missing_ok=True)


def _compiled_before() -> bool:
    """Whether the CPU communication operation lies in torch's cache of extensions already."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions"))
    return any(Path(root).rglob("deepspeed_shm_comm*.so"))
