"""Two boards that never mix: public values for everyone, private ones for the owner of the data.

Public: constants of the plan, epsilon, a rate timed on synthetic records, and values computed on public records.
Private: anything computed on private records without noise: losses, norms, batch sizes and step times. These are kept
only if the config asks for them (`run.private_curves`): no epsilon covers what a person decides by looking at them.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from murmuration.accounting.durable import naming
from murmuration.accounting.escaping import printable, printable_lines
from murmuration.train.measures.shares import TITLES
from murmuration.train.storage.run_dir import BadRecordList, PublicTimes, RunDir, end_line, measurements, open_private

if TYPE_CHECKING:
    from murmuration.train.config.phase import Phase

WAITING = "waiting_share"
"""Share of a step's time for which it waits for records. Where it is not near zero, more cores make steps faster."""


WHERE = ("phase", "step")
"""What the latest measurements say beside values."""
MOST_TAG = 200
BAR = 20
ERASE = "\r\x1b[2K"


def _newer(log: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The same measurements at the last step that the log has of this phase: it is written before the run's state, and
    a kill may fall between them."""
    for entry in reversed(measurements(log)):
        if entry.phase == found.get("phase") and found.keys() - WHERE <= entry.values.keys():
            return {"phase": entry.phase, "step": entry.step, **entry.values}
    return found


def title(name: str, objective: str) -> str:
    """A public metric as people read it."""
    plain = TITLES.get(name, name.replace("_", " "))
    return f"zero-shot {plain}" if name in TITLES and objective == "caption" else plain


def picture(tag: str, sample: dict[str, str]) -> Any:
    """A PNG with its text in the tag, which is all that TensorBoard shows above a picture."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    content = base64.b64decode(sample["png"])
    with Image.open(io.BytesIO(content)) as opened:
        width, height = opened.size
    beside = f"{sample['caption']} (true: {sample['truth']})" if sample["truth"] else sample["caption"]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    return Summary(value=[Summary.Value(tag=f"{tag} {printable(beside)}"[:MOST_TAG], image=image)])


class Board:
    """Writes on the main rank; silent elsewhere."""

    def __init__(
        self,
        run_dir: RunDir,
        main: bool,
        times: PublicTimes | None = None,
        private_curves: bool = False,
        phases: Iterable[Phase] = (),
    ) -> None:
        self._main = main
        # A terminal that can draw a line again. Under Slurm the output becomes a file even where it looks like a
        # terminal.
        terminal = sys.stdout.isatty() and "SLURM_JOB_ID" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
        self._live, self._drawn = main and terminal, False
        # What phases are called on the public board, where no tag may look like a private value: `private/loss`.
        self._tags = {each.name: "dp" if each.privacy else "without-dp" for each in phases if each.name == "private"}
        self._run_dir = run_dir
        self.keeps_private = private_curves
        """Whether anything computed on private records without noise is kept, apart from the lists of unusable records;
        equal on all ranks."""
        self.times = times or PublicTimes()
        found: Any = run_dir.state().get("measured")
        self.latest: dict[str, Any] | None = _newer(run_dir.public_log, found) if isinstance(found, dict) else None
        """What was measured last on held-out public records, also before this start."""
        self.on_measured: Callable[[], None] = lambda: None
        self._listed: BadRecordList | None = None
        if not main:
            return
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        from torch.utils.tensorboard import SummaryWriter

        # One time for all public points: the times of private steps reveal their batch sizes.
        self._opened = float(self.times.at)
        self._public = SummaryWriter(str(run_dir.public_board), flush_secs=5)
        end_line(run_dir.public_log)
        self._public_log = run_dir.public_log.open("a")
        if private_curves:
            self._private = SummaryWriter(str(run_dir.private_board), flush_secs=5)
            end_line(run_dir.private_log)
            self._private_log = open_private(run_dir.private_log)

    def public(self, phase: str, step: int, values: dict[str, float]) -> None:
        if self._main:
            self._write(self._public, self._public_log, phase, self.tag(phase), step, values, self._opened)

    def describe(self, config: str, settings: dict[str, str | float], metrics: list[str]) -> None:
        """What is trained, for TensorBoard's pages of texts and hyperparameters, which compares runs by `metrics`."""
        if not self._main:
            return
        from torch.utils.tensorboard.summary import hparams

        # As lines of code: a name in it is then no markup.
        lines = "\n".join("    " + line for line in printable_lines(config).splitlines())
        self._public.add_text("config", lines, 0, walltime=self._opened)
        # Without the end of the session: it would be told now, and its time later would tell how long steps took.
        experiment, start, _ = hparams(dict(settings), dict.fromkeys(metrics, 0.0))
        for summary in (experiment, start):
            self._add(summary, 0)

    def certified(self, certificate: str, phase: str, step: int, samples: list[dict[str, str]]) -> None:
        """The certificate as text, and the report's public pictures under what the model made of them."""
        if not self._main:
            return
        self._public.add_text("certificate", certificate, 0, walltime=self._opened)  # Markdown, with names escaped
        for number, sample in enumerate(samples):
            tag = f"{self.tag(phase)} held-out/{number:02d}"  # a group of their own, or they would hide the curves
            self._add(picture(tag, sample), step)
        self._public.flush()

    def _add(self, summary: Any, step: int) -> None:
        events = self._public.file_writer
        assert events is not None, "it is closed at the end of the run"
        events.add_summary(summary, step, self._opened)

    def tag(self, phase: str) -> str:
        return self._tags.get(phase, phase)

    def measured(self, phase: Phase, step: int, values: dict[str, float], unusable: str | None) -> None:
        """Measurements of a durable checkpoint, on held-out public records."""
        self.public(phase.name, step, values)
        if unusable is not None:
            self.say(f"{phase.name}  {unusable}")
        where = f"checkpoint at step {step}  " if phase.trains else ""
        shown = "  ".join(f"{title(name, phase.objective)} {value:.3f}" for name, value in values.items())
        self.say(f"{phase.name}  {where}{shown}")
        self.latest = {"phase": phase.name, "step": step, **values}
        self.on_measured()

    def signals(self, phase: str, step: int, layers: dict[str, float]) -> None:
        """Signal to noise of each layer on held-out public records: too many numbers for logs and console."""
        if self._main:
            for layer, value in layers.items():
                tag = f"{self.tag(phase)} signal to noise/{layer}"
                self._public.add_scalar(tag, value, step, walltime=self._opened)

    def private(self, phase: str, step: int, values: dict[str, float]) -> None:
        if self._main and self.keeps_private:
            self._write(self._private, self._private_log, phase, phase, step, values, None)

    def bad_records(self, phase: str, rank: int, reasons: dict[int, str]) -> None:
        """Lists the unusable records that this rank has met so far, for the owner to repair."""
        if self._listed is None:
            self._listed = BadRecordList(self._run_dir, rank)
        self._listed.add(phase, reasons)

    def say(self, text: str) -> None:
        """The console is a public sink."""
        if self._main:
            # What is said next takes the place of the bar, which comes back below it.
            if self._drawn:
                print(ERASE, end="")
                self._drawn = False
            print(printable_lines(text), flush=True)

    def progress(self, line: str, step: int, steps: int) -> None:
        """On a terminal one line that is drawn again, elsewhere a line each time. Of public values alone, like all that
        is said."""
        if not self._main or not self._live or step == steps:
            self.say(line)
            return
        shown = [
            f"{name.replace('_', ' ')} {value:.3f}" for name, value in (self.latest or {}).items() if name not in WHERE
        ]
        filled = BAR * step // steps
        text = "  ".join([f"{'█' * filled}{'░' * (BAR - filled)} {line.strip()}", *shown])
        print(ERASE + printable_lines(text)[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        self._drawn = True

    def close(self) -> None:
        if self._main:
            private = (self._private, self._private_log) if self.keeps_private else ()
            for sink in (self._public, self._public_log, *private):
                sink.close()

    @staticmethod
    def _write(
        writer: Any, log: Any, phase: str, tag: str, step: int, values: dict[str, float], walltime: float | None
    ) -> None:  # fmt: skip
        for name, value in values.items():
            writer.add_scalar(f"{tag}/{name}", value, step, walltime=walltime)
        with naming(log.fileno()):
            log.write(json.dumps({"phase": phase, "step": step, **values}) + "\n")
            log.flush()
        writer.flush()


@dataclass(frozen=True)
class Feed:
    """How fast records come to the steps."""

    waited: Callable[[], float]
    """Seconds for which this rank's steps have waited for records so far."""
    cores: int
    """How many cores all ranks may fill together."""


class Pace:
    """How fast the phase is, as far as that may be public.

    The time of private steps is a function of their records that no noise hides: one picture that is slow to decode
    changes the rate of any number of steps. So public sinks show the rate that the self-test timed on synthetic records
    through the same engine, and the time that the remaining steps would take at that rate; the measured time goes to
    the private board. That is why no progress library draws this line: they all show the time of the last step.
    """

    def __init__(
        self, records_per_step: float, public: bool, synthetic: float | None = None, feed: Feed | None = None
    ) -> None:  # fmt: skip
        """`public`: whether the records are public, so that their own rate may be shown."""
        self._records, self._public, self._synthetic, self._feed = records_per_step, public, synthetic, feed
        self._measured: float | None = None
        self._last: float | None = None
        self._waited = 0.0

    def tick(self) -> dict[str, float]:
        """To be called after each step; returns the step's values for the private board."""
        now, last = time.monotonic(), self._last
        waited = self._feed.waited() if self._feed is not None else 0.0
        waiting, self._waited = waited - self._waited, waited
        self._last = now
        if last is None:
            return {}
        seconds = max(now - last, 1e-9)
        self._measured = self._records / seconds
        values = {"seconds": seconds, "samples_per_second": self._measured}
        if self._feed is not None:
            values |= {"samples_per_second_per_core": self._measured / self._feed.cores}
            values |= {WAITING: min(1.0, waiting / seconds)}
        return values

    def rate(self) -> tuple[float, str] | None:
        """(records per second, how that was measured)"""
        if self._public:
            return None if self._measured is None else (self._measured, "")
        return None if self._synthetic is None else (self._synthetic, " (timed on synthetic records)")

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
