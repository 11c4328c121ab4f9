"""Learning rates as a pure function of the step.

ViP (arXiv 2306.08842): shape cosine, shape_from first-step, warmup 1000: peak · min(t/1000, half-cosine of (t-1)/T).
DP-Cap (2403.02506): shape cosine, warmup 2000, end 10000, first_step 0; its code's first update has rate 0; with
first_step 1 the warm-up is one step ahead and wastes none. Mehta et al. (2205.02973): linear (LAMB), cosine (momentum).
"""

from __future__ import annotations

import math

from murmuration.train.config.optimizer import Schedule


def learning_rate(schedule: Schedule, steps: int, step: int) -> float:
    """The learning rate of the given step, counted from 1, in a phase of `steps` steps."""
    passed = (step - 1) // schedule.hold * schedule.hold
    warm = min(1.0, (passed + schedule.first_step) / schedule.warmup) if schedule.warmup else 1.0
    rising = schedule.start + (schedule.peak - schedule.start) * warm
    return min(rising, _falling(schedule, steps, passed))


def _falling(schedule: Schedule, steps: int, passed: int) -> float:
    begin = schedule.warmup if schedule.shape_from == "warmup" else 0
    end = schedule.end or steps
    done = min(1.0, max(0, passed - begin) / max(1, end - begin))
    if schedule.shape == "constant":
        return schedule.peak
    if schedule.shape == "inverse-sqrt":
        knee = max(1, schedule.warmup)
        return schedule.peak * math.sqrt(knee / max(knee, passed + 1))
    left = 1.0 - done if schedule.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.floor + (schedule.peak - schedule.floor) * left
