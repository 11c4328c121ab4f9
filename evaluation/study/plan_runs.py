"""What a study would do, checked before its first run: every config, and the budgets of the records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from murmuration.accounting.errors import RunError
from murmuration.accounting.unit import unit_in_words
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.study.study_file import Run, Study
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.root import Config

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
    lines = [f"{study.title}: {len(runs)} runs ({study.seeds} of each)"]
    for run, config in zip(runs, configs, strict=True):
        if run.seed > 1:
            continue
        phases = [f"{phase.name} ε = {phase.privacy.epsilon:g}" for phase in config.phases if phase.privacy is not None]
        lines.append(f"  {run.name.rpartition('-')[0]:40} {', '.join(phases) or 'NOT PRIVATE'}")
    total = math.fsum(_epsilon(config) for config in configs)
    if total:
        lines.append(f"on the same records the private runs together spend at most ε = {total:g}, by adding them up")
    return "\n".join(lines)


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
