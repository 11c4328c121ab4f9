"""The clip engine that a config names."""

from __future__ import annotations

from train.clip import ClipEngine
from train.clip_bookkeeping import HOLD, BookKeepingClip
from train.clip_reference import ReferenceClip
from train.clip_rule import ClipRule
from train.config import Run


def make_clip(run: Run, rule: ClipRule) -> ClipEngine:
    if run.clip_engine == "reference":
        return ReferenceClip(rule)
    if run.clip_engine == "opacus":
        # Opacus is for checking alone, and takes seconds to import.
        from train.clip_opacus import OpacusClip

        return OpacusClip(rule)
    return BookKeepingClip(rule, run.precision, HOLD[run.clip_memory])
