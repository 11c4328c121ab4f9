"""One run: its directory and key, its phases in order, and what remains when the last is done."""

from __future__ import annotations

import argparse
import contextlib
from importlib.metadata import version
from pathlib import Path

from accounting import certificate
from accounting.accountant import round_up
from accounting.history import History
from accounting.identity import recognise
from accounting.journal import BudgetSpent, Journal
from accounting.keys import RunKey, destroy
from accounting.ledger import Ledger, LedgerError
from train.board import Board
from train.checkpoint import CheckpointError, Checkpoints, Keep, Loaded
from train.config import Config
from train.finish import finish
from train.phase import train_phase
from train.phase_ledger import declare
from train.ranks import Ranks, lost_rank, spoken_for, watch
from train.recipe import ReadyPhase
from train.run_context import RunContext
from train.run_dir import RunDir
from train.stop import Stopped, StopRequest
from train.stop_rules import asked_for
from train.watchdog import Watchdog

LOCK_WAIT_SECONDS = 60
RESUME_ME = "stopped, resume me"


def run_all(
    arguments: argparse.Namespace, config: Config, phases: list[ReadyPhase], root: Path, ranks: Ranks
) -> None:  # fmt: skip
    run_dir = RunDir(root)
    name = root.name
    journal: Journal | None = None

    def open_run() -> RunKey | None:
        """None if the run is finished: its key is gone, and nothing may be drawn any more."""
        nonlocal journal
        _resume_allowed(run_dir, arguments.resume)
        run_dir.prepare()
        run_dir.stop_file.unlink(missing_ok=True)
        journal = Journal(Ledger.open(run_dir.ledger, LOCK_WAIT_SECONDS))
        fresh = journal.ledger.length == 0
        if journal.history.finished:
            return None
        key = run_dir.run_key(fresh, config.run.debug_seed)
        if fresh:
            journal.start_run(name, key.check_value(), key.debug, _versions())
            run_dir.adopt_key()
        elif journal.history.run["key_check"] != key.check_value():
            raise LedgerError(f"{run_dir.key} is not the key of this ledger; restore the right one or start anew")
        copied = recognise(journal, run_dir.key.parent)
        if copied is not None:
            print(f"{copied}; new keys from here on, and all opened steps stay charged", flush=True)
        return key

    key = ranks.on_main(open_run)
    keep = Keep(config.run.keep_checkpoints, config.run.keep_every, config.run.keep_best)
    checkpoints = Checkpoints(run_dir.checkpoints, ranks, keep)
    board = Board(run_dir, ranks.main)
    state = {"status": "running"}
    watchdog: Watchdog | None = None

    def stalled(reason: str) -> None:
        if ranks.main and journal is not None:
            run_dir.write_state(run=name, status=RESUME_ME, error=reason, **_where(journal.history))

    try:
        if key is None:
            board.say(f"{name} is finished; writing its certificate and report again")
            ranks.on_main(lambda: _require_same_run(config, phases, journal))
            ranks.on_main(lambda: _declare_tuning(config, journal, board))
        else:
            if key.debug:
                board.say("NOT PRIVATE (debug): the keys come from run.debug_seed")
            context = RunContext(
                config=config, name=name, ranks=ranks, key=key, journal=journal, board=board,
                stop=StopRequest(run_dir.stop_file, config.run.stop_after_minutes), checkpoints=checkpoints,
                new_segment=arguments.new_segment,
            )  # fmt: skip
            watchdog = watch(ranks, config.run.stall_seconds, stalled)
            for phase in phases:
                if phase.private:
                    ranks.on_main(lambda phase=phase: declare(context, phase))
            ranks.on_main(lambda: _declare_tuning(config, journal, board))
            for phase in phases:
                loaded = _latest(context)
                if loaded is None or (loaded.position.phase, loaded.position.step) < (
                    phase.number,
                    phase.settings.steps,
                ):
                    train_phase(context, phase, loaded)
        spent = ranks.on_main(lambda: _ended_early(journal, phases, run_dir)) if key is None else None
        state = {"status": "done" if spent is None else "budget spent"}
    except BudgetSpent as error:
        spent = error
        state = {"status": "budget spent"}
        board.say(f"{error}")
    except Stopped:
        state = {"status": RESUME_ME}
        raise
    except BaseException as error:
        status = RESUME_ME if lost_rank(error) else "failed"
        state = {"status": status, "error": type(error).__name__}
        raise
    finally:
        if watchdog is not None:
            watchdog.stop()
        if ranks.main and journal is not None:
            with contextlib.suppress(OSError):  # a full disk has its own error, which this must not hide
                run_dir.write_state(run=name, **state, **_where(journal.history))
    latest = checkpoints.latest()
    assert latest is not None, "a trained phase ends with a checkpoint"
    if latest.position.phase >= len(phases):
        raise LedgerError("the config has fewer phases than the run; give the config that it was trained with")
    if ranks.main and journal is not None:
        finish(config, phases, run_dir, journal, latest, board)
        if not config.run.keep_key and destroy(run_dir.key):
            board.say("the run key is destroyed: nobody can redraw the noise")
        verdict = certificate.verify(run_dir.root)
        if verdict.objection:
            board.say(verdict.objection)
        else:
            board.say(f"final ε = {verdict.epsilon:.6f} of {verdict.budget:g} at δ = {verdict.delta:.3g}, verified")
            if verdict.claimed is not None and verdict.claimed > round_up(verdict.epsilon):
                board.say(f"claimed ε = {verdict.claimed:g}: {verdict.claimed_because}")
        board.say(f"report: {run_dir.report}")
    ranks.barrier()
    board.close()
    if spent is not None:
        raise spent


