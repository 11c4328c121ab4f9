"""ChaCha20 noise: the generator by its published answers, the draw by its distribution, one draw per element."""

from __future__ import annotations

import hmac
import struct
import subprocess
import sys
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from murmuration.accounting.errors import PlanError
from murmuration.accounting.noise import GENERATORS
from murmuration.train.core import PrivateCore
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise import chacha
from murmuration.train.noise.box_muller import direction_in_place, radius_in_place
from murmuration.train.noise.chacha import PER_BLOCK, ChaChaNoise, fixed_words, keystream
from tests.support.interpreted import results_of
from tests.support.kernel_code import compiled
from tests.support.normality import normal_in_every_respect
from tests.support.train_helpers import plan_for

ROOT = Path(__file__).parents[2]
KEY = bytes(range(32))
CPU = torch.device("cpu")
N = 1_000_000
LONGEST, WORD = 2**64 - 1, 2**32 - 1
BORDERS = (0, 1, 2**31 - 1, 2**31, WORD)


def bytes_of(key: bytes, block: int, parameter: int, step: int) -> bytes:
    """One block by the code under test, in the order of RFC 8439."""
    signed = int(np.uint64(block).astype(np.int64))
    words = keystream(fixed_words(key, step, CPU), torch.tensor([signed]), torch.tensor([parameter]))
    return words[:, 0].numpy().astype("<i4").tobytes()


def of_the_library(key: bytes, block: int, parameter: int, step: int, blocks: int = 1) -> bytes:
    """The independent implementation, which takes counter and nonce as 16 bytes, and does not carry between them."""
    starts = [struct.pack("<QII", block + i, parameter, step) for i in range(blocks)]
    return b"".join(Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(bytes(64)) for start in starts)


def test_the_generator_gives_the_known_answer_of_rfc_8439() -> None:
    """Section 2.3.2: counter 1, nonce 00:00:00:09:00:00:00:4a:00:00:00:00."""
    expected = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    found = struct.unpack("<16I", bytes_of(KEY, 0x09000000 << 32 | 1, 0x4A000000, 0))
    assert " ".join(f"{word:08x}" for word in found) == expected


@settings(max_examples=200, deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    block=st.integers(0, LONGEST), parameter=st.integers(0, WORD), step=st.integers(0, WORD),
)  # fmt: skip
def test_every_byte_is_that_of_another_implementation(key: bytes, block: int, parameter: int, step: int) -> None:
    assert bytes_of(key, block, parameter, step) == of_the_library(key, block, parameter, step)


def test_every_byte_is_right_at_the_borders_of_the_words_and_in_many_blocks_at_once() -> None:
    for high, low, parameter, step in product(BORDERS, BORDERS, BORDERS, (0, WORD)):
        place = high << 32 | low, parameter, step
        assert bytes_of(KEY, *place) == of_the_library(KEY, *place)
    first, many = 2**32 - 300, 1000  # the low half of the counter runs over
    words = keystream(fixed_words(KEY, 7, CPU), torch.arange(first, first + many), torch.full((many,), 5))
    assert words.T.contiguous().numpy().astype("<i4").tobytes() == of_the_library(KEY, first, 5, 7, many)


def test_all_256_bits_of_the_key_come_from_the_run_key_and_decide_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [ChaChaNoise(bytes([first]) * 32, 1.0, 1.0)._key(1) for first in range(64)]
    assert {len(key) for key in keys} == {32}
    ones = np.unpackbits(np.array([list(key) for key in keys], np.uint8), axis=1).sum(0)
    assert ((ones > 4) & (ones < 60)).all(), "no bit stands still: a range of seven deviations"
    whole = ChaChaNoise(KEY, 1.0, 1.0)
    drawn, key = whole.draw(1, 0, 0, 100), whole._key(1)
    for bit in range(0, 256, 5):
        other = ChaChaNoise(KEY, 1.0, 1.0)
        flipped = (int.from_bytes(key, "big") ^ 1 << bit).to_bytes(32, "big")
        monkeypatch.setattr(other, "_key", lambda step, flipped=flipped: flipped)
        assert not np.isin(other.draw(1, 0, 0, 100), drawn).any()


def test_the_key_is_derived_from_that_of_the_step_for_this_generator_alone() -> None:
    """By RFC 5869, written out: a salt of zeros, one block."""
    of_step = ChaChaNoise(lambda step: bytes([step]) * 32, 1.0, 1.0)
    for step in (1, 2):
        extracted = hmac.digest(bytes(32), bytes([step]) * 32, "sha256")
        assert of_step._key(step) == hmac.digest(extracted, b"murmuration/2|chacha20\x01", "sha256")


