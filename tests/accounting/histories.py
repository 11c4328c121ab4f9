"""Random histories of a run: crashes, replays, rollbacks, changed configs, corrupt pointers, copied directories.

The trainer is a small state machine around a real journal on disk. Weights are a digest of everything that made
them; "released" is whatever a durable checkpoint let out. After every act two things must hold:

- charged >= released: the ledger charges at least as many steps as there are distinct noise draws in what left;
- no noise key stands behind two released updates, unless their weights and sums were the same;
- while a run lives, neither its secret file nor its memory gives the key of anything that was released.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from murmuration.accounting import key_chain
from murmuration.accounting.epsilon.accountant import describe, epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.key_chain import KeyChain
from murmuration.accounting.keys import RunKey, load, store
from murmuration.accounting.ledger.chain import BudgetSpent, Ledger, LedgerError
from murmuration.accounting.ledger.copied_run import recognise
from murmuration.accounting.ledger.journal import Journal
from tests.support.acc_world import CONFIG, DATA, PLAN, facts

PHASES = 2
STEPS = 6
LEAKED = "what is stored of a run gives the key of a released update"
# Room for many segments: these histories are about keys and charges, the budget has its own tests.
PLAN_HERE = replace(PLAN, steps=STEPS, epsilon_budget=40.0)


@dataclass(frozen=True)
class Update:
    """One noised update in some weights' past: the key of its noise and what it was computed from."""

    key: bytes
    step: int
    before: str
    config: str
    process: int
    """Another world size or machine rounds sums otherwise: only within one process is a sum bitwise the same."""


