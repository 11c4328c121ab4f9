"""Exact noise: the probabilities of a rounded Gaussian and no others, whole multiples of a grid until the division."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.noise import GRID_GROWTH, ExactGrid, fits_grid
from murmuration.train.core import PrivateCore
from murmuration.train.distributed.ranks import Alone
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise import exact
from murmuration.train.noise.aes import CHUNK_BLOCKS, NOISE_CHUNK, AESNoise
from murmuration.train.noise.exact import ExactNoise, error_bound, nearest_whole, nearly_whole
from murmuration.train.noise.update import FURTHEST, NoisyUpdate, UpdateError, sum_on_grid
from tests.support.normality import normal_in_every_respect
from tests.support.step_world import KEYS
from tests.support.train_helpers import plan_for, private_engine
from tests.train.test_train_noise import noised

KEY = bytes(range(32))
N = 1 << 19
PLAN = plan_for(noise=ExactGrid())
ALONE = Fragment("w", 0, 0, 1, 0)


@pytest.fixture(autouse=True)
def precise() -> Iterator[None]:
    with mpmath.workprec(500):
        yield


def counted(deviation: float) -> ExactNoise:
    """On the grid of whole numbers."""
    noise = ExactNoise(KEY, deviation, 1.0, 1.5 / deviation)
    assert noise.grid == 1.0
    return noise


# Which distribution it is.


def masses(deviation: float, reach: int) -> np.ndarray:
    """P([Y] = k) for |k| < reach, and of all that lies beyond on either side."""
    edges = [-math.inf, *(k + 0.5 for k in range(-reach, reach)), math.inf]
    below = [mpmath.ncdf(mpmath.mpf(edge) / mpmath.mpf(deviation)) for edge in edges]
    return np.array([float(after - before) for before, after in pairwise(below)])


def fits(drawn: np.ndarray, deviation: float, reach: int) -> bool:
    found = np.bincount(np.clip(drawn, -reach, reach).astype(int) + reach, minlength=2 * reach + 1)
    expected = masses(deviation, reach) * len(drawn)
    assert expected.min() > 5
    return float(stats.chisquare(found, expected).pvalue) > 1e-6


@pytest.mark.parametrize(("deviation", "reach"), [(0.5**0.5, 2), (3**0.5, 6), (40.0, 150)])
def test_each_whole_number_has_its_own_probability_and_a_wrong_deviation_is_seen(deviation: float, reach: int) -> None:
    drawn = counted(deviation).draw(3, 1, 0, N)
    assert np.array_equal(drawn, np.rint(drawn))
    assert fits(drawn, deviation, reach)
    assert not fits(counted(deviation * 1.02).draw(3, 1, 0, N), deviation, reach)
    assert not fits(counted(deviation / 1.02).draw(3, 1, 0, N), deviation, reach)
    assert not fits(np.trunc(AESNoise(KEY, deviation, 1.0).draw(3, 1, 0, N, np.float64)), deviation, reach)
    pairs = drawn.reshape(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 4.9 * (deviation**2 + 1 / 12) / math.sqrt(N / 2)


def test_on_a_fine_grid_it_is_as_normal_as_any() -> None:
    noise = ExactNoise(KEY, 2.5, 1.0, 1e-9)
    drawn = noise.draw(3, 1, 0, 1_000_000)
    assert normal_in_every_respect(drawn * noise.grid, 2.5)
    assert not normal_in_every_respect(drawn * noise.grid * 1.05, 2.5)


# That each draw is the nearest whole number of a real one, whatever the machine rounds.


def real(deviation: float, first: int, second: int, bits: int, sine: bool, after: float) -> mpmath.mpf:
    """The number whose bits begin so and go on as `after`, in [0, 1), says."""
    u, v = ((mpmath.mpf(word) + after) / mpmath.mpf(2) ** bits for word in (first, second))
    turn = (mpmath.sin if sine else mpmath.cos)(2 * mpmath.pi * v)
    return mpmath.mpf(deviation) * mpmath.sqrt(-2 * mpmath.log(u)) * turn


def nearest(value: mpmath.mpf) -> int:
    return int(mpmath.floor(value + mpmath.mpf(1) / 2))


def near_corners(bits: int) -> st.SearchStrategy[int]:
    """Any word, and those where logarithm and turn are hard: next to all eighths, to nothing and to everything."""
    eighth = 1 << bits - 3
    close = st.builds(lambda k, off: (k * eighth + off) % (1 << bits), st.integers(0, 8), st.integers(-5, 5))
    tiny = st.integers(1, bits - 1).flatmap(lambda b: st.integers(1, 1 << b))
    return st.one_of(st.integers(0, (1 << bits) - 1), close, tiny, tiny.map(lambda w: (1 << bits) - w))


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([64, 128]), st.booleans(), st.sampled_from([0.3, 1.7e6, 1.37 * 2.0**33, 2.0**60]))
def test_what_the_bits_decide_is_the_nearest_and_what_they_do_not_is_left_open(
    data: st.DataObject, bits: int, sine: bool, deviation: float
) -> None:
    first, second = data.draw(near_corners(bits)), data.draw(near_corners(bits))
    found = nearest_whole(deviation, first, second, bits, sine)
    with mpmath.workprec(500):
        ends = [real(deviation, first, second, bits, sine, t) for t in (2.0**-60, 0.5, 1 - 2.0**-50)]
        if found is not None:
            assert {nearest(end) for end in ends} == {found}
        elif first > 0:
            # As far apart as that, or a half close by.
            width = mpmath.mpf(deviation) * (mpmath.sqrt(2 * mpmath.mpf(2) / first) + 60 * mpmath.mpf(2) ** -bits)
            assert nearest(ends[1] - width) != nearest(ends[1] + width)


class Words:
    """A cipher's stream that gives chosen words."""

    def __init__(self, pairs: np.ndarray) -> None:
        self._bytes = pairs.astype("<u8").tobytes()

    def update_into(self, zeros: memoryview, out: bytearray) -> None:
        out[: len(zeros)] = self._bytes[: len(zeros)]


