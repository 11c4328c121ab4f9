"""The run directory: where each file lies, who may read it, and the run's state for scripts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from murmuration.accounting.days import day_of
from murmuration.accounting.durable import atomic, sync
from murmuration.accounting.keys import KeyFileError, RunKey, load, store
from murmuration.accounting.strict_json import whole_lines

if TYPE_CHECKING:
    from murmuration.train.config.root import Config


def run_dir_of(config: Config, config_path: Path) -> Path:
    """Its name: `run.dir`, or that of the config, in `runs` under the current directory."""
    return Path(config.run.dir) if config.run.dir else Path.cwd() / "runs" / config_path.stem


@dataclass(frozen=True)
class RunDir:
    """`runs/<name>`: public files at mode 0644, `tb/private`, `logs/private` and `secret` for the owner alone."""

    root: Path

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def key(self) -> Path:
        return self.root / "secret" / "run.key"

    @property
    def new_key(self) -> Path:
        return self.root / "secret" / "new.key"

    @property
    def public_board(self) -> Path:
        return self.root / "tb" / "public"

    @property
    def private_board(self) -> Path:
        return self.root / "tb" / "private"

    @property
    def public_log(self) -> Path:
        return self.root / "logs" / "public.jsonl"

    @property
    def private_logs(self) -> Path:
        """A folder that nobody else can list: that a file of bad records exists, or how long it is, is private."""
        return self.root / "logs" / "private"

    @property
    def private_log(self) -> Path:
        return self.private_logs / "curves.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.root / "logs" / "evaluation.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def stop_file(self) -> Path:
        return self.root / "stop"

    @property
    def end_file(self) -> Path:
        """Names phases that are to end before their last step, one per line."""
        return self.root / "end_phase"

    def prepare(self) -> None:
        for folder in (self.public_board, self.private_board, self.private_logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.private_board, self.private_logs):
            folder.chmod(0o700)

    def has_private_curves(self) -> bool:
        """Whether there are curves of an earlier start."""
        return any(self.private_board.iterdir()) or self.private_log.exists()

    def run_key(self, fresh: bool, debug_seed: int | None) -> RunKey:
        """A new key for a new ledger, the stored one for an old ledger; a leftover key is never reused."""
        if not fresh:
            if not self.key.exists() and self.new_key.exists():
                self.adopt_key()  # killed between the ledger's first line and the renaming of the key
            key = load(self.key)
            if (debug_seed is not None) != key.debug:
                raise KeyFileError(
                    "run.debug_seed was added or removed since this run began; start a new run directory"
                )
            return key
        if self.key.exists():
            raise KeyFileError(
                f"{self.key} exists without a ledger: the ledger was removed, and continuing would hide its steps; "
                "use a new run directory"
            )
        key = RunKey.fresh() if debug_seed is None else RunKey.from_debug_seed(debug_seed)
        self.new_key.unlink(missing_ok=True)  # left by a start that never reached its ledger: nothing was drawn with it
        store(key, self.new_key)
        return key

    def adopt_key(self) -> None:
        """Gives the key its final name once it is in the ledger, so that a key without a ledger always means that the
        ledger was lost."""
        self.new_key.replace(self.key)
        sync(self.key.parent)

    @property
    def state_file(self) -> Path:
        return self.root / "run_state.json"

    def write_state(self, **state: object) -> None:
        """Writes the state with a random id, so that launch scripts can tell it from the state of an earlier start."""
        state["id"] = secrets.token_hex(8)
        with atomic(self.state_file) as file:
            file.write(json.dumps(state, indent=2).encode() + b"\n")

    def state(self) -> dict[str, object]:
        """What was written last; empty if it cannot be read."""
        try:
            found = json.loads(self.state_file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def open_private(path: Path):
    """Opens a file for appending that only the owner can read, from the first byte on."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")


def end_line(log: Path) -> None:
    """Ends a line that was cut short by a kill, so that it does not swallow the next one."""
    if log.exists() and log.stat().st_size:
        with log.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


class Measurement(NamedTuple):
    phase: str
    step: int
    values: dict[str, float]


def measurements(log: Path) -> list[Measurement]:
    """The lines of a public log in order. Values that are not numbers and lines without a phase and a step are left
    out: no run wrote them."""
    found = []
    for entry in whole_lines(log):
        phase, step = entry.pop("phase", None), entry.pop("step", None)
        if isinstance(phase, str) and _number(step) and step >= 0:
            values = {name: value for name, value in entry.items() if isinstance(value, float) or _number(value)}
            found.append(Measurement(phase, step, values))
    return found


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53


class BadRecordList:
    """One rank's file, in which each record stands once, however often a run is started and killed. Private: that a
    record is unusable is information about it."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._path = run_dir.private_logs / f"bad-records-rank{rank}.jsonl"
        self._listed: set[tuple[object, object]] | None = None

    def add(self, phase: str, reasons: dict[int, str]) -> None:
        if not reasons:
            return
        if self._listed is None:  # an earlier start met some of them, and may have been killed while it wrote
            end_line(self._path)
            self._listed = {(entry.get("phase"), entry.get("record")) for entry in whole_lines(self._path)}
        new = {record: reason for record, reason in reasons.items() if (phase, record) not in self._listed}
        if not new:
            return
        with open_private(self._path) as file:
            for record, reason in new.items():
                file.write(json.dumps({"phase": phase, "record": record, "reason": reason}) + "\n")
        self._listed |= {(phase, record) for record in new}


# Modification times that say nothing about how long private steps took.
#
# Files of a run outlive it, and are copied with their times: those of two checkpoints would reveal the pace of the
# steps between them, which may depend on a single record that is slow to decode. So files get the time at which the
# run was started, plus one second for each checkpoint since, so that backups that compare times still see that a file
# changed.


class PublicTimes:
    """One time for everything written until the next checkpoint; it counts checkpoints and reads no clock."""

    def __init__(self, started: int | None = None) -> None:
        self.started = int(time.time()) if started is None else started
        self.at = self.started

    @property
    def day(self) -> str:
        """The day of the start, in UTC."""
        return day_of(self.started)

    def advance(self) -> None:
        self.at += 1

    def stamp(self, *paths: Path) -> None:
        """Sets the time of these paths. A file system that refuses keeps its own times."""
        for path in paths:
            with contextlib.suppress(OSError):
                os.utime(path, (self.at, self.at), follow_symlinks=False)

    def stamp_all(self, folder: Path, but: tuple[str, ...] = ()) -> None:
        """Sets the time of a folder and everything in it, except for its entries named in `but`, which keep theirs."""
        for each in folder.iterdir():
            if each.name not in but:
                self.stamp(*each.rglob("*"), each)
        self.stamp(folder)