@pytest.mark.parametrize(("parameter", "start"), [(3, 0), (WORD, 0), (1, 8 * (2**32 - 20)), (0, 2**40)])
def test_an_element_is_the_box_muller_transform_of_the_keystream_of_the_library(parameter: int, start: int) -> None:
    """By another implementation of the words and a library's logarithm and sine."""
    noise, step, blocks = ChaChaNoise(KEY, 2.5, 1.0), 5, 50
    found = noise.draw(step, parameter, start, PER_BLOCK * blocks, np.float64)
    stream = of_the_library(noise._key(step), start // PER_BLOCK, parameter, step, blocks)
    far, turn = np.frombuffer(stream, "<u8").reshape(-1, 2).T
    radius = 2.5 * np.sqrt(-2 * np.log((far.astype(float) + 1.0) * 2.0**-64))
    angle = turn.view(np.int64).astype(float) * (2 * np.pi * 2.0**-64)
    expected = np.stack((radius * np.cos(angle), radius * np.sin(angle)), 1).reshape(-1)
    assert found == pytest.approx(expected, abs=1e-13)


def test_every_bit_is_that_of_operations_that_ieee_rounds_in_one_way() -> None:
    """NumPy's are; of PyTorch's, the root is not on all processors, and frozen draws would hold on some alone."""
    noise = ChaChaNoise(KEY, 2.5, 1.0)
    found = noise.draw(3, 1, 0, PER_BLOCK * 500, np.float64)
    stream = of_the_library(noise._key(3), 0, 1, 3, 500)
    radius, sine = np.frombuffer(stream, "<u8").reshape(-1, 2).T
    radius, sine = radius.astype(float), sine.view(np.int64).astype(float)
    cosine, *scratch = (np.empty_like(radius) for _ in range(4))
    radius_in_place(np, radius, (scratch[0], scratch[1], scratch[2]), 2.5)
    direction_in_place(np, sine, cosine, (scratch[0], scratch[1]))
    expected = np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)
    assert found.tobytes() == expected.tobytes()


def test_the_noise_is_normal_and_the_test_has_power() -> None:
    drawn = ChaChaNoise(KEY, 2.5, 1.0).draw(3, 1, 0, N)
    assert drawn.dtype == np.float32 and normal_in_every_respect(drawn, 2.5)
    for wrong in (0.99, 1.01):
        assert not normal_in_every_respect(drawn * wrong, 2.5), "a deviation that is wrong by 1 % is seen"
    assert not normal_in_every_respect(np.clip(drawn, -7.5, 7.5), 2.5), "a tail that is cut off is seen"
    places = [drawn[place::PER_BLOCK].astype(float) / 2.5 for place in range(PER_BLOCK)]
    assert all(normal_in_every_respect(place, 1.0) for place in places)
    for first, second in combinations(places, 2):
        assert abs((first * second).mean()) < 4.9 / np.sqrt(N / PER_BLOCK)
        assert abs((first**2 * second**2).mean() - 1) < 4.9 * np.sqrt(8 / (N / PER_BLOCK))
    tails = int((np.abs(drawn) > 4 * 2.5).sum())
    assert abs(tails - N * 2 * stats.norm.sf(4)) < 5 * np.sqrt(N * 2 * stats.norm.sf(4)) + 1


def test_no_two_of_step_parameter_and_block_share_a_block() -> None:
    """Under one key, as a debug seed has it. Every place has the same value once, so that none stands for another."""
    values = (0, 1, 2, 2**16, 2**31, WORD)
    places = [(block, name, step) for block in (*values, 2**32, 2**40, 2**60) for name in values for step in values]
    drawn = {bytes_of(KEY, *place) for place in places}
    assert len(drawn) == len(places)


def test_steps_parameters_keys_and_far_elements_have_their_own_draws() -> None:
    noise, many = ChaChaNoise(lambda step: KEY, 1.0, 1.0), N // 4
    streams = [
        noise.draw(1, 0, 0, many), noise.draw(2, 0, 0, many), noise.draw(1, 1, 0, many),
        noise.draw(1 + 2**30, 0, 0, many), noise.draw(1, 0, 2**35, many), noise.draw(1, 2**31, 0, many),
        ChaChaNoise(bytes(32), 1.0, 1.0).draw(1, 0, 0, many),
    ]  # fmt: skip
    for first, second in combinations(streams, 2):
        assert abs(float((first.astype(np.float64) * second).mean())) < 5 / np.sqrt(many)
        assert not np.isin(first[:1000], second[:1000]).all()


@pytest.mark.parametrize(
    ("step", "parameter", "start"), [(2**32, 0, 0), (-1, 0, 0), (0, 2**32, 0), (0, -1, 0), (0, 0, -1), (0, 0, 2**66)]
)
def test_what_does_not_fit_the_counter_is_refused(step: int, parameter: int, start: int) -> None:
    noise = ChaChaNoise(KEY, 1.0, 1.0)
    with pytest.raises(ValueError, match="does not fit the noise counter"):
        noise.draw(step, parameter, start, 1)
    assert noise.draw(WORD, WORD, 2**66 - 1, 1).shape == (1,), "the last that fits"


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 500), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12), step=st.integers(0, 99))
def test_any_cut_of_a_parameter_gives_the_same_numbers(start: int, cuts: list[int], step: int) -> None:
    noise = ChaChaNoise(KEY, 1.0, 1.0)
    whole = noise.draw(step, 5, 0, 1000, np.float64)
    ends = np.cumsum([start, *cuts])
    fragments = [Fragment("w", 5, int(a), int(b - a), int(a)) for a, b in pairwise(ends)]
    parts = [values.numpy() for _, values in noise.chunks(step, fragments, CPU)]
    # Torch's vector and scalar square roots differ in the last bit, so a cut may, too.
    assert np.concatenate(parts) == pytest.approx(whole[start : ends[-1]], abs=4e-15)


