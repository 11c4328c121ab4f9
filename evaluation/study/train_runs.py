"""Trains and evaluates the runs of a study, several at a time, and goes on where it was stopped.

A run is what the commands make of it: each is started as a user would start it, in a process of its own that writes to
a log of its own, and what is finished is not started again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

from murmuration.accounting.durable import atomic, try_lock
from murmuration.accounting.errors import BAD_INPUT, DONE, RESUME_ME
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import whole_lines
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.study.study_file import Run, Study
from murmuration.train.storage.run_dir import RunDir

TRAIN, EVALUATE = "murmuration.train.commands.train", "murmuration.launch.evaluate"
MOST_RESUMES = 5
"""How often a run that asks to be resumed is started again without having been told to stop."""


@dataclass(frozen=True)
class Folder:
    """Where a study keeps its runs."""

    root: Path

    def of(self, run: Run) -> Path:
        return self.root / "runs" / run.name

    def all_runs(self) -> list[Path]:
        """Those of arms, values and seeds, too, that the study no longer has: somebody has seen what they gave."""
        return sorted(self.root.glob("runs/*"))

    def log(self, run: Run) -> Path:
        return self.root / "logs" / f"{run.name}.log"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    def evaluation(self, run: Run, arguments: Sequence[str]) -> Path:
        """One for each command: another study of the same runs, or a changed measure, is another evaluation."""
        asked = hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:8]
        return self.evaluations / f"{run.name}.{arguments[0]}-{asked}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Refuses a second study while one is at work here; the lock of one that was killed is free at once."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".study.lock").open("w") as lock:
            if not try_lock(lock.fileno()):
                raise EvaluationError(f"another study is writing to {self.root}; let it end, or name another --out")
            yield

    def claim(self, runs: Sequence[Run]) -> None:
        """Notes what each run is; one that was made for other settings is refused."""
        for name in ("runs", "logs", "evaluations"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        file = self.root / "runs.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        for run in runs:
            asked = [str(run.config), *run.overrides] if run.weights is None else [str(run.weights)]
            if known.setdefault(run.name, asked) != asked and self.of(run).exists():
                raise EvaluationError(
                    f"{self.of(run)} was trained with other settings; name another --out, or remove it (its steps "
                    "stay charged to its records)"
                )
            elif known[run.name] != asked and any(self.evaluations.glob(f"{run.name}.*")):
                raise EvaluationError(
                    f"{run.name} was evaluated with other settings; name another --out, or remove "
                    f"{self.evaluations / run.name}.*"
                )
            known[run.name] = asked
        with atomic(file, 0o644) as written:
            written.write(json.dumps(known, indent=1).encode())

    def trained(self, run: Run) -> bool:
        if run.weights is not None:
            return True
        # A run whose budget was spent by steps made twice has a certificate, and not all of its steps.
        return (self.of(run) / "certificate.json").exists() and RunDir(self.of(run)).state().get("status") == "done"

    def id_of(self, run: Run) -> str | None:
        """By which the log of runs knows it; None if it was never begun."""
        try:
            return History.read(RunDir(self.of(run)).ledger)[0].run_id
        except (OSError, LedgerError):
            return None


class Process(Protocol):
    def poll(self) -> int | None: ...

    def stop(self) -> None: ...


@dataclass
class Trained:
    """What became of a run; a fault is the last line of its log."""

    run: Run
    fault: str | None = None
    code: int = DONE
    numbers: dict[str, float] = field(default_factory=dict)


def train_all(
    study: Study, runs: Sequence[Run], folder: Folder, start: Callable[[str, list[str], Path], Process], jobs: int,
    say: Callable[[str], None],
) -> list[Trained]:  # fmt: skip
    """Returns all that were finished, or failed; less than all only if it was told to stop."""
    waiting, running, ended = list(runs), list[tuple[Run, Iterator[Process | int], Process]](), list[Trained]()
    alone = len(study.arms)  # the first run of an arm makes what the others share, such as features
    began = time.monotonic()
    with _stops() as told:
        while (waiting and not told) or running:
            room = 1 if len(ended) < alone else jobs
            while waiting and not told and len(running) < room:
                run = waiting.pop(0)
                commands = _commands(study, run, folder, start)
                if isinstance(process := next(commands), int):
                    _ended(study, run, folder, process, ended, len(runs), began, say)
                else:
                    running.append((run, commands, process))
            still = []
            for run, commands, process in running:
                if told:
                    process.stop()
                code = process.poll()
                if code is None:
                    still.append((run, commands, process))
                elif told and code != DONE:
                    continue  # it was stopped, whatever it says
                elif isinstance(following := commands.send(code), int):  # pyright: ignore[reportAttributeAccessIssue]
                    _ended(study, run, folder, following, ended, len(runs), began, say)
                else:
                    still.append((run, commands, following))
            running = still
            time.sleep(0.1)
    return ended


def _commands(
    study: Study, run: Run, folder: Folder, start: Callable[[str, list[str], Path], Process]
) -> Iterator[Process | int]:
    """The commands of a run, one after the other: yields each process, is sent its exit code, and yields the last
    one's."""
    log, resumed = folder.log(run), 0
    train = ["--config", str(run.config), *(part for each in run.overrides for part in ("--set", each))]
    while not folder.trained(run):
        code: Any = yield start(TRAIN, train, log)
        if code not in (DONE, RESUME_ME) or (resumed := resumed + 1) > MOST_RESUMES:
            yield code or BAD_INPUT
            return
    for measure in study.measures_of(run.arm):
        if measure is None or measure.evaluate is None:
            continue
        out = folder.evaluation(run, measure.evaluate)
        if (out / "result.json").exists():
            continue
        protocol, *more = measure.evaluate
        subject = run.weights or folder.of(run)
        code = yield start(EVALUATE, [protocol, str(subject), *more, "--out", str(out)], log)
        if code != DONE:
            yield code
            return
    yield DONE


