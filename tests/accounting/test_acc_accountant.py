"""The accountant at its edges: no steps, capped batches, equal steps told in parts, numbers rounded for readers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle, permutations
from pathlib import Path

import mpmath
import pytest

from murmuration.accounting.epsilon import accountant, gaussian
from murmuration.accounting.epsilon.accountant import (
    MARGIN,
    delta_at,
    deltas_at,
    epsilon,
    epsilon_below,
    merge,
    plain_sigma,
    rdp_epsilon,
    round_up,
    show_delta,
    show_epsilon,
    within,
)
from murmuration.accounting.epsilon.gaussian import (
    ROUNDING,
    gaussian_delta,
    gaussian_epsilon,
    log_delta,
    participations,
    unamplified_epsilon,
)
from murmuration.accounting.epsilon.opacus_check import opacus_epsilon
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

NOTHING = [[], [Event(0.1, 1.0, 0)]]


@pytest.mark.parametrize("events", NOTHING)
def test_where_nothing_was_released_nothing_is_lost(events: list[Event]) -> None:
    assert epsilon(events, 1e-5) == 0.0 == epsilon(events, 1e-5, "rdp")
    assert epsilon_below(events, 1e-5) == 0.0
    assert deltas_at(events, [0.0, 1.0], 1e-5) == [0.0, 0.0] and delta_at(events, 0.0) == 0.0


@pytest.mark.parametrize("found", [math.nan, math.inf, -1e-9])
def test_a_number_that_is_no_epsilon_is_refused(found: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant, "_pld_epsilon", lambda *_: found)
    with pytest.raises(AccountingError, match="pld accountant did not converge"):
        epsilon([Event(0.1, 1.0, 1)], 1e-5)


@pytest.mark.parametrize(
    ("divergences", "best", "said"),
    [([1.0, 1.0, 1.0], 3.0, None), ([1.0, -1e-12, 1.0], 3.0, "unstable"), ([1.0, math.nan, 1.0], 3.0, "unstable"),
     ([1.0, 1.0, 1.0], 2.0, "last usable one of .2, 4."), ([1.0, 1.0, 1.0], 4.0, "last usable one of .2, 4."),
     ([1.0, 1.0, math.inf], 3.0, "last usable one of .2, 3."), ([math.inf] * 3, 3.0, "last usable one of .nan, nan.")],
)  # fmt: skip
def test_rdp_answers_only_from_inside_of_its_orders(
    divergences: list[float], best: float, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library answers 0 for a negative divergence, and takes the last order where a larger one would be best."""

    class Found:
        _orders, _rdp = (2.0, 3.0, 4.0), divergences

        def get_epsilon_and_optimal_order(self, delta: float) -> tuple[float, float]:
            return delta, best

    monkeypatch.setattr("dp_accounting.rdp.RdpAccountant", Found)
    with pytest.raises(AccountingError, match=said) if said else nullcontext():
        assert rdp_epsilon([], 1e-5) == 1e-5


def test_the_edges_of_what_can_be_accounted_are_inside() -> None:
    for sigma in (1e-9, 1e9):
        assert Event(1.0, sigma, 0, cap=1, records=1).sigma == sigma


def test_equal_steps_are_counted_together_in_any_order() -> None:
    kinds = [
        Event(0.1, 1.0, 2), Event(0.1, 1.0, 3), Event(0.1, 2.0, 1), Event(0.1, 1.0, 4, cap=7, records=50),
        Event(0.1, 1.0, 4, cap=7, records=60),
    ]  # fmt: skip
    expected = [Event(0.1, 1.0, 5), *kinds[3:], kinds[2]]
    for order in permutations(kinds):
        assert merge(order) == expected


