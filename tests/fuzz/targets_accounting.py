"""Ledger and certificate, as `account.py verify` reads them. Nothing here loads torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from murmuration.accounting.adaptive import METRIC, SENSITIVITY, AdaptiveRule
from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.errors import NOT_ALL_CHECKED
from murmuration.accounting.ledger.chain import Ledger, LedgerError, make_entry
from murmuration.accounting.ledger.facts import MetricFact
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import Origin
from murmuration.accounting.metrics import ClippedShare
from murmuration.accounting.strict_json import parse
from tests.fuzz.engine import Broken, Target
from tests.fuzz.mutate_bytes import mutate_bytes
from tests.fuzz.mutate_json import dumps, loads, mutate_json, mutate_text, odd_value
from tests.support.acc_world import CONFIG, DATA, KEY, PLAN, SIGNER, document_of, facts, reopen, train, whole_run

CLOSE = 2e-6
"""Between two accountings of the same events: what `verify` lets a certificate differ by, and a little."""


@dataclass(frozen=True)
class Run:
    """A finished run as it should be."""

    name: str
    ledger: bytes
    certificate: dict[str, Any]
    epsilon: float
    plans: list[Any]
    opened: int


class Runs(Target):
    """Three runs: a plain one, one with everything that a ledger can say, one whose clipping norm adapts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.runs = [_certified(folder / name, make) for name, make in MAKERS.items()]
        self.place = folder / "run"
        self.place.mkdir()
        # What the first recomputation loads and caches is no part of a case.
        (self.place / "ledger.jsonl").write_bytes(self.runs[0].ledger)
        verify(self.place)

    def meant(self, data: bytes) -> Run:
        """The run that a mutated file came from, by its name."""
        return next((run for run in self.runs if json.dumps(run.name).encode() in data), self.runs[0])

    def lay(self, ledger: bytes, document: bytes | None) -> None:
        for path in self.place.iterdir():
            path.unlink()
        (self.place / "ledger.jsonl").write_bytes(ledger)
        if document is not None:
            (self.place / "certificate.json").write_bytes(document)


class Ledgers(Runs):
    def seeds(self) -> list[bytes]:
        return [run.ledger for run in self.runs]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_ledger(chance, data, other)

    def act(self, data: bytes) -> int:
        run = self.meant(data)
        self.lay(data, None)
        code = main(["verify", str(self.place)])
        if code == NOT_ALL_CHECKED:
            self._not_better(run, data)
        self._can_be_written_on(data)
        self.lay(data, json.dumps(run.certificate).encode())
        certified = main(["verify", str(self.place), "--json"])
        if certified == NOT_ALL_CHECKED and data != run.ledger:
            spent = verify(self.place).epsilon
            if spent < run.epsilon - CLOSE:
                raise Broken("a ledger with a smaller epsilon than its certificate verifies")
        return max(code, certified)

    def _not_better(self, run: Run, data: bytes) -> None:
        """Where plans and number of steps are those of the honest run, facts of steps make nothing cheaper."""
        entries = [json.loads(line) for line in data.splitlines()]
        plans = [entry["plan"] for entry in entries if entry["kind"] == "plan"]
        opened = sum(entry["kind"] == "open" for entry in entries)
        if plans == run.plans and opened >= run.opened:
            spent = verify(self.place).epsilon
            if not spent >= run.epsilon - CLOSE:
                raise Broken("steps that contradict the frozen plan make epsilon smaller")

    def _can_be_written_on(self, data: bytes) -> None:
        """As a run that resumes does: refused, or mended into a ledger that can be read."""
        self.lay(data, None)
        try:
            ledger = Ledger.open(self.place / "ledger.jsonl")
        except LedgerError:
            return
        try:
            Journal(ledger)
        except LedgerError:
            return
        finally:
            ledger.close()
        if ledger.entries:
            History.read(self.place / "ledger.jsonl")


class Certificates(Runs):
    def seeds(self) -> list[bytes]:
        return [json.dumps(run.certificate, ensure_ascii=False).encode() for run in self.runs]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        return mutate_text(chance, data, other)

    def act(self, data: bytes) -> int:
        run = self.meant(data)
        data = self.signed(run, data)
        self.lay(run.ledger, data)
        code = main(["verify", str(self.place)])
        if code != NOT_ALL_CHECKED:
            return code
        document = json.loads(data)
        for key, honest in run.certificate["claim"].items():
            if not _agrees(document["claim"][key], honest):
                raise Broken(f"a certificate verifies whose claim.{key} is not what its ledger gives")
        if more := document["claim"].keys() & {"delta_claimed"} - run.certificate["claim"].keys():
            raise Broken(f"a certificate verifies with a claim that its ledger does not make: {more.pop()}")
        # What was verified is made into pages when weights are exported.
        pages.write(document, self.place)
        return max(code, main(["explain", str(self.place)]))

    @staticmethod
    def signed(run: Run, data: bytes) -> bytes:
        """Signed anew unless the mutation is in the signature: whoever has the key may sign anything."""
        try:
            document = parse(data)
            if document["signature"] == run.certificate["signature"]:
                return json.dumps(signed(document, KEY)).encode()
        except (ValueError, KeyError, TypeError):
            pass
        return data


def _agrees(found: Any, honest: Any) -> bool:
    if isinstance(honest, dict):
        return isinstance(found, dict) and all(
            _agrees(found.get(key), honest[key]) for key in honest if key != "dp_accounting"
        )
    if isinstance(honest, float):
        return (
            isinstance(found, int | float)
            and not isinstance(found, bool)
            and math.isclose(found, honest, rel_tol=CLOSE)
        )
    return type(found) is type(honest) and found == honest