def hard_pairs(count: int) -> np.ndarray:
    random = np.random.default_rng(7)
    pairs = random.integers(0, 2**64, (count, 2), dtype=np.uint64)
    small = random.integers(0, 64, count).astype(np.uint64)
    third = count // 3
    pairs[:third, 0] >>= small[:third]  # small U: far out
    pairs[third : 2 * third, 0] |= ~(np.uint64(2**64 - 1) >> small[third : 2 * third])  # U close to 1: close to 0
    pairs[: count // 2 : 2, 1] &= np.uint64(2**64 - 2**61)  # V at an eighth
    pairs[:third, 0] |= np.uint64(1)
    return pairs


def errors_over_bounds(deviation: float, pairs: np.ndarray) -> np.ndarray:
    """How far each fp64 number lies from the real one, at either end of what its bits leave open, over its bound."""
    scratch = exact._WholeScratch(len(pairs))
    normals = scratch.normals(Words(pairs), len(pairs), deviation).copy()
    bounds = error_bound(scratch.floats[0, : len(pairs)], deviation)
    worst = np.zeros(len(pairs))
    for at, (first, second) in enumerate(pairs.tolist()):
        for sine in (False, True):
            apart = (
                abs(real(deviation, first, second, 64, sine, t) - normals[2 * at + sine]) for t in (1e-9, 1 - 1e-9)
            )
            worst[at] = max(worst[at], float(max(apart) / mpmath.mpf(float(bounds[at]))))
    return worst


@pytest.mark.parametrize("deviation", [0.7, 1.37 * 2.0**33])
def test_the_bound_holds_for_easy_and_hard_words_and_is_not_far_from_what_is_met(deviation: float) -> None:
    worst = errors_over_bounds(deviation, hard_pairs(1500))
    assert worst.max() <= 1, "more than can be promised"
    assert worst.max() > 1 / 20, "a bound a twentieth as large would fail"


def test_places_where_a_half_is_close_are_not_decided_in_fp64() -> None:
    noise = ExactNoise(KEY, 1.0, 1.0, 1e-6 / math.sqrt(1e9))
    deviation, blocks = noise.std / noise.grid, 1 << 12
    scratch = exact._WholeScratch(blocks)
    _, undecided = nearly_whole(scratch, noise._keystream(1, 0, 0, blocks), blocks, deviation)
    apart = np.abs(scratch.normal - np.rint(scratch.normal)).reshape(-1)
    assert 0 < len(undecided) < blocks / 100
    assert apart[undecided].min() > 0.4 and set(np.flatnonzero(apart > 0.4999)) <= set(undecided.tolist())


@pytest.mark.parametrize("fineness", [1.2, 1e-4, 1e-6 / math.sqrt(1e8)])
def test_without_any_trust_in_fp64_the_same_numbers_come_out(monkeypatch: pytest.MonkeyPatch, fineness: float) -> None:
    """All draws by integers alone; a margin that is too small gives others, so the comparison sees one."""
    noise = ExactNoise(KEY, 1.0, 1.0, fineness)
    quick = noise.draw(5, 2, 3, 3000)
    monkeypatch.setattr(exact, "ANGLE_ERROR", math.inf)
    assert np.array_equal(noise.draw(5, 2, 3, 3000), quick)


@pytest.mark.parametrize("start", [0, 3])
def test_where_fp64_does_not_decide_its_number_is_not_taken(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    noise = counted(1.5)
    honest = noise.draw(5, 2, start, 41)

    def wrong(scratch, stream, count, std):
        whole, _ = nearly_whole(scratch, stream, count, std)
        return whole + 5, np.arange(2 * count)

    monkeypatch.setattr(exact, "nearly_whole", wrong)
    assert np.array_equal(noise.draw(5, 2, start, 41), honest)


def test_64_bits_may_not_be_enough_and_then_the_next_ones_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "MOST_STD", 2.0**200)
    noise = ExactNoise(KEY, 1.0, 1.0, 2.0**-150)
    deviation = noise.std / noise.grid
    for block in range(20):
        words = [
            np.frombuffer(ExactNoise.draw_bits(KEY, level, 9, 4, block), "<u8").tolist() for level in range(5)
        ]  # fmt: skip
        first, second = (sum(pair[side] << 64 * (4 - level) for level, pair in enumerate(words)) for side in (0, 1))
        for sine in (False, True):
            found = noise._decided(9, 4, block, (words[0][0], words[0][1]), deviation, sine)
            assert found == nearest(real(deviation, first, second, 320, sine, 0.5))
            assert nearest_whole(deviation, words[0][0], words[0][1], 64, sine) is None


def test_the_extreme_words_end_in_a_number() -> None:
    """A word of zeros may be any number near 0, and is decided by its next bits."""
    noise = counted(4.0)
    for first in (0, 1, 2**64 - 1):
        for second in (0, 2**62, 2**63, 2**64 - 1):
            found = [noise._decided(1, 0, 0, (first, second), 4.0, sine) for sine in (False, True)]
            assert math.hypot(*found) < 4.0 * 14


# Which element gets which draw.


def test_no_version_and_no_processor_draws_other_numbers() -> None:
    """A run that is continued elsewhere repeats its noise."""
    drawn = ExactNoise(KEY, 1.25, 1.0, 1e-10).draw(3, 2, 5, 5000).astype("<i8").tobytes()
    assert hashlib.sha256(drawn).hexdigest() == "c659dcb0472f4956f8b8dcc3d74a14dfe93ebbdeb90c12fe0769b93a52efce25"


def test_any_stretch_is_a_part_of_the_whole_and_steps_parameters_and_keys_differ() -> None:
    noise = ExactNoise(KEY, 1.0, 1.0, 1e-9)
    length = 2 * CHUNK_BLOCKS + 5
    whole = noise.draw(3, 1, 0, length)
    for start, stop in ((0, 1), (1, 2), (1, length), (2 * CHUNK_BLOCKS - 3, 2 * CHUNK_BLOCKS + 4), (7, 7)):
        assert np.array_equal(noise.draw(3, 1, start, stop - start), whole[start:stop])
    for other in (noise.draw(4, 1, 0, length), noise.draw(3, 2, 0, length)):
        assert not np.array_equal(other, whole)
    assert not np.array_equal(ExactNoise(bytes(32), 1.0, 1.0, 1e-9).draw(3, 1, 0, length), whole)
    with pytest.raises(ValueError, match="ask for float64"):
        noise.draw(3, 1, 0, 4, np.float32)


def test_every_element_gets_the_same_one_draw_at_any_world_size_and_ahead_of_time() -> None:
    sizes = {"a": 1001, "b": 1, "c": 77, "d": 4096}
    mechanism = ExactNoise.of(KEY, PLAN, sum(sizes.values()))
    alone = noised(1, mechanism, sizes, 7, dtype=torch.float64)
    for world, ahead in ((1, True), (2, False), (3, True), (5, False)):
        spread = noised(world, mechanism, sizes, 7, ahead, torch.float64)
        assert all(np.array_equal(alone[name], values) for name, values in spread.items())
    values = np.concatenate(list(alone.values()))
    assert not np.isnan(values).any() and len(np.unique(values)) > 0.99 * len(values)
    assert abs(values.std() * PLAN.divisor / PLAN.noise_std - 1) < 5 / math.sqrt(2 * len(values))


# What rounding the sum does.


def test_what_is_released_is_whole_numbers_until_the_division() -> None:
    plan = plan_for(records=512, batch=32, noise=ExactGrid(), clip_norm=0.3)
    assert plan.divisor == 32.0
    mechanism = ExactNoise.of(KEY, plan, NOISE_CHUNK)
    total = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 20
    flat = total.clone()
    NoisyUpdate(mechanism, 3).finish(flat, [Fragment("w", 6, 11, 5000, 0)])
    noise = mechanism.draw(3, 6, 11, 5000)
    grid = mechanism.grid
    expected = [(round(float(s) / grid) + int(z)) * grid / 32 for s, z in zip(total, noise, strict=True)]
    assert flat.tolist() == expected
    assert torch.equal((flat * 32 / grid).round(), flat * 32 / grid), "on the grid, all of them"


HOSTILE = [0.0, 0.5, -0.5, 1.5, 1e-30, -1e-300, 0.49999999999999994, 2.0**53 + 1, 3e19, -3e19, 1e300]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HOSTILE), st.floats(-3.0, 3.0)), min_size=1, max_size=40))
def test_two_totals_are_no_further_apart_than_before_and_a_step_in_each_element(
    pairs: list[tuple[float, float]],
) -> None:
    """In units of the grid, which the worst neighbours know; also where totals are cut off."""
    grid = 2.0**-30
    one = torch.tensor([base for base, _ in pairs], dtype=torch.float64) * grid
    other = one + torch.tensor([move for _, move in pairs], dtype=torch.float64) * grid
    still = torch.zeros_like(one)
    moved = (sum_on_grid(one, still, grid) - sum_on_grid(other, still, grid)).norm()
    assert moved <= (one - other).norm() + grid * math.sqrt(len(pairs)) * (1 + 1e-12)
    for total in (one, other):
        kept = total.clamp(-FURTHEST * grid, FURTHEST * grid)
        assert ((sum_on_grid(total, still, grid) - kept).abs() <= grid / 2).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_no_number_is_an_error_and_not_a_whole_number(wrong: float) -> None:
    with pytest.raises(UpdateError, match="no number"):
        NoisyUpdate(ExactNoise.of(KEY, PLAN), 1).finish(torch.tensor([wrong], dtype=torch.float64), [ALONE])


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(0.1, 100.0), st.integers(1, 10**9))  # more elements are refused at σ = 100
def test_the_grid_is_the_coarsest_that_the_plan_pays_for(norm: float, sigma: float, elements: int) -> None:
    plan = plan_for(clip_norm=norm, noise_multiplier=sigma, noise=ExactGrid())
    grid = ExactNoise.of(KEY, plan, elements).grid
    assert fits_grid(grid, elements, GRID_GROWTH * norm)
    assert (
        not fits_grid(2.000001 * grid, elements, GRID_GROWTH * norm) and 2 * grid * math.sqrt(elements) > 9.9e-7 * norm
    )