@dataclass(frozen=True)
class Weights:
    phase: int
    step: int
    past: tuple[Update, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass
class Directory:
    """A run directory: its files, its checkpoints, and, while a process lives, its journal and weights."""

    path: Path
    checkpoints: list[Weights] = field(default_factory=list)
    written_at: dict[Weights, int] = field(default_factory=dict)
    journal: Journal | None = None
    chain: KeyChain | None = None
    weights: Weights = Weights(0, 0)
    config: str = CONFIG
    process: int = 0

    @property
    def key(self) -> Path:
        return self.path / "secret" / "run.key"


class Runs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="acc-histories-"))
        self.released: dict[tuple[bytes, int], Update] = {}
        self.out_of: dict[Path, set[tuple[bytes, int]]] = {}
        self.runs: list[Directory] = []
        self.processes = 0

    def teardown(self) -> None:
        for run in self.runs:
            self._kill(run)
        shutil.rmtree(self.root)

    @initialize()
    def fresh(self) -> None:
        path = self.root / "run0"
        (path / "secret").mkdir(parents=True)
        self.runs = [Directory(path)]
        store(RunKey.fresh(), self.runs[0].key)
        self.out_of[path] = set()
        self._start(self.runs[0], None)

    # What the trainer does, in the order of train/run/run.py and train/run/phase.py.

    def _start(self, run: Directory, loaded: Weights | None, config: str | None = None) -> None:
        run.journal = journal = Journal(Ledger.open(run.path / "ledger.jsonl"))
        if journal.ledger.length == 0:
            journal.start_run("random", load(run.key).check_value(), False, {}, "hmac-sha256", "signer")
        recognise(journal, run.path / "secret")
        if loaded is not None:
            try:
                journal.admit_checkpoint(loaded.phase, loaded.step, loaded.digest, run.written_at[loaded])
            except LedgerError:
                self._kill(run)  # refused: somebody copies again, or starts anew
                return
            last = journal.history.last_checkpoint()
            if last is not None and last.digest == loaded.digest:
                for segment in journal.history.segments_of(last.phase)[last.segment :]:
                    key_chain.forget(run.key, segment.chain_name, last.step)
        run.config = config or run.config
        self.processes += 1
        run.process = self.processes
        run.weights = loaded or Weights(0, 0)
        self._enter(run)

    def _enter(self, run: Directory) -> None:
        """Begins or resumes the phase that comes next for these weights; then saves them, as the trainer does."""
        journal, weights = run.journal, run.weights
        assert journal is not None
        if weights.step == STEPS and weights.phase < PHASES - 1:
            run.weights = weights = Weights(weights.phase + 1, 0, weights.past)
        phase = weights.phase
        journal.declare_plan(phase, f"phase {phase}", PLAN_HERE, describe("pld"))
        reason = journal.new_segment_reason(phase, weights.step, run.config)
        if reason is None:
            journal.resumed(phase, weights.step)
        else:
            journal.begin_segment(phase, run.config, DATA, weights.step, reason)
        self._take_keys(run)
        self._checkpoint(run)

    def _take_keys(self, run: Directory) -> None:
        """As `OpenRun.derive`; whatever the ledger lets be repeated must have its keys."""
        assert run.journal is not None
        history, done = run.journal.history, run.weights.step
        segment = history.segments_of(run.weights.phase)[-1]
        known = history.progress[segment.phase, segment.number]
        begun = known.opened > known.begun
        link = key_chain.enter(run.key, segment.chain_name, segment.from_step + 1, done, begun)
        run.chain = KeyChain(link)

    def _key(self, run: Directory, step: int) -> bytes:
        assert run.chain is not None
        return run.chain.key("noise", step)

    def _checkpoint(self, run: Directory, marked: bool = True, forgotten: bool = True) -> None:
        assert run.journal is not None and run.chain is not None
        run.checkpoints = [c for c in run.checkpoints if (c.phase, c.step) != (run.weights.phase, run.weights.step)]
        run.checkpoints.append(run.weights)
        run.written_at[run.weights] = run.journal.ledger.length
        if not marked:
            return
        run.journal.checkpointed(run.weights.phase, run.weights.step, run.weights.digest)
        for update in run.weights.past:
            name = (update.key, update.step)
            assert self.released.setdefault(name, update) == update, "two released updates share a noise key"
            self.out_of[run.path].add(name)
        if forgotten:
            key_chain.forget(run.key, run.chain.segment, run.weights.step)
            run.chain.forget(run.weights.step)

    def _kill(self, run: Directory) -> None:
        if run.journal is not None:
            run.journal.ledger.close()
            run.journal = run.chain = None

    def _step(self, run: Directory, until: str = "done") -> None:
        journal, step, phase = run.journal, run.weights.step + 1, run.weights.phase
        assert journal is not None
        key = self._key(run, step)
        announced = facts(step, PLAN_HERE, keyed=key.hex())
        journal.open_step(phase, step, announced)
        if until == "opened":
            return
        update = Update(key, step, run.weights.digest, run.config, run.process)
        journal.commit_step(phase, step, announced)
        run.weights = Weights(phase, step, (*run.weights.past, update))

    # What may happen to it.

    def _pick(self, number: int, alive: bool) -> Directory | None:
        found = [run for run in self.runs if (run.journal is not None) == alive]
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 5), count=st.integers(1, 4))
    def trains(self, number: int, count: int) -> None:
        run = self._pick(number, alive=True)
        for _ in range(count if run else 0):
            assert run is not None
            if run.weights.step == STEPS:
                if run.weights.phase == PHASES - 1:
                    return
                self._checkpoint(run)
                self._enter(run)
            try:
                self._step(run)
            except BudgetSpent:
                return

    @rule(number=st.integers(0, 5))
    def saves(self, number: int) -> None:
        if run := self._pick(number, alive=True):
            self._checkpoint(run)

    @rule(
        number=st.integers(0, 5),
        moment=st.sampled_from(["idle", "opened", "committed", "saved, not marked", "marked, not forgotten", "torn"]),
    )
    def is_killed(self, number: int, moment: str) -> None:
        run = self._pick(number, alive=True)
        if run is None:
            return
        if moment != "idle" and run.weights.step < STEPS:
            try:
                self._step(run, "opened" if moment == "opened" else "done")
            except BudgetSpent:
                moment = "idle"
            if moment == "saved, not marked":
                self._checkpoint(run, marked=False)
        if moment == "marked, not forgotten":
            self._checkpoint(run, forgotten=False)
        self._kill(run)
        if moment == "torn":
            with (run.path / "ledger.jsonl").open("ab") as file:
                file.write(b'{"facts":{"clip')

    @rule(number=st.integers(0, 5), back=st.integers(0, 3), config=st.sampled_from([CONFIG, CONFIG, "config-2"]))
    def is_resumed(self, number: int, back: int, config: str) -> None:
        """From the last checkpoint, or, where `latest` was corrupt or somebody chose so, from an earlier one."""
        run = self._pick(number, alive=False)
        if run is not None:
            kept = run.checkpoints
            self._start(run, kept[max(0, len(kept) - 1 - back)], config)

    @precondition(lambda self: len(self.runs) < 3)
    @rule(number=st.integers(0, 5))
    def is_copied(self, number: int) -> None:
        run = self._pick(number, alive=False)
        if run is None:
            return
        path = self.root / f"run{len(self.runs)}"
        shutil.copytree(run.path, path)
        self.runs.append(
            Directory(path, list(run.checkpoints), dict(run.written_at), None, None, run.weights, run.config)
        )
        self.out_of[path] = set(self.out_of[run.path])

    @invariant()
    def a_leak_gives_no_key_of_what_was_released(self) -> None:
        released = {key for key, _ in self.released}
        for run in self.runs:
            if run.journal is None:
                continue
            stored = load(run.key).chain
            assert stored is not None and run.chain is not None
            assert run.chain.first == stored.step
            for step in range(STEPS + 2):
                assert stored.at(step).key("noise") not in released, LEAKED
                assert step < stored.step or run.chain.key("noise", step) not in released, LEAKED

    @invariant()
    def charged_covers_released(self) -> None:
        for run in self.runs:
            if run.journal is None:
                continue
            history = run.journal.history
            charged = sum(event.count for event in history.charged())
            released = len(self.out_of[run.path])
            assert charged >= released
            if released:
                assert history.epsilon() >= epsilon([Event(1.0, PLAN.noise_multiplier, released)], PLAN.delta)
            assert history.epsilon() <= history.budget()
