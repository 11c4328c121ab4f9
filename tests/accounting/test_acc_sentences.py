"""Every sentence of a certificate that states a fact about the guarantee is computed here, by other means than ours.

The pages of runs of every kind are cut into sentences, cells and entries. Each must be one that `SAID` knows. A row of
it computes what the sentence says, from the plan and the number of steps, or names the test that does; or it says why
the sentence states no fact about the run. A new sentence in the product therefore needs a row.
"""

from __future__ import annotations

import io
import json
import math
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.banded import BandedNoise, best_banded
from murmuration.accounting.certificate import statement
from murmuration.accounting.certificate.composition import Known, composed
from murmuration.accounting.certificate.pages import markdown
from murmuration.accounting.certificate.verify import LIMITS_AGREEMENT
from murmuration.accounting.epsilon import accountant
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.event import Event
from murmuration.accounting.keys import RunKey
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import Origin
from murmuration.accounting.metrics import HeldOutAccuracy, PlannedMetric
from murmuration.accounting.noise import GRID_GROWTH, ExactGrid
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import CyclicPoisson, Poisson, RandomAllocation, threshold_for
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words
from tests.support import acc_world
from tests.support.acc_world import document_of


def GAUSS(x: float) -> float:
    """NormalDist's own is 0 far out."""
    return math.erfc(-x / math.sqrt(2)) / 2


ROOT = Path(__file__).resolve().parents[2]
Delta = Callable[[float], float]
"""The true δ at an ε, in the worse of the two directions."""


def gaussian(mu: float) -> Delta:
    return lambda e: GAUSS(mu / 2 - e / mu) - math.exp(e) * GAUSS(-mu / 2 - e / mu)


def sampled(
    rate: float, sigma: float, steps: int, records: int = 1, replaced: bool = False, cell: float = 1e-3
) -> Delta:  # fmt: skip
    """Sampled Gaussian steps: the losses of one step on a line, added up by a plain Fourier transform."""
    half = 2**19
    edges = np.arange(-12 * sigma - 1, records + 12 * sigma + 1, 5e-3)

    def masses(means: list[float], weights: list[float]) -> np.ndarray:
        parts = [w * np.diff([GAUSS((x - m) / sigma) for x in edges]) for w, m in zip(weights, means, strict=True)]
        return np.sum(parts, axis=0)

    drawn = [math.comb(records, k) * rate**k * (1 - rate) ** (records - k) for k in range(records + 1)]
    one = masses([float(k) for k in range(records + 1)], drawn)
    other = masses([0.0, -1.0], [1 - rate, rate]) if replaced else masses([0.0], [1.0])
    seen = (one > 0) & (other > 0)
    both = []
    for p, q in ((one[seen], other[seen]), (other[seen], one[seen])):
        losses = np.rint(np.log(p / q) / cell).astype(int)
        kept = np.abs(losses) < half
        line = np.bincount(losses[kept] % (2 * half), p[kept], 2 * half)
        total = np.fft.irfft(np.fft.rfft(line) ** steps, 2 * half)
        both.append(hockey_stick(np.arange(-half, half) * cell, np.roll(total, half)))
    return lambda e: max(side(e) for side in both)


def hockey_stick(losses: np.ndarray, masses: np.ndarray) -> Delta:
    """E(1 - exp(e - loss))⁺; the losses rise."""
    above, weighted = (np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (masses, masses * np.exp(-losses)))

    def delta(e: float) -> float:
        first = np.searchsorted(losses, e, "right")
        return float(above[first] - math.exp(e) * weighted[first])

    return delta


def allocated(slots: int, sigma: float, epochs: int) -> Delta:
    """Epochs of Gaussian steps, the record in one of them: losses of simulated outputs."""
    chance, runs = np.random.default_rng(1), 200_000
    both = []
    for there in (1, -1):
        x = chance.normal(0, sigma, (runs, epochs, slots))
        x[:, :, 0] += there > 0
        losses = np.sort(there * np.log(np.exp((2 * x - 1) / (2 * sigma**2)).mean(2)).sum(1))
        both.append(hockey_stick(losses, np.full(runs, 1 / runs)))
    return lambda e: max(side(e) for side in both)


def epsilon_at(delta: float, curve: Delta) -> float:
    low, high = 0.0, 400.0
    for _ in range(60):
        low, high = ((low + high) / 2, high) if curve((low + high) / 2) > delta else (low, (low + high) / 2)
    return high


def power(alpha: float, curve: Delta) -> float:
    """Most used records that a test with so many false alarms finds."""
    grid = EPSILONS
    deltas = _deltas(curve)
    return float(min((np.exp(grid) * alpha + deltas).min(), (1 - np.exp(-grid) * (1 - alpha - deltas)).min()))


EPSILONS = np.linspace(0, 14, 1401)


@lru_cache(maxsize=4)
def _deltas(curve: Delta) -> np.ndarray:
    return np.array([curve(e) for e in EPSILONS])


