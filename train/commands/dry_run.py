"""`--dry-run`: what a config means, resolved and counted, without touching a GPU or a private record."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from murmuration.accounting.epsilon.accountant import round_up
from murmuration.model.build import build
from murmuration.model.trainable import select
from murmuration.train.config.data import CheckpointData
from murmuration.train.config.root import Config, Phase
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.planner.memory import GIB, memory, simulation, weights_of
from murmuration.train.recipe.labels import check_at_hand, named_lists
from murmuration.train.recipe.open_data import known_records
from murmuration.train.recipe.ready_phase import clip_rule, make_plan, planned_epsilon, resolve_shape, with_steps


def dry_run(config: Config) -> str:
    """Text for people; the resolved config in it is JSON."""
    shape = resolve_shape(config)
    lines = ["resolved config:", json.dumps(config.model_dump(by_alias=True, exclude_none=True), indent=2)]
    lines += ["", "resolved model:", json.dumps(asdict(shape), indent=2)]
    lines += ["", f"engine: {EngineSettings.of(config)}"]
    check_at_hand(config, shape.head.classes)
    for where, path in named_lists(config):
        lines += [f"{where}: {path}{'' if path.exists() else '; not at hand, and needed to train'}"]
    for number, phase in enumerate(config.phases):
        lines += ["", f"phase {number} ({phase.name}, {phase.objective}):"]
        if not phase.trains:
            lines += [f"  {_without_steps(phase)}"]
            continue
        model = build(shape, phase.objective, device="meta")
        select(model, phase.trainable)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        lines += [f"  parameters    {trainable:,} trainable ({phase.trainable})"]
        lines += [f"  {text}" for text in _promise(config, number, phase)]
        lines += [f"  memory/rank   {_memory(config, phase, model)}"]
    return "\n".join(lines)


def _without_steps(phase: Phase) -> str:
    if isinstance(phase.data, CheckpointData):
        there = "" if Path(phase.data.path).exists() else "; not at hand, and needed to train"
        return f"starts from   {phase.data.path}{there}"
    return f"only measures {phase.evaluation.path if phase.evaluation else ''}"


def _promise(config: Config, number: int, phase: Phase) -> list[str]:
    where = f"phases.{number}"
    if phase.privacy is None:
        marked = "on public data" if phase.data.public else "on data not declared public: the run is NOT PRIVATE"
        if phase.epochs is not None:
            phase = with_steps(phase, known_records(phase, where)[0], where, config.run.noise)
        return [f"non-private   {marked}; batch {phase.batch}, {phase.steps} steps"]
    records, source = known_records(phase, where)
    phase = with_steps(phase, records, where, config.run.noise)
    assert phase.privacy is not None
    plan = make_plan(phase, phase.privacy, records, where, noise=config.run.noise)
    clip_rule(phase.privacy, plan, config.micro_batch)
    spent = planned_epsilon(plan)
    found = [
        f"n             {plan.records:,} ({source})",
        f"q             {plan.sampling_rate:.8g} = {plan.threshold}/2^32 (expected batch {plan.divisor:,.2f})",
        f"sigma         {plan.noise_multiplier:g}"
        + (" (calibrated)" if phase.privacy.noise_multiplier is None else " (given)"),
        *([f"noise         exact; charged as {plan.charged_as(1):.6f}·sigma for its grid"] if plan.grid_growth else []),
        *(f"released      {m.name}: bound {m.bound:g}, noise {m.std:g} per step" for m in plan.metrics),
        f"C             {plan.clip_norm:g} ({phase.privacy.clip.kind})",
        f"T             {plan.steps}",
        f"epsilon       {round_up(spent)} of {plan.epsilon_budget:g} (PLD)",
        f"delta         {plan.delta:.6g}",
    ]
    if (note := simulation(plan)) is not None:
        found.append(f"note          {note}")
    if spent > plan.epsilon_budget:
        found.append("note          the budget ends the phase before its last step")
    return found


def _memory(config: Config, phase: Phase, model: nn.Module) -> str:
    """Memory that every rank needs plus memory split over N ranks, as the planner counts it, without activations.

    FSDP2 shards what ZeRO-3 shards, and its optimizer needs no copy of the weights.
    """
    fsdp = config.run.engine == "fsdp2"
    zero = config.zero_optimization
    weights = weights_of(model, phase)
    if fsdp:
        weights = replace(weights, optimizer_copy=0)

    def held(ranks: int) -> float:
        need = memory(weights, 3 if fsdp else zero.stage, ranks, zero.offload_optimizer is not None)
        return (need.stays + max(need.while_computing, need.update)) / GIB

    many = 1 << 20
    fixed, split = held(many), held(1) - held(many)
    sums = "fp64 sums and " if weights.private else ""
    text = f"{fixed:.2f} GiB + {split:.2f} GiB/N for weights, gradients, {sums}optimizer"
    if phase.privacy is not None and config.run.clip_engine != "book-keeping":
        per_record = 4 * weights.trainable * config.micro_batch / GIB
        text += f" + {per_record:.2f} GiB for per-record gradients"
    return text
