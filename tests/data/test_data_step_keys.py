"""Where every step has keys of its own, samplers, readers and decoding processes take those of the step in hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.decode.augment import drop_key, mask_noise
from murmuration.data.draw.micro_batch import slots
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.shard_index import ShardIndex, build

SPEC = DataSpec(16, "random_resized_crop", mask_patches=4, drop_keys=True)
IDS = np.array([0, 3, 1])


def key_of(purpose: str, step: int) -> bytes:
    return f"{purpose} {step}".ljust(32).encode()


def of(purpose: str) -> Callable[[int], bytes]:
    return lambda step: key_of(purpose, step)


def test_the_sampler_takes_both_keys_by_the_step() -> None:
    sampler = PoissonSampler(of("draw"), of("digest"), 1000, 1 << 31)
    for step in (1, 2, 7):
        alone = PoissonSampler(key_of("draw", step), key_of("digest", step), 1000, 1 << 31).draw(step)
        assert sampler.draw(step).digest == alone.digest and np.array_equal(sampler.draw(step).ids, alone.ids)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_reader_takes_every_key_by_the_step_also_in_decoding_processes(small_set: ShardIndex, workers: int) -> None:
    reading = ReadOptions(workers=workers)
    reader = BatchReader(small_set, SPEC, None, of("crop"), of("mask"), of("drop"), reading=reading)
    try:
        for step in (4, 1, 2):
            keys = [key_of(purpose, step) for purpose in ("crop", "mask", "drop")]
            expected, found = (
                BatchReader(small_set, SPEC, None, *keys).read(IDS, step).inputs,
                reader.read(IDS, step).inputs,
            )
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
            assert found["drop_key"][1] == drop_key(keys[2], step, 3)
            assert (found["mask_noise"][1].numpy() == mask_noise(keys[1], step, 3, 4)).all()
    finally:
        reader.close()


def test_a_view_that_is_not_random_asks_for_no_key(small_set: ShardIndex) -> None:
    """Features are made once, before the first step, when no step's key may be at hand."""

    def refuse(step: int) -> bytes:
        raise AssertionError(step)

    reader = BatchReader(small_set, DataSpec(16, "center"), None, refuse, refuse, refuse)
    assert reader.read(IDS, 0).present.all()


# The key with which a model drops units of a record: of (key, step, record), and of nothing else.


KEY = b"d" * 32
DROPPING = DataSpec(16, drop_keys=True)
PINNED_KEYS = [3540222533855815423, -9098053966005043739]


def test_keys_are_those_of_key_step_and_record_in_any_row_beside_anyone(small_set: ShardIndex) -> None:
    ids = np.arange(25)
    expected = torch.tensor([drop_key(KEY, 7, record) for record in range(25)])
    assert len(set(expected.tolist())) == 25
    reader = BatchReader(small_set, DROPPING, dropout_key=KEY, reading=ReadOptions(in_flight=3))
    for world, size in ((1, 25), (2, 4), (3, 5), (7, 2)):
        for rank in range(world):
            for row in slots(ids, rank, world, size):
                found = reader.read(row, 7).inputs["drop_key"]
                assert found.dtype == torch.int64 and found.shape == (size,)
                assert torch.equal(found, torch.where(torch.from_numpy(row) >= 0, expected[row], 0)), "padding is zero"
    assert not bool((reader.read(ids, 8).inputs["drop_key"] == expected).any())
    other = BatchReader(small_set, DROPPING, dropout_key=b"e" * 32)
    assert not bool((other.read(ids, 7).inputs["drop_key"] == expected).any())
    assert reader.drop_key(3, 7) == expected[3]


def test_a_bad_record_has_none(tmp_path: Path, write_tar: Callable[..., Path], picture: Callable[..., bytes]) -> None:
    write_tar(tmp_path / "a.tar", [{"__key__": str(n), "jpg": picture(n) if n else b"no picture"} for n in range(3)])
    batch = BatchReader(build(tmp_path), DROPPING, dropout_key=KEY).read(np.array([0, 1, -1, 2]), 1)
    assert batch.present.tolist() == [False, True, False, True]
    assert batch.inputs["drop_key"].tolist() == [0, drop_key(KEY, 1, 1), 0, drop_key(KEY, 1, 2)]


def test_who_drops_nothing_gets_none(small_set: ShardIndex) -> None:
    batch = BatchReader(small_set, DataSpec(16), dropout_key=KEY).read(np.array([0]), 0)
    assert set(batch.inputs) == {"images"}


def test_keys_are_uniform_and_stable() -> None:
    keys = np.array([drop_key(KEY, step, record) for step in range(50) for record in range(80)])
    assert stats.kstest(keys / 2.0**64 + 0.5, "uniform").pvalue > 1e-3
    assert stats.kstest((keys & 0xFFFFFFFF) / 2.0**32, "uniform").pvalue > 1e-3
    assert len(set(keys.tolist())) == len(keys)
    # Pinned: other keys would change the masks of runs in progress.
    assert [drop_key(KEY, step, record) for step, record in ((0, 0), (1, 2))] == PINNED_KEYS
    assert drop_key(KEY, 1, 2) != drop_key(KEY, 2, 1)
