"""A forecast as text for people and as JSON for scripts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon
from murmuration.train.planner.cluster import Cluster
from murmuration.train.planner.drowned import drowned
from murmuration.train.planner.forecast import PhaseForecast
from murmuration.train.planner.memory import GIB


def as_json(phases: list[PhaseForecast], cluster: Cluster) -> str:
    found: list[dict[str, Any]] = []
    for phase in phases:
        value = asdict(phase)
        for name, layout in [("chosen", phase.chosen), *enumerate(phase.layouts)]:
            place = value["chosen"] if name == "chosen" else value["layouts"][name]
            place["memory"]["stays"] = layout.memory.stays
        if phase.time is not None:
            value["time"] |= {"seconds": phase.time.seconds}
        value |= {"batch": phase.batch.mean, "batch_spread": phase.batch.spread}
        value |= {
            "days": phase.days,
            "gpu_hours": phase.gpu_hours(cluster),
            "reads_per_second": phase.reads_per_second,
            "checkpoint_bytes": phase.checkpoint_bytes,
        }
        value |= {"warning": _warning(phase)}
        found.append(value)
    whole = {
        "gpu_hours": _sum([phase.gpu_hours(cluster) for phase in phases]),
        "days": _sum([phase.days for phase in phases]),
    }
    return json.dumps({"cluster": asdict(cluster), "phases": found, "total": whole}, indent=2)


def as_text(phases: list[PhaseForecast], cluster: Cluster) -> str:
    lines = [
        f"cluster: {cluster.gpus} GPUs of {cluster.memory_gib:g} GiB ({cluster.usable_bytes / GIB:.1f} used at most), "
        f"{cluster.tflops:g} TFLOP/s each, links of {cluster.link_gb_per_s:g} GB/s"
    ]
    for phase in phases:
        lines += ["", *_phase(phase, cluster)]
    days = _sum([phase.days for phase in phases])
    if len(phases) > 1 and days is not None:
        hours = _sum([phase.gpu_hours(cluster) for phase in phases])
        lines += ["", f"all phases: {days:.3g} days, {hours:,.1f} GPU-hours"]
    return "\n".join(lines)


def _phase(phase: PhaseForecast, cluster: Cluster) -> list[str]:
    kind = "non-private" if phase.plan is None else "private"
    cost, own = phase.cost, phase.weights
    flops = cost.private_flops if phase.plan else cost.step_flops
    lines = [
        f"phase {phase.name} ({phase.objective}, {kind}): {own.trainable:,} trainable, {own.frozen:,} frozen weights",
        f"  one record    {flops / 1e9:.3g} GFLOP, {cost.bytes / 2**20:.1f} MiB of activations"
        + (f" (clipping adds {cost.clipping_flops / cost.step_flops:.1%} to the arithmetic)" if phase.plan else ""),
        f"  {'memory/rank':16} {'stays':>9} {'+ update':>9} {'host':>9}   largest micro-batch",
    ]
    for layout in phase.layouts:
        name = f"stage {layout.stage}" + (" + offload" if layout.offload else "")
        if layout.ranks_per_copy:
            name = f"FSDP2 over {layout.ranks_per_copy}"
        graph = "" if layout.recorded is None else f" ({layout.recorded} as a CUDA graph)"
        marked = "  <- config" if layout == phase.chosen else ""
        need = layout.memory
        lines.append(
            f"  {name:<18}{_gib(need.stays):>8} {_gib(need.update):>9} {_gib(need.host + need.host_update):>9}   "
            f"{layout.micro_batch or 'does not fit'}{graph if layout.micro_batch else ''}{marked}"
        )
    time, reads = phase.time, phase.reads_per_second
    if time is not None and reads is not None:
        mixed = f" and {phase.mixed:,} public ones mixed in" if phase.mixed else ""
        lines += [
            f"  micro-batch   {phase.micro_batch}; {phase.batch.mean:,.0f} records{mixed} per step, "
            f"{time.rows:.4g} rows on average",
            f"  step          {_seconds(time.seconds)}: {_seconds(time.compute)} compute, {_seconds(time.exchange)} "
            f"exchange, noise {_seconds(time.noise)} beside it; reading is not counted",
            f"  all {phase.steps:,} steps  {phase.days:.3g} days, {phase.gpu_hours(cluster):,.1f} GPU-hours",
            f"  reading       {reads:,.0f} records per second, {reads / cluster.gpus:,.1f} for each GPU",
        ]
    lines.append(f"  disk          {_gib(phase.checkpoint_bytes)} a checkpoint, {phase.checkpoints} at once")
    if phase.plan is not None:
        lines.append(f"  σ             {phase.plan.noise_multiplier:g}, δ {show_delta(phase.plan.delta)}")
        shown = ", ".join(f"{step:,}: {show_epsilon(value)}" for step, value in phase.epsilons)
        lines.append(f"  ε by step     {shown} (budget {phase.plan.epsilon_budget:g})")
    if (warning := _warning(phase)) is not None:
        lines.append(f"  warning       {warning}")
    return lines + [f"  to change     {text}" for text in phase.advice]


def _warning(phase: PhaseForecast) -> str | None:
    return drowned(phase.plan, phase.weights.trainable, phase.calibrated) if phase.plan else None


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size else "-"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
