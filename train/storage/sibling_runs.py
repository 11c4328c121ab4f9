"""Every run on a set of records, logged with the data: what may already have been spent on the same people.

An epsilon holds for one run. Anyone who publishes several runs on the same records owes the composition, so each
certificate lists its siblings: private runs, runs without noise, audits that trained on the records, and copies of a
run directory. The log contains names, budgets, what ledgers charged, and which share of the records is public: nothing
computed from records but keyed digests.

It lies beside the index, in the folders of the shards (another index of some of them finds it there) and where the
config says (`run.registry`), so that it also exists for data that are mounted read-only or lie behind a URL. A registry
may serve many sets of records. Each line therefore says which shards it is about, by keyed digests of their contents,
by which copies and links in other folders are recognised, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from murmuration.accounting.durable import try_lock
from murmuration.accounting.epsilon.accountant import show_epsilon
from murmuration.accounting.errors import BUDGET_SPENT, RunError
from murmuration.accounting.ledger.facts import Head
from murmuration.accounting.ledger.heads import append, heads_in, newest_in_log, remember_in_log
from murmuration.accounting.strict_json import read, whole_lines
from murmuration.accounting.unit import RECORD
from murmuration.data.index.public_cut import PublicSplit
from murmuration.data.index.salt import BESIDE_RECORDS, SALT, folders_of, read_salt, readable_salt
from murmuration.data.store.index_files import write_once
from murmuration.data.store.place import RecordIndex, ShardError

LOG = "runs.jsonl"
BESIDE_SHARDS = ".murmuration-runs.jsonl"


class DataBudgetError(RunError, RuntimeError):
    """The runs on these records would together exceed the budget that their owner set."""

    exit_code = BUDGET_SPENT


@dataclass(frozen=True)
class Place:
    """One file of the log. `shards` tells these records from others, under the salt in this file; lines about other
    shards alone do not count. Where no salt can be read, every line counts, and so does a line under another salt.
    `whole`: the digest of the whole set, of which these may be a part."""

    file: Path
    salt: Path | None = None
    shards: tuple[str, ...] = field(default=(), repr=False)
    shared: bool = True
    """Whether other indexes of the same records look here."""
    registry: bool = False
    whole: str = field(default="", repr=False)
    of_line: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What a line of these records says of them, where the records need not be at hand."""
    held: list[dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    """All lines of the file, while nobody else may add one."""

    def lines(self) -> list[dict[str, Any]]:
        """Those that are about these records. OSError if they cannot be read."""
        found, told = whole_lines(self.file) if self.held is None else self.held, self._told()
        if not told:
            return found
        ours = set(told["shards"])

        def elsewhere(line: dict[str, Any]) -> bool:
            shards = line.get("shards")
            return isinstance(shards, list) and line.get("salt") == told["salt"] and ours.isdisjoint(map(str, shards))

        mine = [line for line in found if not elsewhere(line)]
        others = {str(line["id"]) for line in found if "id" in line and elsewhere(line)}
        others -= {str(line["id"]) for line in mine if "id" in line}
        of_runs = ("claim_of", "ledger_of")
        return [line for line in mine if not any(str(line[key]) in others for key in of_runs if key in line)]

    def cuts(self) -> Iterator[PublicSplit]:
        """How these records, or some of them, were split. OSError or ValueError if that cannot be read."""
        told = self._told()
        for line in self.lines() if self.salt is not None else []:
            if "public_split" in line:
                cut = read(PublicSplit, line["public_split"])
                yield replace(cut, others="set" in told and "set" in line and line["set"] != told["set"])

    def add(self, line: dict[str, Any]) -> None:
        """OSError or ShardError if that fails."""
        if self.registry and self.salt is not None:
            write_once(self.salt, secrets.token_bytes(32), 0o600)
            read_salt(self.salt)
        line |= self._told()
        append(self.file, line, 0o644)
        if self.held is not None:
            self.held.append(line)

    def _told(self) -> dict[str, Any]:
        """What a line says of these records: the names of the salt, of the set and of its shards. Nothing where no salt
        can be read."""
        salt = None if self.salt is None else readable_salt(self.salt)
        if salt is None:
            return dict(self.of_line)
        names = {"salt": _digest(salt, "salt"), "set": _digest(salt, f"set {self.whole}")}
        return {**names, "shards": sorted(_keyed(salt, self.shards))}


@lru_cache(maxsize=64)
def _keyed(salt: bytes, shards: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_digest(salt, shard) for shard in shards)


def _digest(salt: bytes, what: str) -> str:
    return hashlib.blake2b(os.fsencode(what), digest_size=8, key=salt, person=b"mur-run-shard").hexdigest()


def _beside(folders: Sequence[Path], files: Sequence[tuple[Path, str]], whole: str = "") -> list[Place]:
    """The log in each of these folders is about the files in it; that in the first, about all. `files`: with digests of
    their contents, as far as they are known. Files that were replaced under their names count, too."""
    within: dict[Path, list[str]] = {folder: [] for folder in folders}
    for path, digest in files:
        for folder in {folders[0], path.parent} & within.keys():
            within[folder] += [f"name {os.path.relpath(path, folder)}", *([f"content {digest}"] if digest else [])]
    return [
        Place(each / BESIDE_SHARDS, each / BESIDE_RECORDS, tuple(shards), whole=whole)
        for each, shards in within.items()
    ]


def _places_of_stream(index: RecordIndex) -> tuple[Place, ...]:
    """Of its shards, whose contents are not known; none for records that are made by rule."""
    from murmuration.data.draw.stream import StreamIndex  # it brings PyTorch along

    found = index.places if isinstance(index, StreamIndex) else ()
    paths = [Path(os.path.realpath(place)) for place in found if isinstance(place, Path)]
    if not paths:
        return ()
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return tuple(_beside(folders_of(root, map(str, paths)), [(path, "") for path in paths]))


@dataclass(frozen=True)
class RunLog:
    """The log, in all the places where it is kept. `cut`: how the set is split of which these records are a part;
    `shards`: the local ones, where no registry knows their contents."""

    places: tuple[Place, ...]
    cut: PublicSplit | None = None
    shards: tuple[Path, ...] = field(default=(), repr=False)

    @staticmethod
    def of(index: RecordIndex, registry: str | None = None) -> RunLog:
        from murmuration.data.index.folders import FolderIndex
        from murmuration.data.index.keyed_digest import folders_beside
        from murmuration.data.index.public_split import SplitIndex, whole_of
        from murmuration.data.index.shard_index import ShardIndex  # none of which a library run has

        whole = whole_of(index)
        cut = index.cut if isinstance(index, SplitIndex) else None
        if not isinstance(whole, ShardIndex | FolderIndex):
            return RunLog(_places_of_stream(whole), cut)
        folders = folders_beside(whole)
        contents = tuple(f"content {shard.sha256}" for shard in whole.shards if shard.records)
        names = tuple(f"name {shard.name}" for shard in whole.shards)
        of_all = whole.manifest_digest
        found = [Place(whole.folder / LOG, whole.folder / SALT, contents + names, shared=False, whole=of_all)]
        files = [(folders[0] / shard.name, shard.sha256) for shard in whole.shards if folders]
        found += _beside(folders, files, of_all)
        if registry is not None:
            found.append(Place(Path(registry) / LOG, Path(registry) / SALT, contents, registry=True, whole=of_all))
        places: dict[str, Place] = {}
        for place in found:  # a place that is named twice is one, by whatever path, and then it is the registry
            places[os.path.realpath(place.file)] = place
        unknown = files if registry is None and isinstance(whole, ShardIndex) else []
        return RunLog(tuple(places.values()), cut, tuple(path for path, _ in unknown))

    @staticmethod
    def at(*files: Path) -> RunLog:
        return RunLog(tuple(Place(file) for file in files))

    @staticmethod
    def of_run(files: Sequence[Path], run: str) -> RunLog:
        """The log of the runs on this one's records: its own lines tell which shards those are."""
        places = []
        for file in files:
            told: dict[str, Any] = {}
            with contextlib.suppress(OSError):  # then a run that nobody knows is among the siblings
                own = (line for line in whole_lines(file) if line.get("id") == run)
                for line in (each for each in own if isinstance(each.get("shards"), list)):
                    shards = {*told.get("shards", []), *map(str, line["shards"])}
                    told = {"salt": line.get("salt"), "set": line.get("set"), "shards": sorted(shards)}
            places.append(Place(file, of_line=told))
        return RunLog(tuple(places))

    @staticmethod
    def beside(folder: Path) -> RunLog:
        return RunLog.at(folder / LOG)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(place.file for place in self.places)

    @contextlib.contextmanager
    def alone(self) -> Iterator[RunLog]:
        """The log as it is while nobody else writes, each file read once. Ask it for `require_budget` and `register`
        within this lock: two runs that start at once must not both be let in on what is left of the budget.

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
            read: dict[tuple[int, int], list[dict[str, Any]]] = {}
            places = list(self.places)
            for number, place in enumerate(places):
                with contextlib.suppress(OSError):  # what cannot be read is said where it is asked
                    about = place.file.stat()
                    lines = read.get((about.st_dev, about.st_ino)) or whole_lines(place.file)
                    places[number] = replace(place, held=read.setdefault((about.st_dev, about.st_ino), lines))
            yield replace(self, places=tuple(places))

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
        """Registers each phase of a run once, with what it protects (in words); no `epsilon` means a run without noise,
        or with `private=True` in `more`, one whose noise anybody can draw again. Returns a warning if no other index
        would find it: siblings stay unknown. A budget cannot bind then."""
        entry = {"id": run, "run": name, "phase": phase, "private": epsilon is not None}
        entry |= {"epsilon_budget": epsilon, "delta": delta, **_of_units(unit), **self._cut_in_line(), **more}
        if entry["private"]:
            self.require_cut()
        bound = bool(self._budgets())
        faults, shared = self._write(
            entry, lambda line: (line.get("id"), line.get("phase")) == (run, phase), only_for_all=bound
        )
        if shared or not self.places:
            return None
        warning = f"{faults[0]}: later runs on these records will not know of this one; name a writable folder in "
        if bound:
            raise DataBudgetError(f"{warning}run.registry, as with prepare.py index --registry, or no budget can bind")
        return f"{warning}run.registry"

    def _write(
        self, line: dict[str, Any], known: Callable[[dict[str, Any]], bool] = lambda _: False, only_for_all: bool = True
    ) -> tuple[list[str], bool]:
        """Adds the line where none is `known`. A sentence for each place that cannot be written, and whether others
        with an index of their own find it. `only_for_all`: nowhere, if they do not."""
        faults, shared = [], False
        for place in sorted(self.places, key=lambda place: not place.shared):
            if only_for_all and not (shared or place.shared):
                break
            try:
                if not any(map(known, place.lines())):
                    place.add(line)
                shared |= place.shared
            except (OSError, ShardError) as error:
                faults.append(f"{place.file} cannot be written ({getattr(error, 'strerror', None) or error})")
        if not shared and not faults:
            faults.append("the log lies in the index alone, where runs with another index do not look")
        return faults, shared

    def splits(self) -> list[PublicSplit]:
        """How these records, or some of them, were split into a public and a private part."""
        found: dict[PublicSplit, None] = {}
        for place in self.places:
            try:
                found |= dict.fromkeys(place.cuts())
            except OSError:  # then a run that nobody knows is among the siblings
                continue
            except ValueError as error:
                raise ShardError(
                    f"{place.file}: cannot be read ({error}), but it decides which records are public; restore it"
                ) from None
        return list(found)

    def freeze(self) -> None:
        """Writes how this set is split; ShardError if others, with an index of their own, would not find it."""
        with self.alone() as held:
            held.require_cut()
            faults, shared = held._write(held._cut_in_line(), lambda line: "public_split" in line)
        if not shared:
            raise ShardError(
                f"{faults[0]}, so another run could make another part public; name a writable folder in run.registry, "
                "the same one in all configs (prepare.py split --registry)"
            )

    def require_cut(self) -> None:
        """Holds these records to how they were used first: cut like this, or whole. Of two runs that start at once, the
        second is held to the first."""
        if other := next((cut for cut in self.splits() if cut != self.cut), None):
            raise ShardError(
                f"these records were cut with public_fraction {other}, not with {self.cut or 'none'}; what one run "
                "protects would be public in another, so keep the first"
            )
        if self.cut is not None and (run := self._protecting(but_cut=True)) is not None:
            raise ShardError(
                f"run {run!r} protects all of these records, so no part of them can be public; drop public_fraction, "
                "or name other data"
            )

    def _cut_in_line(self) -> dict[str, Any]:
        if self.cut is None:
            return {}
        return {"public_split": {key: value for key, value in asdict(self.cut).items() if key != "others"}}

    def protecting(self) -> str | None:
        """The name of a private run on these records."""
        return self._protecting()

    def _protecting(self, but_cut: bool = False) -> str | None:
        private = (entry for entry in self.siblings() if entry.get("private", True))
        return next((str(entry.get("run")) for entry in private if not (but_cut and "public_split" in entry)), None)

    def siblings(self, own: Container[str] = ()) -> list[dict[str, Any]]:
        """All other runs on these records, as far as the log knows, with what they claim if they are finished."""
        claims = self._claims()
        found: dict[tuple[object, object], dict[str, Any]] = {}
        unread = []
        for place in self.places:
            try:
                for entry in _entries(place):
                    found.setdefault((entry["id"], entry.get("phase")), entry)
            except OSError as error:  # a certificate must not read as if there were none
                unread.append({"id": "unknown", "run": f"{place.file} cannot be read ({error.strerror})"})
        others = [entry for entry in found.values() if entry["id"] not in own]
        return [
            {**entry, "claimed": claims[entry["id"]]} if entry["id"] in claims else entry for entry in others
        ] + unread

    def unknown_to_others(self, run: str) -> str | None:
        """Why runs with another index of these records may not find this one, nor it them; None if they do."""
        with contextlib.suppress(OSError):
            if not any(entry["id"] == run for place in self.places if place.shared for entry in _entries(place)):
                return "this one stands in no log where runs with another index of these records look"
            if any(path.stat().st_nlink > 1 for path in self.shards):
                return "shards have hard links, and the logs in other folders were not asked"
            return None
        return "a log cannot be read"

    def names(self) -> frozenset[str]:
        """The digests by which the ledgers of these runs name their records, whatever index they used."""
        found: set[str] = set()
        for place in self.places:
            with contextlib.suppress(OSError):
                found |= {str(entry["records"]) for entry in _entries(place) if "records" in entry}
        return frozenset(found)

    def set_budget(self, epsilon: float, unit: str = RECORD) -> list[str]:
        """Sets the budget of all runs on these records that protect such units (in words), from now on; the newest line
        in each place counts. Returns a sentence for each place that could not be written; ShardError if that is all of
        those where others look."""
        faults, shared = self._write({"budget": epsilon, **_of_units(unit)})
        if not shared:
            raise ShardError(
                f"{faults[0]}, so other runs would not know of a budget; name a writable folder with --registry, and "
                "the same one as run.registry in the configs"
            )
        return faults

    def budget(self, unit: str = RECORD) -> float | None:
        """The smallest budget for such units that any place has; None if no place has one."""
        return self._budgets().get(unit)

    def _budgets(self) -> dict[str, float]:
        """The smallest budget for each kind of unit."""
        found: dict[str, float] = {}
        for place in self.places:
            with contextlib.suppress(OSError):
                lines = [line for line in place.lines() if _is_epsilon(line.get("budget"))]
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
                elsewhere |= {entry["id"]} if other in kinds and _is_epsilon(entry.get("epsilon_budget")) else set()
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
        for place in self.places:
            with contextlib.suppress(OSError):
                for line in place.lines():
                    if isinstance(line.get("claim_of"), str) and _is_epsilon(line.get("epsilon")):
                        claims[line["claim_of"]] = line["epsilon"]
                    elif isinstance(line.get("ledger_of"), str):
                        claims.pop(line["ledger_of"], None)  # the run was restored and continued after it was finished
        return claims

    def require_budget(self, own: Container[str], epsilon: float | None, unit: str = RECORD) -> None:
        """Refuses a run that would exceed the records' budget. `epsilon` is what the run may spend in all its phases,
        for such units; None if it has no noise, or keys that everybody can have."""
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
                f"{self.files[0].parent}: these records have a budget of ε = {budget:g}, which a run without noise, "
                "or with a debug seed, exceeds; give the phase a privacy section and no seed, or leave the records out"
            )
        if (spent := self.spent(own, unit)) + epsilon > budget * (1 + 1e-9):
            raise DataBudgetError(
                f"{self.files[0].parent}: these records have a budget of ε = {budget:g} for all runs, of which earlier "
                f"ones take {show_epsilon(spent)}, so a run of ε = {epsilon:g} is too much; lower its budget, or raise "
                "that of the records with prepare.py index --budget"
            )

    def heads(self, run: str) -> list[list[Head]]:
        """What each place knows of the run's ledger, oldest first."""
        of_files = ([*_heads(file), *newest_in_log(file, run)] for file in self.files)
        return [[head for head in found if head.ledger_of == run] for found in of_files]

    def note(self, head: Head) -> None:
        """Notes the ledger's head. Without this, a restored ledger is still recognised by the secret folder, so a place
        that is full or read-only does not end the run."""
        for file in self.files:
            with contextlib.suppress(OSError):
                append(file, head.as_dict(), 0o644)

    def remember(self, head: Head) -> None:
        """Notes it in place of the run's last one, before the weights of a step can be seen that nothing else outside
        of its directory knows of. OSError if that fails: the step must not be seen then."""
        for file in self.files:
            remember_in_log(file, head)


def _unit_of(line: dict[str, Any]) -> str:
    """What a line of the log is about, in words."""
    return str(line.get("unit", RECORD))


def _of_units(unit: str) -> dict[str, str]:
    return {} if unit == RECORD else {"unit": unit}


def _is_epsilon(value: object) -> TypeGuard[float]:
    """Whether a value can be an epsilon, and not a number that would make room for other runs: NaN never compares as an
    excess, and a negative value would reduce the sum."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _entries(place: Place) -> list[dict[str, Any]]:
    """The lines of runs."""
    lines = (line for line in place.lines() if isinstance(line.get("id"), str))
    return [{key: value for key, value in line.items() if key not in ("salt", "set", "shards")} for line in lines]


def _heads(file: Path) -> list[Head]:
    with contextlib.suppress(OSError):
        return heads_in(file.read_bytes().splitlines())
    return []