@dataclass
class World:
    """A finished run: its plan, how often one record may have taken part, and what its certificate says."""

    plan: PrivacyPlan
    count: int
    document: dict[str, Any]
    journal: Journal
    near: float = 0.01
    """How close the other means come to an ε, as a share of it."""

    def __post_init__(self) -> None:
        """By the plan's own words in the ledger, and not by what its parts compute of them."""
        told = json.loads(json.dumps(self.plan.as_dict()))
        sampling, noise = told["sampling"], told.get("noise", {"kind": "independent"})
        self.slots: int = sampling.get("slots", 1)
        self.rate: float = 1 / self.slots if self.slots > 1 else sampling["threshold"] / 2**32
        self.bands: int = sampling.get("parts", 1)
        self.banded = noise["kind"] == "banded"
        self.growth: float = GRID_GROWTH if noise["kind"] == "exact" else 0.0

    @cached_property
    def said(self) -> str:
        return markdown(self.document)

    @property
    def delta(self) -> float:
        return self.plan.delta * (1 + len(self.journal.history.late_plans))

    @property
    def sigma(self) -> float:
        """Of everything that a step releases, as one vector."""
        sigma = self.plan.noise_multiplier / (1 + self.growth)
        parts = [1 / sigma**2, *((m.bound * (1 + self.growth) / m.std) ** 2 for m in self.plan.metrics)]
        return sum(parts) ** -0.5

    def curve(self, records: int = 1, replaced: bool = False, count: int | None = None) -> Delta:
        count = self.count if count is None else count
        if self.slots > 1:
            return allocated(self.slots, self.sigma, count)
        if self.rate == 1:
            return gaussian(math.sqrt(count) / self.sigma * (2 if replaced else records))
        return sampled(self.rate, self.sigma, count, records, replaced)

    @cached_property
    def losses(self) -> Delta:
        return self.curve()

    def is_epsilon(self, told: str, curve: Delta | None = None, delta: float | None = None) -> None:
        """The number is an upper bound of what is true, and a close one."""
        true = epsilon_at(self.delta if delta is None else delta, curve or self.losses)
        assert true * (1 - self.near / 4) - 2e-3 <= float(told) <= true * (1 + self.near) + 2e-3, (told, true)

    def is_share(self, told: str, true: float) -> None:
        least, most = 100 * true * (1 - self.near / 2) - 0.011, 100 * true * (1 + 3 * self.near) + 0.06
        assert least <= float(told) <= min(100.0, most), (told, 100 * true)


def begun(folder: Path, plan: PrivacyPlan, steps: int, finish: bool = True, debug: bool = False) -> Journal:
    folder.mkdir(exist_ok=True)
    journal = acc_world.begin(folder, plan, debug, RunKey.from_debug_seed(1) if debug else acc_world.KEY)
    acc_world.train(journal, range(1, steps + 1), plan)
    journal.checkpointed(0, steps, "digest")
    if finish:
        journal.finish()
    return journal


WHOLE = replace(acc_world.PLAN, steps=12, noise_multiplier=6.0, epsilon_budget=4.0)
POISSON = PrivacyPlan(
    records=2000, sampling=Poisson(threshold_for(2000, 100)), clip_norm=1.5, noise_multiplier=0.8, steps=30,
    delta=2.5e-4, epsilon_budget=8.0,
)  # fmt: skip
PATIENT = Unit("patient", 4, "mean", "table")


def others() -> list[Known]:
    return [Known("earlier", "e" * 64, True, 1.5, 1e-4), Known("open", "0" * 64, False, math.inf, 1e-4)]


def siblings_of(journal: Journal, known: list[Known]) -> dict[str, Any]:
    claimed = document_of(journal)["claim"]["epsilon_claimed"]
    told = [{"run": other.run, "private": other.private} for other in known]
    return {"siblings": told, "composition": composed(journal.history, journal.ledger.entries, claimed, known)}


def plain(plan: PrivacyPlan, count: int | None = None, steps: int | None = None, near: float = 0.01) -> Any:
    def make(folder: Path) -> World:
        journal = begun(folder, plan, plan.steps if steps is None else steps)
        return World(plan, count or plan.steps, document_of(journal, {"about": {"data": "scans"}}), journal, near)

    return make


def early(folder: Path) -> World:
    """Ended after 3 steps: the budget is claimed, and all that it would have allowed."""
    journal = begun(folder, WHOLE, 3)
    document = document_of(journal)
    (event,) = document["limits"]["events"]
    world = World(WHOLE, event["count"], document, journal)
    assert (
        world.losses(WHOLE.epsilon_budget) > WHOLE.delta > world.curve(count=world.count - 1)(WHOLE.epsilon_budget)
    ), "the first step that the budget would have refused"
    return world


def with_words(folder: Path) -> World:
    """All that the owner's words, other runs and restored backups add to what must be said."""
    journal = begun(folder, WHOLE, 12, finish=False)
    for word in ("private_curves", "keep_key", "witness"):
        journal.declare_word(word)
    for use in ("evaluation", "monitor", "mixing", "weights", "unknown-weights", "classes", "class-weights"):
        journal.declare_public(0, use, f"digest of {use}")
    journal.declare_earlier(["digest of earlier records"])
    journal.declare_store(0, "store.example")
    journal.declare_origin(Origin("first", "f" * 64, 1.0, 1e-4, ("other records",)))
    journal.finish()
    return World(WHOLE, 12, document_of(journal, siblings_of(journal, others()[:1])), journal)


