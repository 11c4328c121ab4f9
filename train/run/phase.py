"""One phase of a run, built around its plan: model, keys, records, engine, step; then the loop."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.accounting.keys import Derive
from murmuration.accounting.ledger.facts import Segment
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.loader import Loader, Reader
from murmuration.data.batch.reader import BatchReader
from murmuration.data.draw.micro_batch import MicroBatch, even_width
from murmuration.data.draw.poisson import Sampler
from murmuration.data.index.contents import forget_cached, require_contents, shards_of, with_sample
from murmuration.data.index.epochs import PublicOrder
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import ShardError
from murmuration.model.build import build
from murmuration.model.statistics_head import StatisticsHead
from murmuration.model.whitened_head import WhitenedHead
from murmuration.train.clip.engine import Observation
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.data import CheckpointData
from murmuration.train.config.optimizer import Carry
from murmuration.train.config.phase import SolvedHead
from murmuration.train.core import Computation
from murmuration.train.distributed.cores import own_cores
from murmuration.train.distributed.ranks import on_all
from murmuration.train.engines.base import AppliedUpdate, Engine, OptimizerShard
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.forward import PlainForward
from murmuration.train.noise.update import Update, UpdateError
from murmuration.train.optim.base import BEFORE
from murmuration.train.optim.optimizers import make_optimizer
from murmuration.train.optim.rates import learning_rate
from murmuration.train.private_phase import PrivatePhase, until_unreadable
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.recipe.pixels import IMAGENET, in_words
from murmuration.train.recipe.read_options import public_epochs, rank_plan, reading_options, with_stream_order
from murmuration.train.recipe.ready_phase import ReadyPhase, clip_rule, select_trained
from murmuration.train.recipe.warm_start import hand_over
from murmuration.train.run.board import Feed, Pace
from murmuration.train.run.cached_features import FeatureReader, feature_reader, held_out_features
from murmuration.train.run.context import RunContext
from murmuration.train.run.declare import declare, header, segment_of
from murmuration.train.run.early_end import Ending
from murmuration.train.run.public_mixing import MixingEngine, PublicRecords
from murmuration.train.run.trainer import Spent, Trainer
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.step import Make, PlainStep, Records
from murmuration.train.storage.checkpoint import Loaded
from murmuration.train.storage.saving import Saving


class PhaseTraining:
    """Trains one phase of a run to its end."""

    def __init__(self, run: RunContext, phase: ReadyPhase, loaded: Loaded | None = None) -> None:
        """`loaded`: the checkpoint to start from, of this phase or of the one before it."""
        self.run, self.phase, self.loaded = run, phase, loaded
        self.own = loaded if loaded is not None and loaded.position.phase == phase.number else None
        """The phase's own checkpoint."""
        self.done = 0 if self.own is None else self.own.position.step
        self.at_end = ExitStack()

    def train(self) -> None:
        run, phase = self.run, self.phase
        if not phase.settings.trains:
            return self.without_steps()
        run.ranks.pulse.preparing = True
        self.model = self.initial_model()
        plan = run.ranks.on_main(lambda: declare(run, phase))
        with self.at_end:
            if plan is None:
                self.publicly()
            else:
                if not self.done:
                    settle(self.model, phase.settings.head, plan.noise_std / plan.divisor)
                self.privately(plan)

    def initial_model(self) -> nn.Module:
        """Fresh, from the phase's own checkpoint, or with the weights of the phase before. Weights handed over come
        first, then the choice of what is trained. Adapters belong to the phase, so the phase's own checkpoint is loaded
        after that."""
        settings, own = self.phase.settings, self.own
        model = build(self.phase.shape, settings.objective)
        before = self.loaded.weights() if self.loaded is not None and own is None else {}
        if before:
            hand_over(before, model)
        select_trained(model, settings)
        settle(model, settings.head)
        if before and isinstance(head := getattr(model, "head", None), WhitenedHead):
            head.whiten(before)
        if own is not None:
            model.load_state_dict(own.state_dict(model.state_dict()))
        return model

    def privately(self, plan: PrivacyPlan) -> None:
        run, config, settings = self.run, self.run.config, self.phase.settings
        number, privacy = self.phase.number, settings.privacy
        assert privacy is not None, "a plan is of a private phase"
        segment = run.ranks.on_main(lambda: segment_of(run, self.phase, self.done))
        if settings.features is not None:  # before missing features are computed
            self.require_same_records(segment, sampler=None)
        derive = run.derive(number, segment, self.done)
        rule = clip_rule(privacy, plan, config.micro_batch)
        self.phase = phase = with_stream_order(self.phase, derive("public-order"))
        reader = self.read(derive)
        held_out = held_out_features(run, phase, self.model)
        private = self.at_end.enter_context(
            PrivatePhase(
                plan, self.model, rule, settings.optimizer, derive, run.ranks, EngineSettings.of(config),
                Computation.of(config.run), number=number, begun_after=segment.from_step,
                probes=privacy.loss_probes, manifest=self.own and self.own.manifest,
            )
        )  # fmt: skip
        # On the engine as it will train, and before the optimizer has a state that the test could disturb.
        proved = self.prove(private)
        if settings.features is None:
            self.require_same_records(segment, private.core.sampler())
        loader = private.feed(reader, rank_plan(phase, run.ranks, config.micro_batch))
        mixing = None
        if phase.mixed is not None:
            mixing = MixingEngine.of(run, phase, plan.divisor, private.engine, derive("public-order"))
            self.at_end.callback(mixing.close_public)
        private.begin(run.journal, run.stop, mixing=mixing, first_norm=run.first_norm(number, plan, self.own))
        self.restore(private.engine)
        watching = PublicRecords.of(run, phase, private.engine, derive, private, held_out)
        pace = self.pace(loader, plan.divisor, public=False, synthetic=proved)
        saving = private.saving(run, lambda: header(run, phase), self.list_unusable)
        self.trainer(private.step, pace, saving, watching, rule).run(self.done)

    def publicly(self) -> None:
        run, config, ranks = self.run, self.run.config, self.run.ranks
        derive = run.derive(self.phase.number, None)
        self.phase = phase = with_stream_order(self.phase, derive("public-order"))
        settings = phase.settings
        reader = self.read(derive)
        held_out = held_out_features(run, phase, self.model)
        engine = make_engine(
            EngineSettings.of(config),
            PlainForward(
                self.model, config.run.precision, config.run.compile == "blocks", config.run.gradient_checkpointing
            ),
            make_optimizer(settings.optimizer, self.model.named_parameters()),
            ranks,
        )  # fmt: skip
        self.at_end.callback(engine.close)
        batch = float(settings.batch or 0)
        epochs = public_epochs(phase, int(batch), derive("public-order"))
        width = config.micro_batch
        if phase.placement is None:  # otherwise a node's share of a batch varies
            width = even_width(epochs.batch, ranks.world, width)
        loader = self.load(reader, PublicOrder(epochs), width)
        records = Records(loader.draw, until_unreadable(loader.micro_batches, run.stop))
        step = PlainStep(records, epochs.batch, engine, ranks, run.stop)
        self.restore(engine)
        watching = PublicRecords.of(run, phase, engine, derive, stored=held_out)
        pace = self.pace(loader, batch, settings.data.public)
        copies = EngineSettings.of(config).ranks_per_copy
        saving = Saving(run, phase.number, engine, copies, lambda: header(run, phase), self.list_unusable)
        self.trainer(step.run, pace, saving, watching).run(self.done)

    def read(self, derive: Derive) -> BatchReader | FeatureReader:
        phase, ranks = self.phase, self.run.ranks
        stored, slots = phase.settings.features is not None, phase.slot_rows(derive("augmentation"))
        reading = reading_options(phase.reading, phase.index, ranks)
        reader = phase.reader(derive, None if stored else slots, reading, pin_memory=ranks.device.type == "cuda")
        self.reader: BatchReader | FeatureReader = reader
        if stored:
            self.reader = feature_reader(self.run, phase, self.model, reader, slots)
        self.at_end.callback(self.list_unusable)
        return self.reader

    def list_unusable(self) -> None:
        """Lists the unusable records of the phase: at every checkpoint, and however it ends."""
        self.run.board.bad_records(self.phase.name, self.run.ranks.rank, self.reader.bad_reasons)

    def load(self, reader: Reader, sampler: Sampler[Any], micro_batch: int) -> Loader[Any]:
        phase, ranks = self.phase, self.run.ranks
        loader = Loader(
            reader, sampler, ranks.rank, ranks.world, micro_batch, last=phase.settings.steps,
            plan=rank_plan(phase, ranks, micro_batch), device=ranks.device,
        )  # fmt: skip
        self.at_end.callback(loader.close)
        return loader

    def pace(self, loader: Loader[Any], records: float, public: bool, synthetic: float | None = None) -> Pace:
        """Called on all ranks together."""
        ranks = self.run.ranks
        return Pace(records, public, synthetic, Feed(lambda: loader.waited, ranks.sum(own_cores(ranks))))

    def prove(self, private: PrivatePhase) -> float:
        """Runs the self-test before anything else touches the engine; returns its speed on synthetic records."""
        run, phase, reader = self.run, self.phase, self.reader
        rows = phase.settings.rows_of_a_slot
        if isinstance(reader, FeatureReader):
            width = reader.stored.features.shape[1]
            synthetic = SyntheticRecords.of_features(width, phase.shape.head.classes, rows)
        else:
            synthetic = SyntheticRecords.of(phase.shape, phase.settings.objective, rows)
        report = private.prove(synthetic)
        run.board.say(f"{phase.name}  {report.in_words(private.plan.noise_multiplier)}")
        for note in private.notes(run.key.secret):
            run.note(phase.name, note)
        return report.records_per_second

    def restore(self, engine: Engine) -> None:
        """The optimizer's state: the phase's own, or as much of that of the phase before as it takes over."""
        if self.own is not None:
            self.own.restore_optimizer(engine)
        elif self.loaded is not None:
            carry_over(self.loaded, engine, self.phase.settings.optimizer.carry)

    def trainer(
        self, make: Make, pace: Pace, saving: Saving, watching: PublicRecords, rule: ClipRule | None = None
    ) -> Trainer:
        """`rule`: of a private phase."""
        run, config, settings = self.run, self.run.config.run, self.phase.settings
        return Trainer(
            self.phase.name, settings.steps, partial(learning_rate, settings.schedule, settings.steps), make, run.ranks,
            run.board, pace, saving, watching, Ending.of(self.phase, run.folder, run.ranks, self.done),
            every=config.checkpoint_every, lag=config.checkpoint_lag, log_every=config.log_every,
            clip_bound=rule and rule.bound, public=settings.data.public,
            spent=Spent(lambda: run.writer.history, config.log_every) if rule else None,
        )  # fmt: skip

    def require_same_records(self, segment: Segment, sampler: Sampler[Any] | None) -> None:
        """Before steps after the last durable checkpoint are made again: a check that their records have not changed
        since.

        Raises ShardError on all ranks if one of the shards has changed. How many shards are compared depends on which
        records were drawn, so that number is not shown. Without a sampler, all shards are compared: missing features
        may have to be computed from any of them.
        """
        run, phase, ranks = self.run, self.phase, self.run.ranks
        here = phase.number, segment.number
        steps = ranks.on_main(lambda: range(self.done + 1, run.writer.history.progress[here].opened + 1))
        cache = phase.reading.cache_dir
        everyone = np.arange(phase.index.records if sampler is None else 0)
        drawn: set[int] = set()
        for step in steps:
            ids = None if sampler is None else sampler.draw(step).ids
            if ids is not None and phase.units is not None:
                # Also those records of a unit that the step did not choose, so that the number of shards tells no more
                # than which units were drawn.
                ids = phase.units.records_of_all(ids)
            drawn.update(shards_of(phase.index, everyone if ids is None else ids))
            if cache is not None:  # on every rank, because each node has a cache of its own
                forget = partial(forget_cached, phase.index, ids, Path(cache), ranks.pulse.beat)
                on_all(ranks, forget, ShardError)
        shards = ranks.on_main(lambda: with_sample(phase.index, drawn))
        if not shards:
            return
        run.board.say(
            f"{phase.name}  steps {steps[0]} to {steps[-1]} are made again with the same noise; the shards that they "
            "draw from are compared with the index first"
        )
        own = self.share_of(shards)
        on_all(ranks, lambda: require_contents(phase.index, own, ranks.pulse.beat), ShardError)

    def share_of(self, shards: list[int]) -> list[int]:
        """The shards that this rank compares: those that only some nodes hold are left to the ranks that read them. A
        unit is read on one node, from that node's own copies, so every node compares all of the shards that it
        holds."""
        phase, ranks, placement, index = self.phase, self.run.ranks, self.phase.placement, self.phase.index
        if placement is None:
            return shards[ranks.rank :: ranks.world]
        group = next(number for number, members in enumerate(placement.groups) if ranks.rank in members)
        members = placement.groups[group]
        read = placement.owners == group if phase.units is None or not isinstance(index, ShardIndex) else index.held()
        return [shard for shard in shards if read[shard]][members.index(ranks.rank) :: len(members)]

    def without_steps(self) -> None:
        """Loads or keeps weights, saves them, and measures them on public records if asked."""
        run, phase, ranks = self.run, self.phase, self.run.ranks
        ranks.on_main(lambda: declare(run, phase))
        model = build(phase.shape, phase.settings.objective)
        if phase.start is not None and isinstance(phase.settings.data, CheckpointData):
            report = phase.start.fill(model)
            run.board.say(f"{phase.name}  starts from {phase.start.path.name}\n{report}")
            if phase.pixels != IMAGENET:
                run.board.say(f"{phase.name}  pixels are normalised by {in_words(phase.pixels)}")
        elif self.loaded is not None:
            hand_over(self.loaded.weights(), model)
        engine = StillEngine(model, ranks.device)
        evaluator = None
        if phase.held_out is not None:
            key = run.derive(phase.number, None)("public-masks")
            evaluator = PublicEvaluator(phase, engine, ranks, run.config.micro_batch, key)
        watching = PublicRecords(phase.settings, run.board, evaluator)
        measured = watching.measure()
        saving = Saving(run, phase.number, engine, 1, lambda: header(run, phase))
        saving.begin(0)
        saving.settle(measured)
        watching.publish(0)