def test_full_batches_are_one_gaussian_and_nothing_else_is() -> None:
    assert plain_sigma([Event(1.0, 3.0, 1)]) == pytest.approx(3.0, rel=1e-12)
    many = [Event(1.0, 3.0, 4), Event(1.0, 0.5, 2)]
    assert plain_sigma(many) == pytest.approx((4 / 9 + 2 / 0.25) ** -0.5, rel=1e-12)
    assert plain_sigma([*many, Event(0.999, 3.0, 1)]) is None
    assert plain_sigma([*many, Event(1.0, 3.0, 1, cap=5, records=9)]) is None


def test_readers_see_four_digits_of_epsilon_and_three_of_delta_rounded_up() -> None:
    assert round_up(1.23411) == 1.2342 and round_up(1.2341) == 1.2341 and round_up(2.0) == 2.0
    assert round_up(1.21, 1) == 1.3 and round_up(7.0001, 0) == 8
    assert show_delta(1.0001e-5) == "1.01e-05" and show_delta(math.fsum([1e-5] * 15)) == "0.00015"
    assert show_delta(2.1385355e-9, 6) == "2.13854e-09" and show_delta(0.9999961, 5) == "1"
    assert show_epsilon(115.09463506) == "115.0947" and show_epsilon(8.0) == "8" and show_epsilon(120.0, 2) == "120"
    assert show_epsilon(596.76788) == show_epsilon(596.7679) == "596.7679", "which times 1e4 is a little more"
    for number in range(319_500, 320_000):
        least = math.nextafter(number / 1e4, math.inf)  # times 1e4, some of these round to the number itself
        assert round_up(least) == (number + 1) / 1e4
    for value in (1e-5, 1.2341e-6, 9.996e-9, 2.1449e-9, 4.27707e-9, 0.5, 1 / 3, 2 / 3e7):
        shown = float(show_delta(value))
        assert value <= shown <= value * 1.011
    assert show_delta(1.2341e-6) == "1.24e-06" and show_delta(1e-5) == "1e-05"


def test_a_budget_is_kept_only_with_room_for_other_processors() -> None:
    """Two processors may differ by a hundredth of that, as `test_acc_composition.py` finds."""
    assert 1e-9 < MARGIN < 1e-6
    assert within(8.0 * (1 - 2 * MARGIN), 8.0) and within(0.0, 1e-3)
    for spent in (8.0 * (1 - MARGIN / 2), 8.0, 8.0 * (1 + MARGIN / 2)):
        assert not within(spent, 8.0)


# One Gaussian mechanism in closed form, against the same formula in sixty digits.


