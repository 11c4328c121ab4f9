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

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from murmuration.accounting.errors import PlanError
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.make_plan import steps_of
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.function_reader import FunctionReader
from murmuration.data.draw.micro_batch import EMPTY
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.isolated import kept_of_records
from murmuration.train.clip.losses import incomputable
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.distributed.process import quiet_libraries
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.engines.base import evaluating, modes_of
from murmuration.train.engines.choose import start_ranks
from murmuration.train.library.own_run import NAME, PHASE, OwnRun
from murmuration.train.library.records import Data, OwnRecords, Units
from murmuration.train.library.settings import Settings
from murmuration.train.library.start import INNER, Public, started
from murmuration.train.optim.rates import rates_of, sound
from murmuration.train.optim.torch_optimizer import MakeOptimizer
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.run.board import Board, Pace
from murmuration.train.run.trainer import Spent, Trainer
from murmuration.train.self_test.held import Held, attributes_of
from murmuration.train.self_test.self_test import SelfTestError, SelfTestReport
from murmuration.train.step import StepSummary
from murmuration.train.storage.run_dir import BadRecordList

if TYPE_CHECKING:
    from murmuration.accounting.certificate.verify import Verdict


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
        self._records = read = OwnRecords.of(data, records, units, privacy.views, example, synthetic)
        self.ranks = ranks or start_ranks(settings.engine, settings.shard_over)
        self.ranks.require_same("units.of", read.digest_of_units)
        read.require_readable(self.ranks)
        self._started = started(model, start, self.ranks)
        self.model = self._started.model
        """The module that is trained; on an engine that shards it, its tensors may be elsewhere."""
        for parameter in self.model.parameters():
            if not parameter.numel():  # a switched-off token, say: there is nothing to train
                parameter.requires_grad_(False)
        self._model = self.model if loss is None else Losses(self.model, loss)
        batch = float(read.n) if math.isinf(privacy.expected_batch) else privacy.expected_batch
        steps = settings.steps or steps_of(settings.epochs or 1, read.n, batch, privacy.sampling)
        self._rates = rates = rates_of(schedule, optimizer, steps)
        if privacy.loss_probes is not None and len({rates(step) for step in range(1, steps + 1)}) > 1:
            raise PlanError("privacy.loss_probes find the learning rate while training; give schedule= one number")
        self._busy, self._closed, self._at_end = threading.Lock(), False, ExitStack()
        self._phase: PrivatePhase | None = None
        self._own = own = OwnRun(settings, read, self._started, self._model, self.ranks)
        self._run = own.open
        self._at_end.callback(self._run.close)
        try:
            self.plan: PrivacyPlan = own.declare(steps, batch)
            self.done = own.done
            if own.finished:
                return
            self._phase = phase = own.build(optimizer)
            self._at_end.callback(phase.close)
            self._unchanged = Unchanged(self._model)
            self._saving = phase.saving(
                self._run, lambda: self._run.header(PHASE, own.data, "own"), self._list_unusable,
                self._unchanged.before_save,
            )  # fmt: skip
            self._saving.saved = self.done
        except BaseException:
            self.close()
            raise

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
        if self._own.loaded is not None:
            self._own.loaded.restore_optimizer(phase.engine)
        self._unchanged.proved()
        self._reader = reader = self._records.reader(self._own.read_key, self.settings.workers)
        self._at_end.callback(reader.close)
        self.ranks.on_main(lambda: self._try_first(reader))
        if isinstance(phase.clip, BookKeepingClip):  # in a recipe, what a decoder has passed can be computed
            phase.clip.leaves_out = True
        self._bad, self._stop = BadRecordList(run.folder, self.ranks.rank), StopRequest(run.folder.stop_file)
        self._at_end.callback(self._stop.restore)
        phase.feed(reader)
        first_norm = run.first_norm(PHASE, self.plan, self._own.loaded)
        phase.begin(run.journal, self._stop, first_norm=first_norm, after=self._after)
        self._at_end.callback(self._list_unusable)
        self._pace = Pace(self.plan.divisor, public=False, synthetic=report.records_per_second)
        return report

    def _try_first(self, reader: FunctionReader) -> None:
        """Before anything is charged: refuses items that cannot be read or computed. Nothing is said of one alone."""
        batch, engine = reader.try_first(self._records.n), self.phase.engine
        if engine.partitioned or engine.device.type != "cpu":
            return
        odd = incomputable(engine.model, batch.inputs, batch.present)
        if len(odd) > 1 and odd[batch.present].all():
            raise SelfTestError(
                f"the model fails for all of {len(odd)} records that were tried, or finds no finite loss, though it "
                "takes the synthetic ones; let example= or synthetic= have the sizes and ranges of the items, and "
                "read one to see why"
            )

    def _after(self, number: int) -> None:
        self._run.burn(number)
        self._unchanged.after_step()
        self.done = number  # here, so that whatever interrupts the program later finds the step made

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
            return phase.step(number, rate)
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
        settings, steps = self.settings, self.plan.steps
        return Trainer(
            NAME, steps, self._rates, self.step, self.ranks, self._board, self._pace, self._saving,
            every=settings.checkpoint_every, log_every=settings.log_every,
            spent=Spent(lambda: self._run.writer.history, settings.log_every),
        )  # fmt: skip

    @cached_property
    def _board(self) -> Board:
        board = Board(self._run.folder, self.ranks.main, self._run.checkpoints.times)
        self._at_end.callback(board.close)
        return board

    @property
    def saved(self) -> int:
        """The last step whose weights a checkpoint has."""
        return self.done if self._phase is None else self._saving.saved

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
        self.phase.require_whole()  # a finished run is refused, too
        return (self._loop if "_loop" in vars(self) else self._saving).save(self.done)

    def _save_what_is_new(self) -> None:
        if self._phase is not None and (self.saved != self.done or not self.done):
            self.save()

    def _list_unusable(self) -> None:
        if self._phase is not None and self._phase.made is not None:
            self._bad.add(NAME, self._reader.bad_reasons)
            if isinstance(clip := self._phase.clip, BookKeepingClip) and clip.left_out:
                self._bad.add(NAME, {EMPTY: "the model could not compute some records, whose numbers it is not told"})

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

    def finish(self) -> Verdict:
        """Saves, writes the certificate, destroys the run key, and verifies it all from the ledger alone."""
        self._require_whole()
        self._save_what_is_new()
        return self._own.finish()

    def close(self) -> None:
        """Lets go of readers, engine and the ledger's lock; the run can be continued."""
        self._closed = True
        self._at_end.close()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """A loop that was left early keeps its steps: made again, they would be charged again. After an error, other
        ranks may be elsewhere."""
        try:
            if kind is None and not self._closed and self.saved != self.done:
                with suppress(LedgerError):  # a step failed, or the model was changed outside of it
                    self.save()
        finally:
            self.close()


