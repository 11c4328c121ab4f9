"""One integer hash, SplitMix64's finaliser, for numpy and torch, on any device. No secret depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Integers = TypeVar("Integers", np.ndarray, Tensor)

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number: SplitMix64's step
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))


def mixed(state: Integers) -> Integers:
    """int64 to int64; products wrap, as they do in C."""
    for shift, factor in _MIX:
        state = (state ^ shifted(state, shift)) * factor
    return state ^ shifted(state, 31)


def shifted(state: Integers, by: int) -> Integers:
    """A logical shift: the shift of signed numbers keeps the sign."""
    return (state >> by) & ((1 << (64 - by)) - 1)
