"""Builds one phase around its plan: model, keys, sampler, clip engine, noise, sharded engine; then trains it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from accounting.accountant import describe
from accounting.history import Segment
from accounting.journal import Journal
from accounting.keys import Purpose, RunKey
from accounting.ledger import LedgerError
from accounting.plan import PrivacyPlan
from data.batches import BatchReader
from data.loader import Loader, PublicOrder
from data.public import PublicEpochs
from data.sampler import PoissonSampler
from model.build import build, take_encoder
from train.board import Board, Pace
from train.checkpoint import Checkpoints, Loaded
from train.clip_engines import make_clip
from train.config import Config
from train.engines import make_engine, replicated
from train.forward import PlainForward, PrivateForward
from train.metrics import MetricRelease
from train.noise import Noise, NoiseMechanism
from train.noise_ahead import NoiseAhead
from train.noise_philox import PhiloxNoise
from train.optim import make_optimizer
from train.plain_step import PlainStep
from train.public_eval import PublicEvaluator
from train.ranks import Ranks
from train.reading import reading_options, until_unreadable
from train.recipe import ReadyPhase, clip_rule, make_plan
from train.schedule import learning_rate
from train.self_test import self_test
from train.siblings import register
from train.step import PrivateStep
from train.stop import StopRequest
from train.trainer import Step, Trainer

PUBLIC_SEGMENT = "public"


@dataclass
class RunContext:
    """What all phases of a run share. `journal` exists on the main rank alone: one writer."""

    config: Config
    name: str
    ranks: Ranks
    key: RunKey
    journal: Journal | None
    board: Board
    stop: StopRequest
    checkpoints: Checkpoints
    new_segment: str | None

    @property
    def writer(self) -> Journal:
        assert self.journal is not None, "the main rank holds the ledger"
        return self.journal


def train_phase(run: RunContext, phase: ReadyPhase, loaded: Loaded | None) -> None:
    """From the checkpoint (of this phase, or of the one before it) to the end of the phase."""
    config, ranks, number = run.config, run.ranks, phase.number
    settings = phase.settings
    resumed = loaded is not None and loaded.position.phase == number
    done = loaded.position.step if loaded is not None and resumed else 0
    model = _model(phase, loaded, resumed)
    plan = ranks.on_main(lambda: declare(run, phase))
    segment = ranks.on_main(lambda: _segment(run, phase, done)) if plan else None
    derive = partial(_derive, run.key, number, segment)
    micro_batch = config.train_micro_batch_size_per_gpu
    clip = None
    if plan is not None and settings.privacy is not None:
        clip = make_clip(config.run, clip_rule(settings.privacy, plan, micro_batch))
    engine = make_engine(
        config,
        PrivateForward(model, clip) if clip else PlainForward(model, config.run.precision),
        make_optimizer(settings.optimizer, model.named_parameters(), plan.noise_std / plan.divisor if plan else 0.0),
        ranks,
    )
    reader = BatchReader(
        phase.index, phase.data_spec(augment=True), phase.text,
        augment_key=derive("augmentation"), mask_key=derive("masks"),
        reading=reading_options(settings.data.reading, phase.index), pin_memory=ranks.device.type == "cuda",
    )  # fmt: skip
    load = partial(Loader, reader, rank=ranks.rank, world=ranks.world, micro_batch=micro_batch, last=settings.steps)
    records = plan.divisor if plan else float(settings.batch or 0)
    pace = Pace(records, private=plan is not None)
    step: Step
    ahead: NoiseAhead | None = None
    if plan is not None and clip is not None:
        report = self_test(
            engine, clip, _noise(config, derive("self-test"), plan), replicated(config), phase.shape,
            settings.objective, micro_batch, ranks,
        )  # fmt: skip
        run.board.say(
            f"{phase.name}  self-test passed: σ measured {report.measured_sigma:.3f} (planned "
            f"{plan.noise_multiplier:.3f}), hostile records move the sum by at most {report.largest_hostile:.3f}·C"
        )
        pace.calibrate(report.records_per_second)
        sampler = PoissonSampler(derive("sampling"), derive("sampling-digest"), plan.records, plan.threshold)
        noise = _noise(config, derive("noise"), plan)
        if isinstance(noise, NoiseMechanism):
            noise = ahead = NoiseAhead(noise, [fragment for shard in engine.shards() for fragment in shard.fragments])
        loader = load(sampler)
        step = PrivateStep(
            number, run.journal, loader, clip, noise, engine, ranks, run.stop,
            until_unreadable(loader.micro_batches, run.stop),
            MetricRelease(derive("metric-noise"), plan, clip.rule.bound, ranks) if plan.metrics else None,
        )  # fmt: skip
    else:
        epochs = PublicEpochs(phase.index.records, int(records), derive("public-order"))
        loader = load(PublicOrder(epochs))
        step = PlainStep(epochs, engine, ranks, run.stop, until_unreadable(loader.micro_batches, run.stop))
    if loaded is not None and resumed:
        loaded.restore_optimizer(engine)
    evaluator = None
    if phase.held_out is not None:
        evaluator = PublicEvaluator(phase, engine, ranks, micro_batch, derive("masks"), clip, plan)
    try:
        Trainer(
            number=number, name=phase.name, steps=settings.steps, step=step, engine=engine,
            learning_rate=lambda t: learning_rate(settings.schedule, settings.steps, t),
            ranks=ranks, board=run.board, pace=pace, checkpoints=run.checkpoints,
            checkpoint_every=config.run.checkpoint_every, checkpoint_lag=config.run.checkpoint_lag,
            log_every=config.run.log_every, replicated=replicated(config),
            evaluator=evaluator, clip_bound=clip.rule.bound if clip else None,
            header=lambda: _header(run, phase),
            checkpointed=lambda t, digest: run.writer.checkpointed(number, t, digest),
            spent=lambda: run.writer.history.epsilon() if plan else None,
            budget=plan.epsilon_budget if plan else None, public_records=settings.data.public,
        ).run(done)  # fmt: skip
    finally:
        if ahead is not None:
            ahead.close()
        loader.close()
        engine.close()
        _report_bad(run, phase, reader)


def _noise(config: Config, key: bytes, plan: PrivacyPlan) -> Noise:
    return (PhiloxNoise if config.run.noise == "philox" else NoiseMechanism).of(key, plan)


def _model(phase: ReadyPhase, loaded: Loaded | None, resumed: bool) -> nn.Module:
    """Fresh weights, those of this phase's checkpoint, or handed over from the phase before."""
    model = build(phase.shape, phase.settings.objective)
    if loaded is None:
        return model
    if resumed or set(loaded.weights()) == set(model.state_dict()):
        model.load_state_dict(loaded.state_dict(model.state_dict()))
    else:
        take_encoder(loaded.weights(), model)
    return model


