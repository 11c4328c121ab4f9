"""A step whose learning rate follows probes of the loss (`privacy.loss_probes`)."""

from __future__ import annotations

from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.optim.probed_rate import STATE, ProbedRate
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.trainer import Step
from murmuration.train.step import StepSummary
from murmuration.train.storage.checkpoint import Loaded


def probed_rate(phase: ReadyPhase, plan: PrivacyPlan, loaded: Loaded | None = None) -> ProbedRate | None:
    """As the phase's own checkpoint has it, or as a phase begins; None where learning rates are the schedule's."""
    if (privacy := phase.settings.privacy) is None:
        return None
    return ProbedRate.of(privacy.loss_probes, plan, None if loaded is None else loaded.manifest.get(STATE))


class ProbedStep:
    def __init__(self, step: Step, rate: ProbedRate) -> None:
        self.step, self.rate = step, rate

    def run(self, step: int, learning_rate: float) -> StepSummary:
        """`learning_rate`: the schedule's."""
        rate = learning_rate * self.rate.factor
        observed = self.step.run(step, rate)
        observed.released = self.rate.advance(step, rate, observed.released)
        return observed
