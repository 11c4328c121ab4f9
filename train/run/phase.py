"""One phase of a run, built around its plan: model, keys, records, engine, step; then the loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from murmuration.accounting.keys import Derive
from murmuration.accounting.ledger.facts import Segment
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.held_out import marking
from murmuration.data.batch.loader import Loader, PublicOrder, Reader
from murmuration.data.batch.reader import BatchReader
from murmuration.data.draw.micro_batch import even_width
from murmuration.data.draw.poisson import Sampler
from murmuration.model.build import build
from murmuration.model.statistics_head import StatisticsHead
from murmuration.model.trainable import select
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.config.optimizer import Carry
from murmuration.train.config.phase import SolvedHead
from murmuration.train.config.privacy import Privacy
from murmuration.train.distributed.cores import own_cores
from murmuration.train.distributed.memory import forbid_dumps, keep_from_swap
from murmuration.train.engines.base import Engine
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.forward import PlainForward, PrivateForward
from murmuration.train.noise.adaptive_norm import AdaptiveNorm
from murmuration.train.optim.base import BEFORE
from murmuration.train.optim.choose import make_optimizer
from murmuration.train.optim.probed_rate import ProbedRate
from murmuration.train.private import Computation, PrivateCore, clipping_engine
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor
from murmuration.train.recipe.read_options import public_epochs, rank_plan, reading_options, with_stream_order
from murmuration.train.recipe.ready_phase import ReadyPhase, clip_rule
from murmuration.train.recipe.warm_start import hand_over
from murmuration.train.run.board import Feed, Pace
from murmuration.train.run.cached_features import FeatureReader, feature_reader
from murmuration.train.run.context import RunContext
from murmuration.train.run.declare import declare, header, segment_of
from murmuration.train.run.early_end import Ending
from murmuration.train.run.evaluation_phase import run_without_steps
from murmuration.train.run.probed_step import STATE, ProbedStep, probed_rate
from murmuration.train.run.public_mixing import MixingEngine
from murmuration.train.run.remade import require_same_records
from murmuration.train.run.spent import Spent
from murmuration.train.run.trainer import Saving, Step, Trainer, Watching
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.step import PlainStep, Records
from murmuration.train.storage.checkpoint import Loaded


def train_phase(run: RunContext, phase: ReadyPhase, loaded: Loaded | None) -> None:
    """Trains from the checkpoint (of this phase, or of the one before it) to the end of the phase."""
    if not phase.settings.trains:
        return run_without_steps(run, phase, loaded)
    resumed = loaded is not None and loaded.position.phase == phase.number
    model = initial_model(phase, loaded, resumed)
    plan = run.ranks.on_main(lambda: declare(run, phase))
    if plan is not None and (loaded is None or not resumed or loaded.position.step == 0):
        settle(model, phase.settings.head, plan.noise_std / plan.divisor)
    if plan is not None and phase.settings.privacy is not None:
        train_privately(run, phase, model, plan, phase.settings.privacy, loaded, resumed)
    else:
        train_publicly(run, phase, model, loaded, resumed)


def train_privately(
    run: RunContext, phase: ReadyPhase, model: nn.Module, plan: PrivacyPlan, privacy: Privacy, loaded: Loaded | None,
    resumed: bool,
) -> None:  # fmt: skip
    config, ranks, number, settings = run.config, run.ranks, phase.number, phase.settings
    done = loaded.position.step if loaded is not None and resumed else 0
    segment = _segment(run, phase, done)
    derive = run.derive(number, segment, done)
    engine_settings, computation = EngineSettings.of(config), Computation.of(config.run)
    rule = clip_rule(privacy, plan, config.micro_batch)
    with ExitStack() as at_end:
        phase = with_stream_order(phase, derive("public-order"))
        reader = _reader(run, phase, model, derive, at_end)
        built = clipping_engine(
            model, rule, settings.optimizer, plan.noise_std / plan.divisor, engine_settings, ranks, computation,
            keeps_before=privacy.loss_probes is not None,
        )  # fmt: skip
        at_end.callback(built.engine.close)
        _note_memory(run, phase, built.forward.kept_from_swap)
        core = PrivateCore(plan, built.clip, built.engine, derive, ranks, computation.noise, segment.from_step)
        proved = _prove(run, phase, core, segment, built.forward)
        loader = _private_loader(run, phase, marking(reader, plan.held_out), core, segment, done, at_end)
        mixing = None
        if phase.mixed is not None:
            mixing = MixingEngine.of(run, phase, plan.divisor, built.engine, derive("public-order"))
            at_end.callback(mixing.close_public)
        own = loaded if resumed else None
        records = Records(loader.draw, loader.micro_batches).until_unreadable(run.stop)
        rate = probed_rate(phase, plan, own)
        step = core.step(
            number, run.journal, records, run.stop, stepping=mixing or built.engine,
            first_norm=_first_norm(run, phase, plan, own), probes=rate.probes if rate is not None else None,
        )  # fmt: skip
        at_end.callback(core.close)
        _restore(loaded, resumed, built.engine, settings.optimizer.carry)
        watching = watching_of(run, phase, built.engine, derive, built.clip, plan, step.norm)
        pace = _pace(run, loader, plan.divisor, public=False, synthetic=proved)
        followed = step if rate is None else ProbedStep(step, rate)
        unusable = _lister(run, phase, reader)
        trainer_of(
            run, phase, followed, built.engine, pace, watching, plan, rule.bound, done, unusable, rate
        ).run(done)  # fmt: skip


def _first_norm(run: RunContext, phase: ReadyPhase, plan: PrivacyPlan, own: Loaded | None) -> float | None:
    """C of the next step, where C adapts; `own`: the checkpoint of this phase that it continues from."""
    if plan.adaptive is None:
        return None
    done, digest = (0, None) if own is None else (own.position.step, own.digest)
    return run.ranks.on_main(lambda: run.writer.clip_norm_after(phase.number, done, digest))


def _segment(run: RunContext, phase: ReadyPhase, done: int) -> Segment:
    found = run.ranks.on_main(lambda: segment_of(run, phase, done))
    if phase.settings.features is not None:  # before missing features are computed
        require_same_records(run, phase, found, done, sampler=None)
    return found


def _note_memory(run: RunContext, phase: ReadyPhase, totals: bool) -> None:
    """Tries to keep the run key out of swap and the process out of core dumps, and notes what succeeded. A failure ends
    nothing: the limit on locked memory is the administrator's."""
    key, dumps = keep_from_swap(run.key.secret), forbid_dumps()
    run.board.note(
        phase.name,
        f"core dumps of this process are {'impossible' if dumps else 'left to RLIMIT_CORE = 0'}; in memory that is "
        f"never swapped: the run key {'yes' if key else 'no'}, the totals {'yes' if totals else 'no'}"
        + ("" if key and totals else " (raise the limit: ulimit -l unlimited; or encrypt the swap, or switch it off)"),
    )


