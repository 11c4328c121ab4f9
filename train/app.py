"""From a command line to a finished run: parse, check, train phase after phase, certify. Owns the exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from train.config import Config, run_dir_of
from train.loading import ConfigError, load
from train.recipe import ReadyPhase, RecipeError

STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
DONE, BAD_INPUT, BUDGET_SPENT, SELF_TEST_FAILED, REFUSED, RESUME_ME = 0, 2, 3, 4, 5, 75


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train as a config says: deepspeed launch/train.py --config ds_configs/demo.json",
        epilog="Exit codes: 0 done, 2 bad input, 3 budget spent, 4 self-test failed, 5 ledger or resume refused, "
        "75 stopped, resume me.",
    )
    parser.add_argument("--config", type=Path, required=True, help="one of ds_configs/*.json, or your own")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print what the config means, and stop")
    parser.add_argument(
        "--resume", choices=("auto", "must", "never"), default="auto",
        help="auto: go on if the run directory holds a run; must/never: refuse otherwise/then",
    )  # fmt: skip
    parser.add_argument(
        "--new-segment", metavar="WHY", help="declare a changed config: new keys, and all opened steps stay charged"
    )
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # given by `deepspeed`
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        config = load(arguments.config, arguments.set)
        if arguments.dry_run:
            from train.dry_run import dry_run

            text = dry_run(config)
            if os.environ.get("RANK", "0") == "0":
                print(text)
            return DONE
        from train.recipe import prepare

        phases = prepare(config)  # refuses before anything is started or written
    except (ConfigError, RecipeError) as error:
        error.everywhere = os.environ.get("LOCAL_RANK", "0") != "0"  # pyright: ignore[reportAttributeAccessIssue]
        return complain(error, BAD_INPUT)
    _run(arguments, config, phases)


def _run(arguments: argparse.Namespace, config: Config, phases: list[ReadyPhase]) -> NoReturn:
    from train.process import quiet_libraries

    quiet_libraries()
    # Heavy imports only now: bad input is answered in a second.
    from train.engines import start_ranks
    from train.reading import agree
    from train.run import run_all

    try:
        ranks = start_ranks(config)
    except OSError as error:  # torch's own errors of the kind are RuntimeErrors, with their traceback
        leave(complain(error, BAD_INPUT))
    root = run_dir_of(config, arguments.config)
    leave(_guarded(lambda: run_all(arguments, config, agree(phases, ranks), root, ranks), ranks.main))


def leave(code: int) -> NoReturn:
    """Everything is written and closed. Tearing the process group down in order may abort or hang: it is not done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guarded(act: Callable[[], None], main_rank: bool) -> int:
    """What went wrong, as an exit code and one sentence."""
    from safetensors import SafetensorError

    from accounting.accountant import AccountingError
    from accounting.certificate import CertificateError
    from accounting.journal import BudgetSpent
    from accounting.keys import KeyFileError
    from accounting.ledger import LedgerError
    from data.tar import ShardError, UnreadableError
    from train.checkpoint import CheckpointError
    from train.clip_rule import ClipError
    from train.gradient import UpdateError
    from train.ranks import Disagreement, lost_rank
    from train.self_test import SelfTestError
    from train.shard_map import ShardMapError
    from train.stop import Stopped

    try:
        act()
        return DONE
    except Stopped as stop:
        if main_rank:
            print(f"stopped by {stop}; start the same command again to go on", flush=True)
        return RESUME_ME
    except BudgetSpent as error:
        return complain(error, BUDGET_SPENT)
    except (SelfTestError, UpdateError, ShardMapError) as error:
        return complain(error, SELF_TEST_FAILED)
    except (LedgerError, CheckpointError, KeyFileError, Disagreement) as error:
        return complain(error, REFUSED)
    except UnreadableError as error:
        print(f"error: {error}, then start the same command again to go on", file=sys.stderr, flush=True)
        return RESUME_ME
    except (RecipeError, ShardError, ClipError, AccountingError, CertificateError, SafetensorError) as error:
        return complain(error, BAD_INPUT)
    except OSError as error:
        return complain(storage_sentence(error), BAD_INPUT)
    except RuntimeError as error:
        if not lost_rank(error):
            raise
        return complain(
            RuntimeError("another rank ended; see its message, then start the same command again"), RESUME_ME
        )


def storage_sentence(error: OSError) -> OSError:
    """What a file system says, with the mend: the ledger and the newest checkpoint were synced before."""
    if error.errno not in STORAGE:
        return error
    mended = OSError(f"{error}; nothing saved is lost: free space or mend the permissions, then start again to go on")
    mended.__dict__.update(error.__dict__)
    return mended


def complain(error: Exception, code: int) -> int:
    """By one rank where all fail alike, by each where it may be alone with its trouble."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or (not getattr(error, "everywhere", False) and code in (BAD_INPUT, REFUSED)):
        who = "error" if rank == "0" else f"error (rank {rank})"
        for line in str(error).splitlines():
            print(f"{who}: {line}", file=sys.stderr, flush=True)
    return code
