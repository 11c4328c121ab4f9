"""The shares of right answers that are measured during training: how boards, logs and configs name them.

Free of torch, so that a config is read without it.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST = 5
"""Places that are counted: top-1 to top-5."""
TOP_1, TOP_5, REAL = "top_1", "top_5", "real"
MEAN_PRECISION = "mean_average_precision"
"""Where a record may have any number of classes; see ranking.py."""
TITLES = {TOP_1: "top-1", TOP_5: "top-5", REAL: "ReaL", MEAN_PRECISION: "mean average precision"}
"""What people call them."""


def share_names(classes: int, real: bool) -> list[str]:
    """Those of so many classes; among fewer than five, a top-5 would say nothing."""
    return [TOP_1, *([TOP_5] if classes >= MOST else []), *([REAL] if real else [])]


def right_of(counts: Sequence[int], names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By name, of the counts of a `Tally`: right answers, of how many; a share of no records is left out."""
    *places, records, real, with_right_classes = counts
    of = {TOP_1: (sum(places[:1]), records), TOP_5: (sum(places), records), REAL: (real, with_right_classes)}
    return {name: of[name] for name in names if of[name][1]}


def shares(counts: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    return {name: right / scored for name, (right, scored) in right_of(counts, names).items()}