FIRST_MOMENT = "exp_avg"


def settle(model: nn.Module, settings: SolvedHead | None, noise: float = 0.0) -> None:
    """Tells a head that is solved from sums how; `noise` is the deviation in an element of their mean."""
    head = getattr(model, "head", None)
    if isinstance(head, StatisticsHead):
        given = settings or SolvedHead()
        head.settle(noise, given.ridge)


def carry_over(loaded: Loaded, engine: Engine, how: Carry) -> None:
    """Takes over the optimizer state from the end of the phase before. Learning rates start anew in any case.

    Bu et al. (2402.18752) hand AdamW over with its first moment zeroed: it points where public gradients led, while
    the second moment is a scale that remains valid. The step count stays with the second moment, so that bias
    correction does not inflate it again.
    """
    if how == "none" or not loaded.manifest["optimizer_step"]:
        return  # a phase that was ended by hand before its first step has no state to hand over
    loaded.restore_optimizer(engine, but=(BEFORE,))  # which the first step sets, and the phase before may not have
    if how == "second-moment":
        for shard in engine.shards():
            shard.state[FIRST_MOMENT].zero_()


# A phase without steps loads weights from a checkpoint, or only measures the weights it is given. It leaves a
# checkpoint like any phase, so that the next one, a resume and the certificate need not know the difference.


class StillEngine:
    """A model wrapped as an engine that trains nothing, with what evaluation and checkpoints need."""

    partitioned = False
    trainable_elements = 0

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model.to(device).eval(), device
        self.shapes: dict[str, torch.Size] = {}

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        raise UpdateError("a phase without steps was given a micro-batch")

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        raise UpdateError("a phase without steps was asked to update its weights")

    def observe(self) -> Observation:
        raise UpdateError("a phase without steps has seen no micro-batch")

    def discard(self) -> None:
        """There is nothing to discard."""

    def shards(self) -> list[OptimizerShard]:
        return []

    def optimizer_step(self) -> int:
        return 0

    def set_optimizer_step(self, step: int) -> None:
        del step

    def whole_weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def plain_model(self) -> nn.Module | None:
        return None

    def close(self) -> None:
        """There is nothing to release."""
