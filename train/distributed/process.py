"""The process that a launcher started: its device, its threads, and the verbosity of libraries."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from pathlib import Path

import torch

from murmuration.accounting.errors import RunError
from murmuration.train.distributed.memory import forbid_dumps, reuse_freed_memory


class DeviceError(RunError, RuntimeError):
    """This process cannot use the device that was meant for it."""


def quiet_libraries() -> None:
    """Call this before DeepSpeed is imported: otherwise it guesses the accelerator, with a warning."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # torch looks for ninja on the PATH, which lacks it unless the environment was activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in ("torch.utils.cpp_extension", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def describe_process() -> torch.device:
    """Sets variables that a launcher would have set, and gives this process its device and its share of the cores."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = _free_port()
    forbid_dumps()  # a core dump would write un-noised gradients to disk
    if torch.cuda.is_available():
        device = torch.device("cuda", device_number(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    if torch.version.cuda is not None:
        refuse_idle_gpus(Path("/"))
    if "OMP_NUM_THREADS" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        # Without this, every rank starts one thread per core, and they compete; torchrun limits each to one thread.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    reuse_freed_memory()
    return torch.device("cpu")


def device_number(local_rank: int, seen: int) -> int:
    """Slurm's --gpus-per-task and containers show each process only its own GPU, as number 0."""
    if local_rank < seen:
        return local_rank
    if seen == 1:
        return 0  # NCCL refuses two ranks that use the same GPU
    raise DeviceError(
        f"this is process {local_rank} of its machine (LOCAL_RANK), but it sees {seen} GPUs; start one process for "
        "each GPU (of a GPU that is split by MIG, CUDA sees only one part)"
    )


def refuse_idle_gpus(root: Path) -> None:
    """Refuses GPUs left unused by a driver that is older than PyTorch's CUDA; PyTorch only warns, if at all."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
    if hidden or not any((root / "dev").glob("nvidia[0-9]*")):
        return
    version = root / "proc" / "driver" / "nvidia" / "version"
    driver = version.read_text().splitlines()[0] if version.is_file() else "unknown"
    raise DeviceError(
        f"this machine has GPUs, but PyTorch's CUDA {torch.version.cuda} cannot use them (driver: {driver}); install a "
        'newer driver or a PyTorch for this one, or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
    )


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