def _ended(
    study: Study, run: Run, folder: Folder, code: int, ended: list[Trained], of: int, began: float,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    found = Trained(run, code=code)
    if code == DONE:
        try:
            found.numbers = numbers_of(study, run, folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.fault, found.code = f"has no number to show ({type(error).__name__}: {error})", BAD_INPUT
    else:
        lines = folder.log(run).read_text(errors="replace").strip().splitlines() if folder.log(run).exists() else []
        found.fault = next((line for line in reversed(lines) if line.startswith("error")), f"exit code {code}")
    ended.append(found)
    left = (time.monotonic() - began) / len(ended) * (of - len(ended))
    told = found.fault or ", ".join(f"{name} {value:.4g}" for name, value in found.numbers.items())
    say(f"{len(ended):>4} of {of}  {run.name}  {told}  ({left / 60:.0f} min left)")


def numbers_of(study: Study, run: Run, folder: Folder) -> dict[str, float]:
    """What was measured, by the label of the measure."""
    found = {}
    lines = [] if run.weights else whole_lines(RunDir(folder.of(run)).public_log)
    for measure in study.measures_of(run.arm):
        if measure is None:
            continue
        if measure.metric is not None:
            had = [line[measure.metric] for line in lines if measure.metric in line]
            if not had:
                raise KeyError(f"the run measures no {measure.metric}")
            found[measure.label] = float(had[-1])
        else:
            assert measure.evaluate is not None
            result = json.loads((folder.evaluation(run, measure.evaluate) / "result.json").read_text())
            found[measure.label] = float(result["numbers"][measure.number]["value"])
    return found


@contextmanager
def _stops() -> Iterator[list[int]]:
    """The signals that asked for an end, as they come."""
    told: list[int] = []
    before = {number: signal.signal(number, lambda number, _: told.append(number)) for number in (2, 15)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Launched:
    """A command that a launcher starts: deepspeed, torchrun, srun."""

    def __init__(self, launcher: str, module: str, arguments: list[str], log: Path) -> None:
        given = [*shlex.split(launcher), "-m", "murmuration", "train" if module == TRAIN else "evaluate", *arguments]
        if "deepspeed" in launcher:
            given[given.index("-m")] = "--module"
        with log.open("ab") as file:
            self._process = subprocess.Popen(given, stdout=file, stderr=file, start_new_session=True)

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.terminate()


class Forked:
    """A command in a process of its own, forked from one that has imported what all of them need."""

    _context = get_context("forkserver")

    def __init__(self, threads: int, module: str, arguments: list[str], log: Path) -> None:
        self._context.set_forkserver_preload([TRAIN, "murmuration.train.run.run", "murmuration.evaluation.evaluate"])
        self._process = self._context.Process(target=_act, args=(threads, module, arguments, str(log)))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.terminate()


def _act(threads: int, module: str, arguments: list[str], log: str) -> None:
    os.setsid()  # a stop at the terminal is passed on once
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # one that a killed study has left may not have ended yet
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Training stops, and can be resumed, when the study is gone.
    threading.Thread(target=_stop_with, args=(parent_process(),), daemon=True).start()
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # or a process that trains alone takes all cores
        torch.set_num_threads(threads)
    sys.exit(import_module(module).main(arguments))


def _stop_with(study: Any) -> None:
    study.join()
    os.kill(os.getpid(), signal.SIGTERM)
