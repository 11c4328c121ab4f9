"""Two boards that never mix: public values for everybody, private ones for the owner of the data.

Public: constants of the plan, epsilon, rates over at least 100 steps, and what was computed on public records.
Private: anything computed on private records without noise, so losses, norms, batch sizes and step times.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from murmuration.accounting.escaping import printable_lines
from murmuration.train.storage.run_dir import RunDir, end_line, open_private

RATE_STEPS = 100


class Board:
    """Writes on the main rank; silent elsewhere."""

    def __init__(self, run_dir: RunDir, main: bool) -> None:
        self._main = main
        self._run_dir = run_dir
        if not main:
            return
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        from torch.utils.tensorboard import SummaryWriter

        # One time for all public points: the times of private steps tell their batch sizes.
        self._opened = time.time()
        self._public = SummaryWriter(str(run_dir.public_board), flush_secs=5)
        self._private = SummaryWriter(str(run_dir.private_board), flush_secs=5)
        for log in (run_dir.public_log, run_dir.private_log):
            end_line(log)
        self._public_log = run_dir.public_log.open("a")
        self._private_log = open_private(run_dir.private_log)

    def public(self, phase: str, step: int, values: dict[str, float]) -> None:
        if self._main:
            self._write(self._public, self._public_log, phase, step, values, self._opened)

    def private(self, phase: str, step: int, values: dict[str, float]) -> None:
        if self._main:
            self._write(self._private, self._private_log, phase, step, values, None)

    def bad_records(self, phase: str, rank: int, reasons: dict[int, str]) -> None:
        """Those that this rank met. Private: which records of the data set are unusable says something about them."""
        if not reasons:
            return
        with open_private(self._run_dir.private_log.parent / f"bad-records-rank{rank}.jsonl") as file:
            for record, reason in reasons.items():
                file.write(json.dumps({"phase": phase, "record": record, "reason": reason}) + "\n")

    def say(self, text: str) -> None:
        """The console is a public sink."""
        if self._main:
            print(printable_lines(text), flush=True)

    def close(self) -> None:
        if self._main:
            for sink in (self._public, self._private, self._public_log, self._private_log):
                sink.close()

    @staticmethod
    def _write(
        writer: Any, log: Any, phase: str, step: int, values: dict[str, float], walltime: float | None
    ) -> None:  # fmt: skip
        for name, value in values.items():
            writer.add_scalar(f"{phase}/{name}", value, step, walltime=walltime)
        log.write(json.dumps({"phase": phase, "step": step, **values}) + "\n")
        log.flush()
        writer.flush()


class Pace:
    """Records per second that may be shown: expected records over the time of at least 100 steps.

    The time of one private step tells its batch size, and so do the differences of overlapping windows: windows follow
    one another. Until the first is full, the rate comes from timing synthetic records through the same engine
    (`calibrate`), which says nothing about the data. That is why no progress library draws this line: they all show
    the time of the last step, and the same line as text suits terminals and logs.
    """

    def __init__(self, records_per_step: float, private: bool) -> None:
        self._records = records_per_step
        self._window = RATE_STEPS if private else 1
        self._prior: float | None = None
        self._known: float | None = None
        self._started: float | None = None
        self._steps = 0

    def calibrate(self, records_per_second: float) -> None:
        self._prior = records_per_second

    def tick(self) -> None:
        now = time.monotonic()
        if self._started is None:
            self._started = now
            return
        self._steps += 1
        if self._steps == self._window:
            self._known = self._records * self._steps / max(now - self._started, 1e-9)
            self._steps, self._started = 0, now

    def rate(self) -> tuple[float, str] | None:
        """(records per second, how it is known)"""
        if self._known is not None:
            return self._known, ""
        return (self._prior, " (timed on synthetic records)") if self._prior else None

    def line(self, step: int, steps: int) -> str:
        known = self.rate()
        if known is None:
            return ""
        rate, how = known
        seconds = round((steps - step) * self._records / rate)
        eta = (
            f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
            if seconds >= 3600
            else f"{seconds // 60}m{seconds % 60:02d}s"
        )
        return f"{rate:,.0f} samples/s{how}  ETA {eta}"
