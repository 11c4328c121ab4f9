"""Random allocation: every record once in every epoch, uniformly, wherever and by however many ranks it is drawn."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from murmuration.accounting.keys import Link
from murmuration.accounting.sampling import RandomAllocation
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.draw.samplers import AllocationSampler, DrawError, SharedSampler

KEY, DIGEST_KEY = bytes(range(32)), bytes(range(32, 64))


def step_of(epoch: int, record: int, slots: int, key: bytes = KEY) -> int:
    """The record's step in an epoch by one AES block in ECB mode: no CTR code, no chunks, no numpy."""
    block = ((epoch << 64) | (record // 4)).to_bytes(16, "big")
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    out = cipher.update(block) + cipher.finalize()
    lane = int.from_bytes(out[4 * (record % 4) : 4 * (record % 4) + 4], "little")
    return epoch * slots + lane * slots // LANES + 1


def sampler(records: int, slots: int) -> AllocationSampler:
    return AllocationSampler(KEY, DIGEST_KEY, records, slots)


def taken(draw: Callable[[int], np.ndarray], records: int, epoch: int, slots: int) -> np.ndarray:
    """How often each record takes part in an epoch."""
    counts = np.zeros(records, np.int64)
    for step in range(epoch * slots + 1, (epoch + 1) * slots + 1):
        np.add.at(counts, draw(step), 1)
    return counts


@pytest.mark.parametrize("slots", [2, 3, 7, 64])
@pytest.mark.parametrize("epoch", [0, 5])
def test_steps_against_a_slow_loop(slots: int, epoch: int) -> None:
    records = 403
    expected = [step_of(epoch, record, slots) for record in range(records)]
    for step in range(epoch * slots + 1, (epoch + 1) * slots + 1):
        assert sampler(records, slots).draw(step).ids.tolist() == [r for r in range(records) if expected[r] == step]


@pytest.mark.parametrize("slots", [2, 5, 179, 1000])
def test_every_record_takes_part_exactly_once_in_every_epoch(slots: int) -> None:
    draws = sampler(10_001, slots)
    for epoch in (0, 1, 1 << 30):
        assert (taken(lambda step: draws.draw(step).ids, 10_001, epoch, slots) == 1).all()


def test_a_record_that_is_allocated_twice_is_found() -> None:
    """Planted: a key of its own for each step, and a wall between two steps that both include."""
    two_keys = AllocationSampler(lambda step: bytes([step % 2]) * 32, DIGEST_KEY, 1000, 4)
    assert (taken(lambda step: two_keys.draw(step).ids, 1000, 3, 4) != 1).any()
    poisson = PoissonSampler(KEY, DIGEST_KEY, 1000, LANES // 4)
    assert (taken(lambda step: poisson.draw(step).ids, 1000, 3, 4) != 1).any()


def test_steps_are_uniform_and_epochs_and_records_independent() -> None:
    records, slots, epochs = 200_000, 6, 3
    draws = sampler(records, slots)
    at = np.zeros((epochs, records), np.int64)
    for step in range(1, epochs * slots + 1):
        at[(step - 1) // slots, draws.draw(step).ids] = (step - 1) % slots
    for epoch in range(epochs):
        assert stats.chisquare(np.bincount(at[epoch], minlength=slots)).pvalue > 1e-4
    for one, two in ((at[0], at[1]), (at[1], at[2]), (at[0, :-1], at[0, 1:]), (at[0, :-4], at[0, 4:])):
        pairs = np.bincount(one * slots + two, minlength=slots**2)
        assert stats.chisquare(pairs).pvalue > 1e-4
    sizes = [len(draws.draw(step).ids) for step in range(1, epochs * slots + 1)]
    assert max(abs(size - records / slots) for size in sizes) < 5.5 * np.sqrt(records / slots)


def test_a_step_needs_no_step_before_it_and_no_other_object() -> None:
    first, later = sampler(5000, 12), sampler(5000, 12)
    assert first.draw(1).digest != first.draw(2).digest
    late = later.draw(31)
    assert np.array_equal(first.draw(31).ids, late.ids) and first.draw(31).digest == late.digest
    assert (late.rule, late.records) == (RandomAllocation(12), 5000)
    other = AllocationSampler(KEY, bytes(32), 5000, 12).draw(31)
    assert np.array_equal(other.ids, late.ids) and other.digest != late.digest
    numbers = (31, round(LANES / 12), 5000, 1, 12)  # ledgers hold this digest, and a replayed step must give it again
    message = b"".join(n.to_bytes(8, "little") for n in numbers) + late.ids.astype("<i8").tobytes()
    assert late.digest == hmac.new(DIGEST_KEY, message, hashlib.sha256).hexdigest()


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_that_share_a_draw_find_what_one_finds(world: int) -> None:
    records, slots = 1234, 9
    parts = [
        [_part(sampler(records, slots), step, rank, world) for rank in range(world)] for step in range(10, 10 + slots)
    ]
    for place, step in enumerate(range(10, 10 + slots)):
        for rank in range(world):
            shared = SharedSampler(sampler(records, slots), rank, world, lambda own, p=place: parts[p])
            assert np.array_equal(shared.draw(step).ids, sampler(records, slots).draw(step).ids)
    if world > 1:
        wrong = SharedSampler(sampler(records, slots), 0, world, lambda own: [own, *[own[:0]] * (world - 1)])
        with pytest.raises(DrawError):
            wrong.draw(10)


def _part(draws: AllocationSampler, step: int, rank: int, world: int) -> np.ndarray:
    blocks = -(-draws.records // 4)
    first, stop = (4 * (each * blocks // world) for each in (rank, rank + 1))
    return draws.part(step, first, min(stop, draws.records))


@pytest.mark.parametrize("first", [1, 3, 4, 6])
def test_the_chain_of_keys_gives_an_epoch_one_key_from_wherever_its_segment_begins(first: int) -> None:
    link = Link.first("a segment", first, bytes(32), slots=4)
    draws = AllocationSampler(lambda step: link.at(step).key("sampling"), DIGEST_KEY, 4000, 4)
    for epoch in ((first - 1) // 4, (first - 1) // 4 + 1):
        steps = [step for step in range(4 * epoch + 1, 4 * epoch + 5) if step >= first]
        counts = np.bincount(np.concatenate([draws.draw(step).ids for step in steps]), minlength=4000)
        assert counts.max() == 1, "never twice"
        assert (counts == 1).mean() == pytest.approx(len(steps) / 4, abs=0.05)


def test_lanes_across_the_chunk_border() -> None:
    border, records = 1 << 20, (1 << 20) + 41
    ids = sampler(records, 3).draw(8).ids
    near = [record for record in range(border - 60, records) if step_of(2, record, 3) == 8]
    assert ids[ids >= border - 60].tolist() == near
    assert np.all(np.diff(ids) > 0) and ids.dtype == np.int64


def test_the_last_epoch_is_drawn_whole_and_its_cut_successor() -> None:
    last = [sampler(40, 2).draw(step).ids.tolist() for step in ((1 << 64) - 3, (1 << 64) - 2, (1 << 64) - 1)]
    assert sorted(last[0] + last[1]) == list(range(40)), "a whole epoch, with numbers that 63 bits do not hold"
    assert last[2] == [record for record in range(40) if step_of((1 << 63) - 1, record, 2) == (1 << 64) - 1]
