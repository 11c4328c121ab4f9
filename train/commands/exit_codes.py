"""How every command that joins ranks begins and ends: exit codes, and each error as one sentence and one code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from murmuration.accounting.durable import of_storage, remedy
from murmuration.accounting.errors import BAD_INPUT, REFUSED, RESUME_ME, RunError
from murmuration.accounting.escaping import sentence

if TYPE_CHECKING:
    from murmuration.train.config.root import Config
    from murmuration.train.distributed.ranks import Ranks

FROM_THE_START = "from the start"
"""For commands that keep nothing of a stopped run."""


class LostRank(RunError):
    """Another rank ended, so this one cannot continue either."""

    exit_code = RESUME_ME


def joined(config: Config) -> Ranks:
    """Starts the ranks once all input has been checked."""
    # Heavy imports only now: bad input is refused within a second.
    from murmuration.train.distributed.process import quiet_libraries
    from murmuration.train.engines.choose import start_ranks

    quiet_libraries()
    try:
        return start_ranks(config.run.engine, config.run.shard_over)
    except (OSError, RunError) as error:  # torch's own start-up errors are RuntimeErrors, and keep their traceback
        leave(complain(error))


def leave(code: int) -> NoReturn:
    """Exits once everything is written and closed. An orderly teardown of the process group may abort or hang, so
    there is none."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guarded(act: Callable[[], int], main_rank: bool, then: str = "to continue") -> int:
    """Returns the act's own exit code, or prints one sentence about what went wrong and returns the error's code.

    `then`: what starting the same command again would do.
    """
    from safetensors import SafetensorError

    from murmuration.train.distributed.ranks import lost_rank
    from murmuration.train.distributed.stop import Stopped

    try:
        return act()
    except Stopped as stop:
        if main_rank:
            print(f"stopped by {stop}; start the same command again {then}", flush=True)
        return RESUME_ME
    except RunError as error:
        if error.exit_code != RESUME_ME:
            return complain(error)
        # Each rank reports what it could not read: the others may have read their own part without errors.
        print(f"error: {sentence(error)}, then start the same command again {then}", file=sys.stderr, flush=True)
        return RESUME_ME
    except SafetensorError as error:
        return complain(error)
    except OSError as error:
        return complain(storage_sentence(error, then))
    except RuntimeError as error:
        if not lost_rank(error):
            raise
        return complain(LostRank(f"another rank ended; see its message, then start the same command again {then}"))


def storage_sentence(error: OSError, then: str) -> OSError:
    """The file system's error with its fix: the ledger and the newest checkpoint had been synced before."""
    if not of_storage(error):
        return error
    mended = OSError(f"{error}; nothing saved is lost: {remedy(error)}, then start again {then}")
    mended.__dict__.update(error.__dict__)
    return mended


def complain_per_machine(error: Exception) -> int:
    """For errors in files: all processes of a machine see the same ones, so one of them tells what is wrong."""
    error.everywhere = os.environ.get("LOCAL_RANK", "0") != "0"  # pyright: ignore[reportAttributeAccessIssue]
    return complain(error)


def complain(error: Exception) -> int:
    """Prints the error, once where all ranks fail alike, otherwise on each rank that may be the only one to fail.
    Returns its exit code."""
    code = error.exit_code if isinstance(error, RunError) else BAD_INPUT
    rank = os.environ.get("RANK", "0")
    if rank == "0" or (not getattr(error, "everywhere", False) and code in (BAD_INPUT, REFUSED)):
        who = "error" if rank == "0" else f"error (rank {rank})"
        for line in str(error).splitlines() or [type(error).__name__]:
            print(f"{who}: {sentence(line)}", file=sys.stderr, flush=True)
    return code
