"""Makes the clip engine that a config names."""

from __future__ import annotations

from typing import Literal

from murmuration.train.clip.bookkeeping import HOLD, BookKeepingClip
from murmuration.train.clip.engine import ClipEngine, Precision
from murmuration.train.clip.rule import ClipRule


def make_clip(
    name: str, rule: ClipRule, precision: Precision, memory: Literal["lean", "fast"], compiled: int = 0,
    checkpointed: bool = False,
) -> ClipEngine:  # fmt: skip
    """`compiled`: in micro-batches of so many records, blocks run as compiled code. `checkpointed`: they run again in
    the backward pass."""
    # What is only for checking is not loaded otherwise: Opacus takes seconds.
    if name == "reference":
        from murmuration.train.clip.reference import ReferenceClip

        return ReferenceClip(rule)
    if name == "opacus":
        from murmuration.train.clip.opacus import OpacusClip

        return OpacusClip(rule)
    return BookKeepingClip(rule, precision, HOLD[memory], compiled=compiled, checkpointed=checkpointed)
