"""Draws of the training records that few are learnt from: K per class, a share of each class, or published lists.

The probe and fine-tuning draw alike, so that their numbers are of the same records. What several draws give tells how
much a number depends on which records were seen; a mean never stands without its spread.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.selection import Selection
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen
from murmuration.train.measures.shares import MOST

HEAD = ["learnt from", "draw", "records", "top-1", "top-5"]


@dataclass(frozen=True)
class FewRecords:
    """What is drawn; nothing at all if all records are learnt from."""

    shots: tuple[int, ...] = ()
    percents: tuple[float, ...] = ()
    lists: tuple[Path, ...] = ()
    seeds: tuple[int, ...] = (0,)
    """One draw for each; lists are draws themselves."""

    @staticmethod
    def of(arguments: Namespace) -> FewRecords:
        drawn = tuple(arguments.shots), tuple(arguments.percent), tuple(arguments.list)
        return FewRecords(*drawn, tuple(range(arguments.draws)))

    def __bool__(self) -> bool:
        return bool(self.shots or self.percents or self.lists)

    def told(self) -> dict[str, object]:
        return {
            "shots": list(self.shots), "percents": list(self.percents), "lists": [path.name for path in self.lists],
            "seeds": list(self.seeds),
        }  # fmt: skip

    def candidates(self, train: Chosen) -> np.ndarray:
        """The records of which some may be drawn: with lists alone, those that some list names, so that no other is
        read."""
        if self.shots or self.percents:
            return train.ids
        names = _names(train)
        return np.unique(np.concatenate([_listed(path, names) for path in self.lists]))

    def draws(self, train: Chosen, readable: np.ndarray, labels: np.ndarray, classes: ClassList) -> Iterator[Draw]:
        """Places among the `readable` records of `train`, whose `labels` are given. A list may name others, which are
        left out."""
        try:
            for shots in self.shots:
                for seed in self.seeds:
                    drawn = draw_shots(labels, shots, seed, classes.names)
                    yield Draw(f"{shots} per class", f"seed {seed}", drawn)
            for percent in self.percents:
                for seed in self.seeds:
                    drawn = draw_percent(labels, percent, seed, len(classes.names))
                    yield Draw(f"{percent:g} %", f"seed {seed}", drawn)
        except FewShotError as error:
            raise EvaluationError(str(error)) from None
        names = _names(train) if self.lists else []
        for path in self.lists:
            places = np.flatnonzero(np.isin(readable, _listed(path, names)))
            if not len(places):
                raise EvaluationError(f"--list {path}: none of its records can be read; name another")
            yield Draw("lists", path.name, places)


@dataclass(frozen=True)
class Draw:
    """Places among the readable records, and what they are one draw of."""

    measure: str
    name: str
    places: np.ndarray


@dataclass
class ByDraw:
    """The shares of right answers that were scored after each draw."""

    classes: int
    rows: list[list[str]] = field(default_factory=lambda: [HEAD])
    measured: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, draw: Draw, top1: float, top5: float) -> None:
        self.measured.setdefault(draw.measure, []).append((top1, top5))
        self.rows.append([draw.measure, draw.name, f"{len(draw.places):,}", f"{top1:.4f}", f"{top5:.4f}"])

    def outcome(self, result: Result) -> Outcome:
        for measure, values in self.measured.items():
            result.add_draws(f"top-1, {measure}", [top1 for top1, _ in values])
            if self.classes >= MOST:
                result.add_draws(f"top-5, {measure}", [top5 for _, top5 in values])
        result.notes.append(
            "Intervals and ± are over draws of the records that were learnt from, not over those scored."
        )
        return Outcome(result, table=self.rows, table_title="By draw")


def _names(train: Chosen) -> list[str]:
    index = train.index
    whole = Chosen(index.whole, index.ids) if isinstance(index, Selection) else train
    if whole.folders is None:
        raise EvaluationError("--list names files, and these records are not single files; name class folders")
    return [whole.name(int(record)) for record in (index.ids if isinstance(index, Selection) else train.ids)]


def _listed(path: Path, names: Sequence[str]) -> np.ndarray:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return listed(lines, names)
    except (OSError, UnicodeDecodeError, FewShotError) as error:
        raise EvaluationError(f"--list {path}: {error}") from None


# Which records a few-shot classifier may learn from: so many per class, a share of each class, or the files of a
# list.
#
# A seed orders each class once, and a draw takes the first records of that order. So a draw of five contains that of
# one, and a class is ordered alike whatever other classes there are.


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