def beside_a_run_without_noise(folder: Path) -> World:
    journal = begun(folder, WHOLE, 12)
    return World(WHOLE, 12, document_of(journal, siblings_of(journal, others())), journal)


def chosen(folder: Path) -> World:
    """The best of 3 runs, all of which are charged."""
    journal = begun(folder, WHOLE, 12, finish=False)
    journal.declare_tuning(Declared("the learning rate", Tuning(3.0, fixed=True)))
    journal.finish()
    return World(WHOLE, 3 * 12, document_of(journal), journal)


def late(folder: Path) -> World:
    """A second plan that outputs of the first may have shaped: one (ε, δ) is proved, by basic composition of δ."""
    journal = begun(folder, WHOLE, 12, finish=False)
    journal.declare_plan(1, "second", replace(WHOLE, noise_multiplier=60.0), {})
    journal.finish()
    return World(WHOLE, 12, document_of(journal), journal)


def without_promise(folder: Path) -> World:
    journal = begun(folder, WHOLE, 12, debug=True)
    return World(WHOLE, 12, document_of(journal), journal)


WORLDS: dict[str, Callable[[Path], World]] = {
    "Poisson": plain(POISSON),
    "whole": plain(WHOLE),
    "bands": plain(replace(WHOLE, records=101, sampling=CyclicPoisson(2**32, 4), noise=best_banded(4, 12)), count=3),
    "allocation": plain(
        replace(WHOLE, records=101, sampling=RandomAllocation(4), noise_multiplier=2.0, delta=5e-3), 3, near=0.06
    ),
    "exact": plain(replace(WHOLE, noise=ExactGrid())),
    "units": plain(replace(WHOLE, units=PATIENT, unit=unit_in_words(PATIENT), adjacency=adjacency_in_words(PATIENT))),
    "views": plain(replace(WHOLE, views=3, metrics=(PlannedMetric("loss", 2.0, 40.0),))),
    "held out": plain(replace(WHOLE, metrics=(HeldOutAccuracy.of(9.0, 0.1),))),
    "early": early,
    "words": with_words,
    "others": beside_a_run_without_noise,
    "chosen": chosen,
    "late": late,
    "no promise": without_promise,
}


def units_of(page: str) -> Iterator[str]:
    """Sentences of paragraphs, entries of lists, rows of tables, lines of the card and leaves of the registry entry."""
    page = re.sub(
        r"```json\n(.*?)```", lambda m: "\n".join(leaves("registry", json.loads(m[1]))), page, flags=re.DOTALL
    )
    page = re.sub(r"```yaml\n(.*?)```", lambda m: m[1].replace("\n", "\n### "), page, flags=re.DOTALL)
    for line in page.splitlines():
        if re.match(r"#{1,2} |\|[-|]+$|```|\s*$", line):
            continue
        if line.startswith(("|", "- ", "### ", "registry")):
            yield re.sub(r"^- ", "", line)
        else:
            yield from re.split(r"(?<=[.:]) (?=[A-Z])", line.strip("*"))


def leaves(place: str, value: Any) -> Iterator[str]:
    for key, each in value.items():
        yield from leaves(key, each) if isinstance(each, dict) else [f"registry {key}: {each}"]


Check = Callable[..., object] | str
"""Computes what a sentence says of a world; or the test, elsewhere, that does; or why there is nothing to compute."""
DEFINED, OWNERS, OUTSIDE = "a definition or a heading", "the owner's word", "names what is not covered"
NUMBER, ONE = r"([\d.,e-]+)", r"(?:record|unit)"


def claims(w: World, epsilon: str, delta: str, unit: str = "") -> None:
    """Where the budget is claimed it may be looser than what was spent, and never below it."""
    assert w.delta <= float(delta) <= w.delta * 1.01 and unit in ("", unit_in_words(w.plan.units))
    if w.document["limits"]["events"] is None:  # by basic composition of plans whose delta is that of one
        assert float(epsilon) == 2 * w.plan.epsilon_budget and float(delta) == 2 * w.plan.delta
    elif w.document["claim"]["epsilon_claimed"] == w.plan.epsilon_budget:
        assert float(epsilon) == w.plan.epsilon_budget and w.curve(count=w.count - 1)(float(epsilon)) <= w.delta
    else:
        w.is_epsilon(epsilon)


