"""Every row of the accounting ground truth, and what must hold between accountants."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from murmuration.accounting.epsilon.accountant import delta_at, epsilon, merge
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.epsilon.gaussian import gaussian_delta, gaussian_epsilon, unamplified_epsilon
from murmuration.accounting.epsilon.trade_off import of_events
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

LAION, IMAGENET = 233_000_000, 1_281_167
DPCAP = 233_804_767

ROWS = [
    # name, n, B, sigma, T, delta·n, RDP, PLD (by a transform whose rounding does not matter at four digits)
    ("vip", LAION, 98_304, 0.48, 6000, 0.5, 7.9963, 6.8316),
    ("vip+1", LAION, 98_304, 0.48, 6001, 0.5, 7.9964, 6.8316),
    ("vip-23M", LAION / 10, 98_304, 0.66, 6000, 0.5, 8.1513, 7.2982),
    ("vip-2.3M", LAION / 100, 98_304, 2.5, 6000, 0.5, 7.9354, 7.4699),
    ("vip-32k", LAION, 32_768, 0.45, 18_000, 0.5, 7.8394, 6.6893),
    ("vip-text", LAION, 81_920, 0.5, 10_000, 0.5, 6.9955, 5.9785),
    ("dpcap", DPCAP, 1_310_720, 0.728, 5708, 1.0, 8.0499, 7.3370),
    ("dpcap-half", DPCAP, 1_310_720, 0.728, 5708, 0.5, 8.2585, 7.5391),
    ("dpcap-eps2", DPCAP, 1_310_720, 1.18, 2854, 1.0, 1.9928, 1.7768),
    ("dpcap-eps7", 2_000_000_000, 1_310_720, 0.527, 5000, 1.0, 7.3019, 6.2994),
    ("tan", IMAGENET, 32_768, 2.5, 18_000, 8e-7 * IMAGENET, 7.9798, 7.4856),
]


@pytest.mark.parametrize(("name", "n", "batch", "sigma", "steps", "share", "rdp", "pld"), ROWS, ids=lambda v: str(v))
def test_row(name, n, batch, sigma, steps, share, rdp, pld) -> None:
    events, delta = [Event(batch / n, sigma, steps)], share / n
    by_rdp, by_pld = epsilon(events, delta, "rdp"), epsilon(events, delta)
    assert abs(by_rdp - rdp) <= 1e-4
    assert abs(by_pld - pld) <= 2e-4
    assert by_pld <= by_rdp


@pytest.mark.rest
def test_row_where_rdp_must_refuse_and_pld_answers() -> None:
    events, delta = [Event(81_920 / IMAGENET, 0.5, 10_000)], 0.5 / IMAGENET
    with pytest.raises(AccountingError, match=r"did not converge.*use the PLD accountant"):
        epsilon(events, delta, "rdp")
    assert abs(epsilon(events, delta) - 452.8) < 0.1


MEHTA = {
    0.25: (15.4098, 16.9227), 0.5: (8.0576, 8.6766), 1: (4.2247, 4.5309), 2: (2.2305, 2.3826), 4: (1.1935, 1.2678),
    6: (0.8359, 0.8849), 8: (0.6529, 0.6893), 10: (0.5411, 0.5700),
}  # fmt: skip


@pytest.mark.parametrize("target", MEHTA)
def test_full_batch_table(target: float) -> None:
    exact, rdp = MEHTA[target]
    assert abs(calibrate_sigma(Event(1.0, 1.0, 1), target, 1e-6) - exact) <= 1e-4
    assert abs(calibrate_sigma(Event(1.0, 1.0, 1), target, 1e-6, "rdp") - rdp) <= 1e-4


EPOCHS = {
    15: (391, 0.6970, 0.6659), 16: (196, 0.8011, 0.7634), 17: (98, 0.9484, 0.9000), 18: (49, 1.1567, 1.0930),
    19: (25, 1.4446, 1.3624), 20: (13, 1.7828, 1.6891),
}  # fmt: skip


EXACT = [
    # n, B, T, delta·n, epsilon, sigma by RDP, sigma by PLD: four digits, so epsilon is met to a few thousandths
    (LAION, 98_304, 6000, 0.5, 8.0, 0.4799, 0.4565), (LAION / 10, 98_304, 6000, 0.5, 8.0, 0.6638, 0.6417),
    (LAION / 100, 98_304, 6000, 0.5, 8.0, 2.4838, 2.3682), (LAION, 32_768, 18_000, 0.5, 8.0, 0.4474, 0.4250),
    (LAION, 8192, 72_000, 0.5, 8.0, 0.4139, 0.3936), (DPCAP, 1_310_720, 5708, 1.0, 8.0, 0.7296, 0.7071),
    (DPCAP, 1_310_720, 2854, 1.0, 2.0, 1.1769, 1.1023),
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(("n", "batch", "steps", "share", "target", "rdp", "pld"), EXACT)
def test_exact_sigmas_meet_their_epsilon(n, batch, steps, share, target, rdp, pld) -> None:
    for by, sigma in (("rdp", rdp), ("pld", pld)):
        spent = epsilon([Event(batch / n, sigma, steps)], share / n, by)
        assert abs(spent - target) < 5e-3, (by, spent)


@pytest.mark.rest
@pytest.mark.parametrize("power", EPOCHS)
def test_ten_epochs_table(power: int) -> None:
    steps, rdp, pld = EPOCHS[power]
    event = Event(2**power / IMAGENET, rdp, steps)
    assert abs(epsilon([event], 1e-6, "rdp") - 10) < 5e-3
    assert abs(epsilon([Event(event.rate, pld, steps)], 1e-6) - 10) < 2e-2


def test_shuffled_epochs_cost_what_they_cost() -> None:
    def honest(n: float, batch: float, sigma: float, steps: int, delta: float) -> float:
        return unamplified_epsilon(sigma, steps, batch, round(n), delta)

    assert abs(honest(DPCAP, 1_310_720, 0.728, 5708, 1 / DPCAP) - 74.2) < 0.05
    assert abs(honest(DPCAP, 1_310_720, 1.18, 2854, 1 / DPCAP) - 24.7) < 0.05
    assert abs(honest(2_000_000_000, 1_310_720, 0.527, 5000, 1 / 2_000_000_000) - 29.8) < 0.05
    assert abs(honest(LAION, 98_304, 0.48, 6000, 0.5 / LAION) - 27.1) < 0.05
    # 253.1 epochs: some records are seen 254 times, and the bound is for them.
    assert 51.7 <= honest(LAION / 100, 98_304, 2.5, 6000, 0.5 / (LAION / 100)) < 51.85


@pytest.mark.slow
@pytest.mark.parametrize(("spreads", "expected"), [(0, 61.0), (2, 22.8), (6, 7.285), (8, 7.2825)])
def test_a_cap_far_above_the_batch_is_harmless_and_a_low_one_is_not(spreads: int, expected: float) -> None:
    batch = 1_300_000
    cap = math.floor(batch + spreads * math.sqrt(batch * (1 - batch / DPCAP)))
    event = Event(batch / DPCAP, 0.728, 5708, cap, DPCAP)
    assert abs(epsilon([event], 1 / DPCAP) - expected) < 2e-3 * expected
    with pytest.raises(AccountingError, match="RDP cannot account for a capped batch"):
        epsilon([event], 1 / DPCAP, "rdp")


@pytest.mark.rest
def test_a_low_cap_costs() -> None:
    free = epsilon([Event(0.01, 2.0, 5)], 1e-6)
    assert epsilon([Event(0.01, 2.0, 5, 100, 10_000)], 1e-6) > 1.2 * free
    assert epsilon([Event(0.01, 2.0, 5, 181, 10_000)], 1e-6) == pytest.approx(free, rel=1e-3)


@pytest.mark.parametrize("sigma", [0.4, 1.0, 5.0])
def test_closed_form_agrees_with_the_discretisation(sigma: float) -> None:
    exact = gaussian_epsilon(sigma, 1e-6)
    discretised = epsilon([Event(1 - 1e-12, sigma, 1)], 1e-6)
    assert exact - 1e-6 <= discretised <= exact + 3e-4
    assert gaussian_delta(sigma, exact) <= 1e-6
    assert gaussian_delta(sigma, exact - 1e-9) >= 1e-6 * (1 - 1e-6)


def test_closed_form_never_rounds_a_leak_away() -> None:
    # With much noise the two normal tails agree to the last bit; delta must not become zero by cancellation.
    assert gaussian_delta(1e17, 0.0) >= 1 / (math.sqrt(2 * math.pi) * 1e17)
    assert gaussian_delta(1e6, 0.0) >= 0.999999 / (math.sqrt(2 * math.pi) * 1e6)


def test_composition_is_of_mechanisms_and_not_of_epsilons() -> None:
    first, second = Event(0.01, 1.0, 30), Event(0.05, 2.0, 10)
    joint = epsilon([first, second], 1e-6)
    assert joint == epsilon([second, first], 1e-6)
    assert joint == pytest.approx(epsilon([Event(0.01, 1.0, 10), second, Event(0.01, 1.0, 20)], 1e-6), abs=1e-12)
    alone = epsilon([first], 1e-6), epsilon([second], 1e-6)
    assert max(alone) < joint < sum(alone)
    assert epsilon([Event(1.0, 3.0, 9)], 1e-6) == pytest.approx(gaussian_epsilon(1.0, 1e-6), rel=1e-12)
    assert merge([first, first, Event(0.01, 1.0, 0)]) == [Event(0.01, 1.0, 60)]


def test_delta_and_epsilon_are_inverse() -> None:
    events = [Event(0.01, 1.0, 50)]
    value = epsilon(events, 1e-6)
    assert delta_at(events, value) <= 1e-6 * (1 + 1e-9)
    assert delta_at(events, value - 1e-3) > 1e-6
    assert delta_at([Event(1.0, 1.0, 1)], gaussian_epsilon(1.0, 1e-6)) <= 1e-6
    with pytest.raises(AccountingError):
        delta_at(events, -1.0)


def test_gdp_mu_bounds_the_curve_and_is_exact_without_sampling() -> None:
    assert of_events([Event(1.0, 2.0, 4)], 1e-6).fit().mu == pytest.approx(1.0)
    events = [Event(0.02, 1.0, 100)]
    mu = of_events(events, 1e-6).fit().mu
    for value in (0.1, 0.37, 0.9):
        if (delta := delta_at(events, value)) > 1e-6:
            assert gaussian_delta(1 / mu, value) >= 0.999 * delta
    central_limit = 0.02 * math.sqrt(100 * math.expm1(1.0))
    assert mu > central_limit, "the central-limit formula understates"


def test_never_below_a_monte_carlo_lower_bound() -> None:
    """The likelihood-ratio test on one subsampled step is a lower bound that no accountant may undercut."""
    from scipy.stats import norm

    rate, sigma, delta = 0.2, 0.8, 1e-3
    value = epsilon([Event(rate, sigma, 1)], delta)
    worst = 0.0
    for cut in [x / 50 for x in range(-100, 400)]:
        out = norm.sf(cut / sigma)
        into = (1 - rate) * out + rate * norm.sf((cut - 1) / sigma)
        if into > delta:
            worst = max(worst, math.log((into - delta) / out))
    assert worst <= value <= worst + 5e-3


@pytest.mark.rest
def test_two_billion_records_take_no_longer_than_two_million_and_less_than_a_gigabyte() -> None:
    program = (
        "import re, time, sys\n"
        "from murmuration.accounting.cli.main import main\n"
        "def seconds(n, batch):\n"
        "    begun = time.process_time()\n"
        "    main(f'epsilon --n {n} --batch {batch} --sigma 0.728 --steps 7200 --delta 1e-9 --json'.split())\n"
        "    return time.process_time() - begun\n"
        "seconds(21000, 13)\n"
        "few, many = seconds(2100000, 1311), seconds(2100000000, 1310720)\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss would count the parent that forked
        "print(few, many, re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
        "assert not {'torch', 'opacus', 'deepspeed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    few, many, kibibytes = (float(x) for x in done.stdout.strip().splitlines()[-1].split())
    # A thousand times as many records take no longer; work for each would take a thousand times as long.
    assert many < 4 * few
    assert kibibytes * 1024 < 1e9
