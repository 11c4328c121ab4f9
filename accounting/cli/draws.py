"""How records take part in the steps that a command is asked about.

The words are those of a config: `--sampling` is `privacy.sampling`, `--bands` is `privacy.noise.bands`. A config with
the same numbers gets the same events.
"""

from __future__ import annotations

import argparse

from murmuration.accounting.banded import MOST_BANDS
from murmuration.accounting.errors import PlanError
from murmuration.accounting.plan import parse_delta
from murmuration.accounting.sampling import AnySampling, make_sampling


def asked_sampling(arguments: argparse.Namespace, batch: float, steps: int) -> AnySampling:
    """Who takes part in each step, as a plan would freeze it."""
    if steps < 1:
        raise PlanError(f"--steps must be at least 1, but is {steps}")
    require_usable(arguments)
    bands = arguments.bands
    if bands > min(arguments.n, steps):
        raise PlanError(f"--bands {bands} needs as many records and steps, not {arguments.n} and {steps}")
    kind = "poisson" if arguments.sampling == "shuffled" else arguments.sampling
    return make_sampling(kind, arguments.n, batch, steps, bands)


def require_usable(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.bands <= MOST_BANDS:
        raise PlanError(f"--bands must lie between 1 and {MOST_BANDS}, but is {arguments.bands}")
    if arguments.bands > 1 and arguments.sampling != "poisson":
        raise PlanError(f"--sampling {arguments.sampling} is proved for independent noise alone; leave --bands out")


def delta_of(arguments: argparse.Namespace) -> float:
    if arguments.n < 1:
        raise PlanError(f"--n must be at least 1, but is {arguments.n}")
    return parse_delta(arguments.delta, arguments.n)
