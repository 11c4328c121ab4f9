"""Private training as a library: your own module and records, with the same proof, ledger and certificate as those of
a recipe.

    settings = murmuration.Settings(
        privacy=murmuration.Privacy(epsilon=4, expected_batch=200), steps=100,
        dataset="faces, version 1", run_dir="runs/faces",
    )
    with murmuration.PrivateTraining(Net, dataset, settings, schedule=1e-3, example=public_batch) as training:
        for step in training:
            ...
        print(training.finish())
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.accounting.adaptive import AdaptiveError
from murmuration.accounting.certificate import certificate
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.errors import InputError, PlanError
from murmuration.accounting.keys import destroy, hkdf, load
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.journal import BudgetSpent
from murmuration.accounting.ledger.lines import NAMED, RECORDS_AS_PUBLIC, PublicUse
from murmuration.accounting.make_plan import make_plan, steps_of
from murmuration.accounting.plan import PrivacyPlan, require_together
from murmuration.accounting.unit import Unit
from murmuration.data.batch.dataset import as_inputs, as_read, is_dataset
from murmuration.data.batch.function_reader import FunctionReader
from murmuration.data.batch.slot_rows import SlotRows, UnitReduce
from murmuration.data.index.units import UnitTable
from murmuration.train.clip.isolated import kept_of_records
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.config.privacy import Privacy
from murmuration.train.config.zero_optimization import ZeroOptimization
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.process import quiet_libraries
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.engines.base import evaluating, modes_of
from murmuration.train.engines.choose import EngineSettings, start_ranks
from murmuration.train.optim.probed_rate import STATE, ProbedRate
from murmuration.train.optim.rates import rates_of, sound
from murmuration.train.optim.torch_optimizer import MakeOptimizer, described
from murmuration.train.planner.drowned import drowned
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.run.board import Board, Pace
from murmuration.train.self_test.held import Held
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.room import largest_that_fits
from murmuration.train.self_test.self_test import SelfTestError, SelfTestReport
from murmuration.train.start import INNER, Public, started
from murmuration.train.step import StepSummary
from murmuration.train.storage.bad_records import BadRecordList
from murmuration.train.storage.certify import certify
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.micro_batch_file import keep, kept
from murmuration.train.storage.open_run import open_run
from murmuration.train.storage.run_dir import RunDir
from murmuration.train.storage.sibling_runs import RunLog

PHASE, NAME = 0, "training"
EngineName = Literal["local", "deepspeed", "fsdp2"]
Data = Any
"""A torch.utils.data.Dataset or anything with len() and []; or a function `read`, given `records`."""
NUMBERS = (
    "In an epoch of random allocation, or a block of steps with correlated noise, a record takes part once, by its "
    "number, and the run was continued within one: that the program gave each record the same number as before is its "
    "own word (`order`)."
)
RESTORED = (  # with a `registry`, what every certificate says is enough
    "This run has no log outside its directory. Its secret file tells how long the ledger is and loses the keys of "
    "each step before the step's weights can be seen, so a ledger or a secret folder that is restored alone is "
    "refused. A whole run directory that is restored in place (secret folder, ledger and checkpoints together) cannot "
    "be told from the original: its steps may then be made again under the same keys, and are charged once."
)
NO_LOG = "The records are known by the name and number that the program gave them; other runs on them are not known."
LOGGED = (
    "The records are known by the name and number that the program gave them; other runs on them are those that were "
    "told the same `registry`."
)
DEVIATIONS = [
    "The training loop is a program of the user's own: what it computes from private records beside the private step, "
    "or makes of the summaries that steps return, is not covered.",
    "The model is the user's own. Its forward() was given one record at a time, by construction, and could write "
    "nothing of it into a tensor that records share. Weights, buffers and the attributes of its modules were compared "
    "before and after every step; what it may keep elsewhere in Python (a global list, a file), or do through private "
    "interfaces of PyTorch, was not looked at.",
]


@dataclass(frozen=True)
class Units:
    """The protected unit, where it is not a record: all records for which `of` has the same value.

    >>> Units("patient", of=["anna", "ben", "anna"], rows=2)
    Units(by='patient', rows=2, reduce='mean')
    """

    by: str
    """The kind of unit, in a word: "patient"."""
    of: Sequence[object] | np.ndarray = field(repr=False)
    """The unit of each record, in the order of their numbers. Private."""
    rows: int = 1
    """The most records of a unit that a step takes."""
    reduce: UnitReduce = "mean"


@dataclass(frozen=True)
class Settings:
    """What is trained for, and how and where it runs. `privacy` has the same keys as in a config.

    >>> four = Privacy(epsilon=4, expected_batch=200)
    >>> Settings(four, dataset="faces, version 1", run_dir="runs/faces", epochs=3).engine
    'local'
    >>> Settings(four, dataset="faces, version 1", run_dir="runs/faces")
    Traceback (most recent call last):
    murmuration.accounting.errors.PlanError: give either steps or epochs
    """

    privacy: Privacy
    dataset: str
    """A name and version of the records, which alone identifies them: a run continues, and weights that were trained on
    the same records are refused, by this name."""
    run_dir: str | Path
    steps: int | None = None
    epochs: float | None = None
    """Give one of steps and epochs."""
    micro_batch: int | Literal["auto"] = "auto"
    """Records that a rank computes at a time."""
    engine: EngineName = "local"
    zero: ZeroOptimization = field(default_factory=ZeroOptimization)
    shard_over: int | None = None
    """With FSDP2: the ranks of one copy of the weights; None: all."""
    computation: Computation = field(default_factory=Computation)
    checkpoint_every: int = 100
    """Steps from one checkpoint to the next, in `for step in training`."""
    keep_checkpoints: int = 2
    log_every: int = 10
    order: str | None = None
    """With allocation or correlated noise, any text that changes when the order of the records does, such as a digest
    of their names in order. An epoch continues only if it is the same at every opening; otherwise every opening begins
    a new one under new keys, and the interrupted one stays charged."""
    registry: str | Path | None = None
    """A folder for the log of all runs on these records, the same one for all of them: it holds them to a common
    budget, and certificates list them."""
    public: Mapping[PublicUse, str] = field(default_factory=dict)
    """Names of the records that are used without noise: {"evaluation": "MNIST test, version 1"}. It is your word, which
    the certificate repeats, that nobody's privacy depends on them."""
    about_data: str | None = None
    about_owner: str | None = None
    keep_key: bool = False
    debug_seed: int | None = None
    new_segment: str | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise PlanError("give either steps or epochs")
        least = {"steps": self.steps, "checkpoint_every": self.checkpoint_every, "log_every": self.log_every}
        least |= {"keep_checkpoints": self.keep_checkpoints}
        least |= {} if self.micro_batch == "auto" else {"micro_batch": self.micro_batch}
        for name, value in least.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlanError(f"{name} must be a whole number from 1 up, but is {value!r}")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise PlanError(f"epochs must be a finite number above 0, but is {self.epochs}")
        if not self.dataset.strip():
            raise PlanError("dataset must be a name and version of the records")
        if self.engine not in (engines := get_args(EngineName)):
            raise PlanError(f"engine {self.engine!r} is none of {', '.join(engines)}")
        if unknown := set(self.public) - set(RECORDS_AS_PUBLIC):
            raise PlanError(f"public: {', '.join(sorted(unknown))} is none of {', '.join(RECORDS_AS_PUBLIC)}")
        if self.dataset in self.public.values():
            raise PlanError(f"public: {self.dataset!r} is what this run protects; name other records")
        EngineSettings(self.engine, 1, self.zero, self.shard_over)  # refuses what does not fit
        whole = self.engine == "local" or (self.engine == "deepspeed" and self.zero.stage < 3)
        if self.computation.compile == "blocks" and not (whole and self.computation.clip_engine == "book-keeping"):
            raise PlanError(
                'compile="blocks" needs whole weights and the book-keeping clip engine; use engine "local", or '
                '"deepspeed" at a stage below 3, or leave it out'
            )
        mechanisms = self.privacy.mechanisms | ({"exact"} if self.computation.noise == "exact" else set())
        require_together(mechanisms | ({"keep_key"} if self.keep_key else set()))


