"""The one-shot update: which stretches of a parameter get their noise, and that none gets it twice."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import NOISE_CHUNK, AESNoise, in_chunks
from murmuration.train.noise.update import NoisyUpdate, UpdateError

MECHANISM = AESNoise(b"s" * 32, 1.5, 4.0)


def stretch(start: int, length: int, parameter: int = 0) -> Fragment:
    return Fragment(f"w{parameter}", parameter, start, length, start)


def test_neighbouring_stretches_in_any_order_are_no_overlap() -> None:
    whole = MECHANISM.draw(3, 0, 0, 12, np.float64) / 4.0
    for order in permutations([stretch(0, 5), stretch(5, 1), stretch(6, 6)]):
        flat, update = torch.zeros(12, dtype=torch.float64), NoisyUpdate(MECHANISM, 3)
        for fragment in order:
            update.finish(flat, [fragment])
        assert update.elements == 12
        np.testing.assert_allclose(flat.numpy(), whole, rtol=1e-12)


@pytest.mark.parametrize("first, second", [((0, 4), (3, 2)), ((0, 8), (2, 2)), ((5, 3), (5, 3)), ((0, 1), (0, 9))])
def test_any_overlap_is_refused_whichever_comes_first(first: tuple[int, int], second: tuple[int, int]) -> None:
    for one, other in ((first, second), (second, first)):
        flat, update = torch.zeros(12, dtype=torch.float64), NoisyUpdate(MECHANISM, 3)
        update.finish(flat, [stretch(*one)])
        before = flat.clone()
        with pytest.raises(UpdateError, match="asked for twice"):
            update.finish(flat, [stretch(*other)])
        assert torch.equal(flat, before)
        update.finish(flat, [stretch(*other, parameter=1)])  # the same place of another parameter is another draw
        assert not torch.equal(flat, before)


def test_a_long_fragment_is_cut_without_a_gap_or_an_overlap() -> None:
    short, long = Fragment("v", 4, 2, 9, 0), Fragment("w", 5, 7, 2 * NOISE_CHUNK + 5, 9)
    assert list(in_chunks([short, long])) == [
        short,
        Fragment("w", 5, 7, NOISE_CHUNK, 9),
        Fragment("w", 5, 7 + NOISE_CHUNK, NOISE_CHUNK, 9 + NOISE_CHUNK),
        Fragment("w", 5, 7 + 2 * NOISE_CHUNK, 5, 9 + 2 * NOISE_CHUNK),
    ]
