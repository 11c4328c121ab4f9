"""Noise: the right distribution (by tests that would see a wrong one), one draw per element, whoever asks."""

from __future__ import annotations

import random
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise import aes as noise_module
from murmuration.train.noise.aes import CHUNK_BLOCKS, NOISE_CHUNK, AESNoise, in_chunks
from murmuration.train.noise.box_muller import FURTHEST
from murmuration.train.noise.prefetch import NoiseAhead
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate, UpdateError
from tests.support.normality import normal_in_every_respect
from tests.support.train_helpers import fragments_of, plan_for, slice_of

KEY = bytes(range(32))
N = 1_000_000


def test_the_noise_is_normal_and_the_test_has_power() -> None:
    drawn = AESNoise(KEY, 2.5, 1.0).draw(3, 1, 0, N)
    assert drawn.dtype == np.float32
    assert normal_in_every_respect(drawn, 2.5)
    assert not normal_in_every_respect(drawn * 0.95, 2.5)
    assert not normal_in_every_respect(drawn * 1.05, 2.5)
    assert not normal_in_every_respect(np.clip(drawn, -7.5, 7.5) * 1.0, 2.5)
    laplace = np.random.default_rng(0).laplace(0, 2.5 / np.sqrt(2), N)
    assert not normal_in_every_respect(laplace, 2.5)


def test_even_and_odd_elements_are_both_normal_and_independent() -> None:
    """Cosine and sine halves of Box-Muller."""
    drawn = AESNoise(KEY, 1.0, 1.0).draw(1, 0, 0, 2 * N)
    even, odd = drawn[::2].astype(np.float64), drawn[1::2].astype(np.float64)
    assert normal_in_every_respect(even, 1.0) and normal_in_every_respect(odd, 1.0)
    assert abs((even * odd).mean()) < 4.9 / np.sqrt(N)
    assert abs((even**2 * odd**2).mean() - 1) < 4.9 * np.sqrt(8 / N)
    assert abs((even[1:] * even[:-1]).mean()) < 4.9 / np.sqrt(N)


def test_tails_reach_as_far_as_a_normal_does() -> None:
    drawn = np.abs(AESNoise(KEY, 1.0, 1.0).draw(7, 2, 0, 4 * N))
    for bound in (3.0, 4.0, 4.5):
        expected = 4 * N * 2 * stats.norm.sf(bound)
        assert abs((drawn > bound).sum() - expected) < 5 * np.sqrt(expected) + 1
    assert 4.6 < drawn.max() < 6.8


