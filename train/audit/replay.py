"""Two trainings under the same keys, one record blanked in the second: what may differ, and by how much?

Both use the trainer of every run, with its board, checkpoints, measurements, ledger and report, each in a folder of its
own. The mechanism's outputs (weights, optimizer state, released numbers) may depend on the record, hidden by noise. So
the second training takes over the outputs of the first after each step, and both compute the same next step on
neighbouring data sets. Everything else must then be equal, byte for byte: which records are drawn, the other records'
rows of the micro-batches, the noise, the ledger, and everything that the public sees. The sums may differ by at most C.
A branch that depends on a record's value shows in one such pair, and so does noise that is not what the ledger says.
The printed report is a function of real records without noise: PRIVATE.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.certificate.signature import public_key
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.key_chain import KeyChain, PhaseKeys
from murmuration.accounting.keys import RunKey
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import KEYED
from murmuration.accounting.noise import CorrelationFact
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.unit import noun
from murmuration.data.batch.loader import Reader
from murmuration.data.draw.micro_batch import EMPTY, Fetched, MicroBatch
from murmuration.data.draw.samplers import make_sampler
from murmuration.model.build import build
from murmuration.model.trainable import select
from murmuration.train.audit.setup import audited_phase
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.core import Computation
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.engines.around import EngineAround
from murmuration.train.engines.base import AppliedUpdate, Engine
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.noise.update import Noise, Update
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.recipe.ready_phase import ReadyPhase, clip_rule, plan_of_phase
from murmuration.train.run.board import Board, Pace
from murmuration.train.run.context import RunContext
from murmuration.train.run.declare import header
from murmuration.train.run.phase import PhaseTraining
from murmuration.train.run.public_mixing import PublicRecords
from murmuration.train.run.report import write_report
from murmuration.train.run.run import tell_state
from murmuration.train.run.trainer import Trainer
from murmuration.train.step import Make, StepSummary
from murmuration.train.storage.certify import OF_THIS_TRAINER
from murmuration.train.storage.checkpoint import Checkpoints, Keep
from murmuration.train.storage.run_dir import PublicTimes, RunDir

# The two sums are made of the same products except for one record's: beyond that, only rounding may move them.
ROUNDING = 1e-3
# By how many standard errors the measured deviation of all noise may miss the planned one.
MOST_ERRORS = 5.0
Around = Callable[[Noise], Noise]
# Equal in both trainings: the speed that a self-test would have timed on synthetic records, and the start time.
PACE, START = 1000.0, 0


@dataclass
class ReplayReport:
    phase: str
    record: int
    steps: int
    drawn: int
    """In how many steps the record was drawn."""
    bound: float
    moves: list[float] = field(default_factory=list)
    """Per step, the distance between the two sums, in units of C."""
    noun: str = "record"
    """What was blanked: a record, or a unit of several."""
    released: dict[str, float] = field(default_factory=dict)
    """For each number that is released with noise, the largest distance between the two, in units of its bound."""
    noise_ratio: float = math.nan
    """Measured deviation of the noise over the planned one, with the error of that measurement."""
    noise_error: float = math.nan
    equal: list[str] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(self.__dict__ | {"largest_move": max(self.moves, default=0.0)})

    def as_text(self) -> str:
        lines = [
            "PRIVATE: the following is computed from real records without noise",
            f"phase {self.phase}: {self.steps} steps made twice, with {self.noun} {self.record} and with a blank in "
            f"its place; it was drawn in {self.drawn} of them",
            f"equal, byte for byte: {', '.join(self.equal) or 'nothing'}",
            f"sums moved by at most {max(self.moves, default=0.0):.6f}·C",
            *(f"{name} moved by at most {apart:.6f} of its bound" for name, apart in self.released.items()),
            f"noise: {self.noise_ratio:.4f} of the planned deviation (± {self.noise_error:.4f})",
        ]
        return "\n".join([*lines, *(f"REFUTED: {each}" for each in self.refuted)])


class BlankedReader:
    """Replaces one record by ⊥: its slot is drawn and planned as before, and nothing is read for it."""

    def __init__(self, inner: Reader, record: int) -> None:
        self._inner, self._record = inner, record

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        return self._inner.fetch(np.where(ids_row == self._record, EMPTY, ids_row), step)

    def report(self, fetched: Fetched) -> None:
        self._inner.report(fetched)

    def close(self) -> None:
        self._inner.close()


@dataclass
class SeenNoise:
    """What was drawn in all steps so far."""

    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    squares: float = 0.0
    elements: int = 0


class RecordedNoise:
    """Records the noise that a step really adds, for the comparison."""

    def __init__(self, inner: Noise, seen: SeenNoise | None = None) -> None:
        self._inner = inner
        self.seen = seen or SeenNoise()

    @property
    def std(self) -> float:
        return self._inner.std

    def at(self, std: float) -> RecordedNoise:
        return RecordedNoise(self._inner.at(std), self.seen)

    @property
    def divisor(self) -> float:
        return self._inner.divisor

    @property
    def generator(self) -> str:
        return self._inner.generator

    @property
    def grid(self) -> float:
        return self._inner.grid

    def correlation(self, step: int) -> CorrelationFact | None:
        return self._inner.correlation(step)

    def prepare(self, step: int) -> None:
        self._inner.prepare(step)

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        for fragment, noise in self._inner.chunks(step, fragments, device, dtype):
            values = noise.double().cpu().numpy() * (self.grid or 1.0)
            self.seen.digest.update(f"{step} {fragment.parameter} {fragment.start} ".encode() + values.tobytes())
            self.seen.squares += float(np.square(values).sum())
            self.seen.elements += fragment.length
            yield fragment, noise


class SummedEngine(EngineAround):
    """Keeps each step's sum as it is before the noise is added."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.sums: dict[tuple[int, int], Tensor] = {}
        self._rows: list[str] = []

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        self._rows += digests_of_slots(batch)
        super().accumulate(batch, rule)

    def take_rows(self) -> list[str]:
        """A digest of every slot of the step's micro-batches, in the order of the records that were drawn."""
        rows, self._rows = self._rows, []
        return rows

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        self.sums = {}
        return self.inner.update(_Summed(update, self.sums), learning_rate)


