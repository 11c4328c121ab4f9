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
    """C follows a quantile of the gradient norms, by means of a noised count that is charged with the gradient."""

    quantile: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Target share of gradients whose norm is at most C, so that they pass unclipped.",
    )
    learning_rate: float = Field(default=0.2, gt=0, le=10, description="Largest change of log C in one step.")
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Noise on the count of clipped records, in units of the 1/2 that one record adds; null: "
        "expected_batch / 10.",
    )


class ClipGroup(Section):
    names: str = Field(min_length=1, description="Pattern of parameter names, such as `encoder.*`.")
    budget: float = Field(
        gt=0, allow_inf_nan=False, description="Share of C, in proportion to the budgets of the other groups."
    )


class Clip(Section):
    kind: Literal["flat", "automatic"] = Field(
        default="flat", description="Factor on a gradient g: min(1, C/‖g‖) for flat, C/(‖g‖ + gamma) for automatic."
    )
    norm: float = Field(default=1.0, gt=0, description="C: the most that one record can move the sum.")
    adaptive: AdaptiveClip | None = Field(
        default=None, description="null: C stays at `norm`; otherwise `norm` is the C of the first step."
    )
    gamma: float = Field(
        default=0.01, ge=0, description="Added to the norm by automatic clipping; flat clipping has none."
    )
    groups: Literal["all", "block", "layer"] | Annotated[list[ClipGroup], Field(min_length=1)] = Field(
        default="all",
        description="What is clipped together: all parameters; or each block or layer, to equal shares whose squares "
        "sum to C²; or a list of groups with budgets of their own, where a parameter belongs to the first group that "
        "matches its name.",
    )

    @property
    def grouping(self) -> Grouping:
        if not isinstance(self.groups, list):
            return self.groups
        return tuple((group.names, group.budget) for group in self.groups)


class ReleasedMetric(Section):
    """Published with noise at every step, and charged as one event with the gradient."""

    name: Literal["loss", "clipped", "accuracy"] = Field(
        description="Metric to publish: the mean training loss, the share of clipped records, or the accuracy on "
        "held-out private records (objective classify)."
    )
    bound: float = Field(default=1.0, gt=0, description="Each record adds a number between 0 and this bound.")
    noise_multiplier: float = Field(gt=0, description="Noise on the sum, in units of the bound.")
    share: float | None = Field(
        default=None,
        gt=0,
        le=0.5,
        description="For accuracy: the share of the private records that are held out. They are drawn like all others "
        "but not trained on in this phase.",
    )

    def planned(self) -> PlannedMetric:
        std = self.bound * self.noise_multiplier
        return PlannedMetric(self.name, self.bound, std) if self.share is None else HeldOutAccuracy.of(std, self.share)


class LossProbes(Section):
    """The learning rate follows the loss along the weights' last move: every few steps, the records drawn also add
    their loss's slope and curvature along it to two noised sums, which are charged with the gradient (HyFreeDP,
    2503.00703)."""

    every: int = Field(
        default=10,
        ge=2,
        description="Steps from one probe to the next; each costs three forward passes over the step's records.",
    )
    bound: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Each record adds a number between -bound and bound to either sum: differences of its loss over "
        "one step.",
    )
    noise_multiplier: float = Field(
        default=10.0,
        gt=0,
        description="Noise on either sum, in units of the bound. At a σ of 1, 10 costs 1 % more noise on gradients.",
    )
    most: float = Field(default=2.0, gt=1, le=10, description="Largest factor by which one probe changes the rate.")


class BandedNoise(Section):
    """Correlated noise: what is added to a step is partly taken back within its block of `bands` steps. The records are
    dealt into as many parts, whose turns follow each other."""

    kind: Literal["banded"] = Field(description="The only kind; null means independent noise.")
    bands: int = Field(
        ge=2,
        le=MOST_BANDS,
        description="Steps of a block, and parts of the records; expected_batch may be at most n / bands. Each step "
        "draws noise for up to this many steps. `account.py compare` shows what each number gives.",
    )
    horizon: int | None = Field(
        default=None,
        ge=2,
        description="Number of steps over which the noise that adds up is made least; null: all steps of the phase. "
        "Fewer: each step has less noise, and more of it adds up.",
    )


