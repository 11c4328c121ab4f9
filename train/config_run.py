"""Section of the config that says how a run is kept: how often it is saved, what stays, and when it ends by itself."""

from __future__ import annotations

from pydantic import Field

from train.section import Section

# After which the process group itself gives up; a hang must be told of before.
COLLECTIVE_SECONDS = 1800


class Keeping(Section):
    """Nothing here shapes what is released, so a resumed run may change it."""

    checkpoint_every: int = Field(default=100, gt=0)
    checkpoint_lag: int = Field(
        default=1, ge=0, description="Steps that training goes on while a checkpoint is written; 0: it waits."
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="The newest, so many.")
    keep_every: int | None = Field(
        default=None, gt=0, description="Also those whose step is a multiple of this, for good."
    )
    keep_best: str | None = Field(
        default=None,
        description="Also the one with the best of this public metric; the planned budget is claimed then.",
    )
    stall_seconds: float = Field(
        default=1200.0,
        gt=0,
        le=COLLECTIVE_SECONDS - 100,
        description="A rank that makes no progress for so long ends the job with exit code 75.",
    )
    stop_after_minutes: float | None = Field(
        default=None, gt=0, description="Save and end with exit code 75 so long after the start."
    )
