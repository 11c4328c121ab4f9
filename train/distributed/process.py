"""The process that a launcher started: its device, its threads, and the verbosity of libraries."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from murmuration.accounting.errors import RunError

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4


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


# The memory of a process. Secrets stay in it: they reach no core dump and, as far as the system allows, no swap.
#
# A limit of 0 on core files is not enough: where the kernel pipes dumps to a program (`kernel.core_pattern`), it
# ignores the limit. A process that is not dumpable is not dumped at all, and no other process of the same user may
# read its memory, including debuggers and samplers such as py-spy.


def forbid_dumps() -> bool:
    """Forbids core files of this process; returns whether that worked. Forks inherit this; programs that they start do
    not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = _of_libc("prctl")
    if prctl is None:
        return False
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0


def keep_from_swap(held: bytes | bytearray | Tensor) -> bool:
    """Locks the memory pages of `held`; False where the system does not allow that many (RLIMIT_MEMLOCK).

    Device memory is not swapped. Copies made elsewhere are not covered.
    """
    if isinstance(held, Tensor):
        if held.device.type != "cpu":
            return True
        address, length = held.data_ptr(), held.numel() * held.element_size()
    elif isinstance(held, bytearray):
        address, length = ctypes.addressof((ctypes.c_char * len(held)).from_buffer(held)), len(held)
    else:
        address, length = id(held), held.__sizeof__()  # in CPython an object's bytes follow its header
    mlock = _of_libc("mlock")
    return length == 0 or (mlock is not None and mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)) == 0)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM = 2**30


def reuse_freed_memory() -> None:
    """Has glibc keep what was freed for the next allocation. By default it gives blocks above 32 MiB back to the
    kernel, which clears each page of the next one."""
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def _of_libc(name: str):
    """The function of libc, or None on a system without it."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
