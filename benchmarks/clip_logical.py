"""Whole logical steps of many micro-batches: their cost per record must not depend on the number of micro-batches.

It is measured at the low end. At the high end it is counted: a micro-batch calls the same operators and reaches the
same memory peak whether it is the first or the last, so a step of 2²⁰ records costs 2²⁰ / micro-batch times one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from clip_engines import Contender
from clip_memory import peak_bytes
from clip_models import Inputs, Workload
from clip_timing import seconds_of
from torch.utils._python_dispatch import TorchDispatchMode

HIGH_END = 1 << 20


class _Calls(TorchDispatchMode):
    """Counts operators that are called."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: Callable[[], None]) -> int:
    with _Calls() as calls:
        step()
    return calls.count


def logical_steps(workload: Workload, baseline: Contender, ours: Contender, device: torch.device) -> dict[str, Any]:
    size = workload.logical_micro_batch or workload.micro_batch
    batches = [workload.batch(size, device, seed) for seed in range(8)]

    def whole(contender: Contender, count: int) -> Callable[[], None]:
        def run() -> None:
            contender.clear()
            for i in range(count):
                contender.step(batches[i % len(batches)])

        return run

    def one(inputs: Inputs) -> Callable[[], None]:
        return lambda: ours.step(inputs)

    whole(ours, 1)()
    whole(baseline, 1)()
    first = calls_of(one(batches[0])), peak_bytes(one(batches[0]), device)
    rows = []
    for count in workload.logical:
        plain, here = seconds_of(whole(baseline, count), device), seconds_of(whole(ours, count), device)
        record = {"logical_batch": count * size, "micro_batches": count, "seconds_per_record": here / (count * size)}
        rows.append(record | {"time_ratio": here / plain})
    # The totals now contain the longest step; one more micro-batch is measured on top of it.
    last = calls_of(one(batches[0])), peak_bytes(one(batches[0]), device)
    ours.clear()
    return {
        "micro_batch": size,
        "measured": rows,
        "calls_first": first[0],
        "calls_last": last[0],
        "peak_first": first[1],
        "peak_last": last[1],
        "counted_calls_per_record": {
            str(n): first[0] * -(-n // size) / n for n in (1 << 7, 1 << 10, 1 << 14, HIGH_END) if n >= size
        },
    }
