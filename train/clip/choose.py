"""Makes the clip engine that a config names."""

from __future__ import annotations

from typing import Literal

from murmuration.train.clip.bookkeeping import HOLD, BookKeepingClip
from murmuration.train.clip.engine import ClipEngine, Precision
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.clip.scaling import Scaling


def make_clip(
    name: str, rule: ClipRule, precision: Precision, memory: Literal["lean", "fast"], scaling: Scaling | None = None
) -> ClipEngine:
    if name == "reference":
        return ReferenceClip(rule, scaling)
    if name == "opacus":
        if scaling is not None:
            raise ClipError('the Opacus engine scales no gradients; use run.clip_engine = "book-keeping"')
        # Opacus is only for checking, and takes seconds to import.
        from murmuration.train.clip.opacus import OpacusClip

        return OpacusClip(rule)
    return BookKeepingClip(rule, precision, HOLD[memory], scaling=scaling)
