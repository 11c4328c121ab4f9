"""What a model answered, a line for each micro-batch, so that a stopped evaluation continues after the last whole one.

The file is named by a digest of all that an answer depends on, so a changed command begins another file. Records are
computed in the same micro-batches whether or not the evaluation was interrupted: kernels may round a row by its
neighbours. JSON keeps every bit of a float.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmuration.accounting.durable import try_lock
from murmuration.train.evaluate.errors import EvaluationError

FOLDER = "progress"


@dataclass(frozen=True)
class MicroBatchAnswers:
    """One answer for each readable record, in order, and why the others could not be read."""

    answers: list[tuple[int, Any]]
    unreadable: dict[int, str]

    def as_line(self) -> bytes:
        told = {"answers": self.answers, "unreadable": list(self.unreadable.items())}
        return json.dumps(told).encode() + b"\n"

    @staticmethod
    def of_line(line: bytes) -> MicroBatchAnswers:
        told = json.loads(line)
        answers = [(int(record), answer) for record, answer in told["answers"]]
        return MicroBatchAnswers(answers, {int(record): str(reason) for record, reason in told["unreadable"]})


@dataclass
class Answers:
    """`parts` are the micro-batches that were answered, those of earlier starts first."""

    descriptor: int
    parts: list[MicroBatchAnswers] = field(default_factory=list)

    @staticmethod
    @contextlib.contextmanager
    def kept(out: Path, identity: str) -> Iterator[Answers]:
        folder = out / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{identity[:32]}.jsonl"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not try_lock(descriptor):
                raise EvaluationError(f"another evaluation is writing to {out}; let it end, or name another --out")
            found = Answers(descriptor)
            end = 0
            for line in path.read_bytes().splitlines(keepends=True):
                # A kill can cut the last line only.
                if not line.endswith(b"\n"):
                    break
                found.parts.append(MicroBatchAnswers.of_line(line))
                end += len(line)
            os.truncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
            yield found
        finally:
            os.close(descriptor)

    def add(self, part: MicroBatchAnswers) -> None:
        rest = memoryview(part.as_line())
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]
        os.fsync(self.descriptor)
        self.parts.append(part)

    @property
    def count(self) -> int:
        return sum(len(part.answers) for part in self.parts)

    def all(self) -> list[tuple[int, Any]]:
        return [answer for part in self.parts for answer in part.answers]

    def unreadable(self) -> dict[int, str]:
        return {record: reason for part in self.parts for record, reason in part.unreadable.items()}
