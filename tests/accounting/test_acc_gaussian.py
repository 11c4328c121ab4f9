"""One Gaussian mechanism in closed form, against the same formula in sixty digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import mpmath
import pytest

from murmuration.accounting.epsilon import gaussian
from murmuration.accounting.epsilon.gaussian import (
    ROUNDING,
    gaussian_delta,
    gaussian_epsilon,
    log_delta,
    participations,
    unamplified_epsilon,
)

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
