"""How a worker script gives its results to the test that launched it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from murmuration.accounting.errors import DONE
from murmuration.train.commands.exit_codes import leave
from murmuration.train.distributed.ranks import Ranks


def answer(ranks: Ranks, results: Any) -> NoReturn:
    """Ends every rank as training ends it: an interpreter that tears a process group down may abort."""
    if ranks.main:
        print("RESULTS " + json.dumps(results), flush=True)
    ranks.barrier()
    leave(DONE)
