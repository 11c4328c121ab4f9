"""One run: its directory and key, its phases in order, and what remains when the last is done."""

from __future__ import annotations

import argparse
import contextlib
from importlib.metadata import version
from pathlib import Path

from accounting import certificate
from accounting.accountant import round_up
from accounting.identity import recognise
from accounting.journal import BudgetSpent, Journal
from accounting.keys import RunKey, destroy
from accounting.ledger import Ledger, LedgerError
from train.board import Board
from train.checkpoint import CheckpointError, Checkpoints, Keep
from train.config import Config
from train.finish import finish
from train.phase import train_phase
from train.phase_ledger import declare
from train.ranks import Ranks, lost_rank, spoken_for, watch
from train.recipe import ReadyPhase
from train.resume import latest_checkpoint, recover
from train.run_context import RunContext
from train.run_dir import RunDir
from train.stop import Stopped, StopRequest
from train.stop_rules import asked_for

LOCK_WAIT_SECONDS = 60
RESUMABLE, CERTIFYING = "stopped, resume me", "trained; its certificate is not written"


def run_all(
    arguments: argparse.Namespace, config: Config, phases: list[ReadyPhase], root: Path, ranks: Ranks
) -> None:  # fmt: skip
    run_dir = RunDir(root)
    journal = ranks.keep_on_main(lambda: _open_journal(run_dir, arguments.resume))
    key = ranks.on_main(lambda: _key_of(run_dir, journal, root.name, config.run.debug_seed))
    keep = Keep(config.run.keep_checkpoints, config.run.keep_every, config.run.keep_best)
    run = RunContext(
        config=config, name=root.name, ranks=ranks, secret=key, journal=journal, board=Board(run_dir, ranks.main),
        stop=StopRequest(run_dir.stop_file, config.run.stop_after_minutes), folder=run_dir,
        checkpoints=Checkpoints(run_dir.checkpoints, ranks, keep), new_segment=arguments.new_segment,
    )  # fmt: skip
    state = {"status": "failed"}
    try:
        spent = _trained_before(run, phases) if key is None else _train(run, phases)
        state = {"status": CERTIFYING}
    except Stopped:
        state = {"status": RESUMABLE}
        raise
    except BaseException as error:
        state = {"status": RESUMABLE if lost_rank(error) else "failed", "error": type(error).__name__}
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk has its own error, which this must not hide
            _tell(run, **state)
    _conclude(run, phases)
    _tell(run, status="done" if spent is None else "budget spent")
    ranks.barrier()
    run.board.close()
    if spent is not None:
        raise spent


def _open_journal(run_dir: RunDir, mode: str) -> Journal:
    _resume_allowed(run_dir, mode)
    run_dir.prepare()
    run_dir.stop_file.unlink(missing_ok=True)
    return Journal(Ledger.open(run_dir.ledger, LOCK_WAIT_SECONDS))


def _key_of(run_dir: RunDir, journal: Journal | None, name: str, debug_seed: int | None) -> RunKey | None:
    """None if the run is finished: its key is gone, and nothing may be drawn any more."""
    assert journal is not None
    if journal.history.finished:
        return None
    fresh = journal.ledger.length == 0
    key = run_dir.run_key(fresh, debug_seed)
    if fresh:
        journal.start_run(name, key.check_value(), key.debug, _versions())
        run_dir.adopt_key()
    elif journal.history.run["key_check"] != key.check_value():
        raise LedgerError(f"{run_dir.key} is not the key of this ledger; restore the right one or start anew")
    copied = recognise(journal, run_dir.key.parent)
    if copied is not None:
        print(f"{copied}; new keys from here on, and all opened steps stay charged", flush=True)
    return key


