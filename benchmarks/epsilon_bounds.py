"""How far apart the two bounds of epsilon are, over a grid of rates, noise and steps, and what they cost.

    OMP_NUM_THREADS=1 python benchmarks/epsilon_bounds.py

For each number of steps: how many settings have an epsilon that one may ask for, the median and the largest distance
of the bounds in parts of epsilon, where that is, and the processor seconds of an upper bound.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from murmuration.accounting.epsilon.accountant import epsilon, epsilon_below
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

DELTAS, SIGMAS, STEPS = (1e-6, 1e-9), (0.5, 0.7, 1.0, 2.0, 5.0), (100, 1000, 10_000, 100_000, 1_000_000)
RATES = tuple(10.0**-k for k in range(1, 8))
LEAST, MOST = 1e-4, 30.0


def main() -> None:
    print("| steps | settings | median | largest | at (q, σ, δ: ε) | CPU-s of an upper bound, mean and most |")
    print("|---|---|---|---|---|---|")
    for steps in STEPS:
        found, seconds = [], []
        for delta in DELTAS:
            for rate in RATES:
                for sigma in SIGMAS:
                    events = [Event(rate, sigma, steps)]
                    begun = time.process_time()
                    try:
                        above = epsilon(events, delta)
                    except AccountingError:
                        continue
                    spent = time.process_time() - begun
                    if LEAST < above < MOST:
                        seconds.append(spent)
                        below = epsilon_below(events, delta) or 0.0
                        found.append(((above - below) / above, rate, sigma, delta, above))
        apart, rate, sigma, delta, above = max(found)
        print(
            f"| {steps:,} | {len(found)} | {statistics.median(each[0] for each in found):.1e} | {apart:.2g} | "
            f"{rate:g}, {sigma:g}, {delta:g}: {above:.4g} | {statistics.mean(seconds):.2f}, {max(seconds):.2f} |"
        )


if __name__ == "__main__":
    main()
