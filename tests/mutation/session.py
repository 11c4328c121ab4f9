"""The session of Cosmic Ray: its mutants of every file, and which are left out and why."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult

from tests.mutation.operators import register
from tests.mutation.places import why_skipped
from tests.mutation.settings import Group, groups, raw
from tests.mutation.tree import WORK

REFUSAL = "statements/DeleteRaise"


def path_of(name: str) -> Path:
    return WORK / f"session-{name}.sqlite"


def begin(name: str) -> None:
    """Runs in the copy."""
    register()
    group = groups()[name]
    path_of(name).unlink(missing_ok=True)
    with use_db(str(path_of(name))) as database:
        found = _all_work_items([Path(file) for file in group.files], {})
        # As cr-filter-operators would, which takes minutes to write down that it leaves out two of three.
        database.add_work_items(item for item in found if not excluded(item.mutations[0].operator_name))
        leave_out(database, group)


def excluded(operator: str) -> bool:
    patterns = raw()["cosmic-ray"]["filters"]["operators-filter"]["exclude-operators"]
    return any(re.match(pattern, operator) for pattern in patterns)


def leave_out(database: WorkDB, group: Group) -> None:
    chosen = defaultdict[str, list[WorkItem]](list)
    why = defaultdict[str, list[str]](list)
    for item in database.pending_work_items:
        mutation = item.mutations[0]
        file = mutation.module_path.as_posix()
        reason = why_skipped(file, mutation.start_pos)
        if mutation.operator_name == REFUSAL:
            reason = None  # it begins where no argument does
        if reason is None:
            chosen[file].append(item)
        else:
            why[reason].append(item.job_id)
    for file, items in chosen.items():
        # Some more of a file are the same ones and others.
        items.sort(key=lambda item: (item.mutations[0].operator_name, item.mutations[0].occurrence))
        random.Random(f"{raw()['mutation']['seed']} {file}").shuffle(items)
        most = group.most(file)
        beyond = [] if most is None else items[most:]
        # What a file refuses is all tried: without a refusal a run that proves nothing goes on.
        why["not in the sample"] += [i.job_id for i in beyond if i.mutations[0].operator_name != REFUSAL]
    for reason, ids in why.items():
        database.set_multiple_results(ids, WorkResult(output=reason, worker_outcome=WorkerOutcome.SKIPPED))
