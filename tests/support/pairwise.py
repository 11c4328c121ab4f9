"""Products of many settings: `make test` runs so few of them that any two settings still meet, `make test-full` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs_of(row: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(combinations(enumerate(row), 2))


def pairwise(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of the rows, with every pair of settings that occurs in any of them. The same at every call."""
    missing = set().union(*map(pairs_of, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def never(*_: Any) -> bool:
    return False


def all_of(
    *settings: Iterable[Any], unless: Callable[..., bool] = never, rest: Callable[..., bool] = never
) -> list[Any]:
    """The whole product for `pytest.mark.parametrize`; a pairwise part of what is not `rest` is marked `core`."""
    rows = [row for row in product(*settings) if not unless(*row)]
    core = set(pairwise([row for row in rows if not rest(*row)]))
    return [pytest.param(*row, marks=pytest.mark.core if row in core else ()) for row in rows]