def declare(run: RunContext, phase: ReadyPhase) -> PrivacyPlan | None:
    """Into the ledger, frozen. Plans of later phases are declared before the first step: they depend on no output."""
    privacy = phase.settings.privacy
    if privacy is None:
        run.writer.declare_nonprivate(phase.number, phase.name, phase.settings.data.public, phase.index.manifest_digest)
        return None
    known = run.writer.history.plans.get(phase.number)
    plan = make_plan(phase.settings, privacy, phase.index.records, f"phases.{phase.number}", known)
    run.writer.declare_plan(phase.number, phase.name, plan, describe("pld"))
    warning = register(
        phase.index.folder, run.writer.ledger.entries[0].hash, phase.name, run.name, plan.epsilon_budget, plan.delta
    )  # fmt: skip
    if warning is not None:
        run.board.say(warning)
    return plan


def _segment(run: RunContext, phase: ReadyPhase, done: int) -> Segment:
    """The segment whose keys the next step uses; a new one wherever the old keys must not be used again."""
    contents = phase.contents()
    digest = run.config.digest(phase.number, contents)
    reason = run.writer.new_segment_reason(phase.number, done, digest)
    known = run.writer.history.segments_of(phase.number)
    if known and known[-1].manifest_digest != contents["data"]:
        raise LedgerError(
            f"the records of phase {phase.name!r} changed since the run began; "
            "restore them or start a new run directory"
        )
    if reason is None:
        run.writer.resumed(phase.number, done)
        return known[-1]
    if known and run.new_segment is None and reason == "the config changed":
        raise LedgerError(
            f"phase {phase.name!r} was configured differently when it began; restore the config, or declare the "
            "change with --new-segment 'why' (all opened steps stay charged)"
        )
    salt = "debug" if run.key.debug else None
    return run.writer.begin_segment(phase.number, digest, contents["data"], done, run.new_segment or reason, salt)


def _derive(key: RunKey, phase: int, segment: Segment | None, purpose: Purpose) -> bytes:
    return key.derive(purpose, phase, segment.key_name if segment else PUBLIC_SEGMENT)


def _header(run: RunContext, phase: ReadyPhase) -> dict[str, Any]:
    """What ties a checkpoint to its run: ledger head and length, plan, data. Never a key."""
    ledger = run.writer.ledger
    plan = run.writer.history.plans.get(phase.number)
    return {
        "run": run.name,
        "ledger": {"length": ledger.length, "head": ledger.head},
        "plan": plan.as_dict() if plan else None,
        "manifest_digest": phase.index.manifest_digest,
        "objective": phase.settings.objective,
    }


def _report_bad(run: RunContext, phase: ReadyPhase, reader: BatchReader) -> None:
    """A private report: which records could not be used, and why. Every rank writes what it met."""
    if reader.bad_reasons:
        run.board.bad_records(phase.name, run.ranks.rank, reader.bad_reasons)