def digests_of_slots(batch: MicroBatch) -> list[str]:
    slots, tensors = len(batch.present), [("present", batch.present), *sorted(batch.inputs.items())]
    found = []
    for slot in range(slots):
        digest = hashlib.sha256()
        for name, tensor in tensors:
            own = tensor.unflatten(0, (slots, -1))[slot].cpu().contiguous().numpy()
            digest.update(f"{name} {own.dtype} {tensor.shape} ".encode() + own.tobytes())
        found.append(digest.hexdigest())
    return found


class _Summed:
    def __init__(self, inner: Update, sums: dict[tuple[int, int], Tensor]) -> None:
        self._inner, self._sums = inner, sums

    @property
    def elements(self) -> int:
        return self._inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            self._sums[fragment.parameter, fragment.start] = fragment.of(flat).detach().double().clone()
        self._inner.finish(flat, fragments)


class Leading:
    """The first training's step, which remembers the numbers it released."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self.released: dict[str, float] = {}

    def __call__(self, step: int, learning_rate: float) -> StepSummary:
        summary = self._make(step, learning_rate)
        self.released = dict(summary.released)
        return summary


class Following:
    """The second training's step, which ends by taking over the outputs of the first training's mechanism."""

    def __init__(self, make: Make, engine: Engine, leader: Leading, leaders_engine: Engine) -> None:
        self._make, self._engine, self._leader, self._leaders = make, engine, leader, leaders_engine
        self.released: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, step: int, learning_rate: float) -> StepSummary:
        summary = self._make(step, learning_rate)
        for one, other in zip(self._leaders.shards(), self._engine.shards(), strict=True):
            with torch.no_grad():
                other.weights.copy_(one.weights)
                for name, value in one.state.items():
                    other.state[name].copy_(value)
        for name, value in self._leader.released.items():
            self.released.setdefault(name, []).append((value, summary.released[name]))
        summary.released = dict(self._leader.released)
        return summary


@dataclass
class World:
    """One of the two trainings."""

    run: RunContext
    private: PrivatePhase
    step: Leading | Following
    noise: RecordedNoise
    trainer: Trainer
    console: StringIO = field(default_factory=StringIO)

    def __post_init__(self) -> None:
        self._steps = self.trainer.steps_after(0)

    def begin(self) -> None:
        with redirect_stdout(self.console):
            self.trainer.save(0)

    def advance(self) -> None:
        """Makes a step; after the last one, ends the training."""
        with redirect_stdout(self.console):
            next(self._steps, None)

    @property
    def engine(self) -> SummedEngine:
        assert isinstance(self.private.engine, SummedEngine)
        return self.private.engine

    def close(self) -> None:
        self.private.close()
        self.run.writer.ledger.close()


def compare(first: World, second: World, plan: PrivacyPlan, report: ReplayReport) -> None:
    """Makes the steps in both trainings, and writes into the report what was equal and what was not."""
    worlds = (first, second)
    for world in worlds:
        world.begin()
    rows: list[list[list[str]]] = [[], []]
    for number in range(1, report.steps + 1):
        drawn = first.private.drawn(number)
        places = np.flatnonzero(drawn == report.record).tolist()
        report.drawn += len(places)
        for world, seen in zip(worlds, rows, strict=True):
            world.advance()
            own = world.engine.take_rows()
            seen.append([digest for place, digest in enumerate(own) if place not in places])
        sums, others = first.engine.sums, second.engine.sums
        squares = sum(float((sums[place] - others[place]).square().sum()) for place in sums)
        report.moves.append(math.sqrt(squares) / plan.clip_norm)
    for world in worlds:
        world.advance()
        with redirect_stdout(world.console):
            write_last_pages(world.run)
    sinks = [public_sinks(world.run.folder.root, world.console) for world in worlds]
    for what, pair in (
        ("all other rows of all micro-batches", rows),
        ("noise", [world.noise.seen.digest.hexdigest() for world in worlds]),
        ("ledger with its keyed digests of who was drawn", [each.pop("ledger.jsonl") for each in sinks]),
    ):
        if pair[0] == pair[1]:
            report.equal.append(what)
        else:
            report.refuted.append(f"{what}: not equal, although only one {report.noun} was blanked")
    if unequal := differing(*sinks):
        told = ", ".join(unequal)
        report.refuted.append(f"what the public sees: {told} not equal, although one {report.noun} was blanked")
    else:
        report.equal.append(f"what the public sees ({', '.join(sinks[0])})")
    if isinstance(second.step, Following):
        _judge_released(report, second.step.released, plan)
    _judge(report, first.noise.seen, plan)


def _judge_released(report: ReplayReport, pairs: dict[str, list[tuple[float, float]]], plan: PrivacyPlan) -> None:
    """Judges the numbers released with the same noise: they lie as far apart as the sums behind them."""
    for metric in plan.metrics:
        scale = metric.expected(plan.divisor, plan.held_out)
        both = pairs.get(f"noised_{metric.name}", [])
        apart = max((abs(one - other) * scale for one, other in both), default=0.0)
        # They are released as 32-bit floats.
        rounded = max((max(abs(one), abs(other)) * scale for one, other in both), default=0.0) * 2.0**-23
        report.released[metric.name] = apart / metric.bound
        if apart > metric.bound * (1 + ROUNDING) + rounded:
            report.refuted.append(f"one {report.noun} moved the released {metric.name} by more than its bound")


def _judge(report: ReplayReport, noise: SeenNoise, plan: PrivacyPlan) -> None:
    if (largest := max(report.moves, default=0.0)) > report.bound * (1 + ROUNDING):
        report.refuted.append(f"one {report.noun} moved a sum by {largest:.6f}·C, but {report.bound:.6f}·C is promised")
    report.noise_ratio = math.sqrt(noise.squares / max(1, noise.elements)) / plan.noise_std
    report.noise_error = math.sqrt(0.5 / max(1, noise.elements))
    if abs(report.noise_ratio - 1) > MOST_ERRORS * report.noise_error:
        report.refuted.append(
            f"the noise has {report.noise_ratio:.4f} of the planned deviation, more than {MOST_ERRORS:g} standard "
            "errors away from 1"
        )


def replay(
    config: Config, ranks: Ranks, steps: int, record: int | None, around: Around = lambda noise: noise
) -> ReplayReport:
    """Runs both trainings and compares them; `around` is for planted faults in tests."""
    phase, privacy = audited_phase(config, "a replay")
    if privacy.sampling != "poisson":
        raise RecipeError(f"a replay counts on Poisson samples; give --set {phase.where}.privacy.sampling=poisson")
    if privacy.noise is not None:
        raise RecipeError(f"a replay measures independent noise alone; give --set {phase.where}.privacy.noise=null")
    plan = plan_of_phase(phase.settings, phase.n, phase.where, config.run.noise)
    steps = min(steps, plan.steps)
    phase = replace(phase, settings=phase.settings.model_copy(update={"steps": steps}))
    rule, one = clip_rule(privacy, plan, config.micro_batch), noun(plan.units)
    twice = _Replay(config, ranks, phase, plan, rule, around)
    if record is None:
        record = twice.first_drawn()
    if not 0 <= record < plan.records:
        raise RecipeError(f"--record {record} is not among the {plan.records} {one}s; give a smaller number")
    folder = Path(tempfile.mkdtemp(prefix="murmuration-replay-"))
    worlds: list[World] = []
    try:
        for name, blanked in (("with", None), ("without", record)):
            leader = worlds[0] if worlds else None
            worlds.append(twice.world(folder / name, blanked, leader))
        report = ReplayReport(phase.name, record, steps, 0, rule.sensitivity / plan.clip_norm, noun=one)
        compare(worlds[0], worlds[1], plan, report)
        return report
    finally:
        for world in worlds:
            world.close()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Replay:
    """What both trainings are made of."""

    config: Config
    ranks: Ranks
    phase: ReadyPhase
    plan: PrivacyPlan
    rule: ClipRule
    around: Around

    def __post_init__(self) -> None:
        self.key = RunKey.fresh()
        self.derive = PhaseKeys(
            partial(self.key.derive, phase=self.phase.number, segment="replay"),
            KeyChain(self.key.first_link("replay", step=1)),
        )

    def first_drawn(self) -> int:
        """A random record of the first non-empty draw: a record that is never drawn would show nothing."""
        plan, derive = self.plan, self.derive
        sampler = make_sampler(plan.sampling, derive("sampling"), derive("sampling-digest"), plan.records)
        for number in range(1, self.phase.settings.steps + 1):
            if len(ids := sampler.draw(number).ids):
                return int(ids[secrets.randbelow(len(ids))])
        return secrets.randbelow(plan.records)

    def world(self, folder: Path, blanked: int | None, leader: World | None) -> World:
        phase, plan, derive, config = self.phase, self.plan, self.derive, self.config
        torch.manual_seed(0)  # both begin from the same weights
        model = build(phase.shape, phase.settings.objective)
        select(model, phase.settings.trainable)
        assert phase.settings.privacy is not None, "a phase without privacy is not replayed"
        private = PrivatePhase(
            plan, model, self.rule, phase.settings.optimizer, derive, self.ranks,
            EngineSettings("local", config.micro_batch), Computation.of(config.run), number=phase.number,
            around_engine=SummedEngine, probes=phase.settings.privacy.loss_probes,
        )  # fmt: skip
        engine = private.engine
        assert isinstance(engine, SummedEngine)
        reader: Reader = phase.reader(derive, phase.slot_rows(derive("augmentation")))
        if blanked is not None:
            reader = BlankedReader(reader, blanked)
        private.feed(reader)
        # A run directory like that of any run, with board and ledger.
        run_dir, key = RunDir(folder), self.key
        run_dir.prepare()
        journal = Journal(Ledger.open(run_dir.ledger))
        journal.start_run("replay", key.check_value(), key.debug, {}, KEYED, public_key(key))
        journal.declare_plan(phase.number, phase.name, plan, describe("pld"))
        checkpoints = Checkpoints(run_dir.checkpoints, self.ranks, Keep())
        checkpoints.times = PublicTimes(START)
        run = RunContext(
            "replay", run_dir, self.ranks, journal, key, checkpoints, None, config,
            Board(run_dir, self.ranks.main, checkpoints.times, config.run.private_curves, config.phases),
            StopRequest(run_dir.stop_file),
        )  # fmt: skip
        contents = run.contents(phase)
        digest = config.digest(phase.number, contents)
        journal.begin_segment(phase.number, digest, contents["data"], 0, "first", "replay")
        noise = RecordedNoise(self.around(private.core.noise("noise")))
        steps: list[Leading | Following] = []

        def together(make: Make) -> Make:
            """Learning rates that follow probes are around it, so that both follow the first training's."""
            if leader is not None and isinstance(leader.step, Leading):
                steps.append(Following(make, engine, leader.step, leader.engine))
            else:
                steps.append(Leading(make))
            return steps[0]

        private.begin(run.writer, run.stop, noise=noise, around_step=together)
        watching = PublicRecords.of(run, phase, engine, derive, private)
        pace = Pace(plan.divisor, public=False, synthetic=PACE)
        saving = private.saving(run, lambda: header(run, phase), lambda: None)
        trainer = PhaseTraining(run, phase).trainer(private.step, pace, saving, watching, self.rule)
        return World(run, private, steps[0], noise, trainer)


