"""Time of a step as a ratio to the non-private steps just before and after it, in one process, in shuffled order.

A machine's speed drifts, and other programs disturb it; a ratio within a second or two is hardly affected.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], None]
# The real number is one more, since every step has already run once before it is timed.
WARM_UPS = 1
# Shortest time, in seconds, that is worth reading the clock for.
SHORTEST, MOST_REPEATS = 0.1, 20


@dataclass(frozen=True)
class Timing:
    """Seconds of each step and its ratio to its two non-private neighbours."""

    seconds: list[float]
    ratios: list[float]

    def summary(self) -> dict[str, float]:
        return {
            "time_ratio": statistics.median(self.ratios),
            "time_ratio_min": min(self.ratios),
            "time_ratio_max": max(self.ratios),
            "seconds": statistics.median(self.seconds),
            "rounds": len(self.ratios),
        }


def seconds_of(step: Step, device: torch.device) -> float:
    """Process time on a CPU (other processes do not count), events on a GPU."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begun = time.process_time()
    step()
    return time.process_time() - begun


def repeated(step: Step, times: int) -> Step:
    def run() -> None:
        for _ in range(times):
            step()

    return run


def interleaved(
    baseline: Step, others: Mapping[str, Step], rounds: int, device: torch.device, seldom: Collection[str] = ()
) -> dict[str, Timing]:
    """One round: each of the others once, in shuffled order, with a non-private step between any two; those that are
    timed `seldom`, in every second round.

    The name "" has the non-private steps themselves, each against the ones before and after it.
    """
    plain = _long_enough(baseline, device)
    timed = {name: _long_enough(step, device) for name, step in others.items()}
    found: dict[str, Timing] = {name: Timing([], []) for name in others}
    shuffle, names = random.Random(0), list(others)
    between = [plain()]
    for number in range(rounds):
        shuffle.shuffle(names)
        for name in (name for name in names if name not in seldom or number % 2 == 0):
            here = timed[name]()
            between.append(plain())
            found[name].seconds.append(here)
            found[name].ratios.append(2 * here / (between[-2] + between[-1]))
    own = [2 * here / (before + after) for before, here, after in zip(between, between[1:], between[2:], strict=False)]
    return found | {"": Timing(between, own or [1.0])}


def _long_enough(step: Step, device: torch.device) -> Callable[[], float]:
    """Warms up, and returns a function that times one step; it repeats short steps several times."""
    repeated(step, WARM_UPS)()
    times = max(1, min(MOST_REPEATS, int(SHORTEST / max(seconds_of(step, device), 1e-9))))
    return lambda: seconds_of(repeated(step, times), device) / times
