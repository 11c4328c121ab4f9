"""One phase of a run around its plan: model, keys, records, sharded engine, step; then the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from accounting.keys import Purpose
from data.batches import BatchReader
from data.loader import Loader, PublicOrder
from train.board import Pace
from train.checkpoint import Loaded
from train.clip_engines import make_clip
from train.engines import make_engine, replicated
from train.features import feature_reader
from train.forward import PlainForward, PrivateForward
from train.mixing import MixingEngine
from train.monitor import LossMonitor
from train.optim import make_optimizer
from train.phase_ledger import declare, derive_key, header, segment_of
from train.phase_model import carry_over, initial_model
from train.plain_step import PlainStep
from train.private_parts import PrivateParts
from train.public_eval import PublicEvaluator
from train.reading import begun, public_epochs, rank_plan, reading_options, until_unreadable
from train.recipe import ReadyPhase, clip_rule
from train.run_context import RunContext
from train.schedule import learning_rate
from train.still_phase import stand_still
from train.stop_rules import Ending
from train.trainer import Step, Trainer


def train_phase(run: RunContext, phase: ReadyPhase, loaded: Loaded | None) -> None:
    """From the checkpoint (of this phase, or of the one before it) to the end of the phase."""
    if not phase.settings.trains:
        return stand_still(run, phase, loaded)
    config, ranks, number = run.config, run.ranks, phase.number
    settings = phase.settings
    resumed = loaded is not None and loaded.position.phase == number
    done = loaded.position.step if loaded is not None and resumed else 0
    model = initial_model(phase, loaded, resumed)
    plan = ranks.on_main(lambda: declare(run, phase))
    segment = ranks.on_main(lambda: segment_of(run, phase, done)) if plan else None
    derive = partial(derive_key, run.key, number, segment)
    micro_batch = config.train_micro_batch_size_per_gpu
    clip = None
    if plan is not None and settings.privacy is not None:
        clip = make_clip(config.run, clip_rule(settings.privacy, plan, micro_batch))
    phase = begun(phase, derive("public-order"))
    reader = _reader(run, phase, derive)
    if settings.features is not None:
        reader = feature_reader(run, phase, model, reader)
    engine = make_engine(
        config,
        PrivateForward(model, clip) if clip else PlainForward(model, config.run.precision),
        make_optimizer(settings.optimizer, model.named_parameters(), plan.noise_std / plan.divisor if plan else 0.0),
        ranks,
    )
    load = partial(
        Loader, reader, rank=ranks.rank, world=ranks.world, micro_batch=micro_batch, last=settings.steps,
        plan=rank_plan(phase, ranks, micro_batch),
    )  # fmt: skip
    records = plan.divisor if plan else float(settings.batch or 0)
    pace = Pace(records, private=plan is not None)
    private = None
    if plan is not None and clip is not None:
        private = PrivateParts(run, phase, plan, clip, engine, derive, load)  # before anything else touches the engine
        pace.calibrate(private.records_per_second)
    mixing = MixingEngine.of(run, phase, records, engine, derive("public-order")) if phase.mixed else None
    stepping = mixing or engine
    step: Step
    if private is not None:
        loader = private.loader
        step = private.step(stepping, done, loaded.digest if loaded is not None and resumed else None)
    else:
        epochs = public_epochs(phase, int(records), derive("public-order"))
        loader = load(PublicOrder(epochs))
        step = PlainStep(epochs, stepping, ranks, run.stop, until_unreadable(loader.micro_batches, run.stop))
    if loaded is not None:
        loaded.restore_optimizer(engine) if resumed else carry_over(loaded, engine, settings.optimizer.carry)
    evaluator = None
    if phase.held_out is not None:
        evaluator = PublicEvaluator(phase, engine, ranks, micro_batch, derive("masks"), clip, plan)
    monitor = None
    if phase.monitored is not None:
        monitor = LossMonitor(phase, engine, ranks, micro_batch, derive("masks"), clip, plan)
    try:
        Trainer(
            number=number, name=phase.name, steps=settings.steps, step=step, engine=engine,
            learning_rate=lambda t: learning_rate(settings.schedule, settings.steps, t),
            ranks=ranks, board=run.board, pace=pace, checkpoints=run.checkpoints,
            checkpoint_every=config.run.checkpoint_every, checkpoint_lag=config.run.checkpoint_lag,
            log_every=config.run.log_every, replicated=replicated(config),
            evaluator=evaluator, monitor=monitor, clip_bound=clip.rule.bound if clip else None,
            header=lambda: header(run, phase),
            checkpointed=lambda t, digest: run.writer.checkpointed(number, t, digest),
            spent=lambda: run.writer.history.epsilon() if plan else None,
            budget=plan.epsilon_budget if plan else None, public_records=settings.data.public,
            ending=Ending.of(phase, run.folder, ranks, done),
        ).run(done)  # fmt: skip
    finally:
        if private is not None:
            private.close()
        if mixing is not None:
            mixing.close_public()
        loader.close()
        engine.close()
        run.board.bad_records(phase.name, ranks.rank, reader.bad_reasons)


def _reader(run: RunContext, phase: ReadyPhase, derive: Callable[[Purpose], bytes]) -> BatchReader:
    return BatchReader(
        phase.index, phase.data_spec(augment=True), phase.text,
        augment_key=derive("augmentation"), mask_key=derive("masks"), dropout_key=derive("dropout"),
        reading=reading_options(phase.reading, phase.index), pin_memory=run.ranks.device.type == "cuda",
    )  # fmt: skip
