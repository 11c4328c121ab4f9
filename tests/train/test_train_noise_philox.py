"""Philox noise: the generator by its published answers, the draw by its distribution, one draw per element."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from murmuration.accounting.certificate.statement import GENERATOR_DEVIATIONS
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import NOISE_CHUNK
from murmuration.train.noise.philox import WORD, PhiloxNoise, philox
from tests.support.normality import normal_in_every_respect

KEY = bytes(range(32))
CPU = torch.device("cpu")
N = 1_000_000


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((WORD, WORD), (WORD,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)  # fmt: skip
def test_the_generator_gives_the_known_answers_of_random123(key: tuple, counter: tuple, expected: str) -> None:
    words = philox(key, tuple(torch.tensor([word]) for word in counter))  # pyright: ignore
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_the_noise_is_normal_and_the_test_has_power() -> None:
    drawn = PhiloxNoise(KEY, 2.5, 1.0).draw(3, 1, 0, N)
    assert drawn.dtype == np.float32 and normal_in_every_respect(drawn, 2.5)
    assert not normal_in_every_respect(drawn * 0.95, 2.5) and not normal_in_every_respect(drawn * 1.05, 2.5)
    even, odd = drawn[::2].astype(float) / 2.5, drawn[1::2].astype(float) / 2.5
    assert normal_in_every_respect(even, 1.0) and normal_in_every_respect(odd, 1.0)
    assert abs((even * odd).mean()) < 4.9 / np.sqrt(N / 2)
    assert abs((even**2 * odd**2).mean() - 1) < 4.9 * np.sqrt(8 / (N / 2))
    tails = int((np.abs(drawn) > 4 * 2.5).sum())
    assert abs(tails - N * 2 * stats.norm.sf(4)) < 5 * np.sqrt(N * 2 * stats.norm.sf(4)) + 1


def test_steps_parameters_keys_and_far_elements_have_their_own_draws() -> None:
    noise = PhiloxNoise(KEY, 1.0, 1.0)
    streams = [
        noise.draw(1, 0, 0, N // 4), noise.draw(2, 0, 0, N // 4), noise.draw(1, 1, 0, N // 4),
        noise.draw(1 + 2**30, 0, 0, N // 4), noise.draw(1, 0, 2**34, N // 4),
        PhiloxNoise(bytes(32), 1.0, 1.0).draw(1, 0, 0, N // 4),
    ]  # fmt: skip
    for i, first in enumerate(streams):
        for second in streams[:i]:
            assert abs(float((first.astype(np.float64) * second).mean())) < 5 / np.sqrt(N // 4)
            assert not np.isin(first[:1000], second[:1000]).all()
    for step, parameter in ((2**40, 0), (-1, 0), (0, 2**24), (0, -1)):
        with pytest.raises(ValueError, match="does not fit"):
            noise.draw(step, parameter, 0, 1)


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 500), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12), step=st.integers(0, 99))
def test_any_cut_of_a_parameter_gives_the_same_numbers(start: int, cuts: list[int], step: int) -> None:
    noise = PhiloxNoise(KEY, 1.0, 1.0)
    whole = noise.draw(step, 5, 0, 1000, np.float64)
    ends = np.cumsum([start, *cuts])
    fragments = [Fragment("w", 5, int(a), int(b - a), int(a)) for a, b in pairwise(ends)]
    parts = [values.numpy() for _, values in noise.chunks(step, fragments, CPU)]
    # Torch's vector and scalar square roots differ in the last bit, so a cut may, too.
    assert np.concatenate(parts) == pytest.approx(whole[start : ends[-1]], abs=4e-15)


def test_large_fragments_are_cut_and_small_ones_are_drawn_together() -> None:
    noise = PhiloxNoise(KEY, 1.0, 1.0)
    fragments = [
        Fragment("a", 0, 3, NOISE_CHUNK + 10, 0), Fragment("b", 1, 0, 7, NOISE_CHUNK + 10),
        Fragment("c", 2, 5, 9, NOISE_CHUNK + 17)
    ]  # fmt: skip
    found = torch.zeros(NOISE_CHUNK + 26, dtype=torch.float64)
    for chunk, values in noise.chunks(4, fragments, CPU):
        assert not chunk.of(found).any() and len(values) == chunk.length <= NOISE_CHUNK
        chunk.of(found).copy_(values)
    for f in fragments:
        alone = noise.draw(4, f.parameter, f.start, f.length, np.float64)
        assert f.of(found).numpy() == pytest.approx(alone, abs=4e-15)
    assert int((found != 0).sum()) == NOISE_CHUNK + 26


def test_it_says_what_it_is_not_and_ignores_the_global_generators() -> None:
    assert "not a cryptographic generator" in GENERATOR_DEVIATIONS[PhiloxNoise.generator]
    first = PhiloxNoise(KEY, 1.0, 1.0).draw(4, 2, 3, 100)
    torch.manual_seed(1)
    torch.randn(3)
    assert np.array_equal(PhiloxNoise(KEY, 1.0, 1.0).draw(4, 2, 3, 100), first)
