"""Numbers of which nothing is proved: every function of the accountant refuses them in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.adaptive import AdaptiveError, AdaptiveRule
from murmuration.accounting.banded import BandedNoise, best_banded
from murmuration.accounting.epsilon import tuning
from murmuration.accounting.epsilon.accountant import delta_at, deltas_at, epsilon
from murmuration.accounting.epsilon.affordable import calibrate_batch, calibrate_slots, calibrate_steps
from murmuration.accounting.epsilon.audit_bound import AuditError, epsilon_bound, numbers_of_guesses, p_value
from murmuration.accounting.epsilon.audit_evidence import collect
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.epsilon.composition import Composition, NotConverged
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.loss_lattice import LossLattice, dots
from murmuration.accounting.epsilon.neighbours import group_epsilon, replacement_epsilon
from murmuration.accounting.epsilon.opacus_check import opacus_epsilon
from murmuration.accounting.epsilon.other_pairs import Group, dominating
from murmuration.accounting.epsilon.tuning import Declared, Tuning, selected_epsilon
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.metrics import HeldOutAccuracy, PlannedMetric
from murmuration.accounting.noise import GRID_GROWTH, ExactGrid
from murmuration.accounting.plan import parse_delta
from murmuration.accounting.sampling import MOST_SLOTS, Poisson, RandomAllocation, slots_for, threshold_for
from murmuration.accounting.unit import Unit
from tests.support.acc_world import PLAN

NAN, INF = math.nan, math.inf
ONE = [Event(0.1, 1.0, 1)]
CAPPED = [Event(0.1, 1.0, 3, cap=20, records=100)]
EPOCHS = [Event(1 / 2, 1.0, 2, slots=2)]
RULE = AdaptiveRule(quantile=0.6, learning_rate=0.5, lowest=0.01, highest=100.0)
LOSS = PlannedMetric("loss", 2.0, 80.0)
ACCURACY = HeldOutAccuracy("accuracy", 1.0, 5.0, 0.25)
MATRIX = best_banded(4, 40)

Row = tuple[str, Callable[[], Any], type[Exception], str]


def each(
    what: str, act: Callable[..., Any], error: type[Exception], words: str, *given: Any, **named: Any
) -> Iterator[Row]:
    """A row for each of `given`: keywords, or the only argument."""
    for one in given:
        asked = one if isinstance(one, dict) else {}
        arguments = () if isinstance(one, dict) else (one,)
        yield f"{what}: {one}", lambda a=arguments, k=asked: act(*a, **k), error, words


def event(**changes: Any) -> Event:
    return Event(**({"rate": 0.1, "sigma": 1.0, "count": 1} | changes))


def planned(**changes: Any) -> Any:
    return replace(PLAN, **changes)


def tuned(**changes: Any) -> Tuning:
    return Tuning(**changes)


def moved(spoil: Callable[[np.ndarray], np.ndarray]) -> BandedNoise:
    """The block of four steps, changed by `spoil`."""
    changed = spoil(np.array(MATRIX.whole))
    return BandedNoise(tuple(tuple(changed[at, : at + 1]) for at in range(4)), 40)


ROWS: list[Row] = [
    *each("a step", event, AccountingError, "sampling rate must lie", {"rate": 0.0}, {"rate": 1.0001}),
    *each("a step", event, AccountingError, "noise multiplier", {"sigma": 0.0}, {"sigma": 9e-10}, {"sigma": 1.1e9},
          {"sigma": NAN}),
    *each("a step", event, AccountingError, "cannot be negative", {"count": -1}),
    *each("a step", event, AccountingError, "a cap and a record count of at least 1", {"cap": 5}, {"records": 5},
          {"cap": 0, "records": 5}, {"cap": 5, "records": 0}),
    ("a step: slots", lambda: Event(0.3, 1.0, 1, slots=4), AccountingError, "rate of 1 over its steps"),
    *each("epsilon at delta", lambda delta: epsilon(ONE, delta), AccountingError, "delta must lie",
          0.0, 1.0, -1e-5, NAN),
    *each("a group at delta", lambda delta: group_epsilon(ONE, delta, 2), AccountingError, "delta must lie in",
          0.0, 1.0, -1e-6, NAN),
    *each("replacement at delta", lambda delta: replacement_epsilon(ONE, delta), AccountingError, "delta must lie in",
          0.0, 1.0, -1e-6, NAN),
    *each("delta at epsilon", lambda value: deltas_at([Event(1.0, 1.0, 1)], [1.0, value], 1e-5), AccountingError,
          "epsilon must be finite", -1e-9, NAN, INF),
    ("a small delta", lambda: epsilon(ONE, 1e-38), NotConverged, "too small"),
    ("a small delta and a cap", lambda: epsilon([replace(CAPPED[0], sigma=20.0, count=1000)], 2e-10), NotConverged,
     "too small for PLD accounting: 2.22e-13 of it"),
    ("what rounding moved", lambda: epsilon([Event(1e-6, 0.7, 10**7)], 1e-15), NotConverged, "rounding"),
    ("no noise to speak of", lambda: epsilon([Event(0.5, 1e-3, 2)], 1e-6), AccountingError, "use more noise"),
    ("no noise to speak of and a cap", lambda: epsilon([replace(CAPPED[0], sigma=1e-9)], 1e-5), AccountingError,
     "cannot discretise Event"),
    ("losses that spread too far", lambda: Composition((LossLattice(1.0, 0, np.full(2, 0.5)),), (10**15,)).epsilon(0.1),
     NotConverged, "spread too far"),
    ("losses of a pair too large", lambda: dominating(Group(0.5, 1e-4, 2), 1e-4), AccountingError,
     "cannot discretise Group"),
    ("too many losses", lambda: dots(0.5, 0.01), AccountingError, "too many losses"),
    ("many steps of little noise", lambda: epsilon([Event(0.5, 1e-4, 1000)], 1e-6), AccountingError,
     "cannot discretise"),
    ("no finite epsilon", lambda: gaussian_epsilon(1e-5, 1e-6), AccountingError,
     r"^no finite epsilon for sigma = 1e-05 at delta = 1e-06; use more noise or a larger delta$"),
    ("rdp of a cap", lambda: epsilon(CAPPED, 1e-5, "rdp"), AccountingError, "capped batch"),
    *each("a group of", lambda records: group_epsilon([Event(1.0, 1.0, 1)], 1e-6, records), AccountingError,
          "at least 1 record", 0, -1),
    ("a pair of none", lambda: Group(0.1, 1.0, 0), AccountingError, "at least 1 record"),
    ("a group and a cap", lambda: group_epsilon(CAPPED, 1e-6, 2), AccountingError, "capped batches"),
    ("replacement and a cap", lambda: replacement_epsilon(CAPPED, 1e-6), AccountingError, "capped batches"),
    ("opacus and a cap", lambda: opacus_epsilon([*ONE, *CAPPED], 1e-5, timeout=1e-9), AccountingError,
     "cannot account for a capped batch; drop --cap"),
    ("opacus out of time", lambda: opacus_epsilon(ONE, 1e-5, timeout=0.01), AccountingError,
     r"no answer within 0\.01 s; drop --cross-check opacus"),
    ("rdp of an allocation", lambda: epsilon(EPOCHS, 1e-5, "rdp"), AccountingError, "random allocation"),
    ("groups of an allocation", lambda: group_epsilon(EPOCHS, 1e-5, 2), AccountingError, "random allocation"),
    ("replacement in an allocation", lambda: replacement_epsilon(EPOCHS, 1e-5), AccountingError, "random allocation"),
    ("opacus of an allocation", lambda: opacus_epsilon(EPOCHS, 1e-5), AccountingError, "random allocation"),
    ("an allocation to many steps", lambda: epsilon([Event(2**-21, 1.0, 1, slots=2**21)], 1e-5), AccountingError,
     "steps, not 2097152"),
    *each("sigma for", lambda target: calibrate_sigma(Event(0.1, 1.0, 1), target, 1e-6), AccountingError,
          "finite and positive", 0.0, -1.0, NAN, INF),
    ("noise beyond all", lambda: calibrate_sigma(Event(1.0, 1.0, 1), 1e-7, 1e-12), AccountingError,
     "no noise multiplier up to 1e5"),
    ("steps that are too dear", lambda: calibrate_steps(Event(0.5, 0.5, 1), 0.1, 1e-6), AccountingError,
     "single step passes"),
    ("steps whose epsilon nobody knows", lambda: calibrate_steps(Event(0.5, 1.0, 1), 8.0, 1e-38), AccountingError,
     "single step passes"),
    ("a batch that is too dear", lambda: calibrate_batch(10, 0.5, 3, 0.1, 1e-6), AccountingError, "batch of 1 passes"),
    ("epochs of many steps", lambda: calibrate_slots(10, 1.0, MOST_SLOTS + 1, 1.0, 1e-5), AccountingError,
     "up to 1,048,576 steps, not 1,048,577"),
    *each("runs", tuned, AccountingError, "mean number of tuning runs must be at least 1, but is", {"mean": 0.99},
          {"mean": INF}, {"mean": NAN}, {"mean": 0}),
    ("runs: a part of one", lambda: Tuning(2.5, fixed=True), AccountingError, "must be whole, but is 2.5"),
    *each("runs", tuned, AccountingError, "at least 0, but is", {"mean": 2, "shape": -0.1}, {"mean": 2, "shape": NAN}),
    *each("a declaration of", Declared, AccountingError, "must say in words", "", None, 3),
    ("runs without a bound", lambda: Tuning(1e300).epsilon([Event(1.0, 1e-3, 1)], 1e-12), AccountingError,
     "did not converge"),
    *each("runs that no double holds", lambda of: selected_epsilon([Event(1.0, 8.0, 4)], 1e-6, *of), AccountingError,
          "has no bound here", (1e13, 0.0), (10.0, 1e300), (10.0, 1e-9)),
    ("runs whose price nobody knows", lambda: tuning._least([Event(1.0, 0.02, 1)], 1e-120), AccountingError,
     "did not converge"),
    ("guesses: more right than made", lambda: p_value(10, 5, 6, 1.0, 0.0), AuditError, "must hold"),
    ("guesses: below no epsilon", lambda: p_value(10, 5, 5, -1.0, 0.0), AuditError, "not a privacy claim"),
    ("guesses: certain", lambda: epsilon_bound(10, 5, 5, 0.0, 1.0), AuditError, "confidence of 1.0"),
    ("guesses: of one canary", lambda: numbers_of_guesses(1), AuditError, "can refute nothing"),
    ("evidence: too little", lambda: collect(np.zeros(9), np.ones(10, bool)), AuditError, "one score per canary"),
    ("evidence: no numbers", lambda: collect(np.full(10, NAN), np.ones(10, bool)), AuditError, "not finite"),
    *each("a Poisson sample", Poisson, PlanError, "threshold K must lie", 0, 2**32 + 1),
    *each("a plan", planned, PlanError, "records and steps", {"records": 0}, {"steps": 0}),
    *each("a plan", planned, PlanError, "at least one view", {"views": 0}),
    *each("a plan", planned, PlanError, "delta must lie", {"delta": 0.0}, {"delta": 0.011}, {"delta": NAN}),
    *each("a plan", planned, PlanError, "must be a finite positive number", {"clip_norm": 0.0}, {"clip_norm": INF},
          {"noise_multiplier": 0.0}, {"noise_multiplier": NAN}, {"noise_multiplier": -1.0}, {"epsilon_budget": 0.0},
          {"epsilon_budget": INF}),
    *each("records held out", lambda **wrong: replace(ACCURACY, **wrong), PlanError, "held",
          {"share": 0.6}, {"bound": 2.0}, {"share": 0.0}),
    ("an accuracy of no records", lambda: PlannedMetric("accuracy", 1.0, 5.0), PlanError, "is a HeldOutAccuracy"),
    ("a loss of held-out records", lambda: replace(ACCURACY, name="loss"), PlanError, "is a PlannedMetric"),
    ("a metric twice", lambda: planned(metrics=(ACCURACY, ACCURACY)), PlanError, "released twice"),
    *each("a batch of 100", lambda batch: threshold_for(100, batch), PlanError, r"must lie in \(0, 100\]",
          0, -1, 101, NAN),
    ("a delta in words", lambda: parse_delta("one", 100), PlanError, "delta must be a number, '1/n' or"),
    *each("a metric", lambda **given: PlannedMetric("loss", **given), PlanError, "finite positive bound",
          {"bound": 0.0, "std": 1.0}, {"bound": 1.0, "std": 0.0}, {"bound": 1.0, "std": INF}),
    *each("norms that adapt", lambda **wrong: replace(RULE, **wrong), AdaptiveError, "needs",
          {"quantile": 0.0}, {"quantile": 1.0}, {"learning_rate": 0.0}, {"learning_rate": 10.5}, {"lowest": 0.0},
          {"lowest": 2.0, "highest": 1.0}, {"highest": INF}, {"quantile": NAN}, {"lowest": NAN}),
    *each("the growth of exact noise", lambda growth: ExactGrid(growth), PlanError, "must lie in", 0.0, 2 * GRID_GROWTH,
          NAN),
    *each("an epoch of", RandomAllocation, PlanError, "has 2 to 1,048,576 steps", 1, MOST_SLOTS + 1),
    *each("bands", lambda of: best_banded(*of), PlanError, "takes 2 to 256 bands", (1, 9), (257, 999)),
    ("bands: more than steps", lambda: best_banded(4, 3), PlanError, "at least as many steps and horizon, not 3"),
    ("bands: a matrix of one", lambda: BandedNoise(((1.0,),), 9), PlanError, "takes 2 to 256 bands, not 1"),
    ("a batch of no records", lambda: threshold_for(0, 1), PlanError, "at least one record, but the index has 0"),
    ("bands without a step", lambda: replace(MATRIX, horizon=0), PlanError,
     "horizon of banded noise must be at least 1 step, but is 0"),
    ("bands: less noise", lambda: moved(lambda m: m * 0.999), PlanError, "one record moves"),
    ("bands: other weights", lambda: moved(lambda m: m * np.where(np.eye(4) > 0, 1, 1.5)), PlanError,
     "one record moves"),
    ("bands: negative diagonal", lambda: moved(lambda m: m * -1), PlanError, "above 0"),
    ("bands: a draw left out", lambda: moved(lambda m: m * np.where(np.arange(4) == 1, 0, 1)), PlanError, "above 0"),
    ("bands: no number", lambda: moved(lambda m: m * NAN), PlanError, "finite"),
    ("bands: rows of another size", lambda: BandedNoise(MATRIX.rows[1:], 40), PlanError, "not lower triangular"),
    ("bands: more than a batch fills", lambda: threshold_for(999, 999 / 7, 8), PlanError, "at most 7 bands"),
    ("bands: more than a part holds", lambda: threshold_for(100, 20, 6), PlanError, "use at most 5 bands"),
    ("epochs that are not whole", lambda: slots_for(233_804_767, 98_304, 6000), PlanError,
     r"2\.52 times; use expected_batch = 116902, or 98319\.9 with steps = 7134"),
    ("epochs of more than all", lambda: slots_for(10, 11, 5), PlanError, r"expected_batch must lie in \(0, 10\]"),
    *each("a unit by", Unit, ValueError, "is no name", "", "key:", "a\nb", "x" * 201),
    *each("a unit", lambda of: Unit("patient", *of), ValueError, "at least 1 record, not '",
          (0, "mean"), (-1, "sum"), (1, "max"), (4, "")),
]  # fmt: skip


@pytest.mark.parametrize(("act", "error", "words"), [pytest.param(*row[1:], id=row[0][:60]) for row in ROWS])
def test_what_is_not_proved_is_refused_in_one_sentence(
    act: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        act()
    assert str(refused.value) and "\n" not in str(refused.value)


def test_what_lies_beside_those_numbers_is_answered() -> None:
    assert math.isfinite(gaussian_epsilon(4e-5, 1e-5)) and math.isfinite(epsilon([Event(0.5, 1e3, 2)], 1e-6))
    assert group_epsilon([], 1e-6, 2) == replacement_epsilon([], 1e-6) == epsilon([], 1e-6) == 0.0
    assert epsilon(EPOCHS, 1e-5) > 0 and delta_at(EPOCHS, 1.0) > 0
    assert ONE[0].mechanism == "Poisson-subsampled Gaussian" and EPOCHS[0].mechanism.startswith("epochs of Gaussian")
    assert Tuning(1) == Tuning(1.0, 1.0, False) and Tuning(1, 0.0).shape == 0.0 and Tuning(2.5).mean == 2.5
    assert planned(metrics=(ACCURACY,)).held_out == 0.25 and planned(delta=1 / 100).delta == 0.01
    assert replace(MATRIX, horizon=1).sensitivity == MATRIX.sensitivity and threshold_for(999, 999 / 7, 7) == 2**32
    assert slots_for(233_804_767, 116_902, 6000) == 2000 and slots_for(233_804_767, 98_319.9, 7134) == 2378
