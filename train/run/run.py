"""One run: its directory and key, its phases in order, and what is left to do after the last one."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from importlib.metadata import version
from pathlib import Path

from murmuration.accounting.epsilon.accountant import round_up, show_delta, show_epsilon
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.ledger.lines import KEYED
from murmuration.train.config.root import Config
from murmuration.train.distributed.ranks import Ranks, lost_rank
from murmuration.train.distributed.rendezvous import open_to_others
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.distributed.watchdog import watch
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.board import Board
from murmuration.train.run.context import RunContext
from murmuration.train.run.declare import declare
from murmuration.train.run.early_end import asked_for
from murmuration.train.run.phase import PhaseTraining
from murmuration.train.run.report import NEXT, certified, shown_config
from murmuration.train.run.witness import Witness
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.open_run import open_run
from murmuration.train.storage.run_dir import RunDir

RESUMABLE, CERTIFYING = "stopped, resume me", "trained; its certificate is not written"
TRAINING, FAILED = "training; resume me if killed", "failed"
OTHER = "another rank than the main one"


def run_all(
    arguments: argparse.Namespace, config: Config, phases: list[ReadyPhase], root: Path, ranks: Ranks
) -> None:  # fmt: skip
    run_dir = RunDir(root)
    settings = config.run
    keep = Keep(settings.keep_checkpoints, settings.keep_every, settings.keep_best)
    versions = {name: version(name) for name in ("torch", "deepspeed", "dp-accounting", "timm")}
    opened = open_run(
        run_dir, root.name, ranks, keep, versions, resume=arguments.resume, debug_seed=settings.debug_seed,
        new_segment=arguments.new_segment, record_digests=KEYED,
    )  # fmt: skip
    run = RunContext(
        **vars(opened), config=config,
        board=Board(run_dir, ranks.main, opened.checkpoints.times, settings.private_curves, config.phases),
        stop=StopRequest(run_dir.stop_file, settings.stop_after_minutes),
    )  # fmt: skip
    if (place := open_to_others()) is not None and any(phase.private for phase in phases):
        run.board.say(
            f"the ranks meet at {place}: whoever can connect there can read counters of private steps, stop the run or "
            "pose as a rank, so let nobody else reach that network (docs/proof.md)"
        )
    if run.journal is not None and settings.witness is not None:
        run.journal.witnesses["witness"] = Witness(settings.witness, run.board.say)
    state = {"status": FAILED}
    try:
        spent = _trained_before(run, phases) if run.secret is None else _train(run, phases)
        state = {"status": CERTIFYING}
    except Stopped:
        state = {"status": RESUMABLE}
        raise
    except BaseException as error:
        state = {"status": RESUMABLE if lost_rank(error) else FAILED, "error": type(error).__name__}
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk has its own error, which this must not hide
            tell_state(run, **state)
            run.settle_times()
    _conclude(run, phases)
    tell_state(run, status="done" if spent is None else "budget spent")
    ranks.barrier()
    run.board.close()
    run.close()
    if spent is not None:
        raise spent


def _train(run: RunContext, phases: list[ReadyPhase]) -> BudgetSpent | None:
    """Trains what is left of all phases; returns the reason if the budget ended them."""

    def stalled(reason: str) -> None:
        tell_state(run, status=RESUMABLE, error=reason)

    tell_state(run, status=TRAINING)
    run.board.on_measured = lambda: _tell_measured(run)
    watchdog = watch(run.ranks, run.config.run.stall_seconds, stalled, asked=lambda: run.stop.reason)
    parted = False
    try:
        for phase in phases:
            if phase.private and (plan := run.ranks.on_main(lambda phase=phase: declare(run, phase))) is not None:
                run.board.say(f"{phase.name}  protects {plan.unit}: n = {plan.records:,}")
        run.ranks.on_main(lambda: _declare_choices(run))
        run.ranks.on_main(run.tell_objection)
        run.ranks.on_main(lambda: run.board.describe(shown_config(run.config), *_compared(run, phases)))
        for phase in phases:
            loaded = run.latest()
            done = (-1, 0) if loaded is None else (loaded.position.phase, loaded.position.step)
            if done < (phase.number, phase.settings.steps):
                PhaseTraining(run, phase, loaded).train()
        parted = True
    except Stopped:
        parted = True
        raise
    except BudgetSpent as error:
        parted = True
        run.board.say(f"{error}")
        return error
    finally:
        watchdog.stop(parted)
        run.stop.end_listening()
    return None


def _trained_before(run: RunContext, phases: list[ReadyPhase]) -> BudgetSpent | None:
    """Checks a finished run before its certificate and report are written again, as it was trained; returns the reason
    if the budget ended it."""
    run.board.say(f"{run.name} is finished; writing its certificate and report again")
    run.ranks.on_main(lambda: _require_same_run(run, phases))
    run.ranks.on_main(run.recover)
    run.ranks.on_main(lambda: _declare_choices(run))
    return run.ranks.on_main(lambda: _ended_early(run, phases))


def _conclude(run: RunContext, phases: list[ReadyPhase]) -> None:
    """Writes the certificate and the report; after that, nothing needs the key any more."""
    latest = run.newest()
    if latest.position.phase >= len(phases):
        raise LedgerError("the config has fewer phases than the run; give the config that it was trained with")
    if not run.ranks.main:
        return
    verdict = certified(run, phases, latest)
    if verdict.objection:
        run.board.say(verdict.objection)
    else:
        assert verdict.delta is not None and verdict.delta_claimed is not None, "a run that claims something has a plan"
        run.board.say(
            f"final ε = {round_up(verdict.epsilon, 6):.6f} of {verdict.budget:g} at δ = {show_delta(verdict.delta)}, "
            "verified"
        )
        if verdict.claimed is not None and verdict.claimed > round_up(verdict.epsilon):
            claim = f"claimed ε = {show_epsilon(verdict.claimed)} at δ = {show_delta(verdict.delta_claimed)}"
            run.board.say(f"{claim}: {verdict.claimed_because}")
    run.board.say(f"certificate: {run.folder.root / 'certificate.html'}\nreport: {run.folder.report}")
    where = shlex.quote(str(run.folder.root))
    for about, command in NEXT:
        run.board.say(f"{about}: {command.replace('RUN_DIR', where)}")
    run.board.say(f"signed with the key {run.writer.history.run['signer']} (account.py verify --signer)")


def tell_state(run: RunContext, **state: object) -> None:
    """Writes the state that scripts read. Any rank may call it; of those beside the main one, only a failure counts.

    A rank that fails takes the others along, and these call themselves resumable: its own state must stand.
    """
    if run.journal is not None:
        if state["status"] == RESUMABLE and "error" in state and run.folder.state().get("by") == OTHER:
            return
        last = run.journal.history.last_checkpoint()
        where = {"phase": last.phase if last else None, "step": last.step if last else None}
        measured = {"measured": run.board.latest} if run.board.latest is not None else {}
        run.folder.write_state(run=run.name, **state, **where, **measured)
    elif state["status"] == FAILED:
        run.folder.write_state(run=run.name, **state, by=OTHER)
        run.checkpoints.times.stamp(run.folder.state_file)


def _tell_measured(run: RunContext) -> None:
    """Called on the main rank while others may fail, which must not be overwritten."""
    if run.folder.state().get("by") != OTHER:
        tell_state(run, status=TRAINING)
        run.checkpoints.times.stamp(run.folder.state_file)


def _compared(run: RunContext, phases: list[ReadyPhase]) -> tuple[dict[str, str | float], list[str]]:
    """Settings by which people compare runs, and the measurements of the last phase that they compare."""
    settings: dict[str, str | float] = {"model": run.config.model.title}
    plans = run.writer.history.plans
    for phase in phases:
        if phase.number in plans:
            plan, name = plans[phase.number], run.board.tag(phase.name)
            settings |= {
                f"{name}/n": plan.records, f"{name}/expected batch": plan.divisor, f"{name}/σ": plan.noise_multiplier,
                f"{name}/C": plan.clip_norm, f"{name}/T": plan.steps, f"{name}/δ": plan.delta,
                f"{name}/ε budget": plan.epsilon_budget,
            }  # fmt: skip
        if phase.settings.schedule is not None:
            settings[f"{run.board.tag(phase.name)}/peak rate"] = phase.settings.schedule.peak
    last = phases[-1]
    metrics = ["epsilon"] if last.private else []
    metrics += last.measured.metrics() if last.measured is not None else []
    return settings, [f"{run.board.tag(last.name)}/{metric}" for metric in metrics]


def _declare_choices(run: RunContext) -> None:
    """Runs before the first step, so that a search whose cost cannot be computed is refused while it costs nothing."""
    settings = run.config.run
    if settings.keep_best is not None:
        run.writer.declare_choice(settings.keep_best)
    if settings.tuned_on_private_data is None:
        return
    cost = run.writer.declare_tuning(settings.tuned_on_private_data.declared())
    if cost is not None:
        run.board.say(
            f"chosen among several private runs: ε = {show_epsilon(cost)} will be claimed for the planned steps"
        )


def _require_same_run(run: RunContext, phases: list[ReadyPhase]) -> None:
    """The pages of a finished run are written only from the config that it was trained with."""
    history = run.writer.history
    for phase in phases:
        segments = history.segments_of(phase.number)
        same = phase.number in history.plans or phase.number in history.nonprivate
        if same and segments:
            same = segments[-1].config_digest == run.config.digest(phase.number, run.contents(phase))
        if not same:
            raise LedgerError(
                f"the run is finished, and phase {phase.name!r} was none of it, or was trained with another config or "
                "data; give the config that it was trained with, or another run.dir"
            )


def _ended_early(run: RunContext, phases: list[ReadyPhase]) -> BudgetSpent | None:
    """BudgetSpent if a phase is short of its last step, unless its plateau rule or a person may have ended it."""
    history = run.writer.history
    chosen = {p.number for p in phases if p.settings.plateau is not None or asked_for(run.folder.end_file, p.name)}
    short = any(
        history.last_committed(phase) < plan.steps for phase, plan in history.plans.items() if phase not in chosen
    )
    return BudgetSpent("the run ended before its last step, because its budget was spent") if short else None
