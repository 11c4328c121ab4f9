"""Measures one workload in this process: first correctness, then time, then memory, then whole logical steps."""

from __future__ import annotations

import gc
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from clip_engines import BASELINE, ENGINES, Contender, available
from clip_flops import Cost, cost_of
from clip_judge import Judge
from clip_logical import logical_steps
from clip_memory import Memory, peak_bytes
from clip_models import Weights, Workload
from clip_timing import interleaved

from murmuration.train.clip.engine import assert_exact_matmul

Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to measure of a workload; without micro-batch sizes, the workload's own is used."""

    model: str
    engines: Sequence[str]
    rounds: int
    device: str
    bf16: bool
    micro_batches: Sequence[int]


def environment(request: Request) -> Row:
    device = torch.device(request.device)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        "precision": "bf16 autocast" if request.bf16 else "fp32",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "timm", "opacus")},
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def measure(name: str, workload: Workload, request: Request) -> Row:
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    assert_exact_matmul()
    if request.device == "cpu":
        torch.set_num_threads(1)
    device = torch.device(request.device)
    model = workload.model(device)
    judge, weights = Judge(workload, model, device), Weights(model)
    rows: dict[str, Row] = {}
    ready: dict[str, Contender] = {}
    for engine in (BASELINE, *(e for e in request.engines if e != BASELINE and available(e))):
        rows[engine] = {"model": name, "engine": engine}
        _guarded(rows[engine], lambda engine=engine: _judged(engine, judge, weights, request, rows, ready))
    # Brute-force records in fp64 are larger than everything else combined.
    bound, judge.records = judge.bound, []
    cost = cost_of(ready[BASELINE].model, workload.batch(1, device))
    measured = [
        _at(workload, size, rows, ready, request, cost) for size in request.micro_batches or [workload.micro_batch]
    ]
    logical = logical_steps(workload, ready[BASELINE], ready["ours"], device) if "ours" in ready else None
    return {
        "model": name, "about": workload.about, "clip_norm": bound, "environment": environment(request),
        "gflops_per_record": {k: v / 1e9 for k, v in vars(cost).items()},
        "rows": [row for rows_of_size in measured for row in rows_of_size], "logical": logical,
    }  # fmt: skip


def _judged(engine: str, judge: Judge, weights: Weights, request: Request, rows: dict[str, Row], ready: Any) -> None:
    contender = ENGINES[engine](weights, judge.bound, request.bf16)
    rows[engine]["note"] = contender.note
    if not engine.startswith(BASELINE):
        rows[engine]["error"] = judge.error(contender)
        rows[engine]["max_contribution"] = judge.max_contribution(contender)
    ready[engine] = contender


def _guarded(row: Row, act: Callable[[], None]) -> bool:
    """A failing engine is a result too: its row says how it failed."""
    try:
        act()
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        return False
    return True


def _at(
    workload: Workload, size: int, judged: dict[str, Row], ready: dict[str, Contender], request: Request, cost: Cost
) -> list[Row]:
    """Time and memory at one micro-batch size."""
    device = torch.device(request.device)
    common = {"micro_batch": size, "flop_bound": cost.bound, "flop_bound_full_gram": cost.bound_full_gram}
    rows = {engine: row | common for engine, row in judged.items()}
    batch = workload.batch(size, device)
    steps = {e: (lambda c=c: c.step(batch)) for e, c in ready.items()}
    alive = {e: step for e, step in steps.items() if _guarded(rows[e], step)}
    if BASELINE not in alive:
        return list(rows.values())
    for e in steps.keys() - alive.keys():
        # Usually out of memory: it will not fit with more records either, and its memory must be freed.
        judged[e]["failed"] = rows[e]["failed"]
        del ready[e], steps[e]
    gc.collect()
    torch.cuda.empty_cache()
    others = {e: step for e, step in alive.items() if e != BASELINE}
    # Peers take two thirds of the time, and their ratios are far from those that are compared here.
    seldom = [e for e in others if not e.startswith("ours")]
    for engine, timing in interleaved(alive[BASELINE], others, request.rounds, device, seldom).items():
        row = rows[engine or BASELINE]
        row |= timing.summary()
        row["records_per_second"] = size / row["seconds"]
    plain = _weigh(workload, ready[BASELINE], size, device)
    for e in alive:
        _guarded(rows[e], lambda e=e: _weighed(rows[e], workload, ready[e], size, device, plain))
    return list(rows.values())


def _weigh(workload: Workload, contender: Contender, size: int, device: torch.device) -> Memory:
    peaks, sizes = [], (size // 2, size) if size > 1 else (1, 2)
    for records in sizes:
        batch = workload.batch(records, device)
        gc.collect()
        peaks.append(peak_bytes(lambda batch=batch: contender.step(batch), device))
    return Memory(*sizes, *peaks)


def _weighed(
    row: Row, workload: Workload, contender: Contender, size: int, device: torch.device, plain: Memory
) -> None:
    memory = plain if row["engine"] == BASELINE else _weigh(workload, contender, size, device)
    row |= {
        "memory_mib": memory.peak_large / 2**20,
        "memory_ratio": memory.peak_large / plain.peak_large,
        "memory_per_record_mib": memory.per_record / 2**20,
        "memory_per_record_ratio": memory.per_record / plain.per_record,
        "max_batch": memory.largest_batch,
    }
