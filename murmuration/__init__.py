"""Murmuration: differentially private training of vision foundation models.

In a checkout this folder holds links to the folders beside it, so that they are imported under one name, installed or
not. What a program needs is here: docs/library.md is its page.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from murmuration.evaluation.models.load import load
    from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ParameterRule, Schedule, ZeroOptimization
    from murmuration.train.config.privacy import (
        AdaptiveClip,
        BandedNoise,
        Clip,
        ClipGroup,
        LossProbes,
        Privacy,
        ReleasedMetric,
    )
    from murmuration.train.core import Computation
    from murmuration.train.library.records import Units
    from murmuration.train.library.settings import Settings
    from murmuration.train.library.start import Public
    from murmuration.train.library.training import PrivateTraining
    from murmuration.train.storage.sibling_runs import RunLog

_HOMES = {
    "train.library.records": ("Units",),
    "train.library.settings": ("Settings",),
    "train.library.start": ("Public",),
    "train.library.training": ("PrivateTraining",),
    "train.config.privacy": (
        "AdaptiveClip", "BandedNoise", "Clip", "ClipGroup", "LossProbes", "Privacy", "ReleasedMetric",
    ),
    "train.config.optimizer": ("Optimizer", "OptimizerParams", "ParameterRule", "Schedule", "ZeroOptimization"),
    "train.core": ("Computation",),
    "train.storage.sibling_runs": ("RunLog",),
    "evaluation.models.load": ("load",),
}  # fmt: skip

__all__ = [
    "AdaptiveClip", "BandedNoise", "Clip", "ClipGroup", "Computation", "LossProbes", "Optimizer", "OptimizerParams",
    "ParameterRule", "Privacy", "PrivateTraining", "Public", "ReleasedMetric", "RunLog", "Schedule", "Settings",
    "Units", "ZeroOptimization", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when asked for: PyTorch takes seconds, and the accountant needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"murmuration.{home}"), name)
    raise AttributeError(f"module 'murmuration' has no attribute {name!r}")
