"""The config's sections on the privacy guarantee: budget, clipping, released metrics, tuning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from murmuration.accounting.banded import MOST_BANDS
from murmuration.accounting.metrics import HeldOutAccuracy, PlannedMetric
from murmuration.accounting.plan import MECHANISMS
from murmuration.accounting.sampling import SamplingKind
from murmuration.train.clip.groups import Grouping
from murmuration.train.config.section import Section

if TYPE_CHECKING:
    from murmuration.accounting.epsilon import tuning as accounted_tuning
    from murmuration.accounting.make_plan import PlanRequest


class AdaptiveClip(Section):
    """C follows a quantile of the gradient norms, by a noised count charged with the gradient."""

    quantile: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of gradients to leave unclipped.",
    )
    learning_rate: float = Field(default=0.2, gt=0, le=10, description="Largest change of log C in one step.")
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Noise on the count, in units of 1/2; null: expected_batch / 10.",
    )


class ClipGroup(Section):
    names: str = Field(min_length=1, description="Parameter names, such as `encoder.*`.")
    budget: float = Field(gt=0, allow_inf_nan=False, description="Relative share of C.")


class Clip(Section):
    kind: Literal["flat", "automatic"] = Field(
        default="flat", description="Factor on a gradient g: flat min(1, C/‖g‖), automatic C/(‖g‖ + gamma)."
    )
    norm: float = Field(default=1.0, gt=0, description="C, the most that a record moves the sum.")
    adaptive: AdaptiveClip | None = Field(default=None, description="null: C stays at `norm`.")
    gamma: float = Field(default=0.01, ge=0, description="For automatic.")
    groups: Literal["all", "block", "layer"] | Annotated[list[ClipGroup], Field(min_length=1)] = Field(
        default="all",
        description="Clipped together: all; each block or layer, at equal shares of C²; or by name.",
    )

    @property
    def grouping(self) -> Grouping:
        if not isinstance(self.groups, list):
            return self.groups
        return tuple((group.names, group.budget) for group in self.groups)


class ReleasedMetric(Section):
    """Published with noise at every step, and charged as one event with the gradient."""

    name: Literal["loss", "clipped", "accuracy"] = Field(
        description="Training loss, clipped share, or accuracy on held-out private records (classify)."
    )
    bound: float = Field(default=1.0, gt=0, description="Most that a record adds.")
    noise_multiplier: float = Field(gt=0, description="Noise, in units of the bound.")
    share: float | None = Field(
        default=None,
        gt=0,
        le=0.5,
        description="accuracy: share of private records not trained on in this phase.",
    )

    def planned(self) -> PlannedMetric:
        std = self.bound * self.noise_multiplier
        return PlannedMetric(self.name, self.bound, std) if self.share is None else HeldOutAccuracy.of(std, self.share)


class LossProbes(Section):
    """The learning rate follows slope and curvature along the last move, from two noised sums charged with the gradient
    (HyFreeDP, 2503.00703)."""

    every: int = Field(
        default=10,
        ge=2,
        description="Steps between probes of three forward passes.",
    )
    bound: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Most that a record adds or takes from a sum.",
    )
    noise_multiplier: float = Field(
        default=10.0,
        gt=0,
        description="Noise on each sum, in units of the bound.",
    )
    most: float = Field(default=2.0, gt=1, le=10, description="Largest change of the rate by one probe.")


class BandedNoise(Section):
    """Correlated noise: later steps of a block of `bands` partly cancel a step's noise. Records form as many parts."""

    kind: Literal["banded"] = Field(description="The only kind.")
    bands: int = Field(
        ge=2,
        le=MOST_BANDS,
        description="Steps per block; expected_batch is at most n / bands.",
    )
    horizon: int | None = Field(
        default=None,
        ge=2,
        description="Steps over which accumulated noise is minimised; null: the phase.",
    )


MOST_VIEWS = 1024
ALL = "all"


