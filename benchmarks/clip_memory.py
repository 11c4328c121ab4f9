"""Peak memory of one step above the level before it: parameters, totals and inputs are not counted.

On a GPU the allocator records the peak. On a CPU nothing does, so the profiler's record of every allocation and release
is added up; this includes scratch space inside operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

BUDGET = 2 << 30


@dataclass(frozen=True)
class Memory:
    """Peaks in bytes at two numbers of records."""

    small: int
    large: int
    peak_small: int
    peak_large: int

    @property
    def per_record(self) -> float:
        return (self.peak_large - self.peak_small) / (self.large - self.small)

    @property
    def largest_batch(self) -> int:
        """Number of records that fit into BUDGET, by the straight line through both peaks."""
        fixed = self.peak_large - self.per_record * self.large
        return max(0, int((BUDGET - fixed) // max(self.per_record, 1.0)))


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    return _peak_on_gpu(step) if device.type == "cuda" else _peak_on_cpu(step)


def _peak_on_gpu(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    memory = [event for event in events if event.name() == "[memory]"]
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(memory))  # pyright: ignore[reportAttributeAccessIssue]
    held = peak = 0
    for _, _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
