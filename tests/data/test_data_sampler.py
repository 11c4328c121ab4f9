"""The sampler: the stated keystream, the stated rate, and independence of everything else."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from murmuration.accounting.sampling import CyclicPoisson, Poisson, RandomAllocation
from murmuration.data.draw.micro_batch import slots
from murmuration.data.draw.node_placement import Placement, place
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.draw.samplers import AllocationSampler, make_sampler
from murmuration.data.draw.stream import StreamEpochs
from murmuration.data.index.epochs import PublicEpochs

ROOT = Path(__file__).resolve().parents[2]
KEY, DIGEST_KEY = bytes(range(32)), bytes(range(32, 64))


def _lane(step: int, record: int) -> int:
    """Lane of one record by one AES block in ECB mode: no CTR code, no chunks, no numpy."""
    block = ((step << 64) | (record // 4)).to_bytes(16, "big")
    cipher = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    out = cipher.update(block) + cipher.finalize()
    return int.from_bytes(out[4 * (record % 4) : 4 * (record % 4) + 4], "little")


def _sampler(records: int, threshold: int) -> PoissonSampler:
    return PoissonSampler(KEY, DIGEST_KEY, records, threshold)


@pytest.mark.parametrize("step", [0, 1, 2**40 + 7, 2**64 - 1])
@pytest.mark.parametrize("threshold", [1, LANES // 7, LANES // 2 + 1, LANES - 1, LANES])
def test_lanes_against_a_slow_loop(step: int, threshold: int) -> None:
    records = 403
    expected = [record for record in range(records) if _lane(step, record) < threshold]
    assert _sampler(records, threshold).draw(step).ids.tolist() == expected


def test_lanes_across_the_chunk_border() -> None:
    border, records = 1 << 20, (1 << 20) + 41
    ids = _sampler(records, LANES // 3).draw(5).ids
    near = [record for record in range(border - 60, records) if _lane(5, record) < LANES // 3]
    assert ids[ids >= border - 60].tolist() == near
    assert np.all(np.diff(ids) > 0) and ids.dtype == np.int64


def test_the_threshold_itself_does_not_join() -> None:
    lane = _lane(9, 17)
    assert 17 not in _sampler(18, lane).draw(9).ids
    assert 17 in _sampler(18, lane + 1).draw(9).ids


def test_full_threshold_means_everyone() -> None:
    draw = _sampler(1001, LANES).draw(3)
    assert draw.ids.tolist() == list(range(1001)) and draw.rule == Poisson(2**32)


def test_an_empty_draw_is_a_draw() -> None:
    draw = _sampler(10, 1).draw(0)
    assert draw.ids.shape == (0,) and draw.ids.dtype == np.int64 and len(draw.digest) == 64
    assert slots(draw.ids, 3, 4, 8).tolist() == [[-1] * 8]


def test_prefix_stability_and_no_state() -> None:
    sampler = _sampler(5000, LANES // 11)
    late = sampler.draw(40).ids
    sampler.draw(7)
    assert np.array_equal(sampler.draw(40).ids, late)
    assert np.array_equal(_sampler(3000, LANES // 11).draw(40).ids, late[late < 3000])
    assert not np.array_equal(PoissonSampler(bytes(32), DIGEST_KEY, 5000, LANES // 11).draw(40).ids, late)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 16, 64])
def test_union_over_ranks_is_the_draw(world: int) -> None:
    ids = _sampler(20_000, LANES // 40).draw(12).ids
    rows = [slots(ids, rank, world, 16) for rank in range(world)]
    assert len({row.shape for row in rows}) == 1
    real = np.concatenate([row[row >= 0] for row in rows])
    assert np.array_equal(real, ids), "the union over ranks must be the draw, without repeats"


def _p_values(draws: list[np.ndarray], records: int, q: float) -> tuple[float, float]:
    """p of the participations per record (chi2, around the claimed q), and of the batch sizes (KS)."""
    steps = len(draws)
    counts = np.bincount(np.concatenate(draws), minlength=records)
    chi2 = float(np.sum((counts - steps * q) ** 2) / (steps * q * (1 - q)))
    p_counts = 2 * min(float(stats.chi2.sf(chi2, records)), float(stats.chi2.cdf(chi2, records)))
    sizes = np.array([len(draw) for draw in draws])
    # Sizes are integers: spread over the step of the distribution function, they are uniform under H0.
    spread = stats.binom.cdf(sizes - 1, records, q) + np.random.default_rng(1).random(steps) * stats.binom.pmf(
        sizes, records, q
    )
    return p_counts, float(stats.kstest(spread, "uniform").pvalue)


def test_rate_is_the_accounted_one() -> None:
    records, steps, threshold = 2000, 3000, LANES // 50
    sampler = _sampler(records, threshold)
    draws = [sampler.draw(step).ids for step in range(steps)]
    assert min(_p_values(draws, records, sampler.q)) > 0.005
    overlap = np.mean([len(np.intersect1d(a, b)) for a, b in pairwise(draws)])
    expected = records * sampler.q**2
    assert abs(overlap - expected) < 4 * np.sqrt(expected / steps)
    # Neighbours share an AES block: their joint participations must still be those of independent coins.
    joint = sum(np.count_nonzero(np.diff(draw) == 1) for draw in draws) / steps
    assert abs(joint - expected) < 4 * np.sqrt(expected / steps)


def test_the_rate_test_has_power() -> None:
    records, steps = 2000, 3000
    wrong = _sampler(records, int(LANES / 50 * 1.05))
    p_counts, p_sizes = _p_values([wrong.draw(step).ids for step in range(steps)], records, 1 / 50)
    assert p_counts < 1e-4 and p_sizes < 1e-6
    fixed = [np.sort(np.random.default_rng(step).choice(records, 40, replace=False)) for step in range(steps)]
    assert _p_values(fixed, records, 1 / 50)[1] < 1e-6, "a fixed batch size must not pass for Poisson sampling"


def test_digest_is_keyed_and_covers_everything() -> None:
    draw = _sampler(100, LANES // 4).draw(6)
    message = b"".join(n.to_bytes(8, "little") for n in (6, LANES // 4, 100)) + draw.ids.astype("<i8").tobytes()
    assert draw.digest == hmac.new(DIGEST_KEY, message, hashlib.sha256).hexdigest()
    others = {
        PoissonSampler(KEY, bytes(32), 100, LANES // 4).draw(6).digest,
        _sampler(101, LANES // 4).draw(6).digest,
        _sampler(100, LANES // 4 + 1).draw(6).digest,
        _sampler(100, LANES // 4).draw(7).digest,
    }
    assert len(others | {draw.digest}) == 5


def test_the_draw_reports_what_the_sampler_did() -> None:
    sampler = _sampler(1000, LANES // 4)
    sampler.threshold, sampler.records = LANES // 2, 800
    draw = sampler.draw(0)
    assert (draw.rule, draw.records) == (Poisson(LANES // 2), 800)
    assert draw.ids.tolist() == [record for record in range(800) if _lane(0, record) < LANES // 2]


@pytest.mark.slow
def test_two_thousand_million_records() -> None:
    """The whole draw in bounded memory, by the same code; its last chunk against single AES blocks."""
    code = f"""
