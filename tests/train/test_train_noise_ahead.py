"""Noise drawn ahead: the same bits as drawn when asked, in bounded memory, whatever is given up or out of order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import NOISE_CHUNK, AESNoise
from murmuration.train.noise.prefetch import NoiseAhead

CPU = torch.device("cpu")
KEY = bytes(range(32))
FRAGMENTS = [
    Fragment("a", 0, 11, NOISE_CHUNK + 77, 0), Fragment("b", 1, 0, 5, NOISE_CHUNK + 77),
    Fragment("c", 2, 1, 3000, NOISE_CHUNK + 90),
    Fragment("d", 3, 0, 2 * NOISE_CHUNK, NOISE_CHUNK + 4000),
]  # fmt: skip
Found = list[tuple[Fragment, np.ndarray]]


class Watched(AESNoise):
    """Counts its draws and, while shut, holds those of other threads back."""

    def __init__(self) -> None:
        super().__init__(KEY, 1.5, 10.0)
        self.open = threading.Event()
        self.open.set()
        self.drawn: list[tuple[int, int, int, int]] = []
        self.fail = False

    def draw(self, step, parameter, start, length, dtype=np.float32):
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(20)
            if self.fail:
                raise MemoryError("no room for the draw")
        self.drawn.append((step, parameter, start, length))
        return super().draw(step, parameter, start, length, dtype)


def taken(noise: AESNoise | NoiseAhead, step: int, fragments: list[Fragment] = FRAGMENTS) -> Found:
    return [(chunk, values.numpy().copy()) for chunk, values in noise.chunks(step, fragments, CPU)]


def same(first: Found, second: Found) -> bool:
    return [p for p, _ in first] == [p for p, _ in second] and all(
        np.array_equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True)
    )


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def ahead(watched: Watched) -> Iterator[NoiseAhead]:
    made = NoiseAhead(watched, FRAGMENTS, threads=2)
    yield made
    watched.open.set()
    made.close()


def test_the_bits_are_those_without_overlap(ahead: NoiseAhead, watched: Watched) -> None:
    plain = AESNoise(KEY, 1.5, 10.0)
    assert (ahead.std, ahead.divisor) == (1.5, 10.0)
    # Wherever an engine has them in its buffer.
    elsewhere = [replace(each, position=each.position + 13) for each in FRAGMENTS]
    for step, fragments in ((1, FRAGMENTS), (2, elsewhere), (7, FRAGMENTS)):
        ahead.prepare(step)
        assert same(taken(ahead, step, fragments), taken(plain, step, fragments))
    assert len(watched.drawn) == len(set(watched.drawn)) == 3 * 6, "every piece was drawn once"
    ahead.prepare(9)
    rounded = [values for _, values in ahead.chunks(9, FRAGMENTS, CPU, torch.float32)]
    assert all(values.dtype == torch.float32 for values in rounded)
    assert np.array_equal(rounded[0].numpy(), plain.draw(9, 0, 11, NOISE_CHUNK))


def test_it_draws_while_the_caller_does_something_else(ahead: NoiseAhead, watched: Watched) -> None:
    ahead.prepare(3)
    for future in list(ahead._drawing.values()):
        future.result(20)
    assert len(watched.drawn) == 6
    taken(ahead, 3)
    assert len(watched.drawn) == 6, "nothing was left to draw when it was asked for"


@pytest.mark.parametrize("most_bytes", [0, 8 * 5, 8 * NOISE_CHUNK, 8 * (NOISE_CHUNK + 5000), 1 << 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_bounded_and_does_not_change_the_bits(watched: Watched, most_bytes: int, threads: int) -> None:
    ahead = NoiseAhead(watched, FRAGMENTS, threads, most_bytes)
    watched.open.clear()
    ahead.prepare(4)
    first = sum(8 * chunk.length for chunk in ahead._drawing)
    assert first <= most_bytes and (first > 0) == (most_bytes >= 8 * NOISE_CHUNK)
    watched.open.set()
    found: Found = []
    for chunk, values in ahead.chunks(4, FRAGMENTS, CPU):
        assert sum(8 * waiting.length for waiting in ahead._drawing) <= most_bytes
        found.append((chunk, values.numpy()))
    assert same(found, taken(AESNoise(KEY, 1.5, 10.0), 4))
    assert len(watched.drawn) == 6 and ahead._room == most_bytes
    ahead.close()


def test_a_step_given_up_leaves_nothing_behind(ahead: NoiseAhead, watched: Watched) -> None:
    watched.open.clear()
    ahead.prepare(5)
    room = ahead._room
    ahead.prepare(6)
    ahead.cancel()
    assert not ahead._drawing and ahead._room > room
    ahead.prepare(5)
    watched.open.set()
    expected = taken(AESNoise(KEY, 1.5, 10.0), 5)
    assert same(taken(ahead, 5), expected)
    assert same(taken(ahead, 5), expected), "asked again, it is drawn again"
    assert same(taken(ahead, 6), taken(AESNoise(KEY, 1.5, 10.0), 6)), "another step than the prepared one"


@pytest.mark.parametrize("asked", [4, 6])
def test_another_step_than_the_prepared_one_gets_its_own_noise(ahead: NoiseAhead, asked: int) -> None:
    ahead.prepare(5)
    assert same(taken(ahead, asked), taken(AESNoise(KEY, 1.5, 10.0), asked))
    assert same(taken(ahead, 5), taken(AESNoise(KEY, 1.5, 10.0), 5)), "and what was prepared still stands"


def test_any_order_and_any_cut_are_right(watched: Watched) -> None:
    ahead = NoiseAhead(watched, FRAGMENTS, 1, 8 * (NOISE_CHUNK + 100))
    ahead.prepare(2)
    for fragments in (FRAGMENTS[::-1], [Fragment("a", 0, 20, 30, 0)], FRAGMENTS[2:3]):
        assert same(taken(ahead, 2, fragments), taken(AESNoise(KEY, 1.5, 10.0), 2, fragments))
    ahead.close()


def test_a_failure_in_a_thread_fails_where_the_noise_is_taken(ahead: NoiseAhead, watched: Watched) -> None:
    watched.fail = True
    ahead.prepare(1)
    with pytest.raises(MemoryError, match="no room"):
        taken(ahead, 1)
    watched.fail = False
    ahead.prepare(1)
    assert same(taken(ahead, 1), taken(AESNoise(KEY, 1.5, 10.0), 1))


def test_with_another_deviation_the_draws_are_the_same_ones_scaled(ahead: NoiseAhead, watched: Watched) -> None:
    ahead.prepare(3)
    wider = ahead.at(4.5)
    assert not ahead._drawing, "what it has drawn is discarded"
    assert (wider.std, wider.divisor, ahead.std) == (4.5, 10.0, 1.5) and ahead.at(1.5) is ahead
    wider.prepare(3)
    assert same(taken(wider, 3), taken(AESNoise(KEY, 4.5, 10.0), 3))
    assert same(taken(ahead, 3), taken(AESNoise(KEY, 1.5, 10.0), 3)), "the first is as it was"
    wider.prepare(4)
    for future in list(wider._drawing.values()):
        future.result(20)
    before = len(watched.drawn)
    assert same(taken(wider, 4), taken(AESNoise(KEY, 4.5, 10.0), 4))
    assert len(watched.drawn) == before, "this one draws ahead, too"


def test_a_step_given_up_in_the_middle_leaves_nothing_to_draw_for_the_next(watched: Watched) -> None:
    """Pieces that still waited would be drawn twice, and their room would never come back."""
    ahead = NoiseAhead(watched, FRAGMENTS, threads=1, most_bytes=8 * NOISE_CHUNK)
    ahead.prepare(1)
    next(ahead.chunks(1, FRAGMENTS, CPU))
    for step in (2, 3):
        ahead.prepare(step)
        assert same(taken(ahead, step), taken(AESNoise(KEY, 1.5, 10.0), step))
        of_step = [each for each in watched.drawn if each[0] == step]
        assert len(of_step) == len(set(of_step)) == 6
    ahead.prepare(4)
    assert same(taken(ahead, 4, FRAGMENTS[::-1]), taken(AESNoise(KEY, 1.5, 10.0), 4, FRAGMENTS[::-1]))
    assert ahead._room == 8 * NOISE_CHUNK and not ahead._drawing and not ahead._waiting, "in whatever order"
    ahead.close()


def test_what_does_not_fit_is_not_drawn_ahead_because_a_later_piece_would(watched: Watched) -> None:
    ahead = NoiseAhead(watched, [FRAGMENTS[2], FRAGMENTS[1]], threads=1, most_bytes=8 * 100)
    ahead.prepare(1)
    assert not ahead._drawing and ahead._room == 8 * 100, "the first of the two has 3,000 elements"
    ahead.close()


def test_closing_ends_the_threads(watched: Watched) -> None:
    before = set(threading.enumerate())
    ahead = NoiseAhead(watched, FRAGMENTS, threads=2)
    ahead.prepare(1)
    own = set(threading.enumerate()) - before
    assert own
    ahead.close()
    assert not any(thread.is_alive() for thread in own)
