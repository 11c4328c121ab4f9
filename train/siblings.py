"""Every run on a set of records, logged beside its index: what somebody may have spent on the same people.

An epsilon holds for one run. Whoever publishes several runs on the same records owes the composition, so each
certificate lists its siblings. The log holds names and planned budgets only, nothing computed from records.
"""

from __future__ import annotations

import json
from pathlib import Path

LOG = "runs.jsonl"


def register(index_folder: Path, run: str, phase: str, name: str, epsilon: float, delta: float) -> str | None:
    """Once per private phase of a run. Returns a warning where the log cannot be written: siblings stay unknown."""
    if any((entry["id"], entry.get("phase")) == (run, phase) for entry in _entries(index_folder)):
        return None
    # A newline first: a line torn by a crash must not swallow this one.
    entry = {"id": run, "run": name, "phase": phase, "epsilon_budget": epsilon, "delta": delta}
    line = "\n" + json.dumps(entry) + "\n"
    try:
        with (index_folder / LOG).open("a") as log:
            log.write(line)
    except OSError as error:
        return f"{index_folder / LOG} cannot be written ({error.strerror}): later runs will not know of this one"
    return None


def siblings(index_folder: Path, run: str) -> list[dict[str, object]]:
    """The other runs that were ever started on these records, as far as the log knows."""
    return [entry for entry in _entries(index_folder) if entry["id"] != run]


def _entries(index_folder: Path) -> list[dict[str, object]]:
    try:
        lines = (index_folder / LOG).read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a crash
        if isinstance(entry, dict) and "id" in entry:
            found.append(entry)
    return found
