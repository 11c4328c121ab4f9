"""The commands of `launch/account.py` and their options. They print JSON with --json, otherwise a few lines for people.

No command imports torch: checking a run needs dp-accounting and nothing of the trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from murmuration.accounting.errors import BAD_INPUT, DONE, REFUSED, RunError
from murmuration.accounting.escaping import escape_output, sentence
from murmuration.accounting.sampling import SamplingKind

Command = Callable[[argparse.Namespace], tuple[dict[str, Any], str]]


def _command(name: str) -> Command:
    """Imported when one is called: SciPy takes seconds, and `--help` needs none of it."""
    from murmuration.accounting.cli import compare, epsilon, run

    return {
        "epsilon": epsilon.epsilon_command,
        "calibrate": epsilon.calibrate,
        "plan": epsilon.plan_command,
        "compare": compare.compare_command,
        "verify": run.verify_command,
        "explain": run.explain_command,
        "statement": run.statement_command,
    }[name]


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = _parser().parse_args(argv)
    command = _command(arguments.command)
    from murmuration.accounting.certificate.verify import CertificateError

    try:
        values, text = command(arguments)
    except (RunError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        # Here the certificate is what was asked about; a run that doubts its own certificate uses the error's own code.
        if isinstance(error, CertificateError):
            return REFUSED
        return error.exit_code if isinstance(error, RunError) else BAD_INPUT
    except ArithmeticError as error:
        print(f"error: these numbers are too large or too small to compute with ({error})", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(values) if arguments.json else text)
    code: int = values.get("exit_code", DONE)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="account.py", description="Recompute, plan, check and explain epsilon.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("epsilon", help="epsilon of sampled Gaussian steps")
    _common(command)
    command.add_argument("--batch", type=float, required=True, help="expected batch, q·n")
    command.add_argument("--steps", type=int, required=True)
    command.add_argument("--sigma", type=float, required=True, help="noise multiplier, std / C")
    command.add_argument(
        "--phase", action="append", default=[], metavar="N,BATCH,SIGMA,STEPS", help="a further phase; may be repeated"
    )
    command.add_argument("--cap", type=int, help="most records per step; records drawn beyond it are dropped at random")
    _draws_options(command, "shuffled")
    command.add_argument("--at-epsilon", type=float, metavar="EPSILON", help="also the delta at this epsilon")
    command.add_argument("--gdp", action="store_true", help="also the mu of Gaussian differential privacy")
    command.add_argument(
        "--best-of", metavar="RUNS[,SHAPE]",
        help="also the epsilon of publishing the best of a random number of such runs: their mean, and the shape of "
        "its distribution (0 logarithmic, 1 geometric (default), poisson, or fixed for exactly that many)",
    )  # fmt: skip
    command.add_argument("--cross-check", choices=("opacus",), help="also Opacus's RDP and PRV (in a torch process)")
    command = commands.add_parser("calibrate", help="the sigma, steps or batch that reaches an epsilon")
    command.epilog = "Leave out the one of --sigma, --steps and --batch that is to be found."
    _common(command)
    command.add_argument("--epsilon", type=float, required=True, help="target, never exceeded")
    command.add_argument("--batch", type=float, help="expected batch, q·n")
    command.add_argument("--steps", type=int)
    command.add_argument("--sigma", type=float, help="noise multiplier, std / C")
    _draws_options(command)
    command = commands.add_parser("plan", help="tables and plots: epsilon over steps, sigma over batch")
    _common(command)
    command.add_argument("--epsilon", type=float, required=True, help="the fixed epsilon of the second table")
    command.add_argument("--batch", type=float, required=True, help="expected batch, q·n")
    command.add_argument("--steps", type=int, required=True)
    command.add_argument("--sigma", type=float, help="noise multiplier of the first table; calibrated if left out")
    _draws_options(command)
    command.add_argument("--plot", type=Path, metavar="FILE.png|FILE.svg", help="both tables as a picture")
    command = commands.add_parser("compare", help="independent against correlated noise, and allocation")
    command.epilog = "Accumulated noise is not accuracy: which noise trains best is an experiment."
    _common(command, required=False)
    command.add_argument("--config", type=Path, metavar="FILE.json", help="take the numbers of its private phase")
    command.add_argument("--phase", metavar="NAME", help="of that config, if it has several private phases")
    command.add_argument("--epsilon", type=float, help="what each of them may spend")
    command.add_argument("--batch", type=float, help="expected batch, q·n")
    command.add_argument("--steps", type=int)
    command.add_argument("--horizon", type=int, help="steps over which the matrices are best; default: all steps")
    command.add_argument("--plot", type=Path, metavar="FILE.png|FILE.svg", help="the table as a picture")
    verify = "recompute a run's epsilon from its ledger alone; exit code 7 if not all was checked"
    command = commands.add_parser("verify", help=verify)
    command.add_argument("target", type=Path, metavar="RUN_DIR|EXPORT|certificate.json")
    command.add_argument("--signer", metavar="HEX", help="the run's public key, as you know it from another source")
    command.add_argument(
        "--strict", action="store_true",
        help="exit code 8, not 7, unless signer, all weights, their provenance and the pages were checked",
    )  # fmt: skip
    command.add_argument("--witness", type=Path, metavar="FILE", help="JSON lines of the heads that a witness recorded")
    command.add_argument("--accountant", choices=("pld", "rdp"), default="pld")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    command = commands.add_parser("explain", help="what a run or an epsilon promises, in plain words")
    command.add_argument("target", type=Path, nargs="?", metavar="RUN_DIR", help="or give numbers instead")
    _common(command, required=False)
    command.add_argument("--epsilon", type=float, help="with --delta: the promise itself")
    command.add_argument(
        "--records-per-person", type=int, metavar="K", help="also the epsilon for a person with K records"
    )
    command.add_argument("--batch", type=float, help="with --n, --steps and --sigma: epsilon is computed")
    command.add_argument("--steps", type=int)
    command.add_argument("--sigma", type=float)
    _draws_options(command)
    statement = "a page and JSON on what withdrawing a person's records from a finished run changes at most"
    command = commands.add_parser("statement", help=statement)
    command.add_argument("target", type=Path, metavar="RUN_DIR|EXPORT")
    command.add_argument("--records", type=int, required=True, metavar="K", help="how many records of one person")
    command.add_argument("--unit", action="store_true", help="K units with all their records, where the run has units")
    command.add_argument("--key", type=Path, metavar="FILE", help="sign it: secret/run.key of a run that kept its key")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _common(command: argparse.ArgumentParser, required: bool = True) -> None:
    command.add_argument("--n", type=int, required=required, help="records")
    command.add_argument("--delta", default=None, help="a number, 1/n or 1/(2n); default 1/(2n)")
    command.add_argument("--accountant", choices=("pld", "rdp"), default="pld")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _draws_options(command: argparse.ArgumentParser, *more: str) -> None:
    """In the words of a config; `more` is known to this command alone."""
    shuffled = "; shuffled: fixed slices of shuffled epochs, for which no amplification may be claimed"
    command.add_argument(
        "--sampling", choices=(*get_args(SamplingKind), *more), default="poisson",
        help=f"allocation: each record in one step of every epoch, chosen in secret{shuffled if more else ''}",
    )  # fmt: skip
    command.add_argument(
        "--bands", type=int, default=1, metavar="B",
        help="correlated noise of so many bands (privacy.noise), for which records take turns; 1: independent",
    )  # fmt: skip
