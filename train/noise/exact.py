"""Gaussian noise in whole multiples of a grid, drawn exactly: no machine rounding shapes its distribution.

What is released. S is the clipped sum, at most C away from the sum S' of a neighbour, in d elements; G is the grid, a
power of two with G·√d ≤ g·C, where g = `plan.noise.growth` = 1e-6. With [x] for the nearest whole number and Y for d
independent draws of N(0, (σC/G)²), the step releases ([S/G] + [Y])·G / (q·n).

Why that is private. (1) [·] moves each element by at most ½, so [S/G] and [S'/G] are at most C/G + √d ≤ (1 + g)·C/G
apart, and noise σC/G on them has the noise multiplier σ / (1 + g), which is the one that is charged. (2) [S/G] is
whole, so [S/G] + [Y] = [[S/G] + Y]: the release is a function of [S/G] + Y, the Gaussian mechanism itself, on real
numbers. Whatever holds for that holds for every function of it: for samples, compositions and groups, at every ε and δ.
So the accountant (PLD, or any other) is asked about the Gaussian with σ / (1 + g), and nothing else needs a proof.
This is why the noise is a rounded Gaussian and not the discrete one of Canonne, Kamath and Steinke (2020): the proved
guarantee for that one is its RDP, from which ε is a few percent larger, and which says nothing about groups.

Why [Y] is drawn exactly. Bits of AES-256 in counter mode are assumed to be random, as for all noise here. The bits of
one counter are the first bits of two numbers U, V in [0, 1) with infinitely many; Box-Muller turns these into two
independent normal numbers, σC/G·√(-2·ln U)·cos 2πV and the same with sin. Only the nearest whole numbers are needed.
From the first 64 bits of U and V, the normal numbers are computed in fp64, with a bound on all that rounding and the
missing bits can change (`error_bound`). Where no half lies within the bound, the nearest whole number is known.
Elsewhere (one element in 20,000 for a million weights, in 4,000 for a hundred million) `nearest_whole` computes it with
integers, from as many bits as it takes; that ends, because a half is hit with probability zero. So the result is a
function of the bits alone, the same with any processor, library or margin, and
P([Y] = k) = Φ((k+½)G/σC) - Φ((k-½)G/σC) to the last digit.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from murmuration.accounting.errors import PlanError
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.noise import EXACT, fits_grid
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import StepKey, by_step
from murmuration.train.noise.aes import BLOCK_BYTES, CHUNK_BLOCKS, AESNoise, Scratch

UNIT = 2.0**-53
"""Largest relative error of one rounding to fp64."""
ANGLE_ERROR, RADIUS_ERROR, FURTHEST = 64 * UNIT, 40 * UNIT, 4.55
# Beyond this, nearly every draw would need many digits.
MOST_STD = 2.0**44
WORD = 64


class ExactNoise(AESNoise):
    """N(0, std²) in multiples of the grid, rounded to whole ones: each is one draw, keyed like any other noise here.

    The grid is the largest power of two that is at most `fineness` times `std`: where C adapts, the grid follows.
    """

    generator = EXACT

    def __init__(self, key: bytes | StepKey, std: float, divisor: float, fineness: float) -> None:
        """A `key` of bytes is used for all steps."""
        self._master, self._fineness = by_step(key), fineness
        super().__init__(lambda step: _level_key(self._master(step), 0), std, divisor)
        if not self.std / self.grid <= MOST_STD:
            raise PlanError(
                f"exact noise on a grid of {self.grid:g} would have a deviation of {self.std / self.grid:.3g} steps, "
                f'more than {MOST_STD:.3g}; use a smaller noise multiplier, or run.noise = "aes"'
            )

    @staticmethod
    def of(key: bytes | StepKey, plan: PrivacyPlan, elements: int = 1) -> ExactNoise:
        """For a gradient of `elements` elements."""
        return ExactNoise(
            key, plan.noise_std, plan.divisor, _fineness(plan.noise.growth, plan.clip_norm, plan.noise_std, elements)
        )

    @staticmethod
    def of_metric(key: bytes | StepKey, metric: PlannedMetric, plan: PrivacyPlan) -> ExactNoise:
        return ExactNoise(key, metric.std, plan.divisor, _fineness(plan.noise.growth, metric.bound, metric.std, 1))

    @property
    def grid(self) -> float:
        return power_of_two_below(self.std * self._fineness)

    def draw(
        self, step: int, parameter: int, start: int, length: int, dtype: type[np.floating] = np.float64
    ) -> np.ndarray:
        """Whole numbers of grid steps, for elements [start, start + length) of one parameter."""
        if dtype is not np.float64:
            raise ValueError("exact noise consists of whole numbers, which float32 would round; ask for float64")
        out = np.empty(length, np.float64)
        if length == 0:
            return out
        first, last = start // 2, (start + length - 1) // 2 + 1
        stream, std = self._keystream(step, parameter, first, last - first), self.std / self.grid
        scratch = _WholeScratch(min(CHUNK_BLOCKS, last - first))
        for block in range(first, last, CHUNK_BLOCKS):
            whole, undecided = nearly_whole(scratch, stream, min(CHUNK_BLOCKS, last - block), std)
            offset = 2 * block - start
            cut_off = max(0, -offset)
            target = out[offset + cut_off : offset + len(whole)]
            wanted = range(cut_off, cut_off + len(target))
            for at in (at for at in undecided.tolist() if at in wanted):
                words = scratch.word_pair(at // 2)
                whole[at] = self._decided(step, parameter, block + at // 2, words, std, sine=bool(at % 2))
            target[...] = whole[cut_off : cut_off + len(target)]
        return out

    def _decided(self, step: int, parameter: int, block: int, words: tuple[int, int], std: float, sine: bool) -> int:
        """Decides a draw with as many bits as it takes: each level adds those of one more key at the same counter."""
        first, second = words
        for level in range(1, 1000):
            found = nearest_whole(std, first, second, level * WORD, sine)
            if found is not None:
                return found
            word, other = np.frombuffer(
                self.draw_bits(self._master(step), level, step, parameter, block), "<u8"
            ).tolist()
            first, second = first << WORD | word, second << WORD | other
        raise AssertionError("64,000 bits did not decide a draw; the cipher is broken")

    @staticmethod
    def draw_bits(key: bytes, level: int, step: int, parameter: int, block: int) -> bytes:
        """Bits 64·level to 64·level + 63 of both uniforms of a block."""
        cipher = AESNoise(_level_key(key, level), 1.0, 1.0)
        return cipher._keystream(step, parameter, block, 1).update(bytes(BLOCK_BYTES))


def _fineness(growth: float, bound: float, std: float, elements: int) -> float:
    """The largest grid / std; a little less than allowed, so that no rounding of this quotient exceeds the limit."""
    if not growth > 0:
        raise PlanError('the plan charges nothing for the grid of exact noise; its run.noise is not "exact"')
    fineness = growth * bound / (std * math.sqrt(elements)) * (1 - 1e-9)
    assert fits_grid(power_of_two_below(fineness * std), elements, growth * bound)
    return fineness


def power_of_two_below(value: float) -> float:
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


def _level_key(key: bytes, level: int) -> bytes:
    """Not cached: a cached key would outlive the key from which it is derived."""
    info = f"murmuration/1|exact-gaussian|{level}".encode()
    return HKDF(SHA256(), len(key), salt=None, info=info).derive(key)


class _WholeScratch(Scratch):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.whole, self.apart = np.empty((2, 2 * blocks))


def nearly_whole(scratch: _WholeScratch, stream, count: int, std: float) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers nearest to `count` pairs of normal ones, and the indices at which they may be wrong."""
    normals = scratch.normals(stream, count, std)
    whole, apart = scratch.whole[: 2 * count], scratch.apart[: 2 * count]
    np.rint(normals, out=whole)
    np.subtract(normals, whole, out=apart)  # exact, since the two are close
    np.abs(apart, out=apart)
    room = error_bound(scratch.floats[0, :count], std)
    np.subtract(0.5, room, out=room)
    return whole, np.flatnonzero(apart.reshape(-1, 2) >= room[:, None])


