"""Mixed precision by PyTorch's autocast: weights, norms and sums stay in fp32; products in layers need not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# fp16 has few exponents: losses are scaled by a constant, a power of two, which is divided out of norms without
# rounding. It never adapts, since that would depend on private gradients.
LOSS_SCALE: dict[Precision, float] = {"fp32": 1.0, "bf16": 1.0, "fp16": 2.0**12}


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Whatever the caller's autocast, which would round norms and sums."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp32":
        return nullcontext()
    # No cache of cast weights: it would tie them into a graph other than the records'.
    return torch.autocast(device.type, TYPES[precision], cache_enabled=False)