class Tan(Section):
    """Tune at low cost: batch and noise are divided by the same number. The ε reported is that of this run itself,
    which is far larger."""

    scale: float = Field(gt=1, description="Number by which expected_batch and the noise multiplier are divided.")


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
    epsilon: float = Field(gt=0, description="Privacy budget of the phase; training stops before it is exceeded.")
    delta: float | str | None = Field(default=None, description="A number, '1/n' or '1/(2n)'; null: 1/(2n).")
    expected_batch: Annotated[float, BeforeValidator(_every_record)] = Field(
        gt=0,
        allow_inf_nan=True,
        json_schema_extra=_or_all,
        description="q·n, the expected number of records per step: the constant by which every noised sum is divided. "
        "all: every record in every step.",
    )
    sampling: SamplingKind = Field(
        default="poisson",
        description="Who takes part in a step. poisson: each record, independently, with probability q. allocation: "
        "the steps are cut into epochs, in each of which every record takes part in exactly one step, so that "
        "expected_batch is rounded to a whole number of times in all; less noise for the same epsilon.",
    )
    clip: Clip = Field(default=Clip(), description="How each record's gradient is bounded.")
    noise_multiplier: float | None = Field(
        default=None, ge=0.1, description="σ; null: calibrated to epsilon by PLD and rounded up."
    )
    noise: BandedNoise | None = Field(
        default=None, description="null: each step has noise of its own; otherwise it is correlated over steps."
    )
    views: int = Field(
        default=1,
        ge=1,
        le=MOST_VIEWS,
        description="K: how often each drawn record is seen in a step, with a crop, mask, caption and dropout of its "
        "own each time. The mean of these K gradients is clipped as one, so that C and epsilon stay what they are; a "
        "micro-batch computes K rows for each of its records.",
    )
    tan: Tan | None = Field(default=None, description="Simulates this phase at low cost; NOT PRIVATE at `epsilon`.")
    release: list[ReleasedMetric] = Field(
        default=[], description="Metrics of private records that are published with noise, at most one of each."
    )
    loss_probes: LossProbes | None = Field(
        default=None,
        description="null: learning rates are the schedule's; otherwise a factor on them is found while training, from "
        "noised probes of the loss. Needs a constant schedule, whose peak is the first guess.",
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
            "tan": self.tan is not None,
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
        from murmuration.accounting.make_plan import ADAPTIVE_SPAN, AdaptiveRequest, PlanRequest  # SciPy takes a second

        adaptive, probes = self.clip.adaptive, self.loss_probes
        if adaptive is not None:
            adaptive = AdaptiveRequest(
                adaptive.quantile, adaptive.learning_rate, ADAPTIVE_SPAN, adaptive.noise_multiplier
            )
        return PlanRequest(
            records=records, expected_batch=self.expected_batch, steps=steps, epsilon=self.epsilon, delta=self.delta,
            noise_multiplier=self.noise_multiplier, clip_norm=self.clip.norm, adaptive=adaptive,
            sampling=self.sampling, bands=self.bands, horizon=None if self.noise is None else self.noise.horizon,
            exact=exact,
            metrics=tuple(metric.planned() for metric in self.release),
            loss_probes=None if probes is None else (probes.bound, probes.noise_multiplier),
            views=self.views, tan=None if self.tan is None else self.tan.scale,
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
    """Declares what was chosen by looking at outputs of private runs on these records; the certificate includes it. All
    of these runs are priced as runs with this one's plan (q, σ, T, draws)."""

    statement: str = Field(min_length=1, description="What was tried, and which outputs decided the choice.")
    mean: float | None = Field(
        default=None, ge=1, description="Average number of runs; null: nothing is charged, and the run is NOT PRIVATE."
    )
    shape: float | Literal["poisson"] = Field(
        default=1.0, description="Distribution of the number of runs: 0 logarithmic, 1 geometric, or poisson."
    )
    fixed: bool = Field(
        default=False, description="The number of runs was fixed beforehand, and all of them are charged."
    )

    @model_validator(mode="after")
    def _possible(self) -> Tuning:
        self.declared()  # raises a ValueError that says why
        return self

    def declared(self) -> accounted_tuning.Declared:
        from murmuration.accounting.epsilon import tuning as accounted_tuning  # SciPy takes a second; few configs ask

        runs = accounted_tuning.Tuning.from_dict(self.model_dump()) if self.mean is not None else None
        return accounted_tuning.Declared(self.statement, runs)
