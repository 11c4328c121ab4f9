"""The clip engine's GPU kernels, for a device that has them. Each has a fallback in plain PyTorch, since some builds
lack Triton. `sums.py` finds what adds to the totals, so an auditor who trusts the self-test need not read these."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from murmuration.train.clip.sums import KERNEL_DEVICES

DEVICES = KERNEL_DEVICES


class Bounds(NamedTuple):
    """Coefficients of the bound on the error of a record's square, which the Gram kernel evaluates."""

    share: float
    """For the rounding of products, in units of the square of its tokens' summed lengths |a||g|."""
    added: float
    """For the rounding of what is added to the sums, in units of those lengths."""
    lost_left: float
    """For what vanishes in fp32, in units of the largest |a|²; `lost_right`, of the largest |g|²."""
    lost_right: float


Gram = Callable[[Tensor, Tensor, int, Bounds, bool], tuple[Tensor, ...]]
# (input, its output's gradient, mean, inverse, weight, wanted=…) -> the input's gradient if it is wanted, and each
# record's or row's of scale and shift
NormBackward = Callable[..., tuple[Tensor | None, Tensor, Tensor]]


class StandardisedKernels(NamedTuple):
    """What `standardised.py` does with gradients of many elements."""

    sums: Callable[[Tensor, Tensor], Tensor]
    squares: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    back: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


Kernel = TypeVar("Kernel")


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def _where_it_runs(load: Callable[[], Kernel]) -> Callable[[torch.device], Kernel | None]:
    """Importing a kernel imports Triton, so it waits for a device that has it."""
    return lambda device: load() if device.type in DEVICES and _triton() else None


@_where_it_runs
def gram() -> Gram:
    from murmuration.train.clip.gram_triton import gram

    return gram


@_where_it_runs
def layer_norm_backward() -> NormBackward:
    from murmuration.train.clip.triton_kernels import layer_norm_backward

    return layer_norm_backward


@_where_it_runs
def group_norm_backward() -> NormBackward:
    from murmuration.train.clip.triton_kernels import group_norm_backward

    return group_norm_backward


@_where_it_runs
def scale() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    from murmuration.train.clip.triton_kernels import scale

    return scale


@_where_it_runs
def row_sums() -> Callable[[Tensor, Tensor, int], Tensor]:
    from murmuration.train.clip.triton_kernels import row_sums

    return row_sums


@_where_it_runs
def standardised() -> StandardisedKernels:
    from murmuration.train.clip.standardised_triton import back, squares, sums

    return StandardisedKernels(sums, squares, back)