def test_the_smallest_uniform_gives_a_finite_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-zero and all-one keystreams are the extremes of Box-Muller."""

    class Stream:
        def __init__(self, byte: int) -> None:
            self.byte = byte

        def encryptor(self):
            return self

        def update_into(self, zeros: memoryview, out: bytearray) -> None:
            out[: len(zeros)] = bytes([self.byte]) * len(zeros)

    for byte in (0, 255):
        monkeypatch.setattr(noise_module, "Cipher", lambda *_, byte=byte: Stream(byte))
        drawn = AESNoise(KEY, 1.0, 1.0).draw(0, 0, 0, 4, np.float64)
        assert np.isfinite(drawn).all()
        assert np.abs(drawn).max() == pytest.approx(FURTHEST if byte == 0 else 0.0, abs=1e-12)


def test_streams_of_other_steps_parameters_and_keys_are_independent() -> None:
    mechanism = AESNoise(KEY, 1.0, 1.0)
    streams = [
        mechanism.draw(1, 0, 0, N // 4), mechanism.draw(2, 0, 0, N // 4), mechanism.draw(1, 1, 0, N // 4),
        AESNoise(bytes(32), 1.0, 1.0).draw(1, 0, 0, N // 4), mechanism.draw(1, 0, N, N // 4),
    ]  # fmt: skip
    for i, first in enumerate(streams):
        for second in streams[:i]:
            assert abs(float((first.astype(np.float64) * second).mean())) < 5 / np.sqrt(N // 4)
            assert not np.isin(first[:1000], second[:1000]).all()


def test_no_stretch_of_the_noise_repeats() -> None:
    """Beyond a chunk of the generator: runs of four values, all different."""
    drawn = AESNoise(KEY, 1.0, 1.0).draw(1, 0, 0, 2 * CHUNK_BLOCKS * 2 + 6)
    runs = drawn[: len(drawn) // 4 * 4].reshape(-1, 4)
    assert len(np.unique(runs, axis=0)) == len(runs)


@settings(max_examples=150, deadline=None)
@given(start=st.integers(0, 500), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12), step=st.integers(0, 99))
def test_any_cut_of_a_parameter_gives_the_same_numbers(start: int, cuts: list[int], step: int) -> None:
    mechanism = AESNoise(KEY, 1.0, 1.0)
    whole = mechanism.draw(step, 5, 0, 1000)
    parts, at = [], start
    for length in cuts:
        parts.append(mechanism.draw(step, 5, at, length))
        at += length
    assert np.array_equal(np.concatenate(parts), whole[start:at])


@pytest.mark.parametrize("shift", [-3, -2, -1, 0, 1, 2])
def test_borders_of_chunks_are_seamless(shift: int) -> None:
    mechanism = AESNoise(KEY, 1.0, 1.0)
    border = 2 * CHUNK_BLOCKS
    whole = mechanism.draw(1, 0, 0, 2 * border + 9)
    assert np.array_equal(mechanism.draw(1, 0, border + shift, 7), whole[border + shift : border + shift + 7])
    assert np.array_equal(mechanism.draw(1, 0, 5, border + shift), whole[5 : 5 + border + shift])
    assert np.array_equal(mechanism.draw(1, 0, 3, 2 * border), whole[3 : 3 + 2 * border])
    assert mechanism.draw(1, 0, 3, 0).size == 0


def test_counter_domains_of_steps_and_parameters_never_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """128-bit start counters: 40 bits of step, 24 of parameter, 64 of block, and nothing that would carry over."""
    seen: list[int] = []
    real = noise_module.modes.CTR

    def spy(counter: bytes):
        seen.append(int.from_bytes(counter, "big"))
        return real(counter)

    # Not in the library itself, which looks for its own class at the first use in a process.
    monkeypatch.setattr(noise_module, "modes", SimpleNamespace(CTR=spy))
    mechanism = AESNoise(KEY, 1.0, 1.0)
    corners = [(s, p) for s in (0, 1, 2**40 - 1) for p in (0, 1, 2**24 - 1)]
    for step, parameter in corners:
        mechanism.draw(step, parameter, 0, 1)
    assert len(set(seen)) == len(corners)
    gaps = np.diff(sorted(seen))
    assert min(gaps) >= 2**64 and max(seen) + 2**64 <= 2**128
    for step, parameter, start in ((2**40, 0, 0), (0, 2**24, 0), (-1, 0, 0), (0, -1, 0), (0, 0, 2**65)):
        with pytest.raises(ValueError, match="does not fit"):
            mechanism.draw(step, parameter, start, 1)


def test_global_random_state_and_threads_of_others_do_not_matter() -> None:
    mechanism = AESNoise(KEY, 1.0, 1.0)
    first = mechanism.draw(4, 2, 3, 100)
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        torch.randn(seed)
        assert np.array_equal(mechanism.draw(4, 2, 3, 100), first)


def test_pieces_cover_every_element_once_and_equal_the_draw() -> None:
    mechanism = AESNoise(KEY, 2.0, 1.0)
    fragments = [Fragment("a", 0, 3, 2 * NOISE_CHUNK + 5, 7), Fragment("b", 1, 0, 9, 2 * NOISE_CHUNK + 20)]
    found = torch.zeros(2 * NOISE_CHUNK + 40, dtype=torch.float64)
    for chunk, noise in mechanism.chunks(4, fragments, torch.device("cpu")):
        assert noise.dtype == torch.float64 and len(noise) == chunk.length <= NOISE_CHUNK
        assert not chunk.of(found).any()
        chunk.of(found).copy_(noise)
    for f in fragments:
        assert np.array_equal(f.of(found).numpy(), mechanism.draw(4, f.parameter, f.start, f.length, np.float64))
    assert int((found != 0).sum()) == sum(f.length for f in fragments)
    with pytest.raises(ValueError, match="float64 or rounded to float32"):
        list(mechanism.chunks(4, fragments, torch.device("cpu"), torch.bfloat16))


def noised(
    world: int, mechanism: Any, sizes: dict[str, int], step: int = 1, ahead: bool = False, dtype: Any = torch.float32
) -> dict[str, np.ndarray]:
    """What NoisyUpdate puts on zeros, put together from the shards of `world` ranks."""
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    found = {name: np.full(size, np.nan) for name, size in sizes.items()}
    total = 0
    for rank in range(world):
        low, high = slice_of(rank, world, sum(sizes.values()))
        flat, fragments = torch.zeros(high - low + 3, dtype=dtype), fragments_of(parameters, low, high)
        noise = NoiseAhead(mechanism, fragments) if ahead else mechanism
        noise.prepare(step)
        update = NoisyUpdate(noise, step)
        update.finish(flat, fragments)
        fact = update.fact(1)
        assert (fact.generator, fact.grid) == (mechanism.generator, mechanism.grid)
        if isinstance(noise, NoiseAhead):
            noise.close()
        total += update.elements
        for f in fragments:
            assert np.isnan(found[f.name][f.start : f.start + f.length]).all()
            found[f.name][f.start : f.start + f.length] = f.of(flat).numpy()
    assert total == sum(sizes.values())
    return found


def test_every_element_gets_the_same_one_draw_at_any_world_size() -> None:
    sizes = {"a": 1001, "b": 1, "c": 77, "d": 4096}
    mechanism = AESNoise(KEY, 3.0, 50.0)
    alone = noised(1, mechanism, sizes)
    for world in (2, 3, 5):
        spread = noised(world, mechanism, sizes)
        assert all(np.array_equal(alone[name], spread[name]) for name in sizes)
    values = np.concatenate(list(alone.values()))
    assert len(np.unique(values)) > 0.99 * len(values)
    assert abs(values.std() * 50 / 3.0 - 1) < 5 / np.sqrt(2 * len(values))
    other = noised(1, mechanism, sizes, step=2)
    assert not any(np.array_equal(alone[name], other[name]) for name in sizes)


def test_the_sum_is_noised_and_then_divided_once_by_the_constant() -> None:
    plan = plan_for(records=400, batch=20, noise_multiplier=1.5, clip_norm=0.5)
    mechanism = AESNoise.of(KEY, plan)
    assert (mechanism.std, mechanism.divisor) == (0.75, plan.divisor)
    total = torch.arange(10, dtype=torch.float32)
    flat = torch.cat([torch.full((2,), 7.0), total])
    update = NoisyUpdate(mechanism, 9)
    update.finish(flat, [Fragment("w", 4, 6, 10, 2)])
    expected = (total.double().numpy() + mechanism.draw(9, 4, 6, 10)) / plan.divisor
    assert flat[2:].numpy() == pytest.approx(expected, rel=1e-6)
    assert flat[:2].tolist() == [7.0, 7.0], "elements outside the map are not touched"
    fact = update.fact(update.elements)
    assert (fact.std, fact.divisor, fact.elements) == (0.75, plan.divisor, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_refused_on_anything_but_fp32(dtype: torch.dtype) -> None:
    flat = torch.zeros(4, dtype=dtype)
    with pytest.raises(UpdateError, match="must be fp32"):
        NoisyUpdate(AESNoise(KEY, 1.0, 1.0), 1).finish(flat, [Fragment("w", 0, 0, 4, 0)])
    assert not flat.any()


def test_plain_updates_divide_by_the_batch_alone() -> None:
    flat = torch.full((6,), 12.0)
    update = PlainUpdate(4)
    update.finish(flat, [Fragment("w", 0, 0, 5, 1)])
    assert flat.tolist() == [12.0, 3.0, 3.0, 3.0, 3.0, 3.0] and update.elements == 5


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
