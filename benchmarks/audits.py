"""What honest audits show on average: lower bounds on epsilon from simulated runs of the plain Gaussian mechanism.

    OMP_NUM_THREADS=1 python benchmarks/audits.py [--audits N] [--canaries N]

An audit's step releases, along each canary's direction, noise alone or noise and the canary's gradient. That is drawn
here instead of trained, with full batches as `launch/audit.py` has them by default, and judged as the audit judges it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.audit_evidence import AuditBound, Claim, collect
from murmuration.accounting.epsilon.audit_pairs import pairs_of
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.event import Event

DELTA = 1e-5
SETTINGS = ((2.0, 4), (40.0, 8))
"""Claimed epsilon, and steps: the defaults of `launch/audit.py`, and `--epsilon 40 --steps 8`."""
STEINKE = "one-run (ε, δ)"


def audited(draw: np.random.Generator, canaries: int, claim: Claim, steps: int) -> AuditBound:
    included = draw.random(canaries) < 0.5
    values = included + claim.sigma * draw.standard_normal((steps, canaries))
    pairs = pairs_of(values, np.tile(included, (steps, 1)))
    return collect(values.sum(axis=0), included, pairs).bound(claim)


def means(bounds: Sequence[AuditBound]) -> dict[str, float]:
    """Means over audits of the best bound of (ε, δ) alone, of the best without assumptions, and of the best of all."""
    alone = [max(each.epsilon for each in bound.tried if each.method == STEINKE) for bound in bounds]
    return {
        STEINKE: statistics.mean(alone),
        "without assumptions": statistics.mean(bound.proven.epsilon for bound in bounds),
        "with assumptions": statistics.mean(bound.epsilon for bound in bounds),
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--audits", type=int, default=300, help="of each setting")
    parser.add_argument("--canaries", type=int, default=2000)
    chosen = parser.parse_args(given)
    for claimed, steps in SETTINGS:
        sigma = calibrate_sigma(Event(1.0, 1.0, steps), claimed, DELTA)
        events = (Event(1.0, sigma, steps),)
        claim, draw = Claim(events, epsilon(list(events), DELTA), DELTA), np.random.default_rng(steps)
        found = means([audited(draw, chosen.canaries, claim, steps) for _ in range(chosen.audits)])
        print(f"ε = {claimed:g} in {steps} steps, {chosen.canaries} canaries, {chosen.audits} audits:")
        print("".join(f"  {name}: {value:.2f}\n" for name, value in found.items()), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
