"""Plans an audit, and refuses everything that can be refused before a process group is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from murmuration.accounting.epsilon.audit_bound import CONFIDENCE, numbers_of_guesses
from murmuration.accounting.plan import PrivacyPlan
from murmuration.model.build import build
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.privacy import Privacy
from murmuration.train.config.root import Config, Phase
from murmuration.train.recipe.ready_phase import ReadyPhase, RecipeError, clip_rule, make_plan, prepare

Kind = Literal["gradient", "input"]


@dataclass(frozen=True)
class AuditOptions:
    """Defaults with power: full batches and few steps hide nothing, and a claim of 2 lies below what 0.3·σ leaks. Where
    noise is correlated, `steps` counts blocks, in each of which a record has one turn, and `rate` is that of a turn."""

    canaries: int = 2000
    kind: Kind = "gradient"
    noise_scale: float = 1.0
    epsilon: float = 2.0
    delta: float = 1e-5
    steps: int = 4
    rate: float = 1.0
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
    trained_rate_batch: float
    """The config's own expected batch, for checking the sampler at the config's own sampling rate."""


def audited_phase(config: Config, kind: str) -> tuple[ReadyPhase, Privacy]:
    """The first private phase of the config, unless it has something that an audit of this kind ("an audit", "a
    replay") does not know."""
    phase = next((phase for phase in prepare(config) if phase.private), None)
    if phase is None or phase.settings.privacy is None:
        raise RecipeError("no phase of this config has `privacy`, so there is no claim to audit; name a private recipe")
    where, privacy = f"phases.{phase.number}.privacy", phase.settings.privacy
    if privacy.clip.adaptive is not None:
        raise RecipeError(f"{kind} holds C fixed; give --set {where}.clip.adaptive=null")
    if privacy.sampling != "poisson":
        raise RecipeError(f"{kind} counts on Poisson samples; give --set {where}.sampling=poisson")
    if privacy.scaling is not None:
        raise RecipeError(f"{kind} is of gradients as they are; give --set {where}.scaling=null")
    return phase, privacy


def set_up_audit(config: Config, options: AuditOptions) -> AuditSetup:
    numbers_of_guesses(options.canaries)
    phase, privacy = audited_phase(config, "an audit")
    where = f"phases.{phase.number}"
    weights = build(phase.shape, phase.settings.objective, device="meta").parameters()
    elements = sum(p.numel() for p in weights if p.requires_grad)
    if options.kind == "gradient" and options.canaries > elements:
        raise RecipeError(
            f"{options.canaries} canaries need as many parameters; the model has {elements}, so use fewer"
        )
    real = min(options.records, phase.n)
    bands = privacy.bands
    batch = options.rate * (real + options.canaries) / bands
    claim = {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "expected_batch": batch,
        "noise_multiplier": None,
        "release": [],
    }
    claimed = privacy.model_copy(update=claim)
    settings = phase.settings.model_copy(update={"privacy": claimed, "steps": options.steps * bands})
    if options.noise_scale != 1 and config.run.noise != "aes":
        raise RecipeError("--noise-scale weakens AES noise only; add --set run.noise=aes")
    plan = make_plan(settings, claimed, real + options.canaries, where, noise=config.run.noise)
    try:
        rule = clip_rule(claimed, plan, config.micro_batch)
    except RecipeError as error:
        best = round(math.sqrt(plan.divisor))
        hint = f"in an audit: --set train_micro_batch_size_per_gpu={best}, or fewer --canaries"
        raise RecipeError(f"{error} ({hint})") from None
    return AuditSetup(options, phase, settings, plan, rule, real, privacy.expected_batch)
