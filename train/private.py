"""Private training as a library: one builder of the private step, used by every command and by programs of your own.

`PrivateCore` puts the parts of the step together: clip engine, sharded engine, self-test, sampler, noise, released
metrics. `PrivateTraining` adds what a run needs around it: plan, ledger, keys, checkpoints, certificate.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from murmuration.accounting.banded import best_banded
from murmuration.accounting.certificate import certificate
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.calibrate import calibrate_sigma, enlarged
from murmuration.accounting.keys import Derive, Purpose, destroy, load
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.journal import BudgetSpent, Journal
from murmuration.accounting.ledger.lines import NAMED
from murmuration.accounting.plan import (
    GRID_GROWTH,
    PlanError,
    PrivacyPlan,
    Sampling,
    draws_for,
    parse_delta,
    rate_of,
    turns_for,
)
from murmuration.data.batch.function_reader import FunctionReader, Read
from murmuration.data.batch.loader import Loader
from murmuration.data.draw.allocation import AllocationSampler
from murmuration.data.draw.poisson import Draw, PoissonSampler, Sampler
from murmuration.data.draw.shared_draw import SHARED_FROM, SharedSampler
from murmuration.train.clip.choose import make_clip
from murmuration.train.clip.engine import ClipEngine, Precision
from murmuration.train.clip.isolated import kept_of_records
from murmuration.train.clip.rule import RECORDS_AT_ONCE, ClipRule, rounding_allowance
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.config.root import NoiseKind, Run, ZeroOptimization
from murmuration.train.distributed.process import quiet_libraries
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.engines.base import Engine, modes_of
from murmuration.train.engines.choose import EngineSettings, make_engine, start_ranks
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.engines.held_out import HeldOutAccuracy
from murmuration.train.engines.loss_probes import LossProbes
from murmuration.train.noise.adaptive_norm import AdaptiveNorm
from murmuration.train.noise.aes import AESNoise, Noise
from murmuration.train.noise.chacha import ChaChaNoise
from murmuration.train.noise.correlated import CorrelatedNoise
from murmuration.train.noise.exact import ExactNoise
from murmuration.train.noise.metrics import MetricRelease
from murmuration.train.noise.prefetch import NoiseAhead
from murmuration.train.optim.base import FlatOptimizer
from murmuration.train.optim.choose import make_optimizer
from murmuration.train.self_test.held import Held
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.room import require_room, too_large
from murmuration.train.self_test.self_test import SelfTestError, SelfTestReport, self_test
from murmuration.train.step import PrivateStep, Records, StepSummary
from murmuration.train.storage.bad_records import BadRecordList
from murmuration.train.storage.certify import completed, earlier_certificate
from murmuration.train.storage.checkpoint import Keep, Position
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.open_run import open_run
from murmuration.train.storage.run_dir import RunDir


@dataclass(frozen=True)
class Computation:
    """How clipped sums and noise are computed; every choice keeps the promise."""

    clip_engine: Literal["book-keeping", "reference", "opacus"] = "book-keeping"
    clip_memory: Literal["lean", "fast"] = "lean"
    precision: Precision = "fp32"
    noise: NoiseKind = "aes"
    # It shapes no release, so it is no part of a training's identity.
    cuda_graph: Literal["auto", "off"] = field(default="auto", repr=False)

    @staticmethod
    def of(run: Run) -> Computation:
        return Computation(run.clip_engine, run.clip_memory, run.precision, run.noise, run.cuda_graph)


@dataclass(frozen=True)
class ClippingEngine:
    """A model in an engine that sums its clipped gradients."""

    clip: ClipEngine
    forward: PrivateForward
    optimizer: FlatOptimizer
    engine: Engine


def clipping_engine(
    model: nn.Module, rule: ClipRule, optimizer: Optimizer, gradient_noise: float, engine: EngineSettings, ranks: Ranks,
    computation: Computation, around_clip: Callable[[ClipEngine], ClipEngine] | None = None,
    make: Callable[..., Engine] = make_engine, keeps_before: bool = False,
) -> ClippingEngine:  # fmt: skip
    """`gradient_noise`: the deviation that the noise has in the mean gradient. `around_clip` is for audits.
    `keeps_before`: the weights from before the last step are kept, for probes of the loss."""
    clip = make_clip(computation.clip_engine, rule, computation.precision, computation.clip_memory)
    if around_clip is not None:
        clip = around_clip(clip)
    # What an audit puts around a clip engine may act on the host, which a recording would leave out.
    forward = PrivateForward(model, clip, graph=computation.cuda_graph == "auto" and around_clip is None)
    flat = make_optimizer(optimizer, model.named_parameters(), gradient_noise)
    flat.keeps_before = keeps_before
    return ClippingEngine(clip, forward, flat, make(engine, forward, flat, ranks))


GENERATORS = {"aes": AESNoise.generator, "chacha20": ChaChaNoise.generator, "exact": ExactNoise.generator}


class PrivateCore:
    """The private step of one plan under one set of keys. `prove` comes before anything else touches the engine."""

    def __init__(
        self, plan: PrivacyPlan, clip: ClipEngine, engine: Engine, derive: Derive, ranks: Ranks,
        noise: NoiseKind = "aes", begun_after: int = 0,
    ) -> None:  # fmt: skip
        """`begun_after`: the step after which the segment of the keys begins."""
        self.plan, self.clip, self.engine, self.ranks = plan, clip, engine, ranks
        if noise not in GENERATORS:
            raise PlanError(f"noise {noise!r} is none of {', '.join(GENERATORS)}")
        if (noise == "exact") != (plan.grid_growth > 0):
            raise PlanError("the noise is exact if and only if the plan charges for its grid (`grid_growth`)")
        self._derive, self._noise, self._begun_after = derive, noise, begun_after
        self._ahead: NoiseAhead | None = None

    def prove(self, synthetic: SyntheticRecords, ranks_per_copy: int, micro_batch: int) -> SelfTestReport:
        noise = self.noise("self-test", begun_after=0)
        if self.engine.device.type == "cuda":
            require_room(self.engine, synthetic, micro_batch, self.ranks)
        try:
            return self_test(self.engine, self.clip, noise, ranks_per_copy, synthetic, micro_batch, self.ranks)
        except torch.OutOfMemoryError:  # the optimizer's state and the sums that are compared come on top
            raise too_large(micro_batch, self.engine.device) from None

    def noise(self, purpose: Purpose, begun_after: int | None = None) -> Noise:
        key = self._derive(purpose)
        if self._noise == "exact":
            return ExactNoise.of(key, self.plan, self.engine.trainable_elements)
        draws = (ChaChaNoise if self._noise == "chacha20" else AESNoise).of(key, self.plan)
        if self.plan.banded is None:
            return draws
        first = (self._begun_after if begun_after is None else begun_after) + 1
        return CorrelatedNoise(draws, self.plan.banded, first)

    @property
    def generator(self) -> str:
        return GENERATORS[self._noise]

    def sampler(self) -> PoissonSampler | AllocationSampler:
        keys = self._derive("sampling"), self._derive("sampling-digest")
        if self.plan.slots > 1:
            return AllocationSampler(*keys, self.plan.records, self.plan.slots)
        return PoissonSampler(*keys, self.plan.records, self.plan.threshold, self.plan.bands)

    def shared_sampler(self) -> Sampler[Draw]:
        """The same draws; among many records, each rank draws a part. All ranks call this together."""
        ranks = self.ranks
        if ranks.world == 1 or self.plan.records < SHARED_FROM:
            return self.sampler()
        return SharedSampler(self.sampler(), ranks.rank, ranks.world, ranks.gather_apart())

    def step(
        self, phase: int, journal: Journal | None, records: Records[Draw], stop: StopRequest, *,
        stepping: Engine | None = None, first_norm: float | None = None, noise: Noise | None = None,
        probes: Callable[[int], bool] | None = None,
    ) -> PrivateStep:  # fmt: skip
        """`stepping` is the engine with what may be mixed into its updates; `first_norm` is C of the next step where C
        adapts; `probes`: which steps also measure the loss along the last move; an audit may give a `noise` of its
        own."""
        if noise is None:
            noise = self.noise("noise")
            if isinstance(noise, AESNoise) or (isinstance(noise, CorrelatedNoise) and self._noise == "aes"):
                fragments = [fragment for shard in self.engine.shards() for fragment in shard.fragments]
                noise = self._ahead = NoiseAhead(noise, fragments)
        metrics = norm = None
        if self.plan.metrics:
            make = ExactNoise.of_metric if self._noise == "exact" else AESNoise.of_metric
            metrics = MetricRelease(self._derive("metric-noise"), self.plan, self.ranks, make)
        if self.plan.adaptive is not None and metrics is not None:
            assert first_norm is not None, "the ledger knows the clipping norm of the next step"
            norm = AdaptiveNorm(self.plan, first_norm)
        if self.plan.held_out is not None and metrics is not None:
            records = Records(records.draw, HeldOutAccuracy(self.engine, metrics).around(records.micro_batches))
        if probes is not None and metrics is not None:
            measured = LossProbes(self.engine, metrics, self.ranks, probes).around(records.micro_batches)
            records = Records(records.draw, measured)
        engine = stepping or self.engine
        return PrivateStep(phase, journal, records, self.clip, noise, engine, self.ranks, stop, metrics, norm)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


PHASE, NAME = 0, "training"
ALLOWANCE = (
    f"Sums of up to {RECORDS_AT_ONCE} records are added up in fp32 and may err by the allowance (at most "
    f"{rounding_allowance(RECORDS_AT_ONCE):.1e}·C); C is lowered by it."
)
NUMBERS = (
    "In an epoch of random allocation, or a block of steps with correlated noise, a record takes part once, by its "
    "number, and the run was continued within one: that the program gave each record the same number as before is its "
    "own word (`order`; versions before did not ask for it)."
)
RESTORED = (
    "This run has no log outside its directory. Its secret file tells how long the ledger is and loses the keys of "
    "each step before the step's weights can be seen, so a ledger or a secret folder that is restored alone is "
    "refused. A whole run directory that is restored in place (secret folder, ledger and checkpoints together) cannot "
    "be told from the original: its steps may then be made again under the same keys, and are charged once."
)
WATCHED = (
    "Nobody watches the run: who sees the console, the files or the load of the machine while it lasts sees when steps "
    "end, and so roughly how long their records took. What is kept does not tell it (rates were timed on synthetic "
    "records, and files have the modification times that the run set), with two exceptions: at which step a start was "
    "ended by a clock, by hand or by a failure, and the change times that the file system itself notes, which no copy "
    "carries."
)
SECRET_FOLDER = "Everything is as private as the run directory's secret folder was while the run lasted."
DEVIATIONS = [
    ALLOWANCE,
    "Proved at every start on the device listed under `machine`; kernels of other devices may round a record's "
    "gradient depending on its row.",
    "The training loop is a program of the user's own: what it computes from private records beside the private step, "
    "or makes of the summaries that steps return, is not covered.",
    "The model is the user's own. Its forward() was given one record at a time, by construction, and could write "
    "nothing of it into a tensor that records share. Weights, buffers and the attributes of its modules were compared "
    "before and after every step; what it may keep elsewhere in Python (a global list, a file), or do through private "
    "interfaces of PyTorch, was not looked at.",
    "The records are known by the name and number that the program gave them; other runs on them are not known.",
    WATCHED,
    SECRET_FOLDER,
    RESTORED,
]


def _require_possible(banded: bool, allocated: bool, floor: bool, keep_key: bool) -> None:
    if banded and floor:
        raise PlanError("noise_floor needs the same independent noise at all steps; drop it, or bands")
    if banded and keep_key:
        raise PlanError("keep_key would keep the keys of the last block's steps; drop it, or bands")
    if allocated and (banded or keep_key):
        raise PlanError("random allocation is proved without bands, and keep_key would keep its key; drop them")


class PrivateTraining:
    """Trains `model` with (ε, δ)-DP for one record, from the run directory's last checkpoint on.

    `model(inputs)` returns one loss per record; `read(number)` returns the inputs of one of the records
    0 … records - 1, whose number is given as an array of one, by one thread at a time. With `views`, it may return
    several rows for a record, and the model returns one loss per row. A record for which it raises anything is absent;
    the reason goes to the run directory's `logs/private`. `prove` tries a few and refuses a `read` that fails for all.

        with PrivateTraining(model, read, ...) as training:
            training.prove()
            for t in training.steps():
                training.step(t, learning_rate)
            training.finish()

    Each step spends part of the budget when it begins. Weights may be looked at at any time; so the keys of a step are
    gone when it returns, and after a crash, steps since the last `save` are not replayed: they stay charged, new keys
    are used, and the last steps may be refused (BudgetSpent). A ledger, or a secret folder, that was restored from a
    backup is refused (LedgerError). On several processes every rank runs the same program; a launcher starts them.
    """

    def __init__(
        self, model: nn.Module, read: Read, *, synthetic: Callable[[int, int], dict[str, torch.Tensor]] | None = None,
        example: Mapping[str, torch.Tensor] | None = None,
        records: int, dataset: str, run_dir: str | Path,
        expected_batch: float, steps: int, epsilon: float, delta: float | str | None = None,
        noise_multiplier: float | None = None, clip: Literal["flat", "automatic"] = "flat", clip_norm: float = 1.0,
        optimizer: Optimizer | None = None, micro_batch: int = 32,
        engine: Literal["deepspeed", "fsdp2", "local"] = "local", zero: ZeroOptimization | None = None,
        computation: Computation | None = None, keep_checkpoints: int = 2, keep_key: bool = False,
        debug_seed: int | None = None, new_segment: str | None = None, ranks: Ranks | None = None,
        about_data: str | None = None, about_owner: str | None = None, bands: int | None = None, views: int = 1,
        sampling: Sampling = "poisson", shard_over: int | None = None, order: str | None = None,
    ) -> None:  # fmt: skip
        """`synthetic(size, seed)`: random inputs of the right form, for the self-test; or `example`, one public record
        or more, whose form suffices. `dataset`: a name and version of the records; a run is continued with records of
        the same name alone. `delta`: None is 1/(2n). `clip_norm`: C.
        `noise_multiplier`: None calibrates it to `epsilon`. `ranks`: None joins those that a launcher started.
        `about_data`, `about_owner`: what the records are and who is responsible, for the certificate. `bands`: steps of
        a block whose noise is correlated (docs/privacy.md); None is independent noise. `views`: the most
        rows that `read` returns for a record; the mean gradient of those that it returns is clipped as one. `sampling`:
        with "allocation", each record takes part in one step of every epoch (docs/privacy.md).
        `shard_over`: with FSDP2, the ranks of one copy of the weights; None: all. `order`: with allocation, any text
        that changes if a record's number does, such as a digest of their names in order. An epoch is gone on with only
        if it is the same at every opening; without it, every opening begins a new epoch (with bands: a new block) under
        new keys, and the one that was broken off stays charged."""
        floor = optimizer is not None and optimizer.params.noise_floor is not None
        _require_possible(bands is not None, sampling == "allocation", floor, keep_key)
        quiet_libraries()
        trained = sum(each.numel() for each in model.parameters())
        self._described = {
            "about": {"data": about_data, "owner": about_owner},
            "model": f"{type(model).__qualname__}, {trained:,} parameters",
        }
        if (synthetic is None) == (example is None):
            raise PlanError("the self-test needs to know what records look like; give either synthetic= or example=")
        made = SyntheticRecords.like(example, views) if example is not None else None
        self._read, self._views = read, views
        self._synthetic = made or SyntheticRecords(synthetic, rows=views)  # pyright: ignore[reportArgumentType]
        self._micro_batch, self._keep_key = micro_batch, keep_key
        self._order = None if order is None else hashlib.sha256(order.encode()).hexdigest()
        self._engine_settings = EngineSettings(engine, micro_batch, zero or ZeroOptimization(), shard_over)
        self._computation = computation or Computation()
        folder = RunDir(Path(run_dir))
        self.ranks = ranks or start_ranks(engine, shard_over)
        versions = {name: version(name) for name in ("torch", "dp-accounting")}
        self._run = open_run(
            folder, folder.root.name, self.ranks, Keep(keep_checkpoints), versions, debug_seed=debug_seed,
            new_segment=new_segment, record_digests=NAMED,
        )  # fmt: skip
        self._data = hashlib.sha256(json.dumps([dataset, records]).encode()).hexdigest()
        self.done = self.saved = 0
        self._core: PrivateCore | None = None
        self._step: PrivateStep | None = None
        self._failed: int | None = None
        self._held: Held | None = None
        self._kept = set[int]()
        try:
            asked = records, expected_batch, steps, epsilon, delta, noise_multiplier, clip_norm, bands, sampling
            self.plan: PrivacyPlan = self.ranks.on_main(lambda: self._declared(*asked))
            if self._run.secret is not None:  # else finished: nothing is drawn any more
                self._build(model, clip, optimizer or Optimizer())
        except BaseException:
            self.close()
            raise

    def _build(self, model: nn.Module, clip: Literal["flat", "automatic"], optimizer: Optimizer) -> None:
        self._model, self._modes = model, modes_of(model)
        self._busy = threading.Lock()
        self._loaded = self._run.latest()
        if self._loaded is not None:
            self.done = self.saved = self._loaded.position.step
            model.load_state_dict(self._loaded.state_dict(model.state_dict()))
        rule = ClipRule.of(self.plan, clip, 0.01, self._micro_batch)
        built = clipping_engine(
            model, rule, optimizer, self.plan.noise_std / self.plan.divisor, self._engine_settings, self.ranks,
            self._computation,
        )  # fmt: skip
        identity = [type(model).__qualname__, {name: list(shape) for name, shape in built.forward.shapes.items()}]
        identity += [repr(rule), optimizer.model_dump(), repr(self._computation), self._micro_batch]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.ranks.require_same("the model and the arguments of the training", digest)
        segment = self.ranks.on_main(
            lambda: self._run.segment(
                PHASE, NAME, digest, self._data, self.done, "their weights may have been seen", self._why_anew()
            )
        )
        derive = self._run.derive(PHASE, segment, self.done)
        core = PrivateCore(
            self.plan, built.clip, built.engine, derive, self.ranks, self._computation.noise, segment.from_step
        )
        self.ranks.on_main(lambda: self._run.require_generator(segment, core.generator))
        self.ranks.on_main(lambda: self._run.remember(self._order))
        self._core = core

    def _why_anew(self) -> str | None:
        """Why an epoch or a block that was begun is not gone on with: records take part in it once, by number."""
        if self.plan.bands > 1 and (self._order is None or self.done % self.plan.bands):
            return "the keys of a block's earlier steps are gone, and later ones need them"
        if self.plan.slots > 1 and (self._order is None or load(self._run.folder.key).order != self._order):
            return "the program does not say, or not the same, in which order it numbers the records"
        return None

    def _declared(
        self, records: int, expected_batch: float, steps: int, epsilon: float, delta: float | str | None,
        sigma: float | None, clip_norm: float, bands: int | None, sampling: Sampling,
    ) -> PrivacyPlan:  # fmt: skip
        """On the main rank: the plan, frozen in the ledger; its σ and its matrix are not computed again when a run is
        continued."""
        writer = self._run.writer
        known = writer.history.plans.get(PHASE)
        banded = None
        if bands is not None:
            same = known is not None and (known.bands, known.steps) == (bands, steps)
            banded = known.banded if known is not None and same else best_banded(bands, steps)
        threshold, slots = draws_for(sampling, records, expected_batch, steps, bands or 1)
        fixed: dict[str, Any] = dict(
            records=records, threshold=threshold, clip_norm=clip_norm, steps=steps, banded=banded, slots=slots,
            delta=parse_delta(delta, records), epsilon_budget=epsilon,
            grid_growth=GRID_GROWTH if self._computation.noise == "exact" else 0.0, views=self._views,
        )  # fmt: skip
        if sigma is None and known is not None and all(getattr(known, name) == value for name, value in fixed.items()):
            sigma = known.noise_multiplier
        if sigma is None:
            turns = turns_for(steps, bands or 1, slots)
            sigma = calibrate_sigma(rate_of(threshold, slots), turns, epsilon, fixed["delta"], slots=slots)
            sigma = enlarged(sigma, fixed["grid_growth"])
        plan = PrivacyPlan(noise_multiplier=sigma, **fixed)
        writer.declare_plan(PHASE, NAME, plan, describe("pld"))
        return plan

    @property
    def core(self) -> PrivateCore:
        if self._core is None:
            raise LedgerError(f"the run in {self._run.folder.root} is finished; give another run_dir to train again")
        return self._core

    def prove(self) -> SelfTestReport:
        """The self-test, after which steps can be taken.

        By construction, whatever the module: `forward()` is given one record at a time, so that no loss and no gradient
        depends on another record, and nothing of a record can be written into a tensor that records share. A module
        that needs more is refused here, in a sentence. Tested, on synthetic records and on values that often mean
        something of their own: clipped, noised once, bounded, all trained, nothing kept.
        """
        core = self.core
        if self._step is not None:
            raise SelfTestError("prove() has passed already; take the steps")
        self._kept = before = kept_of_records()
        report = core.prove(self._synthetic, self._engine_settings.ranks_per_copy, self._micro_batch)
        if self._loaded is not None:
            self._loaded.restore_optimizer(core.engine)
        if kept := kept_of_records() - before:
            raise SelfTestError(
                f"{len(kept)} tensors of the self-test's records are still held somewhere; let forward() keep nothing, "
                "not in a list outside the model either"
            )
        self._modes, self._held = modes_of(self._model), Held.by(self._model)
        self._reader = reader = FunctionReader(self._read, self._synthetic.make(1, 0), self._views)
        self.ranks.on_main(lambda: reader.try_first(self.plan.records))
        self._bad = BadRecordList(self._run.folder, self.ranks.rank)
        self._loader = Loader(
            reader, core.shared_sampler(), self.ranks.rank, self.ranks.world, self._micro_batch, last=self.plan.steps
        )
        self._stop = StopRequest(self._run.folder.stop_file)
        records = Records(self._loader.draw, self._loader.micro_batches).until_unreadable(self._stop)
        self._step = core.step(PHASE, self._run.journal, records, self._stop)
        return report

    def steps(self) -> range:
        """The numbers of the steps that are left."""
        return range(self.done + 1, self.plan.steps + 1 if self._core is not None else self.done + 1)

    def step(self, number: int, learning_rate: float) -> StepSummary:
        """One private step. What it returns is PRIVATE: losses and norms of the drawn records, without noise."""
        if self._step is None:
            raise SelfTestError("no step is taken before prove() has passed; call it first")
        if not self._busy.acquire(blocking=False):
            raise LedgerError("another thread is making a step; make one at a time")
        try:
            return self._one_step(self._step, number, learning_rate)
        finally:
            self._busy.release()

    def _one_step(self, step: PrivateStep, number: int, learning_rate: float) -> StepSummary:
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
            summary = step.run(number, learning_rate)
            self._run.burn(number)
        except (Stopped, BudgetSpent):  # nothing reached the weights
            self.core.engine.discard()
            self._failed = None
            raise
        except BaseException:
            self.core.engine.discard()
            raise
        self._held = self._unchanged_but_for_the_update()
        self.done = number
        self._failed = None
        return summary

    def _require_sound(self) -> None:
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
        run, engine = self._run, self.core.engine
        header = self.ranks.on_main(lambda: run.header(PHASE, self._data, "own"))
        digest = run.checkpoints.save(
            Position(PHASE, self.done), engine, self._engine_settings.ranks_per_copy, header,
            lambda found: run.writer.checkpointed(PHASE, self.done, found),
        )  # fmt: skip
        run.forget(self.done)
        if self._step is not None:
            self._bad.add(NAME, self._reader.bad_reasons)
        self.saved = self.done
        return digest

    def epsilon(self) -> float:
        """What the ledger has charged so far: every step that began."""
        return self.ranks.on_main(lambda: self._run.writer.history.epsilon())

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model's state, on every rank."""
        self._require_sound()
        return self.core.engine.whole_weights()

    def finish(self) -> certificate.Verdict:
        """Saves, writes the certificate, destroys the run key, and verifies it all from the ledger alone."""
        self._require_sound()
        if self._core is not None and (self.saved != self.done or not self.done):
            self.save()
        newest = self._run.checkpoints.latest()
        return self.ranks.on_main(lambda: self._certify(newest))

    def _certify(self, newest: Loaded | None) -> certificate.Verdict:
        run = self._run
        run.writer.finish()
        extra = {
            "known_deviations": [*DEVIATIONS, *([NUMBERS] if self._continued_within() else [])],
            "siblings": [],
            **self._described,
            "dates": {"last_start": run.checkpoints.times.day},
            "engine": str(self._engine_settings),
            "machine": f"{self.ranks.device}; not yet proved on several GPUs",
            "hashes": {
                "data_manifests": {NAME: self._data},
                "checkpoint_manifest_sha256": newest.digest if newest is not None else None,
            },
        }
        history = run.writer.history
        document = earlier_certificate(run.folder, history, run.writer.ledger.entries)
        if document is None:
            document = certificate.compose(history, run.writer.ledger.entries, extra)
            document = completed(run.folder, history, document, [newest] if newest is not None else [])
        certificate.write(document, run.folder.root)
        if not self._keep_key:
            destroy(run.folder.key)
        return certificate.verify(run.folder.root)

    def _continued_within(self) -> bool:
        together = max(self.plan.bands, self.plan.slots)
        entries = self._run.writer.ledger.entries
        return any(entry.kind == "resume" and entry.fields["step"] % together for entry in entries)

    def close(self) -> None:
        """Lets go of readers, engine and the ledger's lock; the run can be continued."""
        if self._step is not None:
            self._bad.add(NAME, self._reader.bad_reasons)
            self._loader.close()
            self._stop.restore()
        if self._core is not None:
            self._core.close()
            self._core.engine.close()
        if self._run.chain is not None:
            self._run.chain.close()
        if self._run.journal is not None:
            self._run.journal.ledger.close()
            self._run.checkpoints.times.stamp_all(self._run.folder.root, but=(self._run.folder.checkpoints.name,))

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
