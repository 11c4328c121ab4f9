"""From a command line to a finished run: parse, check, train phase after phase, certify."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from murmuration.accounting.errors import BUDGET_SPENT, DONE, RunError
from murmuration.accounting.escaping import escape_output
from murmuration.train.commands.arguments import add_config
from murmuration.train.commands.exit_codes import complain_per_machine, guarded, joined, leave

if TYPE_CHECKING:
    from murmuration.train.config.root import Config
    from murmuration.train.recipe.ready_phase import ReadyPhase


# How the audit of a finished run computes, whatever the run did: in one process.
ALONE = ("run.engine=local", "run.shard_over=null")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train as a config says: deepspeed launch/train.py --config ds_configs/demo.json",
        epilog="Exit codes: 0 done, 2 bad input, 3 budget spent, 4 self-test failed, 5 ledger or resume refused, "
        "6 refuted by its own audit (run.audit), 75 stopped, resume me.",
    )
    add_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what the config means, and stop")
    parser.add_argument("--json", action="store_true", help="with --dry-run: one JSON document, and nothing else")
    parser.add_argument(
        "--resume", choices=("auto", "must", "never"), default="auto",
        help="auto: continue the run in the run directory, if there is one; must: refuse if there is none; never: "
        "refuse if there is one",
    )  # fmt: skip
    parser.add_argument(
        "--new-segment", metavar="WHY", help="declare a changed config: it gets new keys, and opened steps stay charged"
    )
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.dry_run:
        parser.error("--json prints what --dry-run finds out; give --dry-run as well")
    return arguments


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    from murmuration.train.config.load import load  # what a typo needs is imported first, and PyTorch last
    from murmuration.train.storage.run_dir import run_dir_of

    try:
        config = load(arguments.config, arguments.set)
        from murmuration.train.recipe.first_look import first_look

        first_look(config, training=not arguments.dry_run)
        if arguments.dry_run:
            from murmuration.train.commands.dry_run import as_json, as_text, meaning
            from murmuration.train.planner.micro_batch import on_this_machine

            found = meaning(on_this_machine(config, run_dir_of(config, arguments.config)))
            if os.environ.get("RANK", "0") == "0":
                print((as_json if arguments.json else as_text)(found))
            return DONE
        from murmuration.train.recipe.ready_phase import prepare

        phases = prepare(config)  # refuses before anything is started or written
        root = run_dir_of(config, arguments.config)
        # A run that is finished compiles nothing any more.
        from murmuration.train.engines.choose import require_compiler

        if config.run.compile == "blocks" and not (root / "certificate.json").exists():
            require_compiler()
        _check_plans(config, phases, root)
    except RunError as error:
        return complain_per_machine(error)
    _run(arguments, config, phases, root)


def _check_plans(config: Config, phases: list[ReadyPhase], root: Path) -> None:
    """Refuses what no plan can promise, and warns of plans by which nothing can be learned. A run that continues has
    its plans in the ledger."""
    from murmuration.train.planner.micro_batch import on_this_machine
    from murmuration.train.recipe.ready_phase import planned, select_trained
    from murmuration.train.storage.run_dir import RunDir

    if RunDir(root).ledger.exists():
        return
    plans = planned(phases, on_this_machine(config, root))
    if os.environ.get("RANK", "0") != "0":
        return
    from murmuration.model.build import build
    from murmuration.train.planner.drowned import drowned

    for phase, plan in plans:
        assert phase.settings.privacy is not None
        model = build(phase.shape, phase.settings.objective, device="meta")
        names = set(select_trained(model, phase.settings))
        weights = sum(p.numel() for name, p in model.named_parameters() if name in names)
        warning = drowned(plan, weights, phase.settings.privacy.noise_multiplier is None)
        for text in (warning, phase.settings.blind):
            if text is not None:
                print(f"warning: phases.{phase.number}: {text}", file=sys.stderr, flush=True)


def _run(arguments: argparse.Namespace, config: Config, phases: list[ReadyPhase], root: Path) -> NoReturn:
    ranks = joined(config)
    from murmuration.train.planner.micro_batch import settled
    from murmuration.train.recipe.read_options import agree
    from murmuration.train.run.run import run_all

    def act() -> int:
        run_all(arguments, settled(config, root, ranks), agree(phases, ranks), root, ranks)
        return DONE

    code = guarded(act, ranks.main)
    if config.run.audit and ranks.main and code in (DONE, BUDGET_SPENT):
        _audit(arguments)
    leave(code)


def _audit(arguments: argparse.Namespace) -> NoReturn:
    """Becomes the process that audits the run, with the memory of the device free for it. Nothing that trains can
    reach the audit's own code, which can plant faults."""
    sys.stdout.flush()
    sys.stderr.flush()
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith("TORCHELASTIC")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), env.get("PYTHONPATH")]))
    settings = [part for each in [*arguments.set, *ALONE] for part in ("--set", each)]
    asked = ["-m", "murmuration", "audit", "--attach", "--config", str(arguments.config), *settings]
    os.execve(sys.executable, [sys.executable, *asked], env)
