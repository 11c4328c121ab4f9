"""The clip engine's GPU kernels, for a device that has them. Each has a fallback in plain PyTorch, since some builds
lack Triton. `sums.py` finds what adds to the totals, so an auditor who trusts the self-test need not read these."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

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
# (…, whether the input's gradient is wanted) -> that gradient, and those of scale and shift
NormBackward = Callable[..., tuple[Tensor | None, Tensor, Tensor]]


def here(device: torch.device) -> bool:
    return device.type in DEVICES and _triton()


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def gram(device: torch.device) -> Gram | None:
    if not here(device):
        return None
    from murmuration.train.clip.gram_triton import gram

    return gram


def layer_norm_backward(device: torch.device) -> NormBackward | None:
    if not here(device):
        return None
    from murmuration.train.clip.layer_norm_triton import backward

    return backward


def group_norm_backward(device: torch.device) -> NormBackward | None:
    if not here(device):
        return None
    from murmuration.train.clip.group_norm_triton import backward

    return backward


def scale(device: torch.device) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    if not here(device):
        return None
    from murmuration.train.clip.scale_triton import scale

    return scale


def row_sums(device: torch.device) -> Callable[[Tensor, Tensor, int], Tensor] | None:
    if not here(device):
        return None
    from murmuration.train.clip.row_sums_triton import row_sums

    return row_sums


class StandardisedKernels(NamedTuple):
    """What `standardised.py` does with gradients of many elements."""

    sums: Callable[[Tensor, Tensor], Tensor]
    squares: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    back: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


def standardised(device: torch.device) -> StandardisedKernels | None:
    if not here(device):
        return None
    from murmuration.train.clip.standardised_triton import back, squares, sums

    return StandardisedKernels(sums, squares, back)
