"""Scales of gradients: a power of two for every row and column of every weight, decided by public second moments.

Where a weight's gradients are small, one amount of noise on all elements drowns them. So each element of a record's
gradient is multiplied by s before it is clipped, summed and noised, and the noised mean is divided by s again. With
v the second moment of an element, s is about 1/√v, factored like Adafactor's: v ≈ row mean · column mean / mean
(Shazeer and Stern, arXiv 1804.04235; the scaling itself is that of Ganesh et al., 2507.01129, algorithm 8).

Powers of two make all of this exact: multiplying by them rounds nothing, in bf16 as in fp64, so what is clipped is
what is measured, and every machine finds the same scales. They cost at most a factor of √2 per row and column.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from murmuration.accounting.strict_json import JsonError, parse

FORMAT = "murmuration-scales/1"
FURTHEST = 40
"""Largest exponent of a row or a column, in either direction: products of both keep far from the limits of fp32."""

Exponents = tuple[tuple[int, ...], tuple[int, ...]]
"""Rows' exponents and columns'. A weight is seen as [rows, columns], by its first dimension; a vector as one column."""


class ScaleError(ValueError):
    """These are no scales that gradients can be multiplied by; the message says which weight has them, and why."""


@dataclass(frozen=True)
class ScaleTable:
    weights: Mapping[str, Exponents]
    """A weight that is not here keeps its gradient."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ScaleError("the scales are of no weight")
        for name, (rows, columns) in self.weights.items():
            every = (*rows, *columns)
            if not (rows and columns and all(type(e) is int and abs(e) <= FURTHEST for e in every)):
                raise ScaleError(
                    f"the scales of {name} are not whole exponents of two from -{FURTHEST} to {FURTHEST}, for its rows "
                    "and its columns"
                )

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    @cached_property
    def span(self) -> tuple[int, int]:
        """The smallest and the largest exponent of any element; 0 is the scale of weights that are not listed."""
        lowest = min(min(rows) + min(columns) for rows, columns in self.weights.values())
        highest = max(max(rows) + max(columns) for rows, columns in self.weights.values())
        return min(0, lowest), max(0, highest)

    def text(self) -> str:
        """As it is kept beside the ledger: the digest is that of these bytes."""
        ordered = sorted(self.weights.items())
        weights = {name: {"rows": list(rows), "columns": list(columns)} for name, (rows, columns) in ordered}
        return json.dumps({"format": FORMAT, "weights": weights}, separators=(",", ":"))

    @staticmethod
    def read(text: bytes) -> ScaleTable:
        try:
            found = parse(text)
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ScaleError(f"its format is not {FORMAT!r}")
            return ScaleTable(
                {name: (tuple(each["rows"]), tuple(each["columns"])) for name, each in found["weights"].items()}
            )
        except (JsonError, KeyError, TypeError, AttributeError) as error:
            raise ScaleError(f"it holds no scales ({str(error)[:200]})") from None


def scales_name(phase: int) -> str:
    """The file beside the ledger in which a phase's table lies."""
    return f"scales-{phase}.json"


@dataclass(frozen=True)
class Moments:
    """Means of the second moments of one weight: over each row, over each column, and over all its elements."""

    rows: Sequence[float]
    columns: Sequence[float]
    mean: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (*self.rows, *self.columns, self.mean)):
            raise ScaleError("second moments are finite and not below 0")

    @property
    def elements(self) -> int:
        return len(self.rows) * len(self.columns)


def scales_of(moments: Mapping[str, Moments], floor: float) -> ScaleTable:
    """s² = mean of all / v for each element, so that a gradient of the usual shape keeps its length, and C its meaning.

    The mean of a weight, and those of its rows and columns, count as no less than `floor` of the mean that they belong
    to: a scale without a bound would give the whole of C to weights that hardly ever have a gradient.
    """
    elements = sum(each.elements for each in moments.values())
    whole = math.fsum(each.mean * each.elements for each in moments.values()) / max(1, elements)
    if not whole > 0:
        raise ScaleError("all second moments are 0")

    def exponent(part: float, of: float) -> int:
        return nearest_exponent(max(part / of, floor) if of > 0 else 1.0)

    found: dict[str, Exponents] = {}
    for name, each in moments.items():
        level = exponent(each.mean, whole)
        rows = tuple(level + exponent(row, each.mean) for row in each.rows)
        found[name] = rows, tuple(exponent(column, each.mean) for column in each.columns)
    return ScaleTable(found)


def nearest_exponent(square: float) -> int:
    """The e for which 2^e is nearest to 1/√square on a logarithmic scale; without a logarithm, whose last digit differs
    between machines."""
    whole = math.frexp(square)[1] - 1  # 2^whole ≤ square < 2^(whole + 1)
    return -((whole + 1) // 2)
