"""The base of every section of the config: unknown keys are refused, and a section is immutable."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from murmuration.accounting.errors import RunError
from murmuration.train.measures.shares import TOP_1

# A fault in a phase, found before or during its setup.


class RecipeError(RunError, ValueError):
    """A phase cannot run as configured; the message names the key and the fix."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def word_given(given: Any, what: str, otherwise: str = "") -> Any:
    """Nothing counts as public by default: `public` must be given. For validators that see a section as written."""
    if not isinstance(given, dict | Section):
        return given  # no section at all, which its type says better
    said = given.get("public") if isinstance(given, dict) else getattr(given, "public", None)
    if said is not True and not (otherwise and said is False):
        raise ValueError(
            f'{what} are used without noise: write "public": true, your word that nobody\'s privacy depends on them, '
            f"which the certificate repeats{otherwise}"
        )
    return given


# The section on how a run is saved: how often, what is kept, and when the run ends by itself.

# The process group's own timeout; the watchdog must report a hang before that.
COLLECTIVE_SECONDS = 1800


class Keeping(Section):
    """Nothing here shapes what is released, so a resumed run may change it."""

    checkpoint_every: int = Field(default=100, gt=0, description="Steps between checkpoints.")
    checkpoint_lag: int = Field(
        default=1, ge=0, description="Steps trained while a checkpoint is written; 0: it waits."
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="Newest checkpoints kept.")
    keep_every: int | None = Field(default=None, gt=0, description="Also keeps those whose step is a multiple.")
    keep_best: str | None = Field(
        default=None,
        description="Also keeps the best by this public metric, such as public_loss; claims the planned budget.",
    )
    stall_seconds: float = Field(
        default=1200.0,
        gt=0,
        le=COLLECTIVE_SECONDS - 100,
        description="A rank so long without progress ends the job with 75.",
    )
    stop_after_minutes: float | None = Field(default=None, gt=0, description="Then saves and ends with 75.")

    @field_validator("keep_best")
    @classmethod
    def _accuracy_is_top_1(cls, given: str | None) -> str | None:
        return TOP_1 if given == "accuracy" else given
