"""What a study would do, checked before its first run: every config, and the budgets of the records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from murmuration.accounting.epsilon.accountant import show_epsilon
from murmuration.accounting.errors import RunError
from murmuration.accounting.unit import unit_in_words
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.study.study_file import Run, Study
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.root import Config, Phase

PLANNED = "8 GPUs of 80 GiB at 150 TFLOP/s each"

if TYPE_CHECKING:
    from murmuration.train.recipe.ready_phase import ReadyPhase


def require_sound(runs: Sequence[Run]) -> list[Config]:
    """The config of each run; refuses the first that cannot be used."""
    found = []
    for run in runs:
        try:
            found.append(load(run.config, list(run.overrides)))
        except ConfigError as error:
            raise EvaluationError(f"{run.name}: {error}") from None
    return found


def plan_in_words(study: Study, runs: Sequence[Run], configs: Sequence[Config]) -> str:
    """`configs`: of all runs but those of published weights."""
    lines = [f"{study.title}: {len(runs)} runs ({study.seeds} of each)"]
    trained = [run for run in runs if run.weights is None]
    hours: list[float | None] = []
    known: dict[str, Any] = {}
    for run, config in zip(trained, configs, strict=True):
        if run.seed > 1:
            continue
        hours.append(planned_hours(config, known))
        phases = [f"{phase.name} ε = {phase.privacy.epsilon:g}" for phase in config.phases if phase.privacy is not None]
        told = "" if hours[-1] is None else f", {_two_digits(hours[-1])} GPU-hours"
        lines.append(f"  {run.name.rpartition('-')[0]:40} {', '.join(phases) or 'NOT PRIVATE'}{told}")
    lines += [f"  {run.name.rpartition('-')[0]:40} evaluated: {run.weights}" for run in runs if run.weights is not None]
    total = math.fsum(_epsilon(config) for config in configs)
    if total:
        # δ follows from the number of records, which a plan need not know.
        lines.append(
            f"on the same records the private runs together spend at most ε = {show_epsilon(total)}, at the sum of "
            "their δ, by adding them up"
        )
    if hours and None not in hours:
        whole = _two_digits(study.seeds * math.fsum(each for each in hours if each is not None))
        lines.append(f"{whole} GPU-hours in all, planned on {PLANNED}; evaluations are not counted")
    return "\n".join(lines)


def planned_hours(config: Config, known: dict[str, Any]) -> float | None:
    """By the planner, on GPUs for which the recipes' hours are planned, too. None where a config is not for GPUs.
    `known`: what records of earlier configs cost."""
    if config.run.engine == "local":
        return None
    from murmuration.train.planner.cluster import Cluster, PlannerError
    from murmuration.train.planner.forecast import counted, forecast

    def cost(config: Config, phase: Phase) -> Any:
        run, model = config.run, config.model
        own = (phase.objective, phase.trainable, phase.optimizer, phase.rows_of_a_slot, phase.privacy is None)
        key = f"{model} {run.precision} {run.gradient_checkpointing} {own}"
        if key not in known:
            known[key] = counted(config, phase)
        return known[key]

    cluster = Cluster(gpus=8, memory_gib=80, tflops=150, link_gb_per_s=25, noise_per_second=4e8)
    try:
        phases = forecast(_with_any_noise(config), cluster, counting=cost, priced=False)
    except PlannerError:
        return None
    hours = [phase.gpu_hours(cluster) for phase in phases]
    return None if None in hours else math.fsum(each for each in hours if each is not None)


def _with_any_noise(config: Config) -> Config:
    """Its hours do not depend on the noise, and calibrating it takes seconds."""
    phases = [
        phase if phase.privacy is None
        else phase.model_copy(update={"privacy": phase.privacy.model_copy(update={"noise_multiplier": 1.0})})
        for phase in config.phases
    ]  # fmt: skip
    return config.model_copy(update={"phases": phases})


def _two_digits(hours: float) -> str:
    return f"{float(f'{hours:.2g}'):,g}"


def _epsilon(config: Config) -> float:
    return math.fsum(phase.privacy.epsilon for phase in config.phases if phase.privacy is not None)


def require_budgets(configs: Sequence[Config], begun: Container[str] = ()) -> None:
    """Refuses a study whose runs would together exceed a budget of their records, before any of them spends it.
    `begun`: ids of those that are registered already."""
    from murmuration.train.recipe.ready_phase import prepare  # with PyTorch, which a typo need not wait for
    from murmuration.train.storage.sibling_runs import RunLog

    asked: dict[str, list[Config]] = defaultdict(list)
    for config in configs:
        asked[" ".join(str(getattr(phase.data, "path", "")) for phase in config.phases if phase.privacy)].append(config)
    for sharing in asked.values():
        for phase in _prepared(sharing, prepare):
            if phase.private:
                log = RunLog.of(phase.index, sharing[0].run.registry)
                log.require_budget(begun, math.fsum(map(_epsilon, sharing)), unit_in_words(phase.unit))


def _prepared(configs: Sequence[Config], prepare: Callable[[Config], list[ReadyPhase]]) -> list[ReadyPhase]:
    """The phases of the first config whose data can be opened: the other runs fail by themselves, with their reason."""
    for config in configs:
        with suppress(RunError):
            return prepare(config)
    return []