def _or_all(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": schema.pop("type"), "exclusiveMinimum": schema.pop("exclusiveMinimum")}, {"const": ALL}]


def _every_record(given: object) -> object:
    """ "all" stands for n, which a config need not know."""
    if given == ALL:
        return math.inf
    if isinstance(given, float) and math.isinf(given):
        raise ValueError('give a number, or "all"')
    return given


class Privacy(Section):
    epsilon: float = Field(gt=0, description="The phase's budget.")
    delta: float | str | None = Field(default=None, description="A number, '1/n' or '1/(2n)'; null: 1/(2n).")
    expected_batch: Annotated[float, BeforeValidator(_every_record)] = Field(
        gt=0,
        allow_inf_nan=True,
        json_schema_extra=_or_all,
        description="q·n, the divisor; all: q = 1.",
    )
    sampling: SamplingKind = Field(
        default="poisson",
        description="allocation: each record in one secret step of every epoch.",
    )
    clip: Clip = Field(default=Clip(), description="Bound on each record's gradient.")
    noise_multiplier: float | None = Field(default=None, ge=0.1, description="σ; null: calibrated to epsilon.")
    noise: BandedNoise | None = Field(default=None, description="null: independent between steps.")
    views: int = Field(
        default=1,
        ge=1,
        le=MOST_VIEWS,
        description="Augmented views per record, whose mean gradient is clipped; multiplies a micro-batch's rows.",
    )
    release: list[ReleasedMetric] = Field(default=[], description="Private metrics, published with noise.")
    loss_probes: LossProbes | None = Field(
        default=None,
        description="Finds the learning rate; needs a constant schedule.",
    )

    @field_serializer("expected_batch")
    def _as_written(self, batch: float) -> float | str:
        return ALL if math.isinf(batch) else batch

    @property
    def held_out(self) -> float | None:
        """Share of the records whose accuracy is released."""
        return next((metric.share for metric in self.release if metric.share is not None), None)

    @property
    def bands(self) -> int:
        return 1 if self.noise is None else self.noise.bands

    @property
    def mechanisms(self) -> frozenset[str]:
        """As `accounting.plan.MECHANISMS` names them."""
        chosen = {
            "banded": self.noise is not None,
            "adaptive": self.clip.adaptive is not None,
            "automatic": self.clip.kind == "automatic",
            "groups": self.clip.groups != "all",
            "held_out": self.held_out is not None,
            "metrics": bool(self.release) or self.loss_probes is not None,
            "views": self.views > 1,
        }
        return frozenset(name for name, given in chosen.items() if given) | ({self.sampling} & MECHANISMS.keys())

    def request(self, records: int, steps: int, exact: bool = False) -> PlanRequest:
        """What this asks of a plan for so many records, or units. `exact`: for exact noise."""
        from murmuration.accounting.make_plan import AdaptiveRequest, PlanRequest  # SciPy takes a second

        adaptive, probes = self.clip.adaptive, self.loss_probes
        if adaptive is not None:
            adaptive = AdaptiveRequest(adaptive.quantile, adaptive.learning_rate, adaptive.noise_multiplier)
        return PlanRequest(
            records=records, expected_batch=self.expected_batch, steps=steps, epsilon=self.epsilon, delta=self.delta,
            noise_multiplier=self.noise_multiplier, clip_norm=self.clip.norm, adaptive=adaptive,
            sampling=self.sampling, bands=self.bands, horizon=None if self.noise is None else self.noise.horizon,
            exact=exact,
            metrics=tuple(metric.planned() for metric in self.release),
            loss_probes=None if probes is None else (probes.bound, probes.noise_multiplier),
            views=self.views,
        )  # fmt: skip

    @model_validator(mode="after")
    def _one_of_each(self) -> Privacy:
        names = [metric.name for metric in self.release]
        if len(set(names)) != len(names):
            raise ValueError("privacy.release names a metric twice; each can be released once")
        if any(metric.name == "clipped" and metric.bound != 1.0 for metric in self.release):
            raise ValueError("a record is clipped or not, so the bound of the metric 'clipped' is 1")
        for metric in self.release:
            if (metric.name == "accuracy") != (metric.share is not None):
                raise ValueError("privacy.release: accuracy needs `share`, the records to hold out; others take none")
            if metric.name == "accuracy" and metric.bound != 1.0:
                raise ValueError("an answer is right or not, so the bound of the metric 'accuracy' is 1")
        return self


class Tuning(Section):
    """Certified: what was chosen by outputs of private runs on these records, all priced by this run's plan."""

    statement: str = Field(min_length=1, description="What was tried, and what decided.")
    mean: float | None = Field(default=None, ge=1, description="Mean number of runs; null: NOT PRIVATE.")
    shape: float | Literal["poisson"] = Field(
        default=1.0, description="Of that number: 0 logarithmic, 1 geometric, or poisson."
    )
    fixed: bool = Field(default=False, description="Fixed beforehand; all runs are charged.")

    @model_validator(mode="after")
    def _possible(self) -> Tuning:
        self.declared()  # raises a ValueError that says why
        return self

    def declared(self) -> accounted_tuning.Declared:
        from murmuration.accounting.epsilon import tuning as accounted_tuning  # SciPy takes a second; few configs ask

        runs = accounted_tuning.Tuning.from_dict(self.model_dump()) if self.mean is not None else None
        return accounted_tuning.Declared(self.statement, runs)
