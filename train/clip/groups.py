"""Group-wise clipping: which parameters are clipped together, and each group's share of the bound.

Shares C_k with Σ C_k² = C² leave the sensitivity at C: a record adds at most C_k to each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

# Patterns of names, each with its budget in proportion to the others.
Budgets = tuple[tuple[str, float], ...]
Grouping = Literal["all", "block", "layer"] | Budgets


class GroupError(ValueError):
    """The groups do not fit the model; the message names the parameter or the pattern."""


def group_of(name: str, grouping: Literal["all", "block", "layer"]) -> str:
    """`blocks.3.attn.qkv.weight` belongs to `blocks.3` by block and to `blocks.3.attn.qkv` by layer; the parameters
    outside all blocks form one group."""
    if grouping == "all":
        return ""
    parts = name.split(".")
    if grouping == "layer":
        return ".".join(parts[:-1]) or name
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def groups_of(names: Iterable[str], grouping: Grouping) -> dict[str, int]:
    """Parameter -> number of its group, in the order in which the model names them, or in that of the patterns."""
    if isinstance(grouping, str):
        numbers: dict[str, int] = {}
        return {name: numbers.setdefault(group_of(name, grouping), len(numbers)) for name in names}
    found: dict[str, int] = {}
    for name in names:
        fitting = [number for number, (pattern, _) in enumerate(grouping) if fnmatchcase(name, pattern)]
        if not fitting:
            raise GroupError(f"privacy.clip.groups has no pattern for {name}; add one that matches it, such as '*'")
        found[name] = fitting[0]
    idle = [pattern for number, (pattern, _) in enumerate(grouping) if number not in found.values()]
    if idle:
        raise GroupError(
            f"privacy.clip.groups: no parameter is left for {idle[0]!r}, so its budget would be lost; remove it"
        )
    return found


def shares(grouping: Grouping, groups: int) -> list[float]:
    """C_k / C of every group; their squares sum to 1."""
    if isinstance(grouping, str):
        return [1 / math.sqrt(groups)] * groups
    whole = math.hypot(*(budget for _, budget in grouping))
    return [budget / whole for _, budget in grouping]
