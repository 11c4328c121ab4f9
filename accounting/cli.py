"""`launch/account.py`: epsilon, calibrate, verify. JSON with --json, a few lines for people without. Never imports torch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accounting.accountant import AccountingError, Event, describe, epsilon, round_up
from accounting.calibrate import calibrate_sigma
from accounting.certificate import CertificateError, verify
from accounting.ledger import LedgerError
from accounting.plan import RATE_DENOMINATOR, PlanError, parse_delta, threshold_for

OK, BAD_INPUT, REFUSED = 0, 2, 5


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        values, text = {"epsilon": _epsilon, "calibrate": _calibrate, "verify": _verify}[arguments.command](arguments)
    except (LedgerError, CertificateError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except (AccountingError, PlanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(values) if arguments.json else text)
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="account.py", description="Recompute, plan and check epsilon.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("epsilon", "epsilon of Poisson-sampled Gaussian steps"),
        ("calibrate", "sigma for epsilon"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--n", type=int, required=True, help="records")
        command.add_argument("--batch", type=float, required=True, help="expected batch, q·n")
        command.add_argument("--steps", type=int, required=True)
        command.add_argument("--delta", default=None, help="a number, 1/n or 1/(2n); default 1/(2n)")
        command.add_argument("--accountant", choices=("pld", "rdp"), default="pld")
        command.add_argument("--json", action="store_true")
        if name == "epsilon":
            command.add_argument("--sigma", type=float, required=True, help="noise multiplier, std / C")
        else:
            command.add_argument("--epsilon", type=float, required=True, help="target, never exceeded")
    command = commands.add_parser("verify", help="recompute a run's epsilon from its ledger alone")
    command.add_argument("target", type=Path, metavar="RUN_DIR|certificate.json")
    command.add_argument("--accountant", choices=("pld", "rdp"), default="pld")
    command.add_argument("--json", action="store_true")
    return parser


def _setting(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.steps < 1:
        raise PlanError(f"--steps must be at least 1, but is {arguments.steps}")
    threshold = threshold_for(arguments.n, arguments.batch)
    return {
        "n": arguments.n,
        "rate": threshold / RATE_DENOMINATOR,
        "threshold": threshold,
        "expected_batch": threshold / RATE_DENOMINATOR * arguments.n,
        "steps": arguments.steps,
        "delta": parse_delta(arguments.delta, arguments.n),
        **describe(arguments.accountant),
    }


def _epsilon(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    setting = _setting(arguments)
    event = Event(setting["rate"], arguments.sigma, arguments.steps)
    value = epsilon([event], setting["delta"], arguments.accountant)
    values = {**setting, "sigma": arguments.sigma, "epsilon": value, "epsilon_rounded_up": round_up(value)}
    return values, f"ε = {round_up(value)} (rounded up)\n{_explain(values)}"


def _calibrate(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    setting = _setting(arguments)
    sigma = calibrate_sigma(setting["rate"], arguments.steps, arguments.epsilon, setting["delta"], arguments.accountant)
    value = epsilon([Event(setting["rate"], sigma, arguments.steps)], setting["delta"], arguments.accountant)
    values = {**setting, "target_epsilon": arguments.epsilon, "sigma": sigma, "epsilon": value}
    return values, f"σ = {sigma} gives ε = {value:.6f} ≤ {arguments.epsilon:g}\n{_explain(values)}"


def _explain(values: dict[str, Any]) -> str:
    return (
        f"σ = {values['sigma']:g}, q = {values['rate']:.8g} = {values['threshold']}/2^32, T = {values['steps']}, "
        f"δ = {values['delta']:.6g}; {values['accountant'].upper()}, dp-accounting {values['dp_accounting']}"
    )


def _verify(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    verdict = verify(arguments.target, arguments.accountant)
    lines = [f"ledger of {verdict.run}: {verdict.lines} lines, unbroken, head {verdict.head}"]
    if verdict.delta is not None:
        lines.append(
            f"ε = {verdict.epsilon:.6f} of {verdict.budget:g} at δ = {verdict.delta:.6g}, recomputed from "
            f"{verdict.opened} opened steps ({verdict.committed} committed)"
        )
    lines.append(
        "there is no certificate yet" if verdict.certified is None and verdict.delta is not None
        else "the certificate agrees"
    )  # fmt: skip
    if verdict.objection:
        lines.append(verdict.objection)
    return asdict(verdict), "\n".join(lines)