# Everything that a run shows to the public, as bytes: it must be equal in two runs that differ in one record.

OWNERS_ALONE = ("tb/private", "logs/private", "secret")
RECORD_HEADER, RECORD_FOOTER = 12, 4  # length and checksum before an event, checksum after it


def write_last_pages(run: RunContext) -> None:
    """The report with the certificate in it, and the state for scripts, as they stand after these steps."""
    history, entries = run.writer.history, run.writer.ledger.entries
    extra = {"known_deviations": list(OF_THIS_TRAINER), "siblings": [], "hashes": {}}
    document = compose(history, entries, extra)
    write_report(run.folder, run.config, document, [])
    tell_state(run, status="done")
    run.board.close()


def public_sinks(root: Path, console: StringIO) -> dict[str, bytes]:
    """By name: the console and every file that is not for the owner alone."""
    found = {"console": console.getvalue().encode()}
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        name = path.relative_to(root).as_posix()
        if name.startswith(OWNERS_ALONE):
            continue
        content = path.read_bytes()
        if path.parent.name == "public" and "tfevents" in path.name:
            # The name contains a process id and a time, and the first event says when the file was opened.
            (length,) = struct.unpack("<Q", content[:8])
            name, content = "tb/public", content[RECORD_HEADER + length + RECORD_FOOTER :]
        elif name == "run_state.json":
            content = json.dumps(json.loads(content) | {"id": "random"}).encode()
        found[name] = content
    return found


def differing(first: dict[str, bytes], second: dict[str, bytes]) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
