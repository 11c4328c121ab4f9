"""Box-Muller on 64-bit words by only sums, products, quotients and square roots.

IEEE rounds each of these in the same way on every machine, while the `log` and `sin` of a library depend on processor
and version. So with numpy, replicas on different machines, and a step resumed on another one, draw the same noise bit
for bit. `ops` is numpy or torch (whose square root is a library's: there the last bit may differ): the functions use
names that both share, and work in place in the caller's scratch memory.
"""

from __future__ import annotations

import math
from typing import Any

# Minimax terms, highest power first, errors below 2^-58 (those of Sun's freely distributable libm).
# log((1 + s) / (1 - s)) = s·(2 + z·P(z)) with z = s², on [√½, √2].
LOG_TERMS = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
)  # fmt: skip
# sin x = x·(1 + z·P(z)) with z = x², on [-π/4, π/4].
SINE_TERMS = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
    8.33333333332248946124e-03, -1.66666666666666324348e-01,
)  # fmt: skip
MANTISSA_BITS = 52
BITS_OF_ROOT_HALF = 0x3FE6A09E667F3BCD
FURTHEST = math.sqrt(2 * 64 * math.log(2))
"""The largest possible draw, in standard deviations: 9.42."""


def radius_in_place(ops: Any, words: Any, scratch: tuple[Any, Any, Any], std: float) -> None:
    """Turns unsigned 64-bit words, given as floats, into std·sqrt(-2·log((word + 1) / 2^64))."""
    power, small, series = scratch
    integers = ops.int64
    bits, exponent, shifted = words.view(integers), power.view(integers), series.view(integers)
    ops.add(words, 1.0, out=words)
    ops.multiply(words, 2.0**-64, out=words)
    # u = 2^k·m with m in [√½, √2): a short series gives the logarithm of m.
    ops.subtract(bits, BITS_OF_ROOT_HALF, out=exponent)
    ops.bitwise_right_shift(exponent, MANTISSA_BITS, out=exponent)
    ops.bitwise_left_shift(exponent, MANTISSA_BITS, out=shifted)
    ops.subtract(bits, shifted, out=bits)
    small[...] = exponent
    ops.multiply(small, math.log(2.0), out=power)
    ops.subtract(words, 1.0, out=words)
    ops.add(words, 2.0, out=small)
    ops.divide(words, small, out=words)
    ops.multiply(words, words, out=small)
    _polynomial(ops, small, LOG_TERMS, series)
    ops.multiply(series, small, out=series)
    ops.add(series, 2.0, out=series)
    ops.multiply(series, words, out=series)
    ops.add(series, power, out=series)
    ops.multiply(series, -2.0 * std * std, out=series)
    ops.sqrt(series, out=words)


def direction_in_place(ops: Any, turns: Any, cosine: Any, scratch: tuple[Any, Any]) -> None:
    """Turns signed 64-bit words, given as floats, into the sine of 2π·word/2^64; the cosine goes to `cosine`."""
    square, series = scratch
    ops.multiply(turns, 2.0**-64 * (math.pi / 2), out=turns)  # a quarter of the angle, within ±π/4
    ops.multiply(turns, turns, out=square)
    _polynomial(ops, square, SINE_TERMS, series)
    ops.multiply(series, square, out=series)
    ops.multiply(series, turns, out=series)
    ops.add(turns, series, out=turns)
    ops.multiply(turns, turns, out=square)
    ops.multiply(square, -1.0, out=cosine)
    ops.add(cosine, 1.0, out=cosine)
    ops.sqrt(cosine, out=cosine)
    for _ in range(2):  # from a quarter of the angle to a half, then to the whole
        ops.multiply(turns, cosine, out=series)
        ops.multiply(turns, turns, out=square)
        ops.multiply(series, 2.0, out=turns)
        ops.multiply(square, -2.0, out=cosine)
        ops.add(cosine, 1.0, out=cosine)


def _polynomial(ops: Any, at: Any, terms: tuple[float, ...], out: Any) -> None:
    """Horner's scheme; product and sum are separate operations, so that no machine fuses them."""
    ops.multiply(at, terms[0], out=out)
    for term in terms[1:-1]:
        ops.add(out, term, out=out)
        ops.multiply(out, at, out=out)
    ops.add(out, terms[-1], out=out)
