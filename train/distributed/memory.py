"""Secrets stay in memory: no core dump holds them, and no swap as far as the system allows.

A limit of 0 on core files is not enough: where the kernel pipes dumps to a program (`kernel.core_pattern`), it ignores
the limit. A process that is not dumpable is not dumped at all, and no other process of the same user may read its
memory, debuggers and samplers such as py-spy included.
"""

from __future__ import annotations

import ctypes
import resource

from torch import Tensor

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4


def forbid_dumps() -> bool:
    """Whether no core file of this process will ever be written. Forks inherit it, programs that they start do not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = _of_libc("prctl")
    if prctl is None:
        return False
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0


def keep_from_swap(held: bytes | bytearray | Tensor) -> bool:
    """Locks the pages that hold it; False where the system does not allow that many (RLIMIT_MEMLOCK).

    What lies on a device is not swapped. Copies that others make are not covered.
    """
    if isinstance(held, Tensor):
        if held.device.type != "cpu":
            return True
        address, length = held.data_ptr(), held.numel() * held.element_size()
    elif isinstance(held, bytearray):
        address, length = ctypes.addressof((ctypes.c_char * len(held)).from_buffer(held)), len(held)
    else:
        address, length = id(held), held.__sizeof__()  # in CPython an object's bytes lie behind its head
    mlock = _of_libc("mlock")
    return length == 0 or (mlock is not None and mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)) == 0)


def _of_libc(name: str):
    """None on a system that has no such call."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
