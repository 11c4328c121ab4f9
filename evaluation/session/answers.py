"""What a model answered, a line for each micro-batch, so that a stopped evaluation continues with what is missing.

Files are named by a digest of all that an answer depends on, so a changed command begins others; each process adds to
one of its own. Records are computed in the same micro-batches whether or not the evaluation was interrupted, and by
however many processes: kernels may round a row by its neighbours. JSON keeps every bit of a float.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.durable import flush, try_lock
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.session.sharing import Sharing

FOLDER = "progress"
MISSING = -1


@dataclass(frozen=True)
class MicroBatchAnswers:
    """One answer for each readable record, in order, and why the others could not be read."""

    number: int
    answers: list[tuple[int, Any]]
    unreadable: dict[int, str]

    def as_line(self) -> bytes:
        told = {"number": self.number, "answers": self.answers, "unreadable": list(self.unreadable.items())}
        return json.dumps(told).encode() + b"\n"

    @staticmethod
    def of_line(line: bytes) -> MicroBatchAnswers:
        told = json.loads(line)
        answers = [(int(record), answer) for record, answer in told["answers"]]
        return MicroBatchAnswers(
            int(told["number"]), answers, {int(record): str(reason) for record, reason in told["unreadable"]}
        )


@dataclass
class Answers:
    folder: Path
    name: str
    descriptor: int
    """The descriptor of this process's own file."""
    counts: np.ndarray
    """By micro-batch, its answers, or MISSING; others may have answered some since this process began."""

    @staticmethod
    @contextlib.contextmanager
    def kept(out: Path, identity: str, micro_batches: int, sharing: Sharing) -> Iterator[Answers]:
        """Entered on all ranks together."""
        folder, name = out / FOLDER, identity[:32]
        descriptor = sharing.together(lambda: _claimed(folder, f"{name}.{sharing.ranks.rank}.jsonl"))
        try:
            counts = sharing.on_main(lambda: _counts(folder, name, micro_batches))
            yield Answers(folder, name, descriptor, counts)
        finally:
            os.close(descriptor)

    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.counts == MISSING)

    def before(self, number: int) -> int:
        """Answers of earlier micro-batches, at least: those of other processes count once they are read."""
        return int(self.counts[:number].clip(0).sum())

    def add(self, part: MicroBatchAnswers) -> None:
        rest = memoryview(part.as_line())
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]
        flush(self.descriptor)
        self.counts[part.number] = len(part.answers)

    def read(self) -> tuple[list[tuple[int, Any]], dict[int, str]]:
        """All answers in the order of the records, and the unreadable ones with their reasons."""
        found = {part.number: part for part in _parts(self.folder, self.name)}
        if len(found) < len(self.counts):
            raise EvaluationError(
                f"{len(self.counts) - len(found)} micro-batches are missing in {self.folder} although all were "
                "answered, so not every machine sees what the others write there; name an --out where they do"
            )
        parts = [found[number] for number in sorted(found)]
        unreadable = {record: reason for part in parts for record, reason in part.unreadable.items()}
        return [answer for part in parts for answer in part.answers], unreadable


def _claimed(folder: Path, name: str) -> int:
    """Opens the file to add to it, behind its last whole line: a kill can cut the last one only."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            raise EvaluationError(
                f"another evaluation is writing to {folder.parent}; let it end, or name another --out"
            )
        end = sum(map(len, _lines(folder / name)))
        os.truncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _counts(folder: Path, name: str, micro_batches: int) -> np.ndarray:
    counts = np.full(micro_batches, MISSING)
    for part in _parts(folder, name):
        counts[part.number] = len(part.answers)
    return counts


def _parts(folder: Path, name: str) -> Iterator[MicroBatchAnswers]:
    """All processes' answers, those of earlier starts too."""
    for path in sorted(folder.glob(f"{name}.*.jsonl")):
        yield from map(MicroBatchAnswers.of_line, _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))
