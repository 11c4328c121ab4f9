"""How records take part in the steps that a command is asked about, and the events that these come to.

The words are those of a config: `--sampling` is `privacy.sampling`, `--bands` is `privacy.noise.bands`. A config with
the same numbers gets the same events.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from murmuration.accounting.banded import MOST_BANDS
from murmuration.accounting.plan import Event, PlanError, draws_for, parse_delta, rate_of, threshold_of, turns_for


@dataclass(frozen=True)
class Draws:
    """Who takes part in each step, as a plan would freeze it."""

    records: int
    threshold: int
    slots: int = 1
    """Above 1: the steps of an epoch of random allocation."""
    bands: int = 1
    """Above 1: in how many parts the records take turns."""

    @staticmethod
    def asked(arguments: argparse.Namespace, batch: float, steps: int) -> Draws:
        if steps < 1:
            raise PlanError(f"--steps must be at least 1, but is {steps}")
        require_usable(arguments)
        sampling, bands = arguments.sampling, arguments.bands
        if bands > min(arguments.n, steps):
            raise PlanError(f"--bands {bands} needs as many records and steps, not {arguments.n} and {steps}")
        kind = "allocation" if sampling == "allocation" else "poisson"
        threshold, slots = draws_for(kind, arguments.n, batch, steps, bands)
        return Draws(arguments.n, threshold, slots, bands)

    @staticmethod
    def allocated(records: int, slots: int) -> Draws:
        return Draws(records, threshold_of(slots), slots)

    @property
    def rate(self) -> float:
        """At which a step draws from the records whose turn it is."""
        return rate_of(self.threshold, self.slots)

    @property
    def expected_batch(self) -> float:
        return self.records / self.slots if self.slots > 1 else self.rate * self.records / self.bands

    def turns(self, steps: int) -> int:
        """The sampled Gaussian steps, or epochs, that so many steps are for one record."""
        return turns_for(steps, self.bands, self.slots)

    def event(self, sigma: float, steps: int) -> Event:
        return Event(self.rate, sigma, self.turns(steps), slots=self.slots)

    def described(self, steps: int) -> dict[str, Any]:
        found: dict[str, Any] = {"n": self.records, "rate": self.rate, "expected_batch": self.expected_batch}
        if self.slots > 1:
            return found | {"slots": self.slots, "epochs": self.turns(steps)}
        found["threshold"] = self.threshold
        return found if self.bands == 1 else found | {"bands": self.bands, "turns": self.turns(steps)}


def require_usable(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.bands <= MOST_BANDS:
        raise PlanError(f"--bands must lie between 1 and {MOST_BANDS}, but is {arguments.bands}")
    if arguments.bands > 1 and arguments.sampling != "poisson":
        raise PlanError(f"--sampling {arguments.sampling} is proved for independent noise alone; leave --bands out")


def in_words(values: dict[str, Any]) -> str:
    """A summary of what `described` gave."""
    if "slots" in values:
        return f"{values['epochs']} epochs of {values['slots']} steps, expected batch {values['expected_batch']:,.2f}"
    drawn = f"q = {values['rate']:.8g} = {values['threshold']}/2^32"
    return drawn if "bands" not in values else f"{drawn} in {values['turns']} turns of {values['bands']} parts"


def delta_of(arguments: argparse.Namespace) -> float:
    if arguments.n < 1:
        raise PlanError(f"--n must be at least 1, but is {arguments.n}")
    return parse_delta(arguments.delta, arguments.n)
