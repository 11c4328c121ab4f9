"""Hashes of tensors, for telling whether two are the same bit by bit."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def digests_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> bytes:
    """Of any type, bf16 too, which NumPy does not know."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
