"""Second moments that an earlier private run released, for scaling gradients: whose they are, and how much is noise.

A private run's AdamW sees its gradients only with their noise, so what it keeps in a checkpoint is a function of what
was released: using it again is post-processing, and costs that run's records nothing. What it says of them is bounded
by that run's own promise, which goes into this run's ledger as that of weights to start from does. Refused are:

- records that both runs protect: a promise for one of them would have to be the sum, and this run's is its own alone;
- records that this run protects and that one used as public, of which the moments may say anything;
- a run that began from weights of another one, whose public records no ledger names here;
- a checkpoint that the ledger beside it does not name: only what a durable checkpoint holds was released.

A second moment is that of the gradient and of its noise. The noise is known: the ledger states its deviation at every
step, so its share can be subtracted. No privacy depends on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from murmuration.accounting.ledger.facts import StepFacts
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.warm_start_origin import Origin
from murmuration.accounting.scale_table import Moments
from murmuration.train.config.section import RecipeError
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.provenance import Provenance
from murmuration.train.storage.run_dir import RunDir

ERRORS = 2.0
"""A mean that exceeds its noise by less than so many standard errors of the noise counts as that many."""


@dataclass(frozen=True)
class NoiseShare:
    """What noise adds to one second moment: expectation and standard deviation."""

    mean: float
    deviation: float

    @staticmethod
    def of(steps: list[StepFacts], decay: float) -> NoiseShare:
        """After these steps, with `decay` by which each step's square loses weight at the next."""
        mean = variance = 0.0
        for facts in steps:
            correlation = facts.noise.correlation
            square = ((facts.noise.std if correlation is None else correlation.added) / facts.noise.divisor) ** 2
            mean = decay * mean + (1 - decay) * square
            variance = decay**2 * variance + 2 * ((1 - decay) * square) ** 2  # of a normal number's square
        return NoiseShare(mean, math.sqrt(variance))

    def least(self, elements: int) -> float:
        return ERRORS * self.deviation / math.sqrt(elements)

    def without(self, found: float, elements: int) -> float:
        """A mean of so many second moments, without what noise adds to it."""
        return max(found - self.mean, self.least(elements))


@dataclass(frozen=True)
class ProtectedRecords:
    """The records of one private phase of this run."""

    phase: str
    digests: frozenset[str]
    """All by which a ledger may know them."""
    known: Callable[[str], bool] = lambda run: False
    """Whether a run, by its id, has used records of their index, in any state of it."""


def origins_of(root: Path, protected: Sequence[ProtectedRecords]) -> tuple[Origin, ...]:
    """The promise of the run whose moments are used."""
    history, entries = History.read(RunDir(root).ledger)
    if (objection := history.why_not_private()) is not None:
        raise RecipeError(f"{root} made no promise ({objection}); name a private run, or source = checkpoint")
    if not history.finished:
        raise RecipeError(f"{root} is not finished, and what it promises may still change; finish it first")
    if history.origins:
        raise RecipeError(
            f"{root} began from what another run had made, and which records that used as public is not known here; "
            "name a run that did not"
        )
    found = Provenance.of(history, entries).origins
    for records in protected:
        inside = any(records.digests.intersection(origin.protected) for origin in found)
        if inside or any(map(records.known, history.ids)):
            raise RecipeError(
                f"{root} was trained on the records that phase {records.phase!r} protects, or on some of them, so its "
                "epsilon would have to be added to this run's; name a run on other records"
            )
        if records.digests & history.without_noise():
            raise RecipeError(
                f"{root} used the records that phase {records.phase!r} protects without noise; name a run on others"
            )
    return tuple(replace(origin, used="scales") for origin in found)


def noise_in(root: Path, loaded: Loaded, decay: float) -> NoiseShare:
    """In the second moments of a checkpoint that the ledger names, made by one private phase alone."""
    history, _ = History.read(RunDir(root).ledger)
    at = loaded.position
    named = [mark.digest for mark in history.checkpoints if (mark.phase, mark.step) == (at.phase, at.step)]
    if loaded.digest not in named:
        raise RecipeError(f"the ledger of {root} does not name its last checkpoint; restore what is missing")
    plan = history.plans.get(at.phase)
    if plan is None:
        raise RecipeError(f"the last phase of {root} had no noise; name a run that ends with a private phase")
    if plan.scaling is not None:
        raise RecipeError(f"{root} scaled its gradients itself, so its noise differs between weights; name another run")
    # Of steps that were made again in a new segment, the last counts.
    made = {step.step: facts for step, facts in sorted(history.committed.items()) if step.phase == at.phase}
    steps = [made.get(step) for step in range(1, at.step + 1)]
    known = [facts for facts in steps if facts is not None]
    if len(known) != len(steps) or loaded.manifest["optimizer_step"] != at.step:
        raise RecipeError(
            f"the moments of {root} are not of the {at.step} steps of its last phase alone, as its ledger states them; "
            "name a run that carried no moments over and lost no lines"
        )
    return NoiseShare.of(known, decay)


def without_noise(found: Mapping[str, Moments], noise: NoiseShare) -> dict[str, Moments]:
    """The moments of the gradients themselves; where these drown, as much as cannot be told from the noise."""
    if all(each.mean - noise.mean <= noise.least(each.elements) for each in found.values()):
        raise RecipeError(
            "its second moments are those of its noise alone; name a run with less noise, or leave it out"
        )

    def of(each: Moments) -> Moments:
        clean: Callable[[float, int], float] = noise.without
        return Moments(
            [clean(row, len(each.columns)) for row in each.rows],
            [clean(column, len(each.rows)) for column in each.columns],
            clean(each.mean, each.elements),
        )

    return {name: of(each) for name, each in found.items()}
