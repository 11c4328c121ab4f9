"""Group-wise clipping: which parameters are clipped together, and each group's share of the bound.

Shares C_k with Σ C_k² = C² leave the sensitivity at C: a record adds at most C_k to each group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Grouping = Literal["all", "block", "layer"]


def group_of(name: str, grouping: Grouping) -> str:
    """`blocks.3.attn.qkv.weight` belongs to `blocks.3` and to `blocks.3.attn.qkv`; what is in no block is a group."""
    if grouping == "all":
        return ""
    parts = name.split(".")
    if grouping == "layer":
        return ".".join(parts[:-1]) or name
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def groups_of(names: Iterable[str], grouping: Grouping) -> dict[str, int]:
    """Parameter -> number of its group, in the order in which the model names them."""
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(group_of(name, grouping), len(numbers)) for name in names}