class Losses(nn.Module):
    """A module and the function of its losses, as one module, in which the module is `inner`."""

    def __init__(self, inner: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.inner, self._loss = inner, loss
        if callable(right := getattr(inner, "right", None)):
            self.right = lambda inputs: right(self._as_items(inputs))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        found = self._loss(self.inner, self._as_items(inputs))
        return found if found.dim() else found.reshape(1)

    @staticmethod
    def _as_items(inputs: dict[str, Tensor]) -> Any:
        """The program's functions see a batch as its dataset has items: a dict, or a tuple."""
        places = [str(place) for place in range(len(inputs))]
        return tuple(inputs[place] for place in places) if set(places) == set(inputs) else inputs


MOST_ON_PROCESSORS = 64


def _digest_of_name(dataset: str) -> str:
    return hashlib.sha256(dataset.encode()).hexdigest()


class PrivateTraining:
    """Trains a model with (ε, δ)-DP for one record, from the run directory's last checkpoint on.

    `model(inputs)` returns one loss per record; or `loss(model, batch)` does. `data` is a map-style Dataset whose items
    are dicts or tuples of tensors; or a function `read(number)`, whose number is an array of one, that returns dicts of
    tensors with one row. It is asked by one thread at a time. A record for which it raises anything is absent, n stays
    what it is, and the reason goes to the run directory's `logs/private`.

    Each step spends part of the budget when it begins. Weights may be looked at at any time; so the keys of a step are
    gone when it returns, and after a crash, steps since the last checkpoint are not replayed: they stay charged, new
    keys are used, and the last steps may be refused (BudgetSpent). A ledger, or a secret folder, that was restored from
    a backup is refused (LedgerError). On several processes every rank runs the same program; a launcher starts them.
    """

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module], data: Data, settings: Settings, *,
        optimizer: Optimizer | MakeOptimizer = torch.optim.AdamW, schedule: Any = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None, start: str | Path | Public | None = None,
        example: Any = None, synthetic: Callable[[int, int], dict[str, Tensor]] | None = None,
        records: int | None = None, units: Units | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """`model`: a module, or better the function that makes it, whose random weights are then shown to be random.
        `optimizer`: a class of torch.optim or a function that makes one, or a murmuration.Optimizer. `schedule`: a
        learning rate, a function of the step, a murmuration.Schedule or a torch.optim.lr_scheduler; None: the
        optimizer's own rate. `start`: where the initial weights come from: None for random ones, a run directory or an
        export to read them from, or Public("why"). `example`: one public item of the data's form, for the self-test; or
        `synthetic(size, seed)`, which makes random ones. `records`: how many there are, for a function `read`.
        `ranks`: None joins those that a launcher started."""
        quiet_libraries()
        self.settings, privacy = settings, settings.privacy
        read, n = as_read(data, records, privacy.views)
        self._table = None if units is None else UnitTable.of_names(units.by, units.of)
        if units is not None and len(units.of) != n:
            raise PlanError(f"units.of has {len(units.of)} values for {n} records; give the unit of each record")
        self._units, self._read = units, read
        self._rows = rows = privacy.views * (1 if units is None else units.rows)
        self._n = n if self._table is None else self._table.count
        if (synthetic is None) == (example is None):
            raise PlanError("the self-test needs to know what records look like; give either synthetic= or example=")
        if synthetic is not None:
            self._synthetic = SyntheticRecords(synthetic, rows=rows)
        elif is_dataset(data):
            self._synthetic = SyntheticRecords.like(as_inputs(example), rows)
        elif isinstance(example, Mapping):
            self._synthetic = SyntheticRecords.like(example, rows)
        else:
            raise InputError(f"example= must be what read() returns, a dict, but is a {type(example).__name__}")
        self.ranks = ranks or start_ranks(settings.engine, settings.shard_over)
        self.ranks.require_same("units.of", "" if self._table is None else self._table.digest)
        self._started = begun = started(model, start, self.ranks)
        self.model = begun.model
        """The module that is trained; on an engine that shards it, its tensors may be elsewhere."""
        self._model = self.model if loss is None else Losses(self.model, loss)
        self._optimizer = optimizer
        if isinstance(optimizer, Optimizer) and optimizer.params.noise_floor is not None:
            require_together(privacy.mechanisms | {"noise_floor"})
        batch = float(self._n) if math.isinf(privacy.expected_batch) else privacy.expected_batch
        steps = settings.steps or steps_of(settings.epochs or 1, self._n, batch, privacy.sampling)
        self._rates = rates = rates_of(schedule, optimizer, steps)
        if privacy.loss_probes is not None and len({rates(step) for step in range(1, steps + 1)}) > 1:
            raise PlanError("privacy.loss_probes find the learning rate while training; give schedule= one number")
        self._log = RunLog(())
        if settings.registry is not None:
            Path(settings.registry).mkdir(parents=True, exist_ok=True)
            self._log = RunLog.beside(Path(settings.registry))
        folder = RunDir(Path(settings.run_dir))
        self._run = open_run(
            folder, folder.root.name, self.ranks, Keep(settings.keep_checkpoints),
            {name: version(name) for name in ("torch", "dp-accounting")}, debug_seed=settings.debug_seed,
            new_segment=settings.new_segment, record_digests=NAMED,
        )  # fmt: skip
        self._data = _digest_of_name(settings.dataset)
        self.done = self.saved = 0
        self._phase: PrivatePhase | None = None
        self._failed: int | None = None
        self._held: Held | None = None
        self._kept = set[int]()
        self._board: Board | None = None
        self._busy, self._closed = threading.Lock(), False
        try:
            self._loaded = self._run.latest() if self._run.secret is not None else None
            self.plan: PrivacyPlan = self.ranks.on_main(lambda: self._declared(steps, batch))
            if self._run.secret is not None:  # else finished: nothing is drawn any more
                self._build()
        except BaseException:
            self.close()
            raise

    def _declared(self, steps: int, batch: float) -> PrivacyPlan:
        """On the main rank: the plan and what else the ledger must know before the first step."""
        writer, settings, units = self._run.writer, self.settings, self._units
        known = writer.history.plans.get(PHASE)
        unit = None
        if units is not None and self._table is not None:
            # Keyed: who belongs together is as private as the records.
            table = hkdf(self._run.key.secret, f"units|{self._table.digest}").hex() if self._run.secret else None
            was = known.units.table if known is not None and known.units is not None else ""
            try:
                unit = Unit(units.by, units.rows, units.reduce, table or was)
            except ValueError as error:
                raise PlanError(f"units: {error}") from None
        request = replace(
            settings.privacy.request(self._n, steps, exact=settings.computation.noise == "exact"),
            expected_batch=batch,
            units=unit,
        )
        try:
            plan = make_plan(request, known)
        except AdaptiveError as error:
            raise PlanError(str(error)) from None
        weights = sum(each.numel() for each in self._model.parameters() if each.requires_grad)
        if (warning := drowned(plan, weights, settings.privacy.noise_multiplier is None)) is not None:
            self._run.say(f"warning: {warning}")
        writer.declare_plan(PHASE, NAME, plan, describe("pld"))
        if self._loaded is not None:  # what a checkpoint has comes from there
            self._started.declare_unsaved(writer, PHASE)
        elif not writer.history.finished:
            self._started.declare(writer, PHASE, self._data)
            if names := sorted(self._started.unexplained):
                self._run.say(
                    f"warning: the certificate will say FOREIGN WEIGHTS, since {', '.join(names[:3])} "
                    f"({len(names)} tensors) are not shown to be random; give model= as a function that makes it, and "
                    'start= or Public("why") for what is not random'
                )
        if settings.keep_key and not writer.history.finished:
            writer.declare_word("keep_key")
        for use, name in settings.public.items():
            writer.declare_public(PHASE, use, _digest_of_name(name))
        if (objection := writer.history.why_not_private()) is not None:
            self._run.say(objection)
        if not writer.history.finished:
            self._run.enter_log(self._log, NAME, plan, self._data)
        return plan

    def _build(self) -> None:
        settings, privacy = self.settings, self.settings.privacy
        if self._loaded is not None:
            self.done = self.saved = self._loaded.position.step
            self._model.load_state_dict(self._loaded.state_dict(self._model.state_dict()))
        rule = ClipRule.of(self.plan, privacy.clip.kind, privacy.clip.gamma, 1, privacy.clip.grouping)
        micro_batch = settings.micro_batch
        if micro_batch == "auto":
            micro_batch = self.ranks.on_main(lambda: kept(self._run.folder.root)) or self._fitting(rule)
            self.ranks.on_main(lambda: keep(self._run.folder.root, micro_batch))
        engine = EngineSettings(settings.engine, micro_batch, settings.zero, settings.shard_over)
        rule = ClipRule.of(self.plan, privacy.clip.kind, privacy.clip.gamma, micro_batch, privacy.clip.grouping)
        optimizer = self._optimizer
        named = optimizer.model_dump() if isinstance(optimizer, Optimizer) else described(optimizer)
        shapes = {name: list(each.shape) for name, each in self._model.named_parameters()}
        computed = settings.computation.identity
        identity = [type(self.model).__qualname__, shapes, repr(rule), named, computed, micro_batch]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.ranks.require_same("the model and the arguments of the training", digest)
        segment = self.ranks.on_main(
            lambda: self._run.segment(
                PHASE, NAME, digest, self._data, self.done, "their weights may have been seen", self._why_anew()
            )
        )
        self._modes = modes_of(self._model)
        keys = self._run.derive(PHASE, segment, self.done)
        rate = ProbedRate.of(privacy.loss_probes, self.plan, self._loaded and self._loaded.manifest.get(STATE))
        self._phase = PrivatePhase(
            self.plan, self._model, rule, optimizer, keys, self.ranks, engine, settings.computation,
            begun_after=segment.from_step, rate=rate,
        )  # fmt: skip
        self._saving = self._phase.saving(
            self._run, lambda: self._run.header(PHASE, self._data, "own"), self._list_unusable
        )  # fmt: skip
        self._unit_key = keys("augmentation") if self._table is not None else b""
        self._begun_with = Held.by(self._model)
        self.ranks.on_main(lambda: self._run.remember(self._order))

    def _fitting(self, rule: ClipRule) -> int:
        """The largest micro-batch that fits: on processors, more rows fill no more of their vector units."""
        most = max(1, math.ceil(self.plan.divisor / self.ranks.world))
        if self.ranks.device.type != "cuda":
            return min(most, max(1, MOST_ON_PROCESSORS // self._rows))
        whole = EngineSettings()  # a shard of it needs less
        trial = clipping_engine(
            copy.deepcopy(self._model), rule, Optimizer(), 0.0, whole, self.ranks,
            replace(self.settings.computation, compile="off"),
        ).engine  # fmt: skip
        try:
            return largest_that_fits(trial, self._synthetic, most, self.ranks)
        finally:
            trial.close()

    @property
    def _order(self) -> str | None:
        return None if self.settings.order is None else hashlib.sha256(self.settings.order.encode()).hexdigest()

    def _why_anew(self) -> str | None:
        """Why an interrupted epoch or block does not continue: records take part in it once, by number."""
        if self.plan.noise.bands > 1 and (self._order is None or self.done % self.plan.noise.bands):
            return "the keys of a block's earlier steps are gone, and later ones need them"
        if self.plan.sampling.steps_of_a_key > 1 and (
            self._order is None or load(self._run.folder.key).order != self._order
        ):
            return "the program does not say, or not the same, in which order it numbers the records"
        return None

    @property
    def phase(self) -> PrivatePhase:
        if self._phase is None:
            raise LedgerError(f"the run in {self._run.folder.root} is finished; give another run_dir to train again")
        self._require_open()
        return self._phase

    def _require_open(self) -> None:
        if self._closed:
            raise LedgerError("this training is closed; open it again to continue")

    def prove(self) -> SelfTestReport:
        """The self-test, after which steps can be taken.

        By construction, whatever the module: `forward()` is given one record at a time, so that no loss and no gradient
        depends on another record, and nothing of a record can be written into a tensor that records share. A module
        that needs more is refused here, in a sentence. Tested, on synthetic records and on values that often mean
        something of their own: clipped, noised once, bounded, all trained, nothing kept.
        """
        phase, run, privacy = self.phase, self._run, self.settings.privacy
        if phase.made is not None:
            raise SelfTestError("prove() has passed already; take the steps")
        if (changed := self._begun_with.changed(Held.by(self._model))) is not None:
            raise SelfTestError(
                f"{changed} changed since the training was opened, so the ledger does not know what it began with; "
                "give the model as it is to begin"
            )
        self._kept = before = kept_of_records()
        report = phase.prove(self._synthetic)
        if self._loaded is not None:
            self._loaded.restore_optimizer(phase.engine)
        if kept := kept_of_records() - before:
            raise SelfTestError(
                f"{len(kept)} tensors of the self-test's records are still held somewhere; let forward() keep nothing, "
                "not in a list outside the model either"
            )
        self._modes, self._held = modes_of(self._model), Held.by(self._model)
        units = self._units
        slots = SlotRows(views=privacy.views)
        if units is not None:
            slots = SlotRows(self._table, units.rows, units.reduce, privacy.views, self._unit_key)
        self._reader = reader = FunctionReader(self._read, self._synthetic.make(1, 0), slots)
        self.ranks.on_main(lambda: reader.try_first(self._n))
        self._bad = BadRecordList(run.folder, self.ranks.rank)
        self._stop = StopRequest(run.folder.stop_file)
        phase.feed(reader)
        phase.begin(run.journal, self._stop, first_norm=run.first_norm(PHASE, self.plan, self._loaded))
        self._pace = Pace(self.plan.divisor, public=False, synthetic=report.records_per_second)
        return report

    def steps(self) -> range:
        """The numbers of the steps that are left."""
        return range(self.done + 1, self.plan.steps + 1 if self._phase is not None else self.done + 1)

    def step(self, number: int, learning_rate: float | None = None) -> StepSummary:
        """One private step, at the schedule's learning rate unless another is given. What it returns is PRIVATE: losses
        and norms of the drawn records, without noise."""
        phase = self.phase
        if phase.made is None:
            raise SelfTestError("no step is taken before prove() has passed; call it first")
        if not self._busy.acquire(blocking=False):
            raise LedgerError("another thread is making a step; make one at a time")
        try:
            rate = self._rates(number) if learning_rate is None else sound(learning_rate, number)
            return self._one_step(phase, number, rate)
        finally:
            self._busy.release()

    def __iter__(self) -> Iterator[int]:
        """Runs the self-test if prove() was not called, takes the remaining steps and yields the number of each. Saves
        and shows progress, with ε spent of the budget, as often as the settings say."""
        if self._phase is None:
            return
        if self.phase.made is None:
            report = self.prove()
            self._run.say(
                f"self-test passed: σ measured {report.measured_sigma:.3f} (planned {self.plan.noise_multiplier:.3f}), "
                f"hostile records move the sum by at most {report.largest_hostile:.3f}·C"
            )
        board, steps, every = self._open_board(), self.plan.steps, self.settings.log_every
        for number in self.steps():
            released = self.step(number).released
            if released:  # noised and charged; the step's keys are gone, so it is never made again
                board.public(NAME, number, released)
            if number % every == 0 or number == steps:
                spent, rate = self.epsilon(), self._rates(number)
                board.public(NAME, number, {"lr": rate, "epsilon": spent})
                line = f"step {number}/{steps}  lr {rate:.2e}  ε {spent:.3f} of {self.plan.epsilon_budget:g}"
                board.progress(f"{line}  {self._pace.line(number, steps)}", number, steps)
            if number % self.settings.checkpoint_every == 0 or number == steps:
                self.save()
            yield number

    def evaluate(self, measure: Callable[[nn.Module], Mapping[str, float]]) -> dict[str, float]:
        """Saves, and only then measures: `measure(model)` in evaluation mode and without gradients, on public records.
        Its numbers go to TensorBoard and the public log."""
        if "evaluation" not in self.settings.public:
            raise PlanError(
                "evaluate() measures on records without noise, which needs your word that they are public; name them "
                'in Settings, such as public={"evaluation": "MNIST test, version 1"}'
            )
        if self.saved != self.done or not self.done:
            self.save()
        whole = self.phase.engine.plain_model() if self.phase.engine.partitioned else self._model
        assert whole is not None
        inner = whole.inner if isinstance(whole, Losses) else whole
        with evaluating(inner), torch.no_grad():
            found = {name: float(value) for name, value in measure(inner).items()}
        self._open_board().public(NAME, self.done, found)
        return found

    def _open_board(self) -> Board:
        self._board = self._board or Board(self._run.folder, self.ranks.main, self._run.checkpoints.times)
        return self._board

    def _one_step(self, phase: PrivatePhase, number: int, learning_rate: float) -> StepSummary:
        self._require_sound()
        if number != self.done + 1:
            raise LedgerError(f"step {number} was asked for after step {self.done}; take the steps that steps() gives")
        if modes_of(self._model) != self._modes:
            raise SelfTestError(
                "a module was switched between training and evaluation since prove(), which tested it as it was; "
                "switch it before"
            )
        # Until all is done: whatever ends a step in its middle, its noise is never added to a second gradient.
        self._failed = number
        try:
            summary = phase.step(number, learning_rate)
            self._run.burn(number)
        except (Stopped, BudgetSpent):  # nothing reached the weights
            phase.engine.discard()
            self._failed = None
            raise
        except BaseException:
            phase.engine.discard()
            raise
        self._held = self._unchanged_but_for_the_update()
        self.done = number
        self._failed = None
        return summary

    def _require_sound(self) -> None:
        self._require_open()
        if self._failed is not None:
            raise LedgerError(
                f"step {self._failed} failed, and its noise must not be used again; close this training and open it "
                "anew: it continues from its last checkpoint, under new keys"
            )
        if self._held is not None and (changed := self._held.changed(Held.by(self._model))):
            raise LedgerError(
                f"{changed} changed outside of the private step, without noise; let nothing but the step change the "
                "model, and forward() keep nothing"
            )

    def _unchanged_but_for_the_update(self) -> Held:
        now = Held.by(self._model)
        assert self._held is not None
        if changed := self._held.but_for_trained().changed(now.but_for_trained()):
            raise LedgerError(
                f"{changed} changed while the model was trained, without noise; let forward() write into nothing and "
                "keep nothing"
            )
        return now

    def save(self) -> str:
        """A checkpoint of the last step, durable when this returns its digest; the keys of its steps are forgotten."""
        self._require_sound()
        if kept := kept_of_records() - self._kept:
            raise LedgerError(f"{len(kept)} tensors of records are still held somewhere; let forward() keep nothing")
        digest = self._saving.save(self.done)
        self.saved = self.done
        return digest

    def _list_unusable(self) -> None:
        if self._phase is not None and self._phase.made is not None:
            self._bad.add(NAME, self._reader.bad_reasons)

    def epsilon(self) -> float:
        """What the ledger has charged so far: every step that began."""
        return self.ranks.on_main(lambda: self._run.writer.history.epsilon())

    def weights(self) -> dict[str, Tensor]:
        """The whole model's state, on every rank."""
        self._require_sound()
        found = self.phase.engine.whole_weights()
        if not isinstance(self._model, Losses):
            return found
        return {name.removeprefix(INNER): tensor for name, tensor in found.items()}

    def finish(self) -> certificate.Verdict:
        """Saves, writes the certificate, destroys the run key, and verifies it all from the ledger alone."""
        self._require_sound()
        if self._phase is not None and (self.saved != self.done or not self.done):
            self.save()
        newest = self._run.checkpoints.latest()
        return self.ranks.on_main(lambda: self._certify(newest))

    def _certify(self, newest: Loaded | None) -> certificate.Verdict:
        run, settings = self._run, self.settings

        def extra() -> dict[str, Any]:
            trained = sum(each.numel() for each in self.model.parameters())
            return {
                "about": {"data": settings.about_data, "owner": settings.about_owner},
                "model": f"{type(self.model).__qualname__}, {trained:,} parameters",
                "dates": {"last_start": run.checkpoints.times.day},
                "engine": str(EngineSettings(settings.engine, 1, settings.zero, settings.shard_over)),
                "machine": f"{self.ranks.device}; not yet proved on several GPUs",
                "hashes": {
                    "data_manifests": {NAME: self._data},
                    "checkpoint_manifest_sha256": newest.digest if newest is not None else None,
                },
            }

        logged = self._log.places and self._log.unknown_to_others(run.writer.history.run_id) is None
        stated = [*DEVIATIONS, LOGGED] if logged else [*DEVIATIONS, NO_LOG, RESTORED]
        stated += [NUMBERS] if self._continued_within() else []
        stated += [f"The initial weights are public because: {self._started.why}"] if self._started.why else []
        certify(
            run.folder, run.writer, [self._log], extra, lambda: [newest] if newest is not None else [], stated
        )  # fmt: skip
        if not settings.keep_key:
            destroy(run.folder.key)
        return certificate.verify(run.folder.root)

    def _continued_within(self) -> bool:
        together = self.plan.sampling.period
        acts = self._run.writer.ledger.entries.acts
        return any(entry.kind == "resume" and entry.fields["step"] % together for entry in acts)

    def close(self) -> None:
        """Lets go of readers, engine and the ledger's lock; the run can be continued."""
        if self._closed:
            return
        self._closed = True
        if self._phase is not None:
            self._list_unusable()
            self._phase.close()
            if self._phase.made is not None:
                self._stop.restore()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._run.chain is not None:
            self._run.chain.close()
        if self._run.journal is not None:
            self._run.journal.ledger.close()
            self._run.checkpoints.times.stamp_all(self._run.folder.root, but=(self._run.folder.checkpoints.name,))

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