class Unchanged:
    def __init__(self, model: nn.Module) -> None:
        self._model, self._held, self._modes = model, Held.by(model), modes_of(model)
        self._kept: set[int] | None = None
        """Tensors of records that other parts of the program hold, which are none of this model's. None before the
        proof, when it has been given no record."""
        self._proved = False

    def before_proof(self) -> None:
        self._kept = kept_of_records()
        if (changed := self._held.changed(Held.by(self._model))) is not None:
            raise SelfTestError(
                f"{changed} changed since the training was opened, so the ledger does not know what it began with; "
                "give the model as it is to begin"
            )

    def proved(self) -> None:
        assert self._kept is not None, "what was held before the proof is known after it"
        if kept := kept_of_records() - self._kept:
            held = "a record's"
            where = next((name for name, words in attributes_of(self._model).items() if held in words), "something")
            raise SelfTestError(
                f"{where} still holds tensors of the self-test's records, {len(kept)} in all; let forward() keep "
                "nothing, not in a list outside the model either"
            )
        self._modes, self._held, self._proved = modes_of(self._model), Held.by(self._model), True

    def require(self) -> None:
        if self._proved and (changed := self._held.changed(Held.by(self._model))):
            raise LedgerError(
                f"{changed} changed outside of the private step, without noise; let nothing but the step change the "
                "model, and forward() keep nothing"
            )

    def before_step(self) -> None:
        self.require()
        if modes_of(self._model) != self._modes:
            raise SelfTestError(
                "a module was switched between training and evaluation since prove(), which tested it as it was; "
                "switch it before"
            )

    def after_step(self) -> None:
        """But for the weights that the update moved."""
        now = Held.by(self._model)
        if changed := self._held.but_for_trained().changed(now.but_for_trained()):
            raise LedgerError(
                f"{changed} changed while the model was trained, without noise; let forward() write into nothing and "
                "keep nothing"
            )
        self._held = now

    def before_save(self) -> None:
        self.require()
        if self._kept is not None and (kept := kept_of_records() - self._kept):
            raise LedgerError(f"{len(kept)} tensors of records are still held somewhere; let forward() keep nothing")
