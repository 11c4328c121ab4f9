"""Where every step has keys of its own, samplers, readers and decoding processes take those of the step in hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.decode.augment import drop_key, mask_noise
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.shard_index import ShardIndex

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