def mutate_ledger(chance: Random, data: bytes, other: bytes) -> bytes:
    """Mostly within lines, and then chained anew, as somebody would do who wants to be believed."""
    if chance.random() < 0.2:
        return mutate_bytes(chance, data, other)
    lines = data.splitlines()
    for _ in range(chance.choice((1, 1, 2))):
        lines = chance.choice((_line, _line, _line, _line, _alike, _arrange))(chance, lines)
    out = b"\n".join(lines) + b"\n"
    return chained(out) if chance.random() < 0.85 else out


def _line(chance: Random, lines: list[bytes]) -> list[bytes]:
    if not lines:
        return lines
    number = chance.randrange(len(lines))
    try:
        changed = dumps(mutate_json(chance, loads(lines[number]))).encode()
    except (ValueError, RecursionError):
        return lines
    return [*lines[:number], changed, *lines[number + 1 :]]


def _alike(chance: Random, lines: list[bytes]) -> list[bytes]:
    """The same lie in every step: a fact that an opening and its commit agree on is believed more easily."""
    keys = (
        "threshold",
        "std",
        "sensitivity",
        "divisor",
        "elements",
        "records",
        "generator",
        "rule",
        "step",
        "segment",
        "share",
    )
    key, value = chance.choice(keys), chance.choice((1, 1e9, 1e-9, 0, -1, 0.5, 2**32, odd_value(chance)))

    def changed(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: value if name == key else changed(inner) for name, inner in item.items()}
        return [changed(inner) for inner in item] if isinstance(item, list) else item

    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            steps = isinstance(entry, dict) and entry.get("kind") in ("open", "commit")
            found.append(json.dumps(changed(entry)).encode() if steps else line)
        except (ValueError, RecursionError):
            found.append(line)
    return found


def _arrange(chance: Random, lines: list[bytes]) -> list[bytes]:
    if not lines:
        return lines
    number, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    return chance.choice(
        (
            lines[:number] + lines[number + 1 :],
            lines[:number],
            [*lines[:number], lines[other], *lines[number:]],
            [*lines[:number], b"", *lines[number:]],
        )
    )


def chained(ledger: bytes) -> bytes:
    """Every line that is JSON gets the number, the link and the hash that belong to it."""
    out, previous = [], "0" * 64
    for index, line in enumerate(ledger.splitlines()):
        try:
            value = json.loads(line)
            fields = {key: part for key, part in value.items() if key not in ("index", "kind", "previous", "hash")}
            entry = make_entry(index, value["kind"], fields, previous)
            out.append(entry.line)
            previous = entry.hash
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            out.append(line + b"\n")
    return b"".join(out)


def _full(folder: Path) -> Journal:
    plan = replace(PLAN, steps=4)
    journal = reopen(folder)
    journal.start_run("full", "check", False, {"dp-accounting": "0.6.0"}, "hmac-sha256", SIGNER)
    journal.declare_nonprivate(0, "warm", True, "public-1")
    journal.declare_origin(Origin("before", "f" * 64, 1.0, 1e-6, ("d" * 64,)))
    journal.declare_choice("public_loss")
    journal.declare_plan(1, "private", plan, describe("pld"))
    journal.declare_tuning(Declared("three runs, the best by public loss", Tuning(3.0, fixed=True)))
    journal.begin_segment(1, CONFIG, DATA, 0, "first")
    train(journal, range(1, 3), plan, 1)
    journal.checkpointed(1, 2, "digest")
    journal.note_copied("copied")
    journal.resumed(1, 2)
    journal.begin_segment(1, CONFIG, DATA, 2, "copied")
    train(journal, range(3, 5), plan, 1)
    journal.finish()
    return journal


def _adaptive(folder: Path) -> Journal:
    count = ClippedShare.of(5.0, AdaptiveRule(0.5, 0.2, 0.01, 100.0))
    plan = replace(PLAN, steps=3, metrics=(count,))
    journal = reopen(folder)
    journal.start_run("adaptive", "check", False, {}, "hmac-sha256", SIGNER)
    journal.declare_plan(0, "private", plan, describe("pld"))
    journal.begin_segment(0, CONFIG, DATA, 0, "first")
    norm = plan.clip_norm
    for step in range(1, 4):
        done = replace(facts(step, plan, sensitivity=norm, std=plan.noise_multiplier * norm),
                       metrics=(MetricFact(METRIC, SENSITIVITY, count.std),))  # fmt: skip
        journal.open_step(0, step, done)
        journal.commit_step(0, step, done, share=0.25)
        assert plan.adaptive is not None
        norm = plan.adaptive.following(norm, 0.25)
    journal.finish()
    return journal


MAKERS = {"tiny": whole_run, "full": _full, "adaptive": _adaptive}


def _certified(folder: Path, make: Any) -> Run:
    journal = make(folder)
    document = document_of(journal, {"hashes": {"config": "abc"}})
    journal.ledger.close()
    ledger = (folder / "ledger.jsonl").read_bytes()
    entries = [json.loads(line) for line in ledger.splitlines()]
    plans = [entry["plan"] for entry in entries if entry["kind"] == "plan"]
    opened = sum(entry["kind"] == "open" for entry in entries)
    return Run(document["run"], ledger, document, journal.history.epsilon("pld"), plans, opened)