import re, sys; sys.path.insert(0, {str(ROOT)!r})
from murmuration.data.draw.poisson import PoissonSampler
draw = PoissonSampler(bytes(range(32)), bytes(32), 2_000_000_000, 1 << 22).draw(77)
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(len(draw.ids), peak, *draw.ids[-20:])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, kilobytes, *last = map(int, done.stdout.split())
    expected = 2e9 / 1024
    assert abs(count - expected) < 5 * np.sqrt(expected)
    assert kilobytes < 300_000
    assert last == [record for record in range(last[0], 2_000_000_000) if _lane(77, record) < 1 << 22]


def test_lanes_far_out() -> None:
    """Records beyond 2^31, without drawing the ones before: the counter's part of the stream is seekable."""
    first, zero = 2_000_000_000, 6_922_369_087
    drawn = _sampler(1 << 34, LANES // 7).part(5, first, first + 4000)
    assert drawn.tolist() == [record for record in range(first, first + 4000) if _lane(5, record) < LANES // 7]
    assert _lane(9, zero) == 0, "searched for, among 2^33: it is below every threshold"
    for threshold in (1, LANES):
        assert zero in _sampler(1 << 34, threshold).part(9, zero - 3, zero + 1)


def test_memory_does_not_grow_with_the_records() -> None:
    tracemalloc.start()
    draw = _sampler(60_000_000, 1 << 16).draw(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20 and len(draw.ids) < 2000


# What cannot be drawn, dealt out or placed, and the words for it.


def allocated(records: int, slots: int) -> AllocationSampler:
    return AllocationSampler(KEY, DIGEST_KEY, records, slots)


def placed(ends: list[int], names: str = "ab", held: int = 2) -> Placement:
    return place(list(names), np.array(ends), [np.array([True] * held)])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    **{f"threshold {each}": (lambda each=each: _sampler(10, each), "threshold") for each in (0, -1, LANES + 1)},
    **{f"keys of {key} and {digest}": (lambda k=key, d=digest: PoissonSampler(bytes(k), bytes(d), 10, 1), "32-byte key")
       for key, digest in ((31, 32), (33, 32), (16, 32), (32, 31), (32, 0))},
    "no record": (lambda: _sampler(0, LANES), "0 records"),
    "more turns than records": (lambda: PoissonSampler(KEY, DIGEST_KEY, 6, LANES // 4, 7), "each part needs one"),
    **{f"step {each}": (lambda each=each: _sampler(10, LANES).draw(each), "outside") for each in (-1, 1 << 64)},
    **{f"part {first} to {stop}": (lambda a=first, b=stop: _sampler(103, LANES // 7).part(9, a, b), "no part")
       for first, stop in ((2, 8), (-4, 8), (8, 4), (0, 104))},
    "a changed draw": (lambda: _sampler(40, LANES).draw(1).ids.fill(7), "read-only"),
    **{f"epochs of {each}": (lambda each=each: allocated(40, each), "has 2 to") for each in (0, 1, 2**20 + 1)},
    "an allocation of none": (lambda: allocated(0, 2), "nothing to sample from"),
    "an allocation before step 1": (lambda: allocated(10, 2).draw(0), "begin with step 1"),
    "an allocation beyond 64 bits": (lambda: allocated(40, 2).draw(1 << 64), "outside 1"),
    "a part of an allocation": (lambda: allocated(10, 2).part(1, 2, 10), "no part that begins"),
    "a changed allocation": (lambda: allocated(40, 2).draw(1).ids.fill(7), "read-only"),
    **{f"layout {each}": (lambda each=each: slots(np.arange(9), *each), "not a possible layout")
       for each in ((-1, 2, 4), (2, 2, 4), (0, 0, 4), (0, 2, 0), (0, 2, -1))},
    **{f"ids {each}": (lambda each=each: slots(np.array(each), 0, 2, 4), "must be sorted")
       for each in ([5, 3, 9], [3, 9, 5], [1, 2, 0], [3, 1])},
    **{f"shards that end at {each}": (lambda each=each: placed(each), "ends must rise")
       for each in ([5, 4], [5, 3], [-1, 3])},
    "one name of two shards": (lambda: placed([2, 4], "a"), "one for each shard"),
    "what a rank has of one shard of two": (lambda: placed([2, 4], held=1), "one for each shard"),
    **{f"ids {each} of 4": (lambda each=each: placed([2, 4]).rows(np.array(each), 0, 2), "beyond the last range")
       for each in ([-1, 3], [-1], [0, 4], [4])},
    "a step before the first of a stream": (lambda: StreamEpochs(1, 8).ids(-1), "step -1 is negative"),
    "public epochs of none": (lambda: PublicEpochs(0, 1, KEY), "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused(what: str) -> None:
    act, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        act()


def test_what_lies_beside_it_is_drawn() -> None:
    assert _sampler(1, LANES).draw(0).ids.tolist() == [0] and placed([2, 4]).rows(np.array([0, 3]), 0, 2).size == 2
    assert allocated(40, 2).draw(1).rule == RandomAllocation(2)
    for rule in (RandomAllocation(1 << 20), Poisson(LANES), CyclicPoisson(LANES // 2, 5)):
        assert make_sampler(rule, KEY, DIGEST_KEY, 40).draw(1 << 20).rule == rule
