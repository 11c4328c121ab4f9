"""The memory of a process. Secrets stay in it: they reach no core dump and, as far as the system allows, no swap.

A limit of 0 on core files is not enough: where the kernel pipes dumps to a program (`kernel.core_pattern`), it ignores
the limit. A process that is not dumpable is not dumped at all, and no other process of the same user may read its
memory, including debuggers and samplers such as py-spy.
"""

from __future__ import annotations

import ctypes
import resource

from torch import Tensor

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4


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
