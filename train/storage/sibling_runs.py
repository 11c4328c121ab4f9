"""Every run on a set of records, logged beside its index: what somebody may have spent on the same people.

An epsilon holds for one run. Whoever publishes several runs on the same records owes the composition, so each
certificate lists its siblings. The log holds names and planned budgets only, nothing computed from records.
"""

from __future__ import annotations

import json
from pathlib import Path

from murmuration.train.storage.run_dir import whole_lines

LOG = "runs.jsonl"


def register(index_folder: Path, run: str, phase: str, name: str, epsilon: float, delta: float) -> str | None:
    """Once per private phase of a run. Returns a warning where the log cannot be written: siblings stay unknown."""
    entry = {"id": run, "run": name, "phase": phase, "epsilon_budget": epsilon, "delta": delta}
    # A newline first: a line torn by a crash must not swallow this one.
    line = "\n" + json.dumps(entry) + "\n"
    try:
        if any((other["id"], other.get("phase")) == (run, phase) for other in _entries(index_folder)):
            return None
        with (index_folder / LOG).open("a") as log:
            log.write(line)
    except OSError as error:
        return f"{index_folder / LOG} cannot be used ({error.strerror}): later runs will not know of this one"
    return None


def siblings(index_folder: Path, run: str) -> list[dict[str, object]]:
    """The other runs that were ever started on these records, as far as the log knows."""
    try:
        return [entry for entry in _entries(index_folder) if entry["id"] != run]
    except OSError as error:  # a certificate must not read as if there were none
        return [{"id": "unknown", "run": f"{index_folder / LOG} cannot be read ({error.strerror})"}]


def _entries(index_folder: Path) -> list[dict[str, object]]:
    return [entry for entry in whole_lines(index_folder / LOG) if "id" in entry]