def test_large_fragments_are_cut_and_small_ones_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []

    def counted(fixed: Tensor, block: Tensor, parameter: Tensor) -> Tensor:
        launches.append(len(block))
        return keystream(fixed, block, parameter)

    monkeypatch.setattr(chacha, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(chacha, "_kernel", lambda: counted)
    chunk_length = 1000 * PER_BLOCK
    monkeypatch.setattr(chacha, "NOISE_CHUNK", chunk_length)
    noise = ChaChaNoise(KEY, 1.0, 1.0)
    fragments = [
        Fragment("a", 0, 3, chunk_length + 10, 0), Fragment("b", 1, 0, 7, chunk_length + 10),
        Fragment("c", 2, 5, 9, chunk_length + 17)
    ]  # fmt: skip
    found = torch.zeros(chunk_length + 26, dtype=torch.float64)
    for chunk, values in noise.chunks(4, fragments, CPU):
        assert not chunk.of(found).any() and len(values) == chunk.length <= chunk_length
        chunk.of(found).copy_(values)
    assert launches == [chunk_length // PER_BLOCK + 1, 2 + 1 + 2], "the long one, and all that is left in one go"
    for f in fragments:
        alone = noise.draw(4, f.parameter, f.start, f.length, np.float64)
        assert f.of(found).numpy() == pytest.approx(alone, abs=4e-15)
    assert int((found != 0).sum()) == chunk_length + 26
    launches.clear()
    monkeypatch.setattr(chacha, "NOISE_CHUNK", 8 * PER_BLOCK)
    assert len(list(noise.chunks(4, [Fragment(str(i), i, 0, 1, i) for i in range(20)], CPU))) == 20
    assert launches == [8, 8, 4], "an element alone costs a block: it counts as one, and memory stays bounded"


def test_it_needs_no_deviation_and_ignores_the_global_generators() -> None:
    assert ChaChaNoise.generator in GENERATORS
    first = ChaChaNoise(KEY, 1.0, 1.0).draw(4, 2, 3, 100)
    torch.manual_seed(1)
    torch.randn(3)
    assert np.array_equal(ChaChaNoise(KEY, 1.0, 1.0).draw(4, 2, 3, 100), first)


@pytest.mark.rest
def test_gpus_take_the_kernel_where_triton_is_and_nothing_imports_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="this build of PyTorch comes without Triton")
    script = (
        "import sys; from murmuration.train.noise.chacha import KERNEL_DEVICES, ChaChaNoise, _kernel; "
        "ChaChaNoise(bytes(32), 1.0, 1.0).draw(1, 0, 0, 9); name = 'murmuration.train.noise.chacha_triton'; "
        "print(KERNEL_DEVICES, name in sys.modules, _kernel() is sys.modules[name].keystream)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.split("\n")[0] == "('cuda',) False True", done.stdout + done.stderr
    chacha._kernel.cache_clear()
    monkeypatch.setattr(chacha, "find_spec", lambda name: None)
    assert chacha._kernel() is None
    chacha._kernel.cache_clear()


@pytest.mark.rest
def test_the_kernel_s_words_are_those_of_torch_bit_by_bit() -> None:
    """In Triton's interpreter, through every border of its programs and words."""
    pytest.importorskip("triton", reason="this build of PyTorch comes without Triton")
    found = results_of(Path(__file__).with_name("chacha_kernel_worker.py"))
    assert found["words"] == [True] * 6 and found["known"] and found["noise"] and found["calls"] == 1


@pytest.mark.rest
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_cards_without_spilling(capability: int) -> None:
    pytest.importorskip("triton", reason="this build of PyTorch comes without Triton")
    from murmuration.train.noise.chacha_triton import BLOCKS, WARPS, _keystream

    kinds = {"fixed": "*i32", "block": "*i64", "parameter": "*i64", "words": "*i32"}
    found = compiled(_keystream, kinds, {"BLOCKS": BLOCKS}, capability, num_warps=WARPS)
    code = found.asm["ptx"]
    assert ".local" not in code and found.metadata.shared == 0 and len(found.asm["cubin"]) > 1000
    assert code.count("shf.l.wrap.b32") == 4 * 8, "a rotation is one instruction, in each of eight quarter rounds"


def test_a_generator_that_is_not_known_is_refused_before_anything_is_drawn() -> None:
    """Programs of one's own are not held to the config's types."""
    unused: Any = None
    with pytest.raises(PlanError, match="noise 'philox' is none of aes, chacha20, exact"):
        PrivateCore(plan_for(), unused, unused, unused, unused, noise="philox")  # pyright: ignore[reportArgumentType]


def test_it_is_on_no_grid() -> None:
    """A grid of exact noise would be charged for."""
    assert ChaChaNoise(KEY, 1.0, 1.0).grid == 0.0