def spent(w: World, epsilon: str, budget: str, delta: str, interval: str) -> None:
    opened = w.journal.history.steps(0)[0]
    count = -(-opened // (w.bands * w.slots))
    w.is_epsilon(epsilon, w.curve(count=count), w.plan.delta)
    budgets = math.fsum(plan.epsilon_budget for plan in w.journal.history.plans.values())
    assert float(budget) == budgets and float(delta) >= w.plan.delta and float(interval) == 1e-4


def is_second_opinion(w: World, epsilon: str) -> None:
    """RDP is looser than the truth, by less than half."""
    opened = w.journal.history.steps(0)[0]
    true = epsilon_at(w.plan.delta, w.curve(count=-(-opened // w.bands)))
    assert true <= float(epsilon) <= 1.5 * true


def table_of_steps(w: World, *told: str) -> None:
    name, n, c, q, sigma, steps, opened, charged = told
    if name == "second":
        assert (opened, charged) == ("0", "")
        return
    assert (int(n), float(c), int(steps)) == (w.plan.records, w.plan.clip_norm, w.plan.steps)
    rate = w.rate
    assert float(q) == pytest.approx(rate, rel=1e-5) and float(sigma) == w.plan.noise_multiplier
    assert int(opened) == w.journal.history.steps(0)[0]
    counted = -(-int(opened) // (w.bands * w.slots))
    times = f"{counted} epochs of {w.slots}" if w.slots > 1 else str(counted)
    found = re.fullmatch(r"\((\S+), (\S+), (.*)\)", charged)
    assert found is not None and found[3] == times
    assert float(found[1]) == pytest.approx(rate, rel=1e-5) and float(found[2]) == pytest.approx(w.sigma, rel=1e-5)


def bounds_every_probability(w: World, factor: str, more: str) -> None:
    """It is e^ε of the claim, which is held to the worst set of outputs."""
    least = math.exp(w.document["claim"]["epsilon_claimed"])
    assert least <= float(factor.replace(",", "")) <= 1.01 * least + 1 and float(more) >= w.delta


def permits(w: World, published: str, n: str) -> None:
    true = w.delta * w.plan.records
    assert int(n.replace(",", "")) == w.plan.records
    assert true * (1 - 1e-9) <= float(published) <= true * 1.01


@lru_cache(maxsize=4)
def _point(claimed: float, delta: float) -> Delta:
    def curve(e: float) -> float:
        if e >= claimed:
            return delta
        return delta + (1 - delta) * (math.exp(claimed) - math.exp(e)) / (math.exp(claimed) + 1)

    return curve


def point(w: World) -> Delta:
    """What the trade-off of a claim is made of: the steps, or one point alone."""
    if w.document["limits"]["events"] is not None:
        return w.losses
    return _point(w.document["claim"]["epsilon_claimed"], w.delta)


def guesses(w: World, best: str) -> None:
    w.is_share(best, 0.5 + point(w)(0.0) / 2)


def finds(w: World, *pairs: str) -> None:
    for alpha, found in zip(pairs[::2], pairs[1::2], strict=True):
        share = float(alpha) / 100
        true = power(share, point(w))
        if w.slots > 1:  # simulated: rare losses are few
            last = math.exp(w.document["claim"]["epsilon_claimed"]) * share + w.delta
            assert 100 * true * 0.85 <= float(found) <= 100 * last + 0.01
        else:
            w.is_share(found, true)


def is_called(w: World, word: str, best: str, found: str) -> None:
    assert w.plan.records * w.delta <= 1
    assert 50 + 50 * point(w)(0.0) <= float(best) + 1e-9 and 100 * power(1e-3, point(w)) <= float(found) + 1e-9
    assert {"strong": ("75", "1"), "moderate": ("90", "10")}[word] == (best, found)


def is_called_weak(w: World) -> None:
    assert 0.5 + point(w)(0.0) / 2 > 0.9 or power(1e-3, point(w)) > 0.1


def resembles_a_gaussian(w: World, more: str, gap: str) -> None:
    mu = float(re.findall(r"privacy: μ = ([\d.]+)\.", w.said)[0])
    above = 0.0 if more == "nothing" else float(more)
    for alpha in np.logspace(-5, -0.01, 200):
        fitted = GAUSS(NormalDist().inv_cdf(alpha) + mu)
        true = power(alpha, point(w))
        if w.slots == 1:  # simulated losses are too few far out
            assert true <= fitted + above + 2e-3 * w.near * 100 * true, (alpha, true, fitted)
        assert fitted - true <= float(gap) / 100 + 0.03 * true + 1e-3


def several(w: World, count: str, epsilon: str) -> None:
    w.is_epsilon(epsilon, w.curve(int(count)))
    one = w.document["claim"]["epsilon_claimed"]
    assert float(epsilon) > one and float(epsilon) != pytest.approx(int(count) * one, rel=0.01)


def unit_of_privacy(w: World, rows: str) -> None:
    for count, epsilon in re.findall(rf"(\d+) {ONE}s ε = ([\d.]+)", rows):
        several(w, count, epsilon)


def nothing_proved(w: World, what: str) -> None:
    """Said exactly where several records' releases depend on one draw, or one point is all that is known."""
    group, alone = "of one person" in what, w.document["limits"]["events"] is None
    assert alone or w.slots > 1 or (group and w.bands > 1)


def replaced(w: World, epsilon: str) -> None:
    w.is_epsilon(epsilon, w.curve(replaced=True))


def at_other_delta(w: World, delta: str, epsilon: str) -> None:
    if w.slots == 1:
        w.is_epsilon(epsilon, delta=float(delta))
    else:  # too small to be simulated: no smaller than at the largest that can be
        assert float(epsilon) >= epsilon_at(1e-4, w.losses)


def held_for(w: World, what: str) -> None:
    if what.startswith("every step"):
        assert w.document["limits"]["events"][0]["count"] == w.count
        assert w.journal.history.steps(0)[0] == w.plan.steps
    else:
        alone = "the (ε, δ) of the claim alone, since a plan was declared after private steps had run"
        late_plan = w.document["limits"]["events"] is None and len(w.journal.history.plans) == 2
        assert what == (alone if late_plan else "all steps that the budget would have allowed")


def because(w: World, why: str) -> None:
    history, told = w.journal.history, why.rstrip(".")
    ended = re.fullmatch(r"phase (\w+) ended after (\d+) of (\d+) planned steps", told)
    if ended is not None:
        phase = {"private": 0, "second": 1}[ended[1]]
        assert int(ended[2]) == history.last_committed(phase) < int(ended[3]) == history.plans[phase].steps
    elif told == "the run was chosen among several":
        assert history.tunings
    else:
        assert told == "every opened step is charged, and the planned number of steps was run"
        assert history.steps(0) == (w.plan.steps, w.plan.steps)


def added_up(w: World, sum_epsilon: str, sum_delta: str, together: str, delta: str) -> None:
    mine, other = epsilon_at(w.delta, w.losses), others()[0]
    for epsilon, added in ((sum_epsilon, sum_delta), (together, delta)):
        w.is_epsilon(str(float(epsilon) - other.epsilon))
        assert float(added) == pytest.approx(w.delta + other.delta, rel=0.01) and float(epsilon) >= mine


def mechanism(w: World, text: str) -> None:
    """Each part stands there exactly where the plan has it."""
    parts = {
        "sum rounded to a grid": w.growth > 0, "`banded`": w.banded,
        "`slots`": w.slots > 1, "per-unit gradients": w.plan.units is not None,
        "per-record gradients": w.plan.units is None, "divided by the constant q·n": True,
    }  # fmt: skip
    assert {part: part in text.replace("\\", "") for part in parts} == parts


def ledger_ends(w: World, length: str, head: str) -> None:
    lines = w.journal.ledger.path.read_bytes().splitlines()
    assert len(lines) == int(length) and json.loads(lines[-1])["hash"] == head


def is_head(w: World, head: str) -> None:
    ledger_ends(w, str(w.journal.ledger.length), head)


def is_(expected: Callable[[World], object]) -> Check:
    """The groups of the row are, as texts, what the world gives."""
    return lambda w, *groups: groups == (expected(w) if isinstance(expected(w), tuple) else (expected(w),))


TUNED = r"(?:\| Tuning on private data \| |registry pre_processing_eda_hyperparameter_tuning: )"
UNIT = rf"(one {ONE} \(.*?\)|one unit \(.*\))"
SAID: list[tuple[str, Check]] = [
    (rf"\({NUMBER}, {NUMBER}\)-differential privacy for {UNIT}, for everything that this run released", claims),
    (
        rf"registry privacy_parameters_description: \({NUMBER}, {NUMBER}\)-differential privacy for {UNIT}, for .*",
        claims,
    ),
    (rf"ε = {NUMBER} spent \(rounded up\) of a budget of {NUMBER}, δ = {NUMBER}; by PLD, interval {NUMBER}", spent),
    (
        rf"ε = {NUMBER} claimed at δ = {NUMBER}: (.+)",
        lambda w, e, delta, why: (claims(w, e, delta), because(w, why)) and not w.journal.history.run["debug"],
    ),
    (r"nothing is claimed: what private steps spent .*", lambda w: w.journal.history.run["debug"]),
    (rf"RDP, as a second opinion: ε = {NUMBER}", is_second_opinion),
    (
        r"RDP, as a second opinion: refused: RDP accounts for Poisson samples, not .*",
        is_(lambda w: () if w.slots > 1 else 0),
    ),
    (rf"(?:unit: |The promise protects ){UNIT}\.?", is_(lambda w: unit_in_words(w.plan.units))),
    (r"neighbours: (.*)", is_(lambda w: adjacency_in_words(w.plan.units))),
    (r"\| Neighbouring data sets \| (.*) \|", is_(lambda w: adjacency_in_words(w.plan.units))),
    (r"registry input_metric: (.*)", is_(lambda w: adjacency_in_words(w.plan.units))),
    (
        rf"registry privacy_unit_description: {UNIT}; (.*)",
        is_(lambda w: (unit_in_words(w.plan.units), adjacency_in_words(w.plan.units))),
    ),
    (r"registry privacy_unit: (.*)-level", is_(lambda w: "User" if w.plan.units else "Record")),
    (r"(?:mechanism: |\| Mechanism \| |registry mechanisms: )(.*?)(?: \|)?", mechanism),
    (
        r"n in private counts units; .* the mean over at most (\d+) of its records, .*, clipped as one",
        is_(lambda w: str(w.plan.units.rows if w.plan.units else 0)),
    ),
    (r"views in private: each drawn record is seen (\d+) times in a step, .*", is_(lambda w: str(w.plan.views))),
    (
        r"held out in private: ([\d.]+)% of the records, .*, charged as one event .*",
        is_(lambda w: f"{100 * (w.plan.held_out or 0):.3f}"),
    ),
    (r"\| (\w+) \| yes \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (.*) \|", table_of_steps),
    (r"The promise bounds how differently the model, and everything else .*", DEFINED),
    (rf"Imagine that this one {ONE} had been blanked out before training\.", DEFINED),
    (
        rf"How differently: .* at most {NUMBER} times its probability without, plus {NUMBER}, .*",
        bounds_every_probability,
    ),
    (
        rf"The factor is e\^epsilon, epsilon = {NUMBER}; what is added is delta\.",
        lambda w, e: claims(w, e, str(w.delta)),
    ),
    (r"Smaller is stronger\.", DEFINED),
    (rf"By itself, delta would permit to publish .*: {NUMBER} of the {NUMBER} on average\.", permits),
    (rf"What a spy gains .* right in 50 % .*, and with the model in at most {NUMBER} %\.", guesses),
    (rf"A guess at even odds is right in at most {NUMBER} % of the cases\.", guesses),
    (rf"One who .* in (1) % .* at most {NUMBER} % .* and at (0\.1) % false alarms at most {NUMBER} %\.", finds),
    (rf"\| {NUMBER} % \| {NUMBER} % \|", finds),
    (rf"These are limits on all attacks, also on one with all the other {ONE}s in hand\.", DEFINED),
    (
        rf"By these limits .* calls the promise (\w+): at most {NUMBER} % of .*, and .* at most {NUMBER} % are found\.",
        is_called,
    ),
    (r"By these limits this program calls the promise weak: read it .*", is_called_weak),
    (
        r"(?:What that rests on:|The promise is therefore|Computers without limits|\| Assumption \|) .*",
        "tests/train/test_train_noise_bits.py",
    ),
    (r"What it does not promise: .*", OUTSIDE),
    (rf"Proved for (.*?)(?:, in each of \d runs)?, against any test .* one {ONE} whether it was used\.", held_for),
    (rf"Gaussian differential privacy: μ = {NUMBER}\.", "the row below"),
    (
        rf"At every share .* that Gaussian allows, plus (\S+); the Gaussian allows up to {NUMBER} % more .*",
        resembles_a_gaussian,
    ),
    (rf"Somebody with several {ONE}s, all of which .*|It is composed .*", "the rows of the table"),
    (rf"A {ONE} that is exchanged for another one, or .*, has a row of its own\.", "the rows of the table"),
    (rf"\| what may change \| ε at δ = {NUMBER} \|", lambda w, delta: float(delta) >= w.delta),
    (rf"\| one {ONE} \| {NUMBER} \|", lambda w, e: claims(w, e, str(w.delta))),
    (rf"\| (\d+) {ONE}s of one person \| {NUMBER} \|", several),
    (rf"\| one {ONE} for another, or .* \| {NUMBER} \|", replaced),
    (rf"\| (\d+ {ONE}s of one person|one {ONE} for another.*|1e-\d+) \| not proved: .* \|", nothing_proved),
    (rf"\| (1e-\d+) \| {NUMBER} \|", at_other_delta),
    (r"\| (?:false alarms|δ|run|part|the \w+) \| .*\|", DEFINED),
    (
        r"\| phase \| .*|\(The picture .*|```|differential_privacy:|###\s*|Recompute everything .*|python launch.*",
        DEFINED,
    ),
    (rf"\| Privacy parameters \| ε = {NUMBER}, δ = {NUMBER} \|", claims),
    (r"\| Privacy parameters \| no promise \|", is_(lambda w: () if w.journal.history.run["debug"] else 0)),
    (
        rf"\| Unit of privacy \| {UNIT}; for a person with (.*), at the same δ \|",
        lambda w, unit, rows: (unit == unit_in_words(w.plan.units), unit_of_privacy(w, rows)),
    ),
    (
        rf"\| Unit of privacy \| {UNIT}; .* with several {ONE}s is not stated, and not in proportion \|",
        lambda w, _: w.journal.history.run["debug"] or not w.document["limits"] or nothing_proved(w, "of one person"),
    ),
    (
        r"\| Variant \| approximate differential privacy, computational: .*",
        lambda w: w.delta > 0 and not w.journal.history.run["debug"],
    ),
    (r"\| Variant \| none \|", lambda w: w.journal.history.run["debug"]),
    (
        r"\| Composition \| every step that the ledger opened, released or not; .*",
        lambda w: w.journal.history.steps(0)[0] > 0,
    ),
    (
        r"\| Post-processing \| anybody may use the outputs .* that does not weaken the promise \|",
        "test_no_function_of_the_outputs_tells_more",
    ),
    (TUNED + r"nothing was declared(?: \|)?", lambda w: not w.journal.history.tunings),
    (TUNED + r"the learning rate \(charged in the claim, .*", lambda w: w.count == 3 * w.plan.steps),
    (
        TUNED + r"runs without noise on the same records: open; .*",
        lambda w: any(not each["private"] for each in w.document["siblings"]),
    ),
    (
        r"\| Trained on without noise \| non-private phases of this run: none; .*",
        lambda w: not w.journal.history.nonprivate,
    ),
    (r"\| Utility and bias \| not measured here; .*", OUTSIDE),
    (r"\| (?:Query model|Trust model|Data collection|Responsible|Check) \| .*|data: .*|responsible: .*", DEFINED),
    (
        r"\| Implementation and side channels \| (.*) deviations are .*",
        is_(lambda w: "known" if w.growth else "floating point and further"),
    ),
    (r"\| Data security and access \| .*", "tests/train/test_train_private_keys.py"),
    (r"\| dp-accounting \| (.*) \|", is_(lambda w: w.journal.history.run["versions"]["dp-accounting"])),
    (
        r"###   (?:private: (\w+))",
        is_(lambda w: str(not w.journal.history.run["debug"]).lower()),
    ),
    (rf"(?:###   |registry )epsilon: {NUMBER}", lambda w, e: claims(w, e, str(w.delta))),
    (rf"(?:###   |registry )delta: {NUMBER}", lambda w, d: w.delta <= float(d) <= 1.01 * w.delta),
    (r'###   unit: "?one (record|unit)\b.*', is_(lambda w: "unit" if w.plan.units else "record")),
    (r"###   neighbours: zero-out|###   accountant: PLD|###   signer: .*", DEFINED),
    (r"###   sampling: (.*)", is_(lambda w: "random allocation" if w.slots > 1 else "Poisson")),
    (r"(?:###   ledger_head: |registry sources: Murmuration; ledger head )(\w+)", is_head),
    (r"Ledger: (\d+) lines, head (\w+)\.", ledger_ends),
    (
        r"In the fields .*|What only .*|registry (?:name|model_name|actors|data\w+|access_type|post_.*): .*",
        DEFINED,
    ),
    (r"registry bound_on_input_distance: 1", lambda w: w.document["adjacency"].startswith("zero-out: one ")),
    (
        r"registry unprotected_quantities: n, sampling rate, clipping norm, noise, number of steps and δ, as .*",
        lambda w: (
            {"records", "sampling", "clip_norm", "noise_multiplier", "steps", "delta"}
            <= w.document["phases"][0]["plan"].keys()
        ),
    ),
    (r"registry release_type: Multiple releases: .*", lambda w: len(w.journal.history.checkpoints) >= 1),
    (
        r"registry composition: Privacy loss distributions of (.*?)(?:, in each of \d runs)?; (.*)\.",
        lambda w, what, why: (held_for(w, what), because(w, why)),
    ),
    (
        r"(?:###   reason: \"|registry \w+: )?NOT PRIVATE.*|The following is about what was run\.",
        lambda w: w.journal.history.why_not_private() is not None,
    ),
    (r"No promise is made about .*", lambda w: w.journal.history.run["debug"]),
    (r"Those that were known when this certificate was written; .*|run: (?:earlier|open), private: .*", DEFINED),
    (rf"\| tiny \| {NUMBER} \| ledger \|", lambda w, e: w.is_epsilon(e)),
    (rf"\| earlier \| {NUMBER} \| claim \|", is_(lambda _: str(others()[0].epsilon))),
    (
        r"\| open \| no promise \| claim \||All of them together promise nothing: open trained .*",
        lambda w: others()[1].epsilon == math.inf,
    ),
    (rf"All of them together: ε = {NUMBER} at δ = {NUMBER}, the sum .*; ε = {NUMBER} at δ = {NUMBER}, .*", added_up),
    (re.escape(statement.DEVIATIONS[0]), lambda w: not w.growth),
    (re.escape(statement.DEVIATIONS[1]), "tests/accounting/test_acc_heads.py"),
    (re.escape(statement.RATCHETED), "tests/train/test_train_ratchet.py"),
    (re.escape(str(BandedNoise.deviation)), lambda w: w.bands > 1),
    (re.escape(str(RandomAllocation.deviation)), lambda w: w.slots > 1),
    (re.escape(statement.FOREIGN_WEIGHTS), OUTSIDE),
    (r"FOREIGN WEIGHTS: .*|The .* are public by the word of the run's owner, which nothing here can check\.", OWNERS),
    (r"The records of phase 'private' were fetched from store\.example .*|Earlier runs used records .*", OUTSIDE),
    (
        r"The weights began from those of run 'first', .* \(epsilon = 1, delta = 0\.0001\) .* the sum of both\.",
        lambda w: (w.journal.history.origins[0].epsilon, w.journal.history.origins[0].delta) == (1.0, 1e-4),
    ),
    *(
        (re.escape(text).replace("`", r"\\?`"), lambda w, word=word: word in w.journal.history.words)
        for word, text in statement.WORDS.items()
    ),
]


@pytest.mark.parametrize("name", WORLDS)
def test_every_sentence_is_true_of_the_run(tmp_path: Path, name: str) -> None:
    world = WORLDS[name](tmp_path / "run")
    for sentence in units_of(world.said):
        rows = [(found, check) for pattern, check in SAID if (found := re.fullmatch(pattern, sentence))]
        assert rows, f"no row says what is true of: {sentence}"
        for found, check in rows:
            if isinstance(check, str):
                assert not check.startswith("tests/") or (Path(__file__).parents[2] / check).is_file()
            else:
                assert check(world, *found.groups()) is not False, sentence
    world.journal.ledger.close()


def test_no_function_of_the_outputs_tells_more() -> None:
    """Post-processing: random functions of a step's output, and how well they tell whether the record was there."""
    chance, cells = np.random.default_rng(3), np.linspace(-6, 7, 400)
    there, blank = (np.diff([GAUSS(x - mean) for x in cells]) for mean in (1.0, 0.0))
    for _ in range(50):
        function = chance.dirichlet(np.full(5, 0.1), len(there))
        p, q = there @ function, blank @ function
        for e in (0.0, 0.5, 1.0, 2.0):
            before, after = (float(np.maximum(0, a - math.exp(e) * b).sum()) for a, b in ((there, blank), (p, q)))
            assert after <= before + 1e-12


DP_CAP: dict[str, Any] = {"rate": 24077779 / 2**32, "sigma": 0.70711, "steps": 5708, "cell": 2.5e-4}
PEOPLE: dict[str, Any] = {"rate": 256 / 8000, "sigma": 0.8991, "steps": 40}


def about(told: float, curve: Delta, delta: float) -> bool:
    return told == pytest.approx(epsilon_at(delta, curve), rel=0.01)


@pytest.mark.parametrize(
    ("file", "sentence", "holds"),
    [
        (
            "README.md",
            "final ε = 7.999754 of 8 at δ = 2.5e-05",
            lambda: about(7.999754, sampled(0.05, 0.60742, 50), 2.5e-5),
        ),
        (
            "docs/privacy.md",
            "two records have 16.8 and ten 115.1 where DP-Cap has 8, and one record for another has 10.4",
            lambda: all(
                about(told, sampled(**DP_CAP, records=k, replaced=other), 1 / 233804767)
                for told, k, other in ((8.0, 1, False), (16.8, 2, False), (115.1, 10, False), (10.4, 1, True))
            ),
        ),
        (
            "benchmarks/learning.md",
            "noise for groups of four (σ = 0.8991, ε = 1.744 for a record)",
            lambda: about(1.744, sampled(**PEOPLE), 1 / 16000) and about(8.0, sampled(**PEOPLE, records=4), 1 / 16000),
        ),
        (
            "docs/accounting.md",
            "DP-Cap's 32 epochs of 179 steps the two bounds on ε at σ = 0.7071 are 7.5963 and 7.5945",
            lambda: (
                [
                    f"{bound([Event(1 / 179, 0.7071, 32, slots=179)], 1 / 233804767):.4f}"
                    for bound in (accountant.epsilon, accountant.epsilon_below)
                ]
                == ["7.5963", "7.5945"]
            ),
        ),
        (
            "docs/accounting.md",
            "At equal ε, σ is 1.7 to 10 % smaller",
            lambda: all(
                accountant.epsilon([Event(1 / slots, (1 - less) * sigma, count, slots=slots)], delta)
                == pytest.approx(accountant.epsilon([Event(rate, sigma, steps)], delta), rel=0.005)
                for slots, count, sigma, rate, steps, delta, less in (
                    (179, 32, 0.70711, DP_CAP["rate"], 5708, 1 / 233804767, 0.017),
                    (5, 10, 1.09302, 2**18 / 1281167, 49, 8e-7, 0.101),
                )
            ),
        ),
        ("docs/recipes.md", "for about 1 % more noise", lambda: 0.0095 < (1 - 2 / 10.0**2) ** -0.5 - 1 < 0.0105),
        (
            "docs/proof.md",
            "which is more than 10⁷·C for a billion weights",
            lambda: 2.0 ** (62 + math.floor(math.log2(1e-6 / math.sqrt(1e9)))) > 1e7,
        ),
        ("docs/privacy.md", "`verify` recomputes them (to a relative 1e-6)", lambda: LIMITS_AGREEMENT == 1e-6),
        (
            "docs/auditing.md",
            "These fifteen files decide that: about 2,950 lines, of which about 1,900 are code",
            lambda: (
                lines_of("If the self-test is trusted", "Which key a step has") == pytest.approx((2950, 1900), rel=0.1)
            ),
        ),
        (
            "docs/auditing.md",
            "(about 850 lines of code)",
            lambda: lines_of("read four more files", "(about")[1] == pytest.approx(850, rel=0.1),
        ),
    ],
)
def test_every_number_of_the_documents_about_the_guarantee_is_true(
    file: str, sentence: str, holds: Callable[[], bool]
) -> None:
    """Where the page says it by a command or a benchmark, the number is computed here."""
    assert " ".join(sentence.split()) in " ".join((ROOT / file).read_text().split())
    assert holds()


def lines_of(first: str, last: str) -> tuple[int, int]:
    """All lines, and those with code, of the files that docs/auditing.md links to between two of its words."""
    page = " ".join((ROOT / "docs" / "auditing.md").read_text().split())
    part = page[page.index(first) : page.index(last, page.index(first))]
    every = code = 0
    for file in dict.fromkeys(re.findall(r"\]\(\.\./(\S+\.py)\)", part)):
        text = (ROOT / file).read_text()
        every, taken = every + text.count("\n"), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            layout = token.type in LAYOUT or (token.type == tokenize.STRING and token.string.startswith('"""'))
            taken |= set() if layout else set(range(token.start[0], token.end[0] + 1))
        code += len(taken)
    return every, code


LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip
