"""The config section of the loss-improvement monitor."""

from __future__ import annotations

from pydantic import Field

from train.section import Section


class Monitor(Section):
    """Public records on which the loss's slope and curvature are measured at checkpoints."""

    path: str
    records: int = Field(default=256, ge=2, description="How many of them: each costs about 20 + 30·probes forwards.")
    every: int = Field(default=1, gt=0, description="Measure at every so-many-th checkpoint.")
    probes: int = Field(default=4, gt=0, description="Random vectors for each of the two traces.")
    micro_batch: int | None = Field(default=None, gt=0, description="null: a quarter of the training's.")