# Noise and epsilon: much and little of either, and pairs whose two tails agree in nearly all digits.
PLACES = [
    (1e9, 0.0), (1e6, 0.0), (1e6, 1e-7), (1e3, 0.0), (1e3, 1e-3), (1e3, 5e-3), (100.0, 0.0), (100.0, 0.05),
    (10.0, 0.0), (10.0, 0.3), (10.0, 2.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (1.0, 8.0), (0.5, 4.0), (0.2, 20.0),
    (0.05, 250.0), (0.02, 1600.0), (0.01, 0.0),
]  # fmt: skip


def exact(sigma: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
        return mpmath.log(mpmath.ncdf(0.5 / s - e * s) - mpmath.exp(e) * mpmath.ncdf(-0.5 / s - e * s))


@pytest.mark.parametrize(("sigma", "epsilon"), PLACES)
def test_log_delta_is_an_upper_bound_and_close(sigma: float, epsilon: float) -> None:
    found, true = log_delta(sigma, epsilon), exact(sigma, epsilon)
    # With much noise the two tails differ by about 1 / sigma of themselves.
    assert true <= found <= min(0.0, true + 1e-9 + 1e-14 * sigma)
    assert gaussian_delta(sigma, epsilon) == math.exp(found)


def worst_tails() -> Callable[[float], float]:
    """The log of the normal distribution function, off by half of what is allowed for, the rest of which the operations
    around it take: the first tail of every delta too small, the second one too large."""
    sides = cycle((1, -1))

    def skewed(place: float) -> float:
        with mpmath.workdps(60):
            return float(mpmath.log(mpmath.ncdf(place)) * (1 + next(sides) * 0.5 * mpmath.mpf(ROUNDING)))

    return skewed


@pytest.mark.parametrize(("sigma", "epsilon"), PLACES)
def test_it_stays_one_where_the_tails_are_rounded_the_wrong_way(
    sigma: float, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "log_ndtr", worst_tails())
    assert log_delta(sigma, epsilon) >= exact(sigma, epsilon)


@pytest.mark.parametrize(
    ("sigma", "delta"), [(50.0, 1e-3), (5.0, 1e-6), (1.0, 1e-5), (0.5, 1e-9), (0.1, 1e-5), (0.02, 1e-12), (1e-4, 1e-5)]
)
def test_epsilon_is_the_least_at_which_delta_is_kept(sigma: float, delta: float) -> None:
    found = gaussian_epsilon(sigma, delta)
    assert exact(sigma, found) <= mpmath.log(delta) < exact(sigma, found * (1 - 1e-9))


def test_epsilon_is_nothing_where_delta_is_kept_without_any() -> None:
    """At delta = 0.01 as long as the distance in total variation is smaller."""
    distance = float(mpmath.exp(exact(50.0, 0.0)))
    assert gaussian_epsilon(50.0, distance * (1 + 1e-9)) == 0.0 < gaussian_epsilon(50.0, distance * (1 - 1e-9)) < 1e-6


@pytest.mark.parametrize(
    ("steps", "batch", "records", "times"),
    [(10, 10, 100, 1), (10, 10, 99, 2), (10, 20, 100, 2), (10, 21, 100, 3), (3, 1, 100, 1), (1, 100, 100, 1),
     (3, 0.1, 0.3, 1), (30, 0.1, 1, 3), (1, 1e-3, 1e9, 1)],
)  # fmt: skip
def test_a_record_takes_part_as_often_as_epochs_were_begun(
    steps: int, batch: float, records: float, times: int
) -> None:
    """Products that are whole but for their rounding begin no further one."""
    assert participations(steps, batch, records) == times  # type: ignore[arg-type]
    claimed = unamplified_epsilon(2.0, steps, batch, records, 1e-5)  # type: ignore[arg-type]
    assert claimed == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(times), 1e-5), rel=1e-12)


# Opacus as a third opinion: its own numbers, and a sentence wherever it cannot give any.


STEPS = [Event(1.0, 4.0, 3)]


def test_both_of_its_accountants_answer_for_the_events_that_were_asked() -> None:
    """At a rate of 1 three steps are one Gaussian, which RDP prices from above and Opacus' PRV to its own error."""
    found = opacus_epsilon(STEPS, 1e-5)
    exact = gaussian_epsilon(4.0 / math.sqrt(3), 1e-5)
    assert exact < found["opacus_rdp"] < 1.3 * exact
    assert found["opacus_prv"] == pytest.approx(exact, abs=0.02)
    assert isinstance(found["opacus"], str)


@pytest.mark.parametrize(
    ("package", "reason"),
    [("raise ImportError('no such wheel')", "no such wheel"), ("import os; os._exit(3)", "no message")],
)
def test_a_package_that_is_broken_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, reason: str
) -> None:
    (tmp_path / "opacus.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(AccountingError, match=rf"Opacus cannot be asked \(.*{reason}\); install it or drop"):
        opacus_epsilon(STEPS, 1e-5)


def test_what_one_of_its_accountants_refuses_stands_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opacus").mkdir()
    (tmp_path / "opacus" / "__init__.py").write_text("__version__ = '0'\nprint('a word of its own')\n")
    (tmp_path / "opacus" / "accountants.py").write_text(
        "class RDPAccountant:\n    def get_epsilon(self, delta): return self.history[0][2] + delta\n"
        "class PRVAccountant:\n    def get_epsilon(self, delta): raise RuntimeError('too small')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert opacus_epsilon(STEPS, 0.25) == {
        "opacus_rdp": 3.25, "opacus_prv": "refused: RuntimeError: too small", "opacus": "0",
    }  # fmt: skip
