"""What a ledger says happened: segments, opened and committed steps, checkpoints, and the epsilon that is charged.

Every opened step is charged, committed or not, in whichever segment; a step replayed within its segment counts once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.adaptive import ROUNDING, NormTrail
from murmuration.accounting.epsilon.accountant import Accountant, epsilon, merge
from murmuration.accounting.errors import AccountingError, written_before
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import FORMAT, LedgerEntry, LedgerError, Lines
from murmuration.accounting.ledger.facts import (
    Charge,
    CheckpointMark,
    Segment,
    StepFacts,
    StepId,
)  # fmt: skip
from murmuration.accounting.ledger.lines import (
    LINES,
    NAMED,
    RECORDS_AS_PUBLIC,
    ChoiceLine,
    CopiedLine,
    EarlierLine,
    FinishLine,
    LostLine,
    NonprivateLine,
    Origin,
    PlanLine,
    PublicLine,
    RecoveredLine,
    ResumeLine,
    RunLine,
    StepLine,
    StoreLine,
    TuningLine,
    Word,
    WordLine,
)  # fmt: skip
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.strict_json import read
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words

if TYPE_CHECKING:
    from murmuration.accounting.epsilon.tuning import Declared

NOT_AFTER_FINISH = (
    "plan", "nonprivate", "origin", "earlier", "public", "store", "word", "segment", "open", "commit", "finish",
)  # fmt: skip
NOTHING_PRIVATE = "NOT PRIVATE: no phase of this run was private"


@dataclass
class Progress:
    """The step that a segment began after, and the last ones that were opened and committed in it."""

    begun: int
    opened: int
    committed: int


@dataclass
class History:
    """The ledger, read from its first line to its last."""

    run: dict[str, Any] = field(default_factory=dict)
    plans: dict[int, PrivacyPlan] = field(default_factory=dict)
    phase_names: dict[int, str] = field(default_factory=dict)
    nonprivate: dict[int, bool] = field(default_factory=dict)
    """Phases without clipping and noise, and whether their data were declared public every time."""
    public_manifests: dict[int, set[str]] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    progress: dict[tuple[int, int], Progress] = field(default_factory=dict)
    """How far each phase's segment came."""
    replayable: array[int] = field(default_factory=lambda: array("Q"))
    """Places of the lines that opened and committed the steps since the newest checkpoint or segment, in turn: no
    earlier step may be replayed."""
    announced: StepFacts | None = None
    """Facts of the step that was opened last."""
    trails: dict[int, NormTrail] = field(default_factory=dict)
    """Clipping norms of phases that adapt them."""
    checkpoints: list[CheckpointMark] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # steps that did what no epsilon covers
    late_plans: list[int] = field(default_factory=list)  # phases whose plan may depend on steps opened before
    tunings: list[Declared] = field(default_factory=list)  # chosen by outputs; no declaration can be taken back
    choices: list[str] = field(default_factory=list)  # public metrics by which checkpoints are kept, perhaps chosen
    public_uses: list[PublicLine] = field(default_factory=list)  # on the owner's word, without noise
    stores: list[StoreLine] = field(default_factory=list)  # that see who is drawn
    words: set[Word] = field(default_factory=set)
    origins: list[Origin] = field(default_factory=list)  # runs whose weights this one began from
    earlier: list[EarlierLine] = field(default_factory=list)  # records without noise, in what this run began with
    finished: bool = False
    _line: int = 0
    _charged: dict[tuple[int, int, Event], Counter[int]] = field(default_factory=dict, repr=False)
    """How many steps of each phase, numbering of its records and kind drew from each part of these, where those take
    turns; of epochs, where records are allocated."""
    _last: tuple[StepId, Event] | None = field(default=None, repr=False)
    """The step that was opened last, and what it, or its epoch up to it, is charged."""
    _same: tuple[tuple[Any, ...], Event] | None = field(default=None, compare=False, repr=False)
    _faulty: dict[int, str] = field(default_factory=dict)
    """The first fault of each phase that has one."""
    _uneven: set[int] = field(default_factory=set, repr=False)
    """Phases of which some step did something else than it had announced."""
    acting: dict[tuple[int, int], tuple[str, str, int]] = field(default_factory=dict)
    """Clipping rule, source of noise and trained elements of each segment, which its config fixes."""
    segment_lines: dict[tuple[int, int], int] = field(default_factory=dict)
    """How long the ledger was before each segment: what was written before belongs to an earlier one."""
    marks_before: dict[tuple[int, int], int] = field(default_factory=dict)
    """How many checkpoints there were before each segment."""
    copied: int = 0
    """How many segments there were when the run directory was last found to be a copy."""
    ids: list[str] = field(default_factory=list)
    """The id of the run comes last; before it, oldest first, those of the runs that it is a copy of."""
    lost: list[Charge] = field(default_factory=list)
    """Charges of parts of this ledger that were lost when it was restored from a backup."""
    lost_at: int = 0
    """How many segments there were when the last such part was noticed."""

    @staticmethod
    def of(entries: Iterable[LedgerEntry]) -> History:
        history = History()
        for entry in entries:
            history.take(entry)
        return history

    @staticmethod
    def read(path: Path) -> tuple[History, Lines]:
        if not path.is_file():
            raise LedgerError(f"there is no ledger at {path}; name the run directory that holds ledger.jsonl")
        entries = Lines(path)
        history = History.of(entries.load())
        if not entries:
            raise LedgerError(f"{path} is empty, so it describes no run; restore it, or name another run directory")
        return history, entries

    def take(self, entry: LedgerEntry) -> None:
        if entry.kind not in LINES:
            raise LedgerError(f"line {entry.index + 1}: unknown kind {entry.kind!r}; read it with a newer version")
        if (entry.kind == "run") != (entry.index == 0):
            raise LedgerError(f"line {entry.index + 1}: a ledger starts with exactly one run entry")
        self._line = entry.index
        if not self.ids:
            self.ids.append(entry.hash)
        if entry.kind == "run" and not {"signer", "record_digests"} <= entry.fields.keys():
            raise LedgerError(written_before("the ledger", "start a new run directory"))
        try:
            if self.finished and entry.kind in NOT_AFTER_FINISH:
                raise ValueError("the run was finished before")
            getattr(self, f"_{entry.kind}")(read(LINES[entry.kind], entry.fields))
        except (ValueError, ArithmeticError) as error:
            raise LedgerError(f"line {entry.index + 1}: malformed {entry.kind!r} entry: {error}") from None

    def _run(self, line: RunLine) -> None:
        if line.format != FORMAT:
            raise ValueError(f"format {line.format!r} is not {FORMAT!r}")
        if line.started is not None and date.fromisoformat(line.started).isoformat() != line.started:
            raise ValueError(f"{line.started} is not a day, YYYY-MM-DD")
        self.run = asdict(line)

    def _plan(self, line: PlanLine) -> None:
        phase, plan = line.phase, line.plan
        if phase in self.plans:
            raise ValueError(f"phase {phase} has a plan already, and a plan is frozen")
        if phase in self.nonprivate:
            raise ValueError(f"phase {phase} was non-private before, so it cannot become private")
        if (plan.unit, plan.adjacency) != (unit_in_words(plan.units), adjacency_in_words(plan.units)):
            raise ValueError(f"the plan promises something for {plan.unit!r} and neighbours {plan.adjacency!r}")
        if other := next((known.unit for known in self.plans.values() if known.unit != plan.unit), None):
            raise ValueError(f"the plan protects {plan.unit}, but an earlier phase protects {other}: no one claim")
        plan.event()  # refused if it is no mechanism
        if self._last is not None:
            self.late_plans.append(phase)
        self.plans[phase] = plan
        if plan.adaptive is not None:
            self.trails[phase] = NormTrail(plan.adaptive, plan.clip_norm)
        self.phase_names[phase] = line.name

    def _nonprivate(self, line: NonprivateLine) -> None:
        phase = line.phase
        if phase in self.plans:
            raise ValueError(f"phase {phase} was private before, so it cannot train without noise")
        # One declaration as not public is enough, whatever is said before or after.
        self.nonprivate[phase] = line.public_data and self.nonprivate.get(phase, True)
        self.public_manifests.setdefault(phase, set()).add(line.manifest_digest)
        self.phase_names[phase] = line.name

    def _segment(self, segment: Segment) -> None:
        if segment.phase not in self.plans:
            raise ValueError(f"phase {segment.phase} has no plan")
        if segment.number != len(self.segments_of(segment.phase)):
            raise ValueError(f"segment {segment.number} is out of order")
        if not 0 <= segment.from_step <= self.plans[segment.phase].steps:
            raise ValueError(f"segment {segment.number} begins after step {segment.from_step}, which its plan has not")
        self.marks_before[segment.phase, segment.number] = len(self.checkpoints)
        self.segment_lines[segment.phase, segment.number] = self._line
        self.segments.append(segment)
        self.progress[segment.phase, segment.number] = Progress(*[segment.from_step] * 3)
        del self.replayable[:]

    def _open(self, line: StepLine) -> None:
        step_id, facts = line.step_id, line.facts
        segment = self._require_current(step_id)
        plan, done = self.plans[step_id.phase], self.progress[step_id.phase, step_id.segment]
        if not segment.from_step < step_id.step <= plan.steps:
            raise ValueError(f"{step_id} is outside the steps {segment.from_step + 1} to {plan.steps} of its segment")
        if step_id.step <= done.opened:
            raise ValueError(f"{step_id} was opened before; a replayed step is not written twice")
        if not step_id.step - 1 == done.opened == done.committed:
            raise ValueError(f"{step_id} was opened while step {done.committed + 1} had not ended")
        if (departure := self.departure(step_id, facts)) is not None:
            raise ValueError(f"step {step_id.step} of phase {step_id.phase} {departure}")
        acting = (facts.clipping.rule, facts.noise.generator, facts.noise.elements)
        if self.acting.setdefault((segment.phase, segment.number), acting) != acting:
            raise ValueError(
                f"step {step_id.step} of phase {step_id.phase} clips by another rule, draws noise from another "
                "source or trains another number of weights than the steps before it, which one config cannot do"
            )
        if (trail := self.trails.get(step_id.phase)) is not None:
            stated = facts.clipping.sensitivity, facts.noise.std
            trail.opened(step_id.segment, step_id.step, segment.from_step, plan.noise_multiplier, *stated)
        self._charge(step_id, self.event(step_id.phase, facts))
        done.opened = step_id.step
        self.announced = facts
        self.replayable.append(self._line)

    def _commit(self, line: StepLine) -> None:
        step_id, facts = line.step_id, line.facts
        self._require_current(step_id)
        done, announced = self.progress[step_id.phase, step_id.segment], self.announced
        if announced is None or step_id.step != self.pending():
            raise ValueError(f"{step_id} was committed without being open, or twice")
        if step_id.phase in self.trails:
            self.trails[step_id.phase].committed(step_id.segment, step_id.step, line.share)
        done.committed = step_id.step
        self.replayable.append(self._line)
        if facts == announced:
            return
        self._uneven.add(step_id.phase)
        if (fault := announced.fault_of(facts)) is None:
            self._charge(step_id, self.event(step_id.phase, facts))
        else:
            self.faults.append(f"step {step_id.step} of phase {step_id.phase} {fault}")
            self._faulty.setdefault(step_id.phase, self.faults[-1])

    def _require_current(self, step_id: StepId) -> Segment:
        """Steps belong to the segment that was begun last in any phase: going back to another needs a new one."""
        if not self._is_current(step_id.phase, step_id.segment):
            raise ValueError(f"{step_id} is outside the current segment")
        return self.segments[-1]

    def _is_current(self, phase: int, segment: int) -> bool:
        return bool(self.segments) and (self.segments[-1].phase, self.segments[-1].number) == (phase, segment)

    def _not_replayable(self, done: Progress) -> int:
        """The last step of the current segment that is not."""
        return done.opened - (len(self.replayable) + 1) // 2

    def places_of(self, step_id: StepId) -> array[int]:
        """Places of the lines that opened and committed a step, as far as there are such; none if it may not be
        replayed."""
        if not self._is_current(step_id.phase, step_id.segment):
            return array("Q")
        first = 2 * (step_id.step - self._not_replayable(self.progress[step_id.phase, step_id.segment]) - 1)
        return self.replayable[first : first + 2] if first >= 0 else array("Q")

    def _checkpoint(self, mark: CheckpointMark) -> None:
        self.checkpoints.append(mark)
        if self._is_current(mark.phase, mark.segment):
            done = self.progress[mark.phase, mark.segment]
            saved = min(mark.step, done.committed) - self._not_replayable(done)
            del self.replayable[: 2 * max(0, saved)]

    def _copied(self, line: CopiedLine) -> None:
        self.copied = len(self.segments)
        self.ids.append(line.id)

    def _lost(self, line: LostLine) -> None:
        if strange := [charge.phase for charge in line.charged if charge.phase not in self.plans]:
            raise ValueError(f"steps of phase {strange[0]} are charged, which has no plan")
        for charge in line.charged:
            charge.event()  # refused if it is no mechanism
        self.lost += line.charged
        self.lost_at = len(self.segments)

    def _resume(self, line: ResumeLine | RecoveredLine) -> None:
        del line  # shows a reader where the run continued; nothing is charged or credited for it

    _recovered = _resume

    def _tuning(self, line: TuningLine) -> None:
        self.tunings.append(line.declared())

    def _choice(self, line: ChoiceLine) -> None:
        self.choices.append(line.by)

    def _public(self, line: PublicLine) -> None:
        if line.phase not in self.phase_names:
            raise ValueError(f"phase {line.phase} was not declared before")
        self.public_uses.append(line)

    def _store(self, line: StoreLine) -> None:
        if line.phase not in self.phase_names:
            raise ValueError(f"phase {line.phase} was not declared before")
        self.stores.append(line)

    def _word(self, line: WordLine) -> None:
        self.words.add(line.what)

    def _origin(self, origin: Origin) -> None:
        self.origins.append(origin)

    def _earlier(self, line: EarlierLine) -> None:
        self.earlier.append(line)

    def _finish(self, line: FinishLine) -> None:
        del line
        self.finished = True

    @property
    def run_id(self) -> str:
        return self.ids[-1]

    @property
    def unit(self) -> Unit | None:
        """What every plan protects, with the first plan's number of rows; None: a record."""
        return next((plan.units for plan in self.plans.values()), None)

    def segments_of(self, phase: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.phase == phase]

    def last_checkpoint(self) -> CheckpointMark | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def pending(self) -> int | None:
        """The step of the current segment that was opened and never committed."""
        if not self.segments:
            return None
        done = self.progress[self.segments[-1].phase, self.segments[-1].number]
        return done.opened if done.opened > done.committed else None

    def steps(self, phase: int | None = None) -> tuple[int, int]:
        """How many steps were opened, and how many of them committed: in one phase, or in all."""
        of = [done for (number, _), done in self.progress.items() if phase in (None, number)]
        return sum(done.opened - done.begun for done in of), sum(done.committed - done.begun for done in of)

    def last_committed(self, phase: int) -> int:
        """0: none was."""
        of = (done for (number, _), done in self.progress.items() if number == phase)
        return max((done.committed for done in of if done.committed > done.begun), default=0)

    def without_noise(self) -> frozenset[str]:
        """Digests of all records that this run used as public: trained on, mixed in, or measured on; and those that
        went into the weights that it began with."""
        trained = (digest for manifests in self.public_manifests.values() for digest in manifests)
        used = (line.digest for line in self.public_uses if line.use in RECORDS_AS_PUBLIC)
        return frozenset(trained).union(used, (line.digest for line in self.earlier))

    def protected(self) -> frozenset[str]:
        """Digests of all record sets that these weights may reveal: this run's own, and those of runs before it."""
        before = (digest for origin in self.origins for digest in origin.protected)
        return frozenset(segment.manifest_digest for segment in self.segments).union(before)

    def why_not_private(self) -> str | None:
        """None if the claim of privacy may be made."""
        if self.run["debug"]:
            return "NOT PRIVATE (debug): the keys come from a seed that the user gave"
        undeclared = [self.phase_names[index] for index, public in self.nonprivate.items() if not public]
        if undeclared:
            return f"NOT PRIVATE: phase {', '.join(undeclared)} trained without noise on data not declared public"
        protected = {segment.manifest_digest for segment in self.segments}
        exposed = [self.phase_names[i] for i, manifests in self.public_manifests.items() if manifests & protected]
        if exposed:
            return f"NOT PRIVATE: phase {', '.join(exposed)} had no noise on records that another phase protects"
        if self.without_noise() & protected:
            return "NOT PRIVATE: records that a phase protects were used without noise, by this run or one before it"
        if self.faults:
            return f"NOT PRIVATE: {self.faults[0]}"
        if free := [declared.statement for declared in self.tunings if declared.tuning is None]:
            return f"NOT PRIVATE: tuned on private data, by a number of runs that is not charged ({free[0]})"
        if self.late_plans and self.tunings:
            return (
                f"NOT PRIVATE: the run was chosen among several, and the plan of phase "
                f"{self.phase_names[self.late_plans[0]]} was declared after private steps had run: for both together "
                "nothing is proved"
            )
        return None if self.plans else NOTHING_PRIVATE

    def why_budget_is_claimed(self) -> str | None:
        """Why the claim must be the planned budget and not what was spent: someone may have chosen by the outputs."""
        if later := [segment for segment in self.segments if segment.number > 0]:
            return f"phase {self.phase_names[later[0].phase]} went on in a new segment ({later[0].reason})"
        for phase, plan in self.plans.items():
            done = self.last_committed(phase)
            if done < plan.steps and (self.finished or any(later > phase for later in self.phase_names)):
                return f"phase {self.phase_names[phase]} ended after {done} of {plan.steps} planned steps"
        if self.choices:
            return f"checkpoints are kept by their {self.choices[0]}, so one may be chosen by outputs"
        if self.late_plans:
            return f"the plan of phase {self.phase_names[self.late_plans[0]]} was declared after private steps had run"
        return None

    def charged(self, phase: int | None = None, fewest: bool = False) -> list[Event]:
        """Each opened step at the weaker of what was announced and what was done; of steps that take turns with the
        records, those that one record may have been drawn in. That is the most for any record, or the fewest. An epoch
        of random allocation is charged whole as soon as one of its steps is opened, at its step of least noise, and
        anew in each segment, which allocates all records anew."""
        if (fault := next((text for at, text in self._faulty.items() if phase in (None, at)), None)) is not None:
            raise LedgerError(f"no epsilon can be given: {fault}")
        events = []
        for (number, _, event), found in self._charged.items():
            if phase in (None, number):
                least = min(found.values()) if len(found) == self.plans[number].sampling.parts else 0
                events.append(replace(event, count=least if fewest else max(found.values())))
        events += [charge.event() for charge in self.lost if phase in (None, charge.phase)]
        return merge(events)

    def _charge(self, step_id: StepId, event: Event) -> None:
        """Counts a step that was opened, or that was committed with other noise than it had announced."""
        turn, numbered = self._turn(step_id), self._numbering(step_id)
        if self._last is not None and self._charged_as_one(step_id) == self._charged_as_one(self._last[0]):
            if event.sigma >= self._last[1].sigma:
                self._last = step_id, self._last[1]
                return
            before = self._charged[step_id.phase, numbered, self._last[1]]
            before[turn] -= 1
            if not before[turn]:
                del before[turn]
            if not before:
                del self._charged[step_id.phase, numbered, self._last[1]]
        self._charged.setdefault((step_id.phase, numbered, event), Counter())[turn] += 1
        self._last = step_id, event

    def _turn(self, step_id: StepId) -> int:
        """Which part of the records the step draws from."""
        return self.plans[step_id.phase].sampling.part(step_id.step)

    def _numbering(self, step_id: StepId) -> int:
        """Equal for steps in which each record surely had the same number, and so was in the same part. An index fixes
        the numbers. A program may give others at every start, and after one that left a block, a new segment begins."""
        return step_id.segment if self.run.get("record_digests") == NAMED else 0

    def _charged_as_one(self, step_id: StepId) -> tuple[int, int, int]:
        """Equal for steps that are charged as one: those of an epoch that is drawn by the keys of one segment."""
        return step_id.phase, step_id.segment, self.plans[step_id.phase].sampling.charged_as_one(step_id.step)

    def charges_more(self, step_id: StepId, event: Event) -> bool:
        """Whether opening this step adds to what is charged: where records take turns, only if no other part has been
        drawn from more often; where they are allocated, only if it begins an epoch or has less noise than those before
        it."""
        if step_id.phase in self._uneven:  # what was announced is not what is charged
            return True
        last = self._last
        if last is not None and self._charged_as_one(step_id) == self._charged_as_one(last[0]):
            return event.sigma < last[1].sigma
        counts = self._charged.get((step_id.phase, self._numbering(step_id), event), Counter())
        return counts[self._turn(step_id)] >= max(counts.values(), default=0)

    def charges_of_next(self, steps: int) -> int:
        """How many of the next steps will add to what is charged, if they follow the step that was opened last and are
        of its kind."""
        assert self._last is not None
        last, event = self._last
        sampling = self.plans[last.phase].sampling
        counts = Counter(self._charged[last.phase, self._numbering(last), event])
        before = max(counts.values(), default=0)
        for step in range(last.step + 1, last.step + steps + 1):
            if sampling.charged_as_one(step) != sampling.charged_as_one(step - 1):
                counts[sampling.part(step)] += 1
        return max(counts.values()) - before

    def departure(self, step_id: StepId, facts: StepFacts) -> str | None:
        """How a step of the current segment contradicts its frozen plan; None if it does not."""
        plan, segment = self.plans[step_id.phase], self.segments[-1]
        if (departure := facts.departure_from(plan)) is not None:
            return departure
        expected = plan.noise.correlation(facts.noise.std, step_id.step, segment.from_step + 1)
        if facts.noise.correlation != expected:
            return "states noise of another matrix than its plan's, or with another deviation than that gives"
        return None

    def last_charge(self) -> Event | None:
        """What the step that was opened last is charged; None if none was."""
        return None if self._last is None else self._last[1]

    def charges(self) -> tuple[Charge, ...]:
        """All that is charged, by phase."""
        return tuple(Charge.of(phase, event) for phase in self.plans for event in self.charged(phase))

    def event(self, phase: int, facts: StepFacts) -> Event:
        """What a step of these facts is charged. Mostly the same as the one before, so that is remembered."""
        parts = facts.sampling.rule, facts.clipping.sensitivity, facts.noise.std
        if self._same is None or self._same[0] != (phase, *parts, facts.metrics):
            self._same = (phase, *parts, facts.metrics), self._event(phase, facts)
        return self._same[1]

    def _event(self, phase: int, facts: StepFacts) -> Event:
        """If C adapts, σ·C_t / C_t is σ except for its last bit: steps that differ by no more are one mechanism."""
        event, plan = facts.event(), self.plans[phase]
        planned, event = plan.effective_noise_multiplier, replace(event, sigma=plan.charged_as(event.sigma))
        moves = plan.adaptive is not None or plan.noise.growth > 0
        if not moves or abs(event.sigma - planned) > 4 * ROUNDING * planned:
            return event
        return replace(event, sigma=planned)

    def planned(self) -> list[Event]:
        """All steps of all plans, as they were planned."""
        return merge(plan.event() for plan in self.plans.values())

    def delta(self) -> float:
        deltas = {plan.delta for plan in self.plans.values()}
        if len(deltas) != 1:
            raise LedgerError(f"the ledger has {len(deltas)} values of delta, so no single claim can be made")
        return deltas.pop()

    def claimed_delta(self) -> float:
        """Plans declared before any private step are composed as one; each later plan, which outputs may have shaped,
        adds its own delta by basic composition."""
        return self.delta() * (1 + len(self.late_plans))

    def epsilon(self, accountant: Accountant = "pld") -> float:
        """Epsilon of everything opened in all private phases, at the run's delta."""
        events = self.charged()
        try:
            return epsilon(events, self.delta(), accountant) if events else 0.0
        except ArithmeticError as error:
            raise AccountingError(
                f"no epsilon can be computed for the noise that this ledger states ({error})"
            ) from None

    def budget(self) -> float:
        """Sum of the phases' budgets: basic composition bounds what the phases may spend together."""
        return sum(plan.epsilon_budget for plan in self.plans.values())