def _train(run: RunContext, phases: list[ReadyPhase]) -> BudgetSpent | None:
    """What is left of all phases; the reason if the budget ended them."""
    if run.key.debug:
        run.board.say("NOT PRIVATE (debug): the keys come from run.debug_seed")

    def stalled(reason: str) -> None:
        _tell(run, status=RESUMABLE, error=reason)

    watchdog = watch(run.ranks, run.config.run.stall_seconds, stalled)
    try:
        for phase in phases:
            if phase.private:
                run.ranks.on_main(lambda phase=phase: declare(run, phase))
        run.ranks.on_main(lambda: _declare_choices(run))
        for phase in phases:
            loaded = latest_checkpoint(run)
            done = (-1, 0) if loaded is None else (loaded.position.phase, loaded.position.step)
            if done < (phase.number, phase.settings.steps):
                train_phase(run, phase, loaded)
    except BudgetSpent as error:
        run.board.say(f"{error}")
        return error
    finally:
        watchdog.stop()
    return None


def _trained_before(run: RunContext, phases: list[ReadyPhase]) -> BudgetSpent | None:
    """Of a finished run; its certificate and report are written again, as it was trained."""
    run.board.say(f"{run.name} is finished; writing its certificate and report again")
    run.ranks.on_main(lambda: _require_same_run(run, phases))
    run.ranks.on_main(lambda: recover(run))
    run.ranks.on_main(lambda: _declare_choices(run))
    return run.ranks.on_main(lambda: _ended_early(run, phases))


def _conclude(run: RunContext, phases: list[ReadyPhase]) -> None:
    """Certificate and report; then nothing is left to do for the key."""
    latest = run.checkpoints.latest()
    if latest is None:
        raise spoken_for(CheckpointError(f"{run.checkpoints.folder} holds no checkpoint; restore it"))
    if latest.position.phase >= len(phases):
        raise LedgerError("the config has fewer phases than the run; give the config that it was trained with")
    if not run.ranks.main:
        return
    finish(run.config, phases, run.folder, run.writer, latest, run.board)
    if not run.config.run.keep_key and destroy(run.folder.key):
        run.board.say("the run key is destroyed: nobody can redraw the noise")
    verdict = certificate.verify(run.folder.root)
    if verdict.objection:
        run.board.say(verdict.objection)
    else:
        run.board.say(f"final ε = {verdict.epsilon:.6f} of {verdict.budget:g} at δ = {verdict.delta:.3g}, verified")
        if verdict.claimed is not None and verdict.claimed > round_up(verdict.epsilon):
            run.board.say(f"claimed ε = {verdict.claimed:g}: {verdict.claimed_because}")
    run.board.say(f"report: {run.folder.report}")


def _tell(run: RunContext, **state: object) -> None:
    """What scripts ask for; any rank may call it."""
    if run.journal is not None:
        last = run.journal.history.last_checkpoint()
        where = {"phase": last.phase if last else None, "step": last.step if last else None}
        run.folder.write_state(run=run.name, **state, **where)


def _declare_choices(run: RunContext) -> None:
    """Before the first step, so that a search whose cost cannot be computed is refused while it costs nothing."""
    settings = run.config.run
    if settings.keep_best is not None:
        run.writer.declare_choice(settings.keep_best)
    if settings.tuned_on_private_data is None:
        return
    cost = run.writer.declare_tuning(settings.tuned_on_private_data.declared())
    if cost is not None:
        run.board.say(
            f"chosen among several private runs: ε = {round_up(cost):g} will be claimed for the planned steps"
        )


def _require_same_run(run: RunContext, phases: list[ReadyPhase]) -> None:
    """What is written about a finished run is written from the config that it was trained with."""
    history = run.writer.history
    for phase in phases:
        segments = history.segments_of(phase.number)
        same = phase.number in history.plans or phase.number in history.nonprivate
        if same and segments:
            same = segments[-1].config_digest == run.config.digest(phase.number, phase.contents())
        if not same:
            raise LedgerError(
                f"the run is finished, and phase {phase.name!r} was trained with another config or data; "
                "give the config that it was trained with, or another run.dir"
            )


def _ended_early(run: RunContext, phases: list[ReadyPhase]) -> BudgetSpent | None:
    """A phase may also have ended by its plateau or by hand, which is no fault."""
    history = run.writer.history
    chosen = {p.number for p in phases if p.settings.plateau is not None or asked_for(run.folder.end_file, p.name)}
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


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "deepspeed", "dp-accounting", "timm")}