def _declare_tuning(config: Config, journal: Journal | None, board: Board) -> None:
    """Before the first step, so that a search whose cost cannot be computed is refused while it costs nothing."""
    assert journal is not None
    if config.run.keep_best is not None:
        journal.declare_choice(config.run.keep_best)
    if config.run.tuned_on_private_data is None:
        return
    cost = journal.declare_tuning(config.run.tuned_on_private_data.declared())
    if cost is not None:
        board.say(f"chosen among several private runs: ε = {round_up(cost):g} will be claimed for the planned steps")


def _require_same_run(config: Config, phases: list[ReadyPhase], journal: Journal | None) -> None:
    """What is written about a finished run is written from the config that it was trained with."""
    assert journal is not None
    history = journal.history
    for phase in phases:
        segments = history.segments_of(phase.number)
        same = phase.number in history.plans or phase.number in history.nonprivate
        if same and segments:
            same = segments[-1].config_digest == config.digest(phase.number, phase.contents())
        if not same:
            raise LedgerError(
                f"the run is finished, and phase {phase.name!r} was trained with another config or data; "
                "give the config that it was trained with, or another run.dir"
            )


def _ended_early(journal: Journal | None, phases: list[ReadyPhase], run_dir: RunDir) -> BudgetSpent | None:
    """Of a finished run. A phase may also have ended by its plateau or by hand, which is no fault."""
    assert journal is not None
    history = journal.history
    chosen = {p.number for p in phases if p.settings.plateau is not None or asked_for(run_dir.end_file, p.name)}
    short = any(
        plan.steps not in {done.step for done in history.committed if done.phase == phase}
        for phase, plan in history.plans.items()
        if phase not in chosen
    )
    return BudgetSpent("the run had ended before its last step, its budget spent") if short else None


def _resume_allowed(run_dir: RunDir, mode: str) -> None:
    exists = run_dir.ledger.exists()
    if mode == "must" and not exists:
        raise LedgerError(f"--resume must: there is no run in {run_dir.root}; drop the flag to start one")
    if mode == "never" and exists:
        raise LedgerError(f"--resume never: {run_dir.root} holds a run already; give another run.dir")


def _latest(run: RunContext) -> Loaded | None:
    """The last durable checkpoint, if it belongs to this ledger and the ledger was not cut behind it."""
    checkpoints, journal, ranks = run.checkpoints, run.journal, run.ranks

    def recover() -> None:
        last = run.writer.history.last_checkpoint()
        checkpoints.recover(last.digest if last is not None else None)

    ranks.on_main(recover)
    try:
        loaded = checkpoints.latest()
    except CheckpointError as damage:
        if run.new_segment is None:
            raise spoken_for(
                CheckpointError(
                    f"{damage}; restore it, or declare --new-segment 'why' to go on from the newest checkpoint that is "
                    "whole (all opened steps stay charged)"
                )
            ) from None
        loaded = checkpoints.fall_back()
        run.board.say(f"{damage}; going on from {loaded.position.folder}, and all opened steps stay charged")

    def check() -> None:
        assert journal is not None
        if loaded is None:
            if journal.history.checkpoints:
                raise CheckpointError(
                    f"{checkpoints.folder} lost its checkpoints, which the ledger names; restore them or start anew"
                )
            return
        stored = loaded.manifest["ledger"]
        journal.admit_checkpoint(loaded.position.phase, loaded.position.step, loaded.digest, stored["length"])
        entries = journal.ledger.entries
        if len(entries) < stored["length"] or entries[stored["length"] - 1].hash != stored["head"]:
            raise LedgerError(
                f"the checkpoint {loaded.position.folder} was written with another or a longer ledger; "
                "restore the ledger that belongs to it"
            )

    ranks.on_main(check)
    ranks.require_same("the last checkpoint (is the run directory shared?)", loaded.digest if loaded else None)
    return loaded


def _where(history: History) -> dict[str, object]:
    last = history.last_checkpoint()
    return {"phase": last.phase if last else None, "step": last.step if last else None}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "deepspeed", "dp-accounting", "timm")}
