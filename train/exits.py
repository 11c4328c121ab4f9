"""How every command that joins ranks begins and ends: exit codes, and each error as one sentence and one code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from accounting.audit_bound import AuditError
from accounting.escaping import sentence
from train.recipe_error import RecipeError

if TYPE_CHECKING:
    from train.config import Config
    from train.ranks import Ranks

DONE, BAD_INPUT, BUDGET_SPENT, SELF_TEST_FAILED, REFUSED, REFUTED, RESUME_ME = 0, 2, 3, 4, 5, 6, 75
FROM_THE_START = "from the start"
"""Of commands that keep nothing of a run that was stopped."""
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


def joined(config: Config) -> Ranks:
    """Starts the ranks, once all input was found good."""
    # Heavy imports only now: bad input is answered in a second.
    from train.engines import start_ranks
    from train.process import quiet_libraries

    quiet_libraries()
    try:
        return start_ranks(config)
    except OSError as error:  # torch's own errors of the kind are RuntimeErrors, with their traceback
        leave(complain(error, BAD_INPUT))


def leave(code: int) -> NoReturn:
    """Everything is written and closed. Tearing the process group down in order may abort or hang: it is not done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guarded(act: Callable[[], int], main_rank: bool, then: str = "to go on") -> int:
    """The act's own code; or of what went wrong, and one sentence. `then`: what the same command would do next time."""
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
        return act()
    except Stopped as stop:
        if main_rank:
            print(f"stopped by {stop}; start the same command again {then}", flush=True)
        return RESUME_ME
    except BudgetSpent as error:
        return complain(error, BUDGET_SPENT)
    except (SelfTestError, UpdateError, ShardMapError) as error:
        return complain(error, SELF_TEST_FAILED)
    except (LedgerError, CheckpointError, KeyFileError, Disagreement) as error:
        return complain(error, REFUSED)
    except UnreadableError as error:
        print(f"error: {sentence(error)}, then start the same command again {then}", file=sys.stderr, flush=True)
        return RESUME_ME
    except (
        RecipeError,
        ShardError,
        ClipError,
        AccountingError,
        AuditError,
        CertificateError,
        SafetensorError,
    ) as error:
        return complain(error, BAD_INPUT)
    except OSError as error:
        return complain(storage_sentence(error, then), BAD_INPUT)
    except RuntimeError as error:
        if not lost_rank(error):
            raise
        return complain(
            RuntimeError(f"another rank ended; see its message, then start the same command again {then}"), RESUME_ME
        )


def storage_sentence(error: OSError, then: str) -> OSError:
    """What a file system says, with the mend: the ledger and the newest checkpoint were synced before."""
    if error.errno not in STORAGE:
        return error
    mended = OSError(f"{error}; nothing saved is lost: free space or mend the permissions, then start again {then}")
    mended.__dict__.update(error.__dict__)
    return mended


def complain(error: Exception, code: int) -> int:
    """By one rank where all fail alike, by each where it may be alone with its trouble."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or (not getattr(error, "everywhere", False) and code in (BAD_INPUT, REFUSED)):
        who = "error" if rank == "0" else f"error (rank {rank})"
        for line in str(error).splitlines():
            print(f"{who}: {sentence(line)}", file=sys.stderr, flush=True)
    return code