def train_publicly(run: RunContext, phase: ReadyPhase, model: nn.Module, loaded: Loaded | None, resumed: bool) -> None:
    config, ranks, settings = run.config, run.ranks, phase.settings
    done = loaded.position.step if loaded is not None and resumed else 0
    derive = run.derive(phase.number, None)
    with ExitStack() as at_end:
        phase = with_stream_order(phase, derive("public-order"))
        reader = _reader(run, phase, model, derive, at_end)
        engine = make_engine(
            EngineSettings.of(config),
            PlainForward(model, config.run.precision, compiled=config.run.compile == "blocks"),
            make_optimizer(settings.optimizer, model.named_parameters(), 0.0),
            ranks,
        )  # fmt: skip
        at_end.callback(engine.close)
        batch = float(settings.batch or 0)
        epochs = public_epochs(phase, int(batch), derive("public-order"))
        width = config.micro_batch
        if phase.placement is None:  # otherwise a node's share of a batch varies
            width = even_width(epochs.batch, ranks.world, width)
        loader = _loader(run, phase, reader, PublicOrder(epochs), width, at_end)
        records = Records(loader.draw, loader.micro_batches).until_unreadable(run.stop)
        step = PlainStep(records, epochs.batch, engine, ranks, run.stop)
        _restore(loaded, resumed, engine, settings.optimizer.carry)
        watching = watching_of(run, phase, engine, derive, None, None)
        pace = _pace(run, loader, batch, settings.data.public)
        trainer_of(run, phase, step, engine, pace, watching, None, None, done, _lister(run, phase, reader)).run(done)


def _reader(
    run: RunContext, phase: ReadyPhase, model: nn.Module, derive: Derive, at_end: ExitStack
) -> BatchReader | FeatureReader:
    reader: BatchReader | FeatureReader = BatchReader(
        phase.index, phase.data_spec(augment=True), phase.text,
        augment_key=derive("augmentation"), mask_key=derive("masks"), dropout_key=derive("dropout"),
        units=phase.units, rows_per_unit=phase.rows_per_unit, unit_reduce=phase.unit_reduce,
        unit_key=derive("augmentation"),
        reading=reading_options(phase.reading, phase.index, run.ranks), pin_memory=run.ranks.device.type == "cuda",
        views=phase.views,
    )  # fmt: skip
    if phase.settings.features is not None:
        reader = feature_reader(run, phase, model, reader)
    at_end.callback(_lister(run, phase, reader))
    return reader


def _lister(run: RunContext, phase: ReadyPhase, reader: BatchReader | FeatureReader) -> Callable[[], None]:
    """What lists the unusable records of the phase: at every checkpoint, and however it ends."""
    return lambda: run.board.bad_records(phase.name, run.ranks.rank, reader.bad_reasons)


def _loader(
    run: RunContext, phase: ReadyPhase, reader: Reader, sampler: Sampler[Any], micro_batch: int, at_end: ExitStack
) -> Loader[Any]:  # fmt: skip
    ranks = run.ranks
    loader = Loader(
        reader, sampler, ranks.rank, ranks.world, micro_batch, last=phase.settings.steps,
        plan=rank_plan(phase, ranks, micro_batch), device=ranks.device,
    )  # fmt: skip
    at_end.callback(loader.close)
    return loader


