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
        ((0, 0), (0, 0, 0, 0), "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ((WORD, WORD), (WORD,) * 4, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)  # fmt: skip
def test_the_generator_gives_the_known_answers_of_random123(key: tuple, counter: tuple, expected: str) -> None:
    assert " ".join(f"{word:016x}" for word in words_of(key, counter)) == expected


def words_of(key: tuple, counter: tuple) -> list[int]:
    words = philox(key, tuple(torch.tensor([signed(word)]) for word in counter))  # pyright: ignore
    return [int(word) % 2**64 for word in words]


def signed(word: int) -> int:
    return int(np.uint64(word).astype(np.int64))


@settings(max_examples=200, deadline=None)
@given(
    key=st.tuples(*[st.integers(0, WORD)] * 2),
    counter=st.tuples(st.integers(0, WORD - 1), *[st.integers(0, WORD)] * 3),
)
def test_every_word_is_numpys(key: tuple, counter: tuple) -> None:
    """An independent implementation. It counts up before it draws, so that it never draws at the counter given."""
    theirs = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
    assert words_of(key, (counter[0] + 1, *counter[1:])) == [int(word) for word in theirs.random_raw(4)]


def test_all_128_bits_of_the_key_come_from_the_run_key_and_decide_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [PhiloxNoise(bytes([first]) * 32, 1.0, 1.0)._key(1) for first in range(64)]
    for half in (0, 1):
        ones = np.array([[key[half] >> bit & 1 for bit in range(64)] for key in keys]).sum(0)
        assert ((ones > 8) & (ones < 56)).all(), "no bit stands still: a range of more than six deviations"
    whole = PhiloxNoise(KEY, 1.0, 1.0)
    drawn = whole.draw(1, 0, 0, 100)
    for half in (0, 1):
        for bit in (0, 31, 32, 63):
            other = PhiloxNoise(KEY, 1.0, 1.0)
            flipped = tuple(part ^ (1 << bit) * (i == half) for i, part in enumerate(whole._key(1)))
            monkeypatch.setattr(other, "_key", lambda step, flipped=flipped: flipped)
            assert not np.isin(other.draw(1, 0, 0, 100), drawn).any()


def test_an_element_is_the_box_muller_transform_of_its_words_of_numpys() -> None:
    """By another implementation of the words and a library's logarithm and sine."""
    noise = PhiloxNoise(KEY, 2.5, 1.0)
    step, parameter, blocks = 5, 3, 50
    found = noise.draw(step, parameter, 0, 4 * blocks, np.float64).reshape(blocks, 2, 2)
    for block in range(1, blocks):
        start = np.array([block - 1, step << 24 | parameter, 0, 0], np.uint64)
        a, b, c, d = (
            int(w) for w in np.random.Philox(key=np.array(noise._key(step), np.uint64), counter=start).random_raw(4)
        )
        for pair, (far, turn) in enumerate(((a, b), (c, d))):
            radius, angle = 2.5 * np.sqrt(-2 * np.log((far + 1.0) * 2.0**-64)), signed(turn) * (2 * np.pi * 2.0**-64)
            assert found[block, pair] == pytest.approx([radius * np.cos(angle), radius * np.sin(angle)], abs=1e-13)


def test_the_noise_is_normal_and_the_test_has_power() -> None:
    drawn = PhiloxNoise(KEY, 2.5, 1.0).draw(3, 1, 0, N)
    assert drawn.dtype == np.float32 and normal_in_every_respect(drawn, 2.5)
    assert not normal_in_every_respect(drawn * 0.95, 2.5) and not normal_in_every_respect(drawn * 1.05, 2.5)
    places = [drawn[place::4].astype(float) / 2.5 for place in range(4)]
    for place, first in enumerate(places):
        assert normal_in_every_respect(first, 1.0)
        for second in places[:place]:
            assert abs((first * second).mean()) < 4.9 / np.sqrt(N / 4)
            assert abs((first**2 * second**2).mean() - 1) < 4.9 * np.sqrt(8 / (N / 4))
    tails = int((np.abs(drawn) > 4 * 2.5).sum())
    assert abs(tails - N * 2 * stats.norm.sf(4)) < 5 * np.sqrt(N * 2 * stats.norm.sf(4)) + 1


def test_steps_parameters_keys_and_far_elements_have_their_own_draws() -> None:
    noise = PhiloxNoise(KEY, 1.0, 1.0)
    streams = [
        noise.draw(1, 0, 0, N // 4), noise.draw(2, 0, 0, N // 4), noise.draw(1, 1, 0, N // 4),
        noise.draw(1 + 2**30, 0, 0, N // 4), noise.draw(1, 0, 2**35, N // 4),
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
