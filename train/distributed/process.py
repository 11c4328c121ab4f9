"""The process that a launcher started: its device, its threads, and libraries that talk too much."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from pathlib import Path

import torch

from murmuration.train.distributed.memory import forbid_dumps


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
    forbid_dumps()  # a core dump would write un-noised gradients to disk
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
