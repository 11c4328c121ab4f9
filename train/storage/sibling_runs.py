"""Every run on a set of records, logged with the data: what may already have been spent on the same people.

An epsilon holds for one run. Anyone who publishes several runs on the same records owes the composition, so each
certificate lists its siblings: private runs, runs without noise, audits that trained on the records, and copies of a
run directory. The log contains names, budgets and what ledgers charged, nothing computed from records.

It lies beside the index, in the folders of the shards (another index of some of them finds it there) and where the
config says (`run.registry`), so that it also exists for data that are mounted read-only.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from murmuration.accounting.durable import try_lock
from murmuration.accounting.errors import BUDGET_SPENT, RunError
from murmuration.accounting.json_lines import whole_lines
from murmuration.accounting.ledger.facts import Head
from murmuration.accounting.ledger.heads import append, heads_in
from murmuration.accounting.unit import RECORD
from murmuration.data.store.place import RecordIndex, ShardError

LOG = "runs.jsonl"
BESIDE_SHARDS = ".murmuration-runs.jsonl"


class DataBudgetError(RunError, RuntimeError):
    """The runs on these records would together exceed the budget that their owner set."""

    exit_code = BUDGET_SPENT


@dataclass(frozen=True)
class RunLog:
    """The log, in all the places where it is kept."""

    files: tuple[Path, ...]

    @staticmethod
    def of(index: RecordIndex, registry: str | None = None) -> RunLog:
        from murmuration.data.index.folders import FolderIndex
        from murmuration.data.index.public_split import whole_of
        from murmuration.data.index.shard_index import ShardIndex  # none of which a library run has

        whole = whole_of(index)
        files = []
        if isinstance(whole, ShardIndex | FolderIndex):
            files = [whole.folder / LOG, *(folder / BESIDE_SHARDS for folder in _folders_of(whole))]
        files += [Path(registry) / LOG] if registry is not None else []
        places: dict[str, Path] = {}
        for file in files:  # a place that is named twice is one, by whatever path
            places.setdefault(os.path.realpath(file), file)
        return RunLog(tuple(places.values()))

    @staticmethod
    def beside(folder: Path) -> RunLog:
        return RunLog((folder / LOG,))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Call `require_budget` and `register` within this lock: two runs that start at once must not both be let in on
        what is left of the budget.

        A place that cannot be locked cannot be written either, or its file system has no locks (some network shares).
        """
        with contextlib.ExitStack() as held:
            opened: dict[tuple[int, int], int] = {}  # each file once, whatever names it has
            for file in self.files:
                with contextlib.suppress(OSError):
                    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
                    held.callback(os.close, descriptor)
                    about = os.fstat(descriptor)
                    opened.setdefault((about.st_dev, about.st_ino), descriptor)
            for _, descriptor in sorted(opened.items()):  # in the same order in every process, whatever paths it sees
                with contextlib.suppress(OSError):
                    while not try_lock(descriptor):
                        time.sleep(0.05)
            yield

    def register(
        self,
        run: str,
        phase: str,
        name: str,
        epsilon: float | None,
        delta: float | None,
        unit: str = RECORD,
        **more: Any,
    ) -> str | None:
        """Registers each phase of a run once, with what it protects (in words); no `epsilon` means a run without noise.
        Returns a warning if the log cannot be written anywhere: siblings stay unknown."""
        entry = {"id": run, "run": name, "phase": phase, "private": epsilon is not None}
        entry |= {"epsilon_budget": epsilon, "delta": delta, **_of_units(unit), **more}
        faults = []
        for file in self.files:
            try:
                if not any((known["id"], known.get("phase")) == (run, phase) for known in _entries(file)):
                    append(file, entry, 0o644)
            except OSError as error:
                faults.append(f"{file} cannot be used ({error.strerror})")
        if self.files and len(faults) == len(self.files):
            return (
                f"{faults[0]}: later runs on these records will not know of this one; name a writable folder in "
                "run.registry"
            )
        return None

    def siblings(self, own: Container[str] = ()) -> list[dict[str, Any]]:
        """All other runs on these records, as far as the log knows, with what they claim if they are finished."""
        claims = self._claims()
        found: dict[tuple[object, object], dict[str, Any]] = {}
        unread = []
        for file in self.files:
            try:
                for entry in _entries(file):
                    found.setdefault((entry["id"], entry.get("phase")), entry)
            except OSError as error:  # a certificate must not read as if there were none
                unread.append({"id": "unknown", "run": f"{file} cannot be read ({error.strerror})"})
        others = [entry for entry in found.values() if entry["id"] not in own]
        return [
            {**entry, "claimed": claims[entry["id"]]} if entry["id"] in claims else entry for entry in others
        ] + unread

    def knows(self, run: str) -> bool:
        with contextlib.suppress(OSError):
            return any(entry["id"] == run for file in self.files for entry in _entries(file))
        return False

    def set_budget(self, epsilon: float, unit: str = RECORD) -> list[str]:
        """Sets the budget of all runs on these records that protect such units (in words), from now on; the newest line
        in each place counts. Returns a sentence for each place that could not be written; ShardError if that is all of
        them."""
        faults = []
        for file in self.files:
            try:
                append(file, {"budget": epsilon, **_of_units(unit)}, 0o644)
            except OSError as error:
                faults.append(f"{file} cannot be written ({error.strerror})")
        if len(faults) == len(self.files):
            raise ShardError(
                f"{faults[0] if faults else 'these records lie nowhere'}, so no run would know of a budget; name a "
                "writable folder with --registry, and the same one as run.registry in the configs"
            )
        return faults

    def budget(self, unit: str = RECORD) -> float | None:
        """The smallest budget for such units that any place has; None if no place has one."""
        return self._budgets().get(unit)

    def _budgets(self) -> dict[str, float]:
        """The smallest budget for each kind of unit."""
        found: dict[str, float] = {}
        for file in self.files:
            with contextlib.suppress(OSError):
                lines = [line for line in whole_lines(file) if _is_epsilon(line.get("budget"))]
                for unit, epsilon in {_unit_of(line): line["budget"] for line in lines}.items():
                    found[unit] = min(epsilon, found.get(unit, math.inf))
        return found

    def claim(self, run: str, epsilon: float) -> None:
        """Logs what a finished run claims, which may be less than its budget."""
        for file in self.files:
            with contextlib.suppress(OSError):
                append(file, {"claim_of": run, "epsilon": epsilon}, 0o644)

    def spent(self, own: Container[str] = (), unit: str = RECORD) -> float:
        """What all other runs spent of the budget for such units: what they claim, or may still spend; by basic
        composition, which holds however the later ones were chosen. A run that protects other units is held to the
        budget for those; without one, nobody knows what it costs these."""
        claims, kinds = self._claims(), self._budgets()
        elsewhere: set[object] = set()
        for entry in self.siblings():
            if (other := _unit_of(entry)) != unit and entry.get("private") is True:
                claims.pop(entry["id"], None)
                elsewhere |= {entry["id"]} if other in kinds else set()
        budgets = [
            (entry["id"], entry.get("epsilon_budget") if _unit_of(entry) == unit else None)
            for entry in self.siblings(own)
            if entry["id"] not in claims and entry["id"] not in elsewhere
        ]
        ours = math.fsum(value for run, value in claims.items() if str(run) not in own)
        return ours + math.fsum(value if _is_epsilon(value) else math.inf for _, value in budgets)

    def _claims(self) -> dict[object, float]:
        """The claims of finished runs, by id."""
        claims: dict[object, float] = {}
        for file in self.files:
            with contextlib.suppress(OSError):
                for line in whole_lines(file):
                    if isinstance(line.get("claim_of"), str) and _is_epsilon(line.get("epsilon")):
                        claims[line["claim_of"]] = line["epsilon"]
                    elif isinstance(line.get("ledger_of"), str):
                        claims.pop(line["ledger_of"], None)  # the run was restored and continued after it was finished
        return claims

    def require_budget(self, own: Container[str], epsilon: float | None, unit: str = RECORD) -> None:
        """Refuses a run that would exceed the records' budget. `epsilon` is what the run may spend in all its phases,
        for such units; None if it has no noise."""
        budgets = self._budgets()
        if not budgets:
            return
        if (budget := budgets.get(unit)) is None and epsilon is not None:
            raise DataBudgetError(
                f"{self.files[0].parent}: these records have a budget for {', '.join(sorted(budgets))}, but this run "
                f"protects {unit}, and what it costs the others is not known; give that unit a budget, too, with "
                "prepare.py index --budget, or protect what has one"
            )
        budget = min(budgets.values()) if budget is None else budget
        if epsilon is None:
            raise DataBudgetError(
                f"{self.files[0].parent}: these records have a budget of ε = {budget:g}, which a run without noise "
                "exceeds; give the phase a privacy section, or raise the budget with prepare.py index --budget"
            )
        if (spent := self.spent(own, unit)) + epsilon > budget * (1 + 1e-9):
            raise DataBudgetError(
                f"{self.files[0].parent}: these records have a budget of ε = {budget:g} for all runs, of which earlier "
                f"ones take {spent:g}, so a run of ε = {epsilon:g} is too much; lower its budget, or raise that of the "
                "records with prepare.py index --budget"
            )

    def heads(self, run: str) -> list[list[Head]]:
        """What each place knows of the run's ledger, oldest first."""
        return [[head for head in _heads(file) if head.ledger_of == run] for file in self.files]

    def note(self, head: Head) -> None:
        """Notes the ledger's head. Without this, a restored ledger is still recognised by the secret folder, so a place
        that is full or read-only does not end the run."""
        for file in self.files:
            with contextlib.suppress(OSError):
                append(file, head.as_dict(), 0o644)


def _unit_of(line: dict[str, Any]) -> str:
    """What a line of the log is about, in words."""
    return str(line.get("unit", RECORD))


def _of_units(unit: str) -> dict[str, str]:
    return {} if unit == RECORD else {"unit": unit}


def _is_epsilon(value: object) -> TypeGuard[float]:
    """Whether a value can be an epsilon, and not a number that would make room for other runs: NaN never compares as an
    excess, and a negative value would reduce the sum."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _folders_of(index: RecordIndex) -> list[Path]:
    """Folders where any other index of some of the same shards also looks, whatever else it contains: each folder of
    shards, and the one that contains them all. An index of single files has only the latter."""
    from murmuration.data.index.shard_index import ShardIndex

    root = getattr(index, "root", None)
    if not isinstance(root, Path):
        return []
    inner = {(root / shard.name).parent for shard in index.shards} if isinstance(index, ShardIndex) else set()
    return [root, *sorted(inner - {root})]


def _entries(file: Path) -> list[dict[str, Any]]:
    return [entry for entry in whole_lines(file) if isinstance(entry.get("id"), str)]


def _heads(file: Path) -> list[Head]:
    with contextlib.suppress(OSError):
        return heads_in(file.read_bytes().splitlines())
    return []
