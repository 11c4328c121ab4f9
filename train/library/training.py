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

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from murmuration.accounting.adaptive import AdaptiveError
from murmuration.accounting.certificate import certificate
from murmuration.accounting.errors import PlanError
from murmuration.accounting.keys import hkdf, load
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.lines import NAMED
from murmuration.accounting.make_plan import make_plan, steps_of
from murmuration.accounting.plan import PrivacyPlan, require_together
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import largest_micro_batch
from murmuration.train.distributed.process import quiet_libraries
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.engines.base import evaluating
from murmuration.train.engines.choose import EngineSettings, start_ranks
from murmuration.train.library.records import Data, OwnRecords, Units
from murmuration.train.library.settings import Settings
from murmuration.train.library.start import INNER, Public, started
from murmuration.train.library.unchanged import Unchanged
from murmuration.train.optim.probed_rate import STATE, ProbedRate
from murmuration.train.optim.rates import rates_of, sound
from murmuration.train.optim.torch_optimizer import MakeOptimizer, described
from murmuration.train.planner.drowned import drowned
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.run.board import Board, Pace
from murmuration.train.run.trainer import Spent, Trainer
from murmuration.train.self_test.self_test import SelfTestError, SelfTestReport
from murmuration.train.step import StepSummary
from murmuration.train.storage.bad_records import BadRecordList
from murmuration.train.storage.certify import Told, finish
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.micro_batch_file import found_once
from murmuration.train.storage.open_run import open_run
from murmuration.train.storage.run_dir import RunDir
from murmuration.train.storage.sibling_runs import RunLog

