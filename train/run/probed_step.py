"""A step whose learning rate follows probes of the loss (`privacy.loss_probes`)."""

from __future__ import annotations

from murmuration.accounting.plan import CURVATURE, SLOPE, PrivacyPlan
from murmuration.train.optim.probed_rate import ProbedRate
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.trainer import Step
from murmuration.train.step import StepSummary
from murmuration.train.storage.checkpoint import Loaded

STATE = "probed_rate"
"""Its key in a checkpoint's manifest."""


def probed_rate(phase: ReadyPhase, plan: PrivacyPlan, loaded: Loaded | None = None) -> ProbedRate | None:
    """As the phase's own checkpoint has it, or as a phase begins; None where learning rates are the schedule's."""
    settings = None if phase.settings.privacy is None else phase.settings.privacy.loss_probes
    if settings is None:
        return None
    probing = plan.divisor * (1 - (plan.held_out or 0.0))  # by which `MetricRelease` divides
    noise = {metric.name: metric.std / probing for metric in plan.metrics}
    rate = ProbedRate(settings.every, settings.most, settings.span, noise[SLOPE], noise[CURVATURE])
    if loaded is not None and STATE in loaded.manifest:
        rate.restore(loaded.manifest[STATE])
    return rate


class ProbedStep:
    def __init__(self, step: Step, rate: ProbedRate) -> None:
        self.step, self.rate = step, rate

    def run(self, step: int, learning_rate: float) -> StepSummary:
        """`learning_rate`: the schedule's."""
        rate = learning_rate * self.rate.factor
        observed = self.step.run(step, rate)
        observed.released = self.rate.advance(step, rate, observed.released)
        return observed
