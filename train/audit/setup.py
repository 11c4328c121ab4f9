"""Plans an audit, and refuses everything that can be refused before a process group is started."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from murmuration.accounting.epsilon.audit_bound import CONFIDENCE, numbers_of_guesses
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import MOST_OFF, AnySampling, make_sampling
from murmuration.model.build import build
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.privacy import Privacy
from murmuration.train.config.root import Config, Phase
from murmuration.train.recipe.ready_phase import ReadyPhase, RecipeError, clip_rule, plan_of_phase, prepare

CanaryKind = Literal["gradient", "input"]


@dataclass(frozen=True)
class AuditOptions:
    """Defaults with power: full batches and few steps hide nothing, and a claim of 2 lies below what 0.3·σ leaks. Where
    noise is correlated, `steps` counts blocks, in each of which a record has one turn, and `rate` is that of a turn;
    with random allocation, epochs, and `rate` is 1 over their steps."""

    canaries: int = 2000
    kind: CanaryKind = "gradient"
    noise_scale: float = 1.0
    epsilon: float = 2.0
    delta: float = 1e-5
    steps: int = 4
    rate: float | None = None
    """None: 1, or 1/2 with random allocation."""
    again: int = 0
    """How many of the last steps, blocks or epochs are made again in a second segment, with keys of its own. That
    begins in the middle of the first of them."""
    records: int = 256
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class AuditSetup:
    """`phase` is the config's, `settings` the shortened one that is trained; records up to `real` are real, the rest
    are canaries."""

    options: AuditOptions
    phase: ReadyPhase
    settings: Phase
    plan: PrivacyPlan
    rule: ClipRule
    real: int
    trained: AnySampling
    """As the config itself draws, of all records together, for checking the sampler."""

    @property
    def resumed_after(self) -> int:
        """The step after which the second segment begins."""
        together = self.plan.sampling.period
        return self.plan.steps - self.options.again * together + together // 2


def audited_phase(config: Config, kind: str) -> tuple[ReadyPhase, Privacy]:
    """The first private phase of the config, unless it has something that an audit of this kind ("an audit", "a
    replay") does not know."""
    phase = next((phase for phase in prepare(config) if phase.private), None)
    if phase is None or phase.settings.privacy is None:
        raise RecipeError("no phase of this config has `privacy`, so there is no claim to audit; name a private recipe")
    if phase.settings.privacy.clip.adaptive is not None:
        raise RecipeError(f"{kind} holds C fixed; give --set {phase.where}.privacy.clip.adaptive=null")
    return phase, phase.settings.privacy


def set_up_audit(config: Config, options: AuditOptions) -> AuditSetup:
    numbers_of_guesses(options.canaries)
    phase, privacy = audited_phase(config, "an audit")
    weights = build(phase.shape, phase.settings.objective, device="meta").parameters()
    elements = sum(p.numel() for p in weights if p.requires_grad)
    if options.kind == "gradient" and options.canaries > elements:
        raise RecipeError(
            f"{options.canaries} canaries need as many parameters; the model has {elements}, so use fewer"
        )
    real = min(options.records, phase.n)
    together, rate = _turn(privacy, options, phase.where)
    batch = rate * (real + options.canaries) / privacy.bands
    claim = {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "expected_batch": batch,
        "noise_multiplier": None,
        "release": [],
        "loss_probes": None,
    }
    claimed = privacy.model_copy(update=claim)
    settings = phase.settings.model_copy(update={"privacy": claimed, "steps": options.steps * together})
    if options.noise_scale != 1 and config.run.noise != "aes":
        raise RecipeError("--noise-scale weakens AES noise only; add --set run.noise=aes")
    plan = plan_of_phase(settings, real + options.canaries, phase.where, config.run.noise)
    if options.again:  # they are charged, too
        longer = settings.model_copy(update={"steps": (options.steps + options.again) * together})
        charged = plan_of_phase(longer, real + options.canaries, phase.where, config.run.noise)
        plan = replace(plan, noise_multiplier=charged.noise_multiplier)
    try:
        rule = clip_rule(claimed, plan, config.micro_batch)
    except RecipeError as error:
        best = round(math.sqrt(plan.divisor))
        hint = f"in an audit: --set train_micro_batch_size_per_gpu={best}, or fewer --canaries"
        raise RecipeError(f"{error} ({hint})") from None
    trained = make_sampling(privacy.sampling, phase.n, privacy.expected_batch, phase.settings.steps)
    return AuditSetup(options, phase, settings, plan, rule, real, trained)


def _turn(privacy: Privacy, options: AuditOptions, where: str) -> tuple[int, float]:
    """The steps of a turn, and the rate at which a step draws those whose turn it is."""
    allocated = privacy.sampling == "allocation"
    rate = options.rate or (0.5 if allocated else 1.0)
    if not allocated:
        return privacy.bands, rate
    slots = round(1 / rate)
    if slots < 2 or abs(rate * slots - 1) > MOST_OFF:
        raise RecipeError(
            f"--rate {rate:g} is not 1 over the steps of an epoch, in one of which {where}.privacy.sampling = "
            "allocation lets a record take part; give 0.5, or 1 over a larger whole number"
        )
    return slots, 1 / slots