def error_bound(radius: np.ndarray, std: float) -> np.ndarray:
    """How far std·√(-2·ln U)·cos 2πV can be from what `box_muller` made of 64-bit words; `radius`: its first factor.

    With u = 2^-53, w and v the words, counting every rounding of `radius_in_place` and `direction_in_place`:
    - U lies in [w, w+1)·2^-64, and (w+1)·2^-64 is rounded twice: ln U is off by 1/w + 2.1u before it is computed. The
      series and the sum with k·ln 2 add at most 13u of its own size (at k = -1, where the two cancel most).
      -2·std² and the root: 2.5u of the radius. Since |√a - √b| ≤ |a - b|/√a, the radius R (for std = 1) is off by at
      most 17u·R + (2/w + 4.2u)/R.
    - The quarter angle is off by 2.5u, including the missing bits of V, and its sine by 4.3u as an angle; doubling
      twice makes it 17.3u. The roundings in between add 9.5u to sine or cosine, and their product with R one more.
    - Together (17 + 27 + 1)u·R + (2/w + 4.2u)/R. If R < FURTHEST, then w > 2^49 and 2/w < 32u.
    So 64u·R + 40u/R covers it, with room for the few roundings here. Further out, nothing is certain.
    """
    with np.errstate(divide="ignore"):
        bound = np.divide(RADIUS_ERROR * std * std, radius)
    bound += ANGLE_ERROR * radius
    bound[radius >= FURTHEST * std] = np.inf
    return bound


