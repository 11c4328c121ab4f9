"""Which records a few-shot classifier may learn from: so many per class, a share of each class, or the files of a list.

A seed orders each class once, and a draw takes the first records of that order. So a draw of five contains that of one,
and a class is ordered alike whatever other classes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import numpy as np


class FewShotError(ValueError):
    """There is no such draw; the message names the cause and the fix."""


def draw_shots(labels: np.ndarray, shots: int, seed: int, names: Sequence[str]) -> np.ndarray:
    """Places of `shots` records of each class, in order."""

    def count(number: int, there: int) -> int:
        if there < shots:
            raise FewShotError(
                f"the class {names[number]!r} has {there} readable training records, fewer than {shots} shots; ask for "
                "fewer, or name a list of classes without it"
            )
        return shots

    return _drawn(labels, seed, len(names), count)


def draw_percent(labels: np.ndarray, percent: float, seed: int, classes: int) -> np.ndarray:
    """Places of `percent` of each class, rounded, but at least one record of each class that has any."""
    return _drawn(labels, seed, classes, lambda _, there: min(there, max(1, round(there * percent / 100))))


def _drawn(labels: np.ndarray, seed: int, classes: int, count: Callable[[int, int], int]) -> np.ndarray:
    chosen = []
    for number in range(classes):
        places = np.flatnonzero(labels == number)
        order = np.random.default_rng([seed, number]).permutation(len(places))
        chosen.append(places[order[: count(number, len(places))]])
    return np.sort(np.concatenate(chosen))


def listed(lines: Sequence[str], files: Sequence[str]) -> np.ndarray:
    """Numbers of the files that a list names, one per line, by their names without folder and extension, as the lists
    of Masked Siamese Networks do (`n01440764_10026.JPEG`)."""
    numbers: dict[str, int] = {}
    for number, file in enumerate(files):
        if numbers.setdefault(PurePosixPath(file).stem, number) != number:
            raise FewShotError(
                f"{file} and {files[numbers[PurePosixPath(file).stem]]} have the same name, so a list cannot tell them "
                "apart; rename one"
            )
    wanted = list(dict.fromkeys(PurePosixPath(line.strip()).stem for line in lines if line.strip()))
    if not wanted:
        raise FewShotError("it names no file; write one per line")
    if lacking := [name for name in wanted if name not in numbers]:
        raise FewShotError(f"it names {lacking[0]}, which is none of the {len(files)} training records; name theirs")
    return np.array(sorted(numbers[name] for name in wanted))
