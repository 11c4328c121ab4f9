"""`--dry-run`: what a config means, resolved and counted, without touching a GPU or a private record.

`meaning` finds it out, as values; `as_text` says it to people and `as_json` to scripts.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from murmuration.accounting.epsilon.accountant import epsilon, round_up, show_delta
from murmuration.accounting.escaping import printable_lines
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.unit import contribution_in_words
from murmuration.model.build import build
from murmuration.model.load_report import WeightsError
from murmuration.model.settings import Shape
from murmuration.model.warm_start import initialise_from
from murmuration.train.config.data import CheckpointData
from murmuration.train.config.root import Config, Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.planner.drowned import drowned
from murmuration.train.planner.memory import GIB, memory_of, weights_of
from murmuration.train.recipe.labels import check_at_hand, named_lists
from murmuration.train.recipe.open_data import known_records
from murmuration.train.recipe.ready_phase import (
    clip_rule,
    plan_of_phase,
    planned_epsilon,
    resolve_shape,
    select_trained,
    with_steps,
)
from murmuration.train.recipe.record_names import names_at_hand
from murmuration.train.recipe.weights_at_hand import EXPORTED


@dataclass(frozen=True)
class Promise:
    """What a private phase promises, and at what noise."""

    plan: PrivacyPlan
    epsilon: float
    """What all steps spend, rounded up."""
    records_known: str
    """How n is known."""
    calibrated: bool
    clip: str

    @property
    def notes(self) -> list[str]:
        early = self.epsilon > self.plan.epsilon_budget
        return ["the budget ends the phase before its last step"] if early else []


@dataclass(frozen=True)
class MemoryNeed:
    """GiB for weights, gradients and optimizer, as the planner counts them, without activations."""

    each_rank: float
    split: float
    """What N ranks share."""
    per_record: float
    """What the engines for checking keep for the gradients of a micro-batch."""


@dataclass(frozen=True)
class PhaseMeaning:
    """One phase; a phase without steps has neither parameters nor memory."""

    number: int
    phase: Phase
    trainable: int = 0
    promise: Promise | None = None
    memory: MemoryNeed | None = None
    notes: list[str] = field(default_factory=list)
    """Names that the index could not be asked for."""
    warning: str | None = None
    """Why nothing can be learned, and the nearest plan of which something can."""


@dataclass(frozen=True)
class Meaning:
    config: Config
    shape: Shape
    phases: list[PhaseMeaning]


def meaning(config: Config) -> Meaning:
    shape = resolve_shape(config)
    check_at_hand(config, shape.head.classes)
    # Weights that are at hand must fit the model, by the names and shapes in the header of their file.
    for number, (phase, following) in enumerate(itertools.pairwise(config.phases)):
        if not isinstance(phase.data, CheckpointData) or not following.trains:
            continue
        path = Path(phase.data.path)
        file = path / EXPORTED if path.is_dir() else path
        if file.suffix != ".safetensors" or not file.is_file():
            continue
        try:
            initialise_from(build(shape, following.objective, device="meta"), path)
        except WeightsError as error:
            raise RecipeError(f"phases.{number}.data.path: {str(error).rstrip('.')}") from None
    return Meaning(config, shape, [_of_phase(config, shape, *numbered) for numbered in enumerate(config.phases)])


def _of_phase(config: Config, shape: Shape, number: int, phase: Phase) -> PhaseMeaning:
    notes = [*names_at_hand(number, phase), *([phase.blind] if phase.blind else [])]
    if not phase.trains:
        return PhaseMeaning(number, phase, notes=notes)
    model = build(shape, phase.objective, device="meta")
    select_trained(model, phase)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    phase, promise = _promise(config, number, phase)
    warning = drowned(promise.plan, trainable, promise.calibrated) if promise is not None else None
    return PhaseMeaning(number, phase, trainable, promise, _memory(config, phase, model), notes, warning)


def _promise(config: Config, number: int, phase: Phase) -> tuple[Phase, Promise | None]:
    """The phase with its steps as a number, and what it promises if it is private."""
    where = f"phases.{number}"
    if phase.privacy is None:
        if phase.epochs is not None:
            phase = with_steps(phase, known_records(phase, where)[0], where)
        return phase, None
    records, source = known_records(phase, where)
    phase = with_steps(phase, records, where)
    assert phase.privacy is not None
    plan = plan_of_phase(phase, records, where, config.run.noise)
    clip_rule(phase.privacy, plan, config.micro_batch)
    calibrated = phase.privacy.noise_multiplier is None
    return phase, Promise(plan, round_up(planned_epsilon(plan)), source, calibrated, phase.privacy.clip.kind)


def _memory(config: Config, phase: Phase, model: nn.Module) -> MemoryNeed:
    weights = weights_of(model, phase)

    def held(ranks: int) -> float:
        need = memory_of(config, weights, ranks)
        return (need.stays + max(need.while_computing, need.update)) / GIB

    many = 1 << 20
    per_record = 0.0
    if phase.privacy is not None and config.run.clip_engine != "book-keeping":
        per_record = 4 * weights.trainable * config.micro_batch / GIB
    return MemoryNeed(held(many), held(1) - held(many), per_record)


def as_text(found: Meaning) -> str:
    lines = [f"engine: {EngineSettings.of(found.config)}"]
    for where, path, _ in named_lists(found.config):
        lines += [f"{where}: {path}{_at_hand(path)}"]
    for one in found.phases:
        lines += ["", f"phase {one.number} ({one.phase.name}, {one.phase.objective}):"]
        lines += [f"  note          {text}" for text in one.notes]
        lines += [f"  {line}" for line in _told(one)]
    promised = [one.promise for one in found.phases if one.promise is not None]
    if len(promised) > 1 and len({promise.plan.delta for promise in promised}) == 1:  # a run claims one delta
        lines += ["", _together([promise.plan for promise in promised])]
    return printable_lines("\n".join(lines))


def _together(plans: list[PrivacyPlan]) -> str:
    """What a record is promised by the run, as its certificate will say."""
    delta, budget = plans[0].delta, sum(plan.epsilon_budget for plan in plans)
    spent = epsilon([plan.event() for plan in plans], delta)
    return f"all private phases together: epsilon {round_up(spent)} of {budget:g}, delta {show_delta(delta, 6)}"


def _at_hand(path: Path) -> str:
    return "" if path.exists() else "; not at hand, and needed to train"


def _told(one: PhaseMeaning) -> list[str]:
    phase = one.phase
    if one.memory is None:
        if isinstance(phase.data, CheckpointData):
            return [f"starts from   {phase.data.path}{_at_hand(Path(phase.data.path))}"]
        return [f"only measures {phase.evaluation.path if phase.evaluation else ''}"]
    lines = [f"parameters    {one.trainable:,} trainable ({phase.trainable})"]
    if one.promise is not None:
        lines += _promised(one.promise)
    else:
        marked = "on public data" if phase.data.public else "on data not declared public: the run is NOT PRIVATE"
        lines += [f"non-private   {marked}; batch {phase.batch}, {phase.steps} steps"]
    sums = "fp64 sums and " if one.promise is not None else ""
    need = one.memory
    text = f"{need.each_rank:.2f} GiB + {need.split:.2f} GiB/N for weights, gradients, {sums}optimizer"
    if need.per_record:
        text += f" + {need.per_record:.2f} GiB for per-record gradients"
    lines += [f"memory/rank   {text}"]
    return lines if one.warning is None else [*lines, f"warning       {one.warning}"]


def _promised(promise: Promise) -> list[str]:
    plan = promise.plan
    return [
        f"n             {plan.records:,} ({promise.records_known})",
        f"unit          {plan.unit}" + ("" if plan.units is None else f": {contribution_in_words(plan.units)}"),
        plan.sampling.in_a_dry_run(plan.records, plan.steps),
        f"sigma         {plan.noise_multiplier:g}" + (" (calibrated)" if promise.calibrated else " (given)"),
        *plan.noise.in_a_dry_run(plan.noise_multiplier, plan.steps),
        *(f"released      {m.name}: bound {m.bound:g}, noise {m.std:g} per step" for m in plan.metrics),
        f"C             {plan.clip_norm:g} ({promise.clip})",
        *([f"views         {plan.views} of each record, clipped as one"] if plan.views > 1 else []),
        f"T             {plan.steps}",
        f"epsilon       {promise.epsilon} of {plan.epsilon_budget:g} (PLD)",
        f"delta         {show_delta(plan.delta, 6)}",
        *(f"note          {note}" for note in promise.notes),
    ]


def as_json(found: Meaning) -> str:
    whole = {
        "config": found.config.model_dump(by_alias=True, exclude_none=True),
        "model": asdict(found.shape),
        "engine": str(EngineSettings.of(found.config)),
        "lists": {where: {"path": str(path), "at_hand": path.exists()} for where, path, _ in named_lists(found.config)},
        "phases": [_as_values(one) for one in found.phases],
    }
    return json.dumps(whole, indent=2)


def _as_values(one: PhaseMeaning) -> dict[str, Any]:
    phase = one.phase
    value: dict[str, Any] = {"number": one.number, "name": phase.name, "objective": phase.objective, "names": one.notes}
    if one.memory is None:
        return value
    value |= {"trainable": phase.trainable, "parameters": one.trainable, "steps": phase.steps}
    value |= {"private": one.promise is not None, "memory_gib": asdict(one.memory)}
    if one.promise is None:
        return value | {"batch": phase.batch, "public": phase.data.public}
    promise, plan = one.promise, one.promise.plan
    return value | {
        "n": plan.records, "n_known": promise.records_known, "q": plan.sampling_rate,
        "expected_batch": plan.divisor, "sigma": plan.noise_multiplier, "calibrated": promise.calibrated,
        "clip_norm": plan.clip_norm, "clip_kind": promise.clip, "epsilon": promise.epsilon,
        "epsilon_budget": plan.epsilon_budget, "delta": plan.delta, "plan": plan.as_dict(),
        "notes": promise.notes, "warning": one.warning,
    }  # fmt: skip