# The same in whole numbers of any length: fixed point, with `places` bits behind the point.


def nearest_whole(std: float, first: int, second: int, bits: int, sine: bool) -> int | None:
    """[std·√(-2·ln U)·cos 2πV] (or sin) for all U and V that begin with these bits; None if they do not decide it."""
    if first == 0:
        return None
    places = bits + WORD
    square = 2 * (bits * _log(2, places) - _log(first + 1, places))
    # The steps below round down, by less than one unit each; no sum of these errors reaches this.
    slack = 8 * bits * places
    lowest = math.isqrt(max(0, square - slack) << places)
    highest = math.isqrt((square + slack + (2 << places) // first + 1) << places) + 1  # ln(1 + 1/w) < 1/w
    # Twice the middle of the possible range, and twice its error bound: V lacks at most 2π·2^-bits of an angle, and the
    # 0.7·2^-bits that make it 7 are far more than the roundings of the series.
    middle = (lowest + highest) * _turned(second, bits, places, sine)
    off = (highest - lowest << places) + highest * (14 << places - bits)
    scale, one = std.as_integer_ratio()  # exactly
    one <<= 2 * places + 1
    least, most = ((2 * scale * (middle + side) + one) // (2 * one) for side in (-off, off))
    return least if least == most else None


def _turned(word: int, bits: int, places: int, sine: bool) -> int:
    """cos or sin of 2π·word/2^bits, by its series within an eighth of a turn from the nearest quarter turn."""
    quarter = 1 << bits - 2
    turns = (word + quarter // 2) // quarter
    angle = _pi(places) * (word - turns * quarter) // (2 * quarter)
    turns -= sine  # sin x = cos(x - π/2)
    odd = turns % 2
    term = abs(angle) if odd else 1 << places
    total, power, square = term, odd, angle * angle >> places
    while term:
        power += 2
        term = (term * square >> places) // (power * (power - 1))
        total += -term if power % 4 > 1 else term
    negative = (turns % 4 in (1, 2)) != (odd and angle < 0)
    return -total if negative else total


@lru_cache(maxsize=8)
def _log_of_two(places: int) -> int:
    return 2 * _artanh((1 << places) // 3, places)


def _log(number: int, places: int) -> int:
    """ln 2^k·(1 + s)/(1 - s) = k·ln 2 + 2·artanh s, with |s| < 0.172."""
    if number == 2:
        return _log_of_two(places)
    power = number.bit_length()
    power -= 2 * number * number < 1 << 2 * power
    s = (abs(number - (1 << power)) << places) // (number + (1 << power))
    series = _artanh(s, places)
    return power * _log_of_two(places) + 2 * (series if number >> power else -series)


def _artanh(s: int, places: int) -> int:
    total, power, square, n = s, s, s * s >> places, 1
    while power:
        power, n = power * square >> places, n + 2
        total += power // n
    return total


@lru_cache(maxsize=8)
def _pi(places: int) -> int:
    """By Machin's formula."""
    guarded = places + 16

    def arctangent_of_one_over(x: int) -> int:
        total, power, n = 0, (1 << guarded) // x, 1
        while power:
            total += power // n if n % 4 == 1 else -(power // n)
            power, n = power // (x * x), n + 2
        return total

    return 16 * arctangent_of_one_over(5) - 4 * arctangent_of_one_over(239) >> 16