PHASE, NAME = 0, "training"
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
        self._records = own = OwnRecords.of(data, records, units, privacy.views, example, synthetic)
        self.ranks = ranks or start_ranks(settings.engine, settings.shard_over)
        self.ranks.require_same("units.of", own.digest_of_units)
        self._started = started(model, start, self.ranks)
        self.model = self._started.model
        """The module that is trained; on an engine that shards it, its tensors may be elsewhere."""
        self._model = self.model if loss is None else Losses(self.model, loss)
        self._optimizer = optimizer
        if isinstance(optimizer, Optimizer) and optimizer.params.noise_floor is not None:
            require_together(privacy.mechanisms | {"noise_floor"})
        batch = float(own.n) if math.isinf(privacy.expected_batch) else privacy.expected_batch
        steps = settings.steps or steps_of(settings.epochs or 1, own.n, batch, privacy.sampling)
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
        self._busy, self._closed, self._at_end = threading.Lock(), False, ExitStack()
        self._at_end.callback(self._run.close)
        self._phase: PrivatePhase | None = None
        self.done = 0
        try:
            self._loaded = self._run.latest() if self._run.secret is not None else None
            self.plan: PrivacyPlan = self.ranks.on_main(lambda: self._declare(steps, batch))
            if self._run.secret is not None:  # else finished: nothing is drawn any more
                self._build()
        except BaseException:
            self.close()
            raise

    def _declare(self, steps: int, batch: float) -> PrivacyPlan:
        """On the main rank: the plan and what else the ledger must know before the first step."""
        run, settings, begun, first = self._run, self.settings, self._started, self._loaded is None
        request = settings.privacy.request(self._records.n, steps, exact=settings.computation.noise == "exact")

        def make(known: PrivacyPlan | None) -> PrivacyPlan:
            # Keyed: who belongs together is as private as the records.
            table = known.units.table if known is not None and known.units is not None else ""
            if run.secret is not None and self._records.table is not None:
                table = hkdf(run.key.secret, f"units|{self._records.digest_of_units}").hex()
            try:
                return make_plan(replace(request, expected_batch=batch, units=self._records.unit(table)), known)
            except AdaptiveError as error:
                raise PlanError(str(error)) from None

        public = begun.uses(saved=not first)
        public |= {use: _digest_of_name(name) for use, name in settings.public.items()}
        weights = begun.checked(self._data) if first else None  # what a checkpoint has comes from there
        plan = run.declare(
            PHASE, NAME, make, self._log, self._data, public=public,
            without_noise=() if weights is None else weights.without_noise,
            origins=() if weights is None else weights.origins, words=("keep_key",) if settings.keep_key else (),
        )  # fmt: skip
        trained = sum(each.numel() for each in self._model.parameters() if each.requires_grad)
        if (warning := drowned(plan, trained, settings.privacy.noise_multiplier is None)) is not None:
            run.say(f"warning: {warning}")
        if first and not run.writer.history.finished and (names := sorted(begun.unexplained)):
            run.say(
                f"warning: the certificate will say FOREIGN WEIGHTS, since {', '.join(names[:3])} ({len(names)} "
                "tensors) are not shown to be random; give model= as a function that makes it, and start= or "
                'Public("why") for what is not random'
            )
        run.tell_objection()
        return plan

    def _build(self) -> None:
        run, settings, privacy, optimizer = self._run, self.settings, self.settings.privacy, self._optimizer
        clip = privacy.clip
        if self._loaded is not None:
            self.done = self._loaded.position.step
            self._model.load_state_dict(self._loaded.state_dict(self._model.state_dict()))
        rule_of = partial(ClipRule.of, self.plan, clip.kind, clip.gamma, grouping=clip.grouping)
        micro_batch = settings.micro_batch
        if micro_batch == "auto":
            most = max(1, math.ceil(self.plan.divisor / self.ranks.world))
            trial = self._model, rule_of(micro_batch=1), settings.computation, self._records.synthetic, most, self.ranks
            micro_batch, _ = found_once(run.folder.root, self.ranks, lambda: largest_micro_batch(*trial))
        rule = rule_of(micro_batch=micro_batch)
        named = optimizer.model_dump() if isinstance(optimizer, Optimizer) else described(optimizer)
        shapes = {name: list(each.shape) for name, each in self._model.named_parameters()}
        computed = settings.computation.identity
        identity = [type(self.model).__qualname__, shapes, repr(rule), named, computed, micro_batch]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.ranks.require_same("the model and the arguments of the training", digest)
        segment = self.ranks.on_main(
            lambda: run.segment(
                PHASE, NAME, digest, self._data, self.done, "their weights may have been seen", self._why_anew()
            )
        )
        keys = run.derive(PHASE, segment, self.done)
        self._unit_key = keys("augmentation") if self._records.units is not None else b""
        self._engine = EngineSettings(settings.engine, micro_batch, settings.zero, settings.shard_over)
        self._unchanged = Unchanged(self._model)
        self._phase = phase = PrivatePhase(
            self.plan, self._model, rule, optimizer, keys, self.ranks, self._engine, settings.computation,
            begun_after=segment.from_step,
            rate=ProbedRate.of(privacy.loss_probes, self.plan, self._loaded and self._loaded.manifest.get(STATE)),
        )  # fmt: skip
        self._at_end.callback(phase.close)
        self._saving = phase.saving(
            run, lambda: run.header(PHASE, self._data, "own"), self._list_unusable, self._unchanged.before_save
        )  # fmt: skip
        self._saving.saved = self.done
        self.ranks.on_main(lambda: run.remember(self._order))

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

    def _require_whole(self) -> None:
        self._require_open()
        if self._phase is not None:
            self._phase.require_whole()
            self._unchanged.require()

    def prove(self) -> SelfTestReport:
        """The self-test, after which steps can be taken.

        By construction, whatever the module: `forward()` is given one record at a time, so that no loss and no gradient
        depends on another record, and nothing of a record can be written into a tensor that records share. A module
        that needs more is refused here, in a sentence. Tested, on synthetic records and on values that often mean
        something of their own: clipped, noised once, bounded, all trained, nothing kept.
        """
        phase, run = self.phase, self._run
        if phase.made is not None:
            raise SelfTestError("prove() has passed already; take the steps")
        self._unchanged.before_proof()
        report = phase.prove(self._records.synthetic)
        for note in phase.notes(run.key.secret):
            run.note(NAME, note)
        if self._loaded is not None:
            self._loaded.restore_optimizer(phase.engine)
        self._unchanged.proved()
        self._reader = reader = self._records.reader(self._unit_key)
        self.ranks.on_main(lambda: reader.try_first(self._records.n))
        self._bad, self._stop = BadRecordList(run.folder, self.ranks.rank), StopRequest(run.folder.stop_file)
        self._at_end.callback(self._stop.restore)
        phase.feed(reader)
        first_norm = run.first_norm(PHASE, self.plan, self._loaded)
        phase.begin(run.journal, self._stop, first_norm=first_norm, after=self._after)
        self._at_end.callback(self._list_unusable)
        self._pace = Pace(self.plan.divisor, public=False, synthetic=report.records_per_second)
        return report

    def _after(self, number: int) -> None:
        self._run.burn(number)
        self._unchanged.after_step()

    def steps(self) -> range:
        """The numbers of the steps that are left."""
        return range(self.done + 1, self.plan.steps + 1 if self._phase is not None else self.done + 1)

    def step(self, number: int, learning_rate: float | None = None) -> StepSummary:
        """One private step, at the schedule's learning rate unless another is given. What it returns is PRIVATE: losses
        and norms of the drawn records, without noise."""
        phase = self.phase
        if not self._busy.acquire(blocking=False):
            raise LedgerError("another thread is making a step; make one at a time")
        try:
            phase.require_whole()
            rate = self._rates(number) if learning_rate is None else sound(learning_rate, number)
            if phase.made is not None:
                self._unchanged.before_step()
                if number != self.done + 1:
                    raise LedgerError(
                        f"step {number} was asked for after step {self.done}; take the steps that steps() gives"
                    )
            summary = phase.step(number, rate)
            self.done = number
            return summary
        finally:
            self._busy.release()

    def __iter__(self) -> Iterator[int]:
        """Runs the self-test if prove() was not called, takes the remaining steps and yields the number of each. Saves
        and shows progress, with ε spent of the budget, as often as the settings say."""
        if self._phase is None:
            return
        if self.phase.made is None:
            self._run.say(f"{NAME}  {self.prove().in_words(self.plan.noise_multiplier)}")
        yield from self._loop.steps_after(self.done)

    @cached_property
    def _loop(self) -> Trainer:
        settings, steps, budget = self.settings, self.plan.steps, self.plan.epsilon_budget
        return Trainer(
            NAME, steps, self._rates, self.step, self.ranks, self._board, self._pace, self._saving,
            every=settings.checkpoint_every, log_every=settings.log_every,
            spent=Spent(lambda: self._run.writer.history, budget, settings.log_every),
        )  # fmt: skip

    @cached_property
    def _board(self) -> Board:
        board = Board(self._run.folder, self.ranks.main, self._run.checkpoints.times)
        self._at_end.callback(board.close)
        return board

    @property
    def saved(self) -> int:
        """The last step whose weights a checkpoint has."""
        return self._saving.saved

    def evaluate(self, measure: Callable[[nn.Module], Mapping[str, float]]) -> dict[str, float]:
        """Saves, and only then measures: `measure(model)` in evaluation mode and without gradients, on public records.
        Its numbers go to TensorBoard and the public log."""
        if "evaluation" not in self.settings.public:
            raise PlanError(
                "evaluate() measures on records without noise, which needs your word that they are public; name them "
                'in Settings, such as public={"evaluation": "MNIST test, version 1"}'
            )
        self._save_what_is_new()
        whole = self.phase.engine.plain_model() if self.phase.engine.partitioned else self._model
        assert whole is not None
        inner = whole.inner if isinstance(whole, Losses) else whole
        with evaluating(inner), torch.no_grad():
            found = {name: float(value) for name, value in measure(inner).items()}
        self._board.public(NAME, self.done, found)
        return found

    def save(self) -> str:
        """A checkpoint of the last step, durable when this returns its digest; the keys of its steps are forgotten."""
        self._require_open()
        return (self._loop if "_loop" in vars(self) else self._saving).save(self.done)

    def _save_what_is_new(self) -> None:
        if self._phase is not None and (self.saved != self.done or not self.done):
            self.save()

    def _list_unusable(self) -> None:
        if self._phase is not None and self._phase.made is not None:
            self._bad.add(NAME, self._reader.bad_reasons)

    def epsilon(self) -> float:
        """What the ledger has charged so far: every step that began."""
        return self.ranks.on_main(lambda: self._run.writer.history.epsilon())

    def weights(self) -> dict[str, Tensor]:
        """The whole model's state, on every rank."""
        self._require_whole()
        found = self.phase.engine.whole_weights()
        if not isinstance(self._model, Losses):
            return found
        return {name.removeprefix(INNER): tensor for name, tensor in found.items()}

    def finish(self) -> certificate.Verdict:
        """Saves, writes the certificate, destroys the run key, and verifies it all from the ledger alone."""
        self._require_whole()
        self._save_what_is_new()
        newest, settings = self._run.newest(), self.settings

        def told() -> Told:
            trained = sum(each.numel() for each in self.model.parameters())
            return Told(
                f"{type(self.model).__qualname__}, {trained:,} parameters", self._engine, {NAME: self._data},
                settings.about_data, settings.about_owner,
            )  # fmt: skip

        return self.ranks.on_main(
            lambda: finish(
                self._run, [self._log], newest, told, deviations=self._deviations(), keep_key=settings.keep_key
            )
        )

    def _deviations(self) -> list[str]:
        logged = self._log.places and self._log.unknown_to_others(self._run.writer.history.run_id) is None
        stated = [*DEVIATIONS, LOGGED] if logged else [*DEVIATIONS, NO_LOG, RESTORED]
        stated += [NUMBERS] if self._continued_within() else []
        return stated + ([f"The initial weights are public because: {why}"] if (why := self._started.why) else [])

    def _continued_within(self) -> bool:
        together = self.plan.sampling.period
        acts = self._run.writer.ledger.entries.acts
        return any(entry.kind == "resume" and entry.fields["step"] % together for entry in acts)

    def close(self) -> None:
        """Lets go of readers, engine and the ledger's lock; the run can be continued."""
        self._closed = True
        self._at_end.close()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _digest_of_name(dataset: str) -> str:
    return hashlib.sha256(dataset.encode()).hexdigest()
