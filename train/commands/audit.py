"""The command line of the audit: parse, refuse unusable options, run, print. It has its own exit codes."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from murmuration.accounting.errors import DONE, REFUTED, RunError
from murmuration.accounting.escaping import escape_output
from murmuration.train.commands.arguments import add_config
from murmuration.train.commands.exit_codes import FROM_THE_START, complain, guarded, joined, leave

if TYPE_CHECKING:
    from murmuration.train.config.root import Config


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="audit.py",
        description="Audit a recipe's privacy claim from outside: deepspeed launch/audit.py --config "
        "ds_configs/demo.json --canaries 2000. Trains the recipe's private phase for a few steps with canaries as "
        "extra records, in a temporary directory with its own key.",
        epilog="Exit codes: 0 not refuted, 2 bad input, 4 self-test failed, 5 ledger refused, 6 claim refuted, 75 "
        "stopped without a result.",
    )
    add_config(parser)
    parser.add_argument("--canaries", type=int, default=2000, metavar="M", help="extra records (default 2000)")
    parser.add_argument("--kind", choices=("gradient", "input"), default="gradient", help="gradient has more power")
    parser.add_argument("--epsilon", type=float, default=2.0, help="claimed ε; small ones are tested best (default 2)")
    parser.add_argument("--delta", type=float, default=1e-5, help="δ of claim and bound (default 1e-5)")
    parser.add_argument(
        "--steps", type=int, default=4,
        help="logical steps, blocks of correlated noise, or epochs of random allocation (default 4)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=float, help="sampling rate q; sampling hides canaries (default 1; with random allocation 0.5)"
    )
    parser.add_argument(
        "--again", type=int, default=0, metavar="N",
        help="how many of the last steps, blocks or epochs to make again in a second segment (default 0)",
    )  # fmt: skip
    parser.add_argument("--records", type=int, default=256, help="real records besides the canaries (default 256)")
    parser.add_argument("--confidence", type=float, default=0.95, help="confidence of the lower bound (default 0.95)")
    parser.add_argument(
        "--noise-scale", type=float, default=1.0, metavar="S",
        help="debug: draw S times the claimed noise (such as 0.3), to see the audit refute the claim",
    )  # fmt: skip
    parser.add_argument(
        "--replay", action="store_true",
        help="run the steps twice under the same keys, once with one record and once with a blank in its place, and "
        "compare everything; the result is private",
    )  # fmt: skip
    parser.add_argument(
        "--record", type=int, metavar="N", help="with --replay: the record to blank (default: one that is drawn)"
    )
    parser.add_argument(
        "--attach", action="store_true",
        help="what run.audit asks for: canaries and replay with their defaults, as evidence in the certificate of this "
        "config's finished run",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    from murmuration.train.config.load import load  # what a typo needs is imported first, and PyTorch last
    from murmuration.train.storage.run_dir import run_dir_of

    try:
        config = load(arguments.config, arguments.set)
        _check(arguments)
        if config.train_micro_batch_size_per_gpu == "auto":
            from murmuration.train.planner.micro_batch import on_this_machine

            config = on_this_machine(config, run_dir_of(config, arguments.config))
    except RunError as error:
        return complain(error)
    if arguments.attach:
        from murmuration.train.audit.attach import attach
        from murmuration.train.engines.local import start_ranks

        root = run_dir_of(config, arguments.config)
        return guarded(lambda: attach(config, root, start_ranks()), main_rank=True)
    return _replay(arguments, config) if arguments.replay else _audit(arguments, config)


def _check(arguments: argparse.Namespace) -> None:
    from murmuration.accounting.epsilon.audit_bound import AuditError

    for name, least in (("canaries", 2), ("steps", 1), ("records", 1)):
        if getattr(arguments, name) < least:
            raise AuditError(f"--{name} {getattr(arguments, name)} is too few for an audit; use at least {least}")
    for name in ("epsilon", "noise_scale"):
        value = getattr(arguments, name)
        if not (math.isfinite(value) and value > 0):
            raise AuditError(f"--{name.replace('_', '-')} {value} is out of range; use a positive number")
    if arguments.noise_scale != 1 and arguments.kind == "input":
        raise AuditError(
            "--noise-scale with --kind input would reveal something about real records under too little noise; "
            "use gradient canaries"
        )
    if not 0 <= arguments.again <= arguments.steps:
        raise AuditError(f"--again {arguments.again} is not among the {arguments.steps} of --steps; use fewer")
    if arguments.rate is not None and not 0 < arguments.rate <= 1:
        raise AuditError(f"--rate {arguments.rate} is not a sampling rate; use one in (0, 1]")
    if not 0.5 <= arguments.confidence < 1:
        raise AuditError(f"--confidence {arguments.confidence} is out of range; use one in [0.5, 1)")


def _replay(arguments: argparse.Namespace, config: Config) -> int:
    from murmuration.train.audit.replay import replay
    from murmuration.train.engines.local import start_ranks

    try:
        report = replay(config, start_ranks(), arguments.steps, arguments.record)
    except (RunError, OSError) as error:
        return complain(error)
    print(report.as_json() if arguments.json else report.as_text(), flush=True)
    return REFUTED if report.refuted else DONE


def _audit(arguments: argparse.Namespace, config: Config) -> int:
    # Heavy imports only now: bad input is refused quickly, and all of it before a process group is started.
    from murmuration.train.audit.setup import AuditOptions, set_up_audit

    options = AuditOptions(
        canaries=arguments.canaries, kind=arguments.kind, noise_scale=arguments.noise_scale,
        epsilon=arguments.epsilon, delta=arguments.delta, steps=arguments.steps, rate=arguments.rate,
        again=arguments.again, records=arguments.records, confidence=arguments.confidence,
    )  # fmt: skip
    try:
        planned = set_up_audit(config, options)
    except (RunError, OSError) as error:
        return complain(error)

    ranks = joined(config)
    from murmuration.train.audit.audit import audit

    def act() -> int:
        report = audit(config, planned, ranks)
        if ranks.main:
            print(report.as_json() if arguments.json else report.as_text(), flush=True)
        ranks.barrier()
        return REFUTED if report.refuted else DONE

    leave(guarded(act, ranks.main, FROM_THE_START))