def _pace(
    run: RunContext, loader: Loader[Any], records: float, public: bool, synthetic: float | None = None
) -> Pace:  # fmt: skip
    """Called on all ranks together."""
    feed = Feed(lambda: loader.waited, run.ranks.sum(own_cores(run.ranks)))
    return Pace(records, public, synthetic, feed)


def _private_loader(
    run: RunContext, phase: ReadyPhase, reader: Reader, core: PrivateCore, segment: Segment, done: int,
    at_end: ExitStack,
) -> Loader[Any]:  # fmt: skip
    if phase.settings.features is None:  # otherwise they were compared before features were computed
        require_same_records(run, phase, segment, done, core.sampler())
    return _loader(run, phase, reader, core.shared_sampler(), run.config.micro_batch, at_end)


def _prove(
    run: RunContext, phase: ReadyPhase, core: PrivateCore, segment: Segment, forward: PrivateForward
) -> float:  # fmt: skip
    """Runs the self-test before anything else touches the engine; returns its speed on synthetic records."""
    run.ranks.on_main(lambda: run.require_generator(segment, core.generator))
    synthetic = SyntheticRecords.of(phase.shape, phase.settings.objective, phase.settings.rows_of_a_slot)
    ranks_per_copy = EngineSettings.of(run.config).ranks_per_copy
    report = core.prove(synthetic, ranks_per_copy, run.config.micro_batch)
    run.board.say(
        f"{phase.name}  self-test passed: σ measured {report.measured_sigma:.3f} (planned "
        f"{core.plan.noise_multiplier:.3f}), hostile records move the sum by at most {report.largest_hostile:.3f}·C, "
        f"{report.written_out:.0%} of the synthetic records needed their gradients written out"
    )
    if run.ranks.device.type == "cuda":
        run.board.note(phase.name, forward.about_graph())
    return report.records_per_second


def watching_of(
    run: RunContext, phase: ReadyPhase, engine: Engine, derive: Derive,
    clip: ClipEngine | None, plan: PrivacyPlan | None, norm: AdaptiveNorm | None = None,
) -> Watching:  # fmt: skip
    """What is measured on public records at checkpoints."""
    micro_batch, masks = run.config.micro_batch, derive("public-masks")
    parts = phase, engine, run.ranks, micro_batch, masks, clip, plan, norm
    return Watching(
        PublicEvaluator(*parts, precision=run.config.run.precision) if phase.held_out is not None else None,
        LossMonitor(*parts) if phase.monitored is not None else None,
    )


def trainer_of(
    run: RunContext, phase: ReadyPhase, step: Step, engine: Engine, pace: Pace, watching: Watching,
    plan: PrivacyPlan | None, clip_bound: float | None, done: int, list_unusable: Callable[[], None] = lambda: None,
    rate: ProbedRate | None = None,
) -> Trainer:  # fmt: skip
    config, number = run.config.run, phase.number
    saving = Saving(
        run.checkpoints, config.checkpoint_every, config.checkpoint_lag, EngineSettings.of(run.config).ranks_per_copy,
        header=lambda: header(run, phase) | ({} if rate is None else {STATE: rate.state()}),
        checkpointed=lambda t, digest: run.writer.checkpointed(number, t, digest), forget=run.forget,
        list_unusable=list_unusable,
    )  # fmt: skip
    return Trainer(
        phase, step, engine, run.ranks, run.board, pace, saving, watching,
        Ending.of(phase, run.folder, run.ranks, done), log_every=config.log_every, clip_bound=clip_bound,
        budget=plan.epsilon_budget if plan else None,
        spent=Spent(lambda: run.writer.history, config.log_every) if plan else lambda: None,
    )  # fmt: skip


# The model of a phase: fresh, from its own checkpoint, or with the weights of the phase before; and what is trained.

FIRST_MOMENT = "exp_avg"


def initial_model(phase: ReadyPhase, loaded: Loaded | None, resumed: bool) -> nn.Module:
    """Weights handed over come first, then the choice of what is trained. Adapters belong to the phase, so the phase's
    own checkpoint is loaded after that."""
    settings = phase.settings
    model = build(phase.shape, settings.objective)
    if loaded is not None and not resumed:
        hand_over(loaded.weights(), model)
    select(model, settings.trainable)
    settle(model, settings.head)
    if loaded is not None and resumed:
        model.load_state_dict(loaded.state_dict(model.state_dict()))
    return model


def settle(model: nn.Module, settings: SolvedHead | None, noise: float = 0.0) -> None:
    """Tells a head that is solved from sums how; `noise` is the deviation in an element of their mean."""
    head = getattr(model, "head", None)
    if isinstance(head, StatisticsHead):
        given = settings or SolvedHead()
        head.settle(noise, given.ridge, given.feature_norm, given.balanced)


def _restore(loaded: Loaded | None, resumed: bool, engine: Engine, carry: Carry) -> None:
    if loaded is not None:
        loaded.restore_optimizer(engine) if resumed else carry_over(loaded, engine, carry)


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
