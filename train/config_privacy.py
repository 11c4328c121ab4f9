"""Sections of the config that say what is promised: budget, clipping, released metrics, tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from accounting import tuning as accounted_tuning
from train.clip_groups import Grouping
from train.section import Section


class AdaptiveClip(Section):
    """C follows a quantile of the gradients' norms, by a noised count that is charged with the gradient."""

    quantile: float = Field(default=0.5, gt=0, lt=1, description="Share of gradients that C lets through whole.")
    learning_rate: float = Field(default=0.2, gt=0, le=10, description="C moves by at most this, in logarithms.")
    noise_multiplier: float | None = Field(
        default=None, gt=0, description="Noise on the count, in units of a record's 1/2; null: expected_batch / 10."
    )
    span: float = Field(default=1e4, ge=1, description="C stays within norm / span and norm · span.")


class ClipGroup(Section):
    names: str = Field(min_length=1, description="A pattern of parameters' names, such as encoder.*")
    budget: float = Field(gt=0, allow_inf_nan=False, description="Of C, in proportion to the other groups' budgets.")


class Clip(Section):
    kind: Literal["flat", "automatic"] = "flat"
    norm: float = Field(default=1.0, gt=0, description="C: the most that one record moves the sum.")
    adaptive: AdaptiveClip | None = Field(
        default=None, description="null: C stays `norm`; otherwise that is the C of the first step."
    )
    gamma: float = Field(default=0.01, ge=0, description="Automatic clipping scales by C / (norm + gamma).")
    groups: Literal["all", "block", "layer"] | Annotated[list[ClipGroup], Field(min_length=1)] = Field(
        default="all",
        description="What is clipped together, with equal shares whose squares sum to C²; or groups with budgets of "
        "their own, of which the first that fits a parameter takes it.",
    )

    @property
    def grouping(self) -> Grouping:
        if not isinstance(self.groups, list):
            return self.groups
        return tuple((group.names, group.budget) for group in self.groups)

    @model_validator(mode="after")
    def _adapts_plainly(self) -> Clip:
        if self.adaptive is not None and (self.kind != "flat" or self.groups != "all"):
            raise ValueError("privacy.clip.adaptive moves one C for all parameters; use kind 'flat' and groups 'all'")
        return self


class ReleasedMetric(Section):
    """Published with noise at every step, and charged as one event with the gradient."""

    name: Literal["loss", "clipped"]
    bound: float = Field(default=1.0, gt=0, description="Each record adds a number in [0, bound].")
    noise_multiplier: float = Field(gt=0, description="Noise on the sum, in units of the bound.")


class Tan(Section):
    """Tune at small cost: batch and noise divided alike. The ε told is the true, far larger one of what is run."""

    scale: float = Field(gt=1, description="What expected_batch and the noise multiplier are divided by.")


class Privacy(Section):
    epsilon: float = Field(gt=0, description="Budget of the phase; training stops before it is passed.")
    delta: float | str | None = Field(default=None, description="A number, '1/n' or '1/(2n)'; null means 1/(2n).")
    expected_batch: float = Field(gt=0, description="q·n: the constant by which every noised sum is divided.")
    clip: Clip = Clip()
    noise_multiplier: float | None = Field(default=None, ge=0.1, description="null: calibrated from epsilon.")
    tan: Tan | None = Field(default=None, description="Simulate this phase at small cost, NOT PRIVATE at `epsilon`.")
    release: list[ReleasedMetric] = Field(default=[], description="Metrics of private records to publish with noise.")

    @model_validator(mode="after")
    def _one_of_each(self) -> Privacy:
        names = [metric.name for metric in self.release]
        if len(set(names)) != len(names):
            raise ValueError("privacy.release names a metric twice; each can be released once")
        if any(metric.name == "clipped" and metric.bound != 1.0 for metric in self.release):
            raise ValueError("a record is clipped or not, so the bound of the metric 'clipped' is 1")
        return self


class Tuning(Section):
    """What was chosen by looking at outputs of private runs on these records; it is written into the certificate."""

    statement: str = Field(min_length=1, description="What was tried and what was chosen by.")
    mean: float | None = Field(
        default=None, ge=1, description="Average number of runs; null: not charged, so NOT PRIVATE."
    )
    shape: float | Literal["poisson"] = Field(default=1.0, description="Of their number: 0 logarithmic, 1 geometric.")
    fixed: bool = Field(default=False, description="Their number was fixed beforehand: all of them are charged.")

    @model_validator(mode="after")
    def _possible(self) -> Tuning:
        self.declared()  # raises a ValueError that says why
        return self

    def declared(self) -> accounted_tuning.Declared:
        runs = accounted_tuning.Tuning.from_dict(self.model_dump()) if self.mean is not None else None
        return accounted_tuning.Declared(self.statement, runs)
