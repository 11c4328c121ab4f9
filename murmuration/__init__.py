"""Murmuration: differentially private training of vision foundation models.

In a checkout this folder holds links to the folders beside it, so that they are imported under one name, installed or
not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from murmuration.evaluation.models.load import load
    from murmuration.train.private import PrivateTraining

__all__ = ["PrivateTraining", "load"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: PyTorch takes seconds, and the accountant needs none of it."""
    if name == "PrivateTraining":
        from murmuration.train.private import PrivateTraining

        return PrivateTraining
    if name == "load":
        from murmuration.evaluation.models.load import load

        return load
    raise AttributeError(f"module 'murmuration' has no attribute {name!r}")