def test_the_grid_follows_a_norm_that_adapts() -> None:
    noise = ExactNoise.of(KEY, PLAN, 1000)
    first, counts = noise.grid, noise.draw(1, 0, 0, 64)
    noise.std /= 4
    assert noise.grid == first / 4 and np.array_equal(noise.draw(1, 0, 0, 64), counts)


def test_metrics_have_grids_of_their_own() -> None:
    metric = PlannedMetric("loss", 2.0, 12.0)
    plan = plan_for(metrics=(metric,), noise=ExactGrid())
    noise = ExactNoise.of_metric(KEY, metric, plan)
    assert noise.std == 12.0 and fits_grid(noise.grid, 1, GRID_GROWTH * 2.0)


def test_a_grid_that_nobody_pays_for_and_one_that_is_too_fine_are_refused() -> None:
    with pytest.raises(PlanError, match="charges nothing for the grid"):
        ExactNoise.of(KEY, plan_for())
    with pytest.raises(PlanError, match="smaller noise multiplier"):
        ExactNoise.of(KEY, plan_for(noise_multiplier=1e6, noise=ExactGrid()), 10**10)
    with pytest.raises(PlanError, match="growth of exact noise must lie"):
        plan_for(noise=ExactGrid(1e-5))


def test_the_core_takes_no_plan_that_says_otherwise() -> None:
    ranks = Alone(torch.device("cpu"))
    engine, clip, _ = private_engine(ranks, plan_for())
    for plan, kind in ((plan_for(), "exact"), (PLAN, "aes"), (PLAN, "chacha20")):
        with pytest.raises(PlanError, match="if and only if"):
            PrivateCore(plan, clip, engine, KEYS.__getitem__, ranks, kind)
    core = PrivateCore(PLAN, clip, engine, KEYS.__getitem__, ranks, "exact")
    assert core.noise("noise").generator == "aes-256-ctr-exact"
    assert fits_grid(core.noise("noise").grid, engine.trainable_elements, GRID_GROWTH * PLAN.clip_norm)


def test_the_grid_costs_a_millionth_of_sigma() -> None:
    assert PLAN.effective_noise_multiplier == PLAN.noise_multiplier / (1 + 1e-6)
    plain = epsilon([Event(PLAN.sampling_rate, PLAN.noise_multiplier, 6)], PLAN.delta)
    charged = epsilon([Event(PLAN.sampling_rate, PLAN.effective_noise_multiplier, 6)], PLAN.delta)
    assert plain < charged < plain * (1 + 1e-4)
