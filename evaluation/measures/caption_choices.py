"""Accuracy of chosen captions, as ARO counts it: over all cases, and as the mean over groups of cases.

Groups are relations (VG-Relation, all of them) or pairs of attributes (VG-Attribution, those with at least 25 cases).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from murmuration.evaluation.measures.interval import Estimate, mean, share

LEAST_ATTRIBUTION = 25


@dataclass(frozen=True)
class Group:
    name: str
    right: int
    cases: int


def grouped(groups: Sequence[str], right: Sequence[bool]) -> list[Group]:
    """One for each name, in alphabetical order."""
    found: dict[str, list[bool]] = {}
    for name, each in zip(groups, right, strict=True):
        found.setdefault(name, []).append(each)
    return [Group(name, sum(values), len(values)) for name, values in sorted(found.items())]


def micro(right: Sequence[bool]) -> Estimate:
    return share(sum(right), len(right))


def macro(groups: Sequence[Group], least: int = 1) -> Estimate | None:
    """The mean of the groups' accuracies, with an interval over groups; None if no group has enough cases."""
    counted = [group.right / group.cases for group in groups if group.cases >= least]
    return mean(counted) if counted else None
