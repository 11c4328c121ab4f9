"""The core of a private phase: the model in an engine that sums its clipped gradients, and the private step of one plan
under one set of keys. It knows no recipe, no run directory and no certificate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from murmuration.accounting.keys import Derive, Purpose
from murmuration.accounting.noise import NoiseKind
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import Draw, DrawnInParts
from murmuration.data.draw.samplers import make_sampler
from murmuration.train.clip.bookkeeping import HOLD, BookKeepingClip
from murmuration.train.clip.engine import ClipEngine, Precision, clipped_totals
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.engines.base import Engine
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.noise.adaptive_norm import AdaptiveNorm
from murmuration.train.noise.choose import over_steps, source_for
from murmuration.train.noise.prefetch import NoiseAhead
from murmuration.train.noise.update import Noise
from murmuration.train.optim.base import FlatOptimizer
from murmuration.train.optim.torch_optimizer import MakeOptimizer, TorchOptimizer
from murmuration.train.self_test.probes import SyntheticRecords, largest_that_fits, require_room, too_large
from murmuration.train.self_test.self_test import SelfTestReport, self_test
from murmuration.train.step import PrivateStep, Records, StepLedger

if TYPE_CHECKING:
    from murmuration.train.config.root import Run


@dataclass(frozen=True)
class Computation:
    """How clipped sums and noise are computed; every choice keeps the promise."""

    clip_engine: Literal["book-keeping", "reference", "opacus"] = "book-keeping"
    clip_memory: Literal["lean", "fast"] = "lean"
    precision: Precision = "fp32"
    noise: NoiseKind = "aes"
    # It shapes no release, so it is no part of a training's identity.
    cuda_graph: Literal["auto", "off"] = field(default="auto", repr=False)
    # It shapes a release, by rounding. Left out of the text only where it is at its default (`identity`).
    compile: Literal["off", "blocks"] = field(default="off", repr=False)
    gradient_checkpointing: bool = field(default=False, repr=False)  # likewise

    @staticmethod
    def of(run: Run) -> Computation:
        """With another clip engine, phases with privacy run as they are written."""
        compiled = run.clip_engine == "book-keeping"
        return Computation(
            run.clip_engine, run.clip_memory, run.precision, run.noise, run.cuda_graph,
            run.compile if compiled else "off", run.gradient_checkpointing,
        )  # fmt: skip

    @property
    def identity(self) -> str:
        """Of what shapes a release."""
        more = [self.compile] * (self.compile != "off") + ["checkpointing"] * self.gradient_checkpointing
        return ", ".join([repr(self), *more])


@dataclass(frozen=True)
class ClippingEngine:
    """A model in an engine that sums its clipped gradients."""

    clip: ClipEngine
    forward: PrivateForward
    optimizer: FlatOptimizer
    engine: Engine


def clipping_engine(
    model: nn.Module, rule: ClipRule, optimizer: Optimizer | MakeOptimizer, engine: EngineSettings,
    ranks: Ranks, computation: Computation,
    around_clip: Callable[[ClipEngine], ClipEngine] | None = None, make: Callable[..., Engine] = make_engine,
    keeps_before: bool = False,
) -> ClippingEngine:  # fmt: skip
    """`around_clip` is for audits. `keeps_before`: the weights from before the last step are kept, for probes of the
    loss."""
    clip = make_clip(rule, computation, engine.micro_batch)
    if around_clip is not None:
        clip = around_clip(clip)
    # What an audit puts around a clip engine may act on the host, which a recording would leave out.
    forward = PrivateForward(model, clip, graph=computation.cuda_graph == "auto" and around_clip is None)
    if isinstance(optimizer, Optimizer):
        from murmuration.train.optim.optimizers import make_optimizer  # ours, of which a program's own needs nothing

        flat = make_optimizer(optimizer, model.named_parameters())
    else:
        flat = TorchOptimizer([each for each in model.named_parameters() if each[1].requires_grad], optimizer)
    flat.keeps_before = keeps_before
    return ClippingEngine(clip, forward, flat, make(engine, forward, flat, ranks))


def largest_micro_batch(
    model: nn.Module, rule: ClipRule, computation: Computation, records: SyntheticRecords, most: int, ranks: Ranks
) -> int:  # fmt: skip
    """The largest micro-batch that fits, by trying."""
    whole = EngineSettings()  # a shard of it needs less
    trial = clipping_engine(
        copy.deepcopy(model), rule, Optimizer(), whole, ranks, replace(computation, compile="off")
    ).engine  # fmt: skip
    try:
        return largest_that_fits(trial, records, most, ranks)
    finally:
        trial.close()


def kept_of_record(model: nn.Module, rule: ClipRule, computation: Computation, records: SyntheticRecords) -> float:
    """Bytes of activations that wait for the backward pass, for each record: what is kept of four more than of two."""
    clip = make_clip(rule, replace(computation, clip_engine="book-keeping", compile="off"))
    clip.prepare(model)
    kept: list[dict[int, UntypedStorage]] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[-1][storage._cdata] = storage
        return tensor.detach()  # an output that is kept with its graph would hold itself

    for size in (2, 4):
        kept.append({})
        batch = records.batch(size, seed=0)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            clipped_totals(clip, model, batch.inputs, batch.present)
    few, more = (sum(storage.nbytes() for storage in each.values()) for each in kept)
    return (more - few) / 2


class PrivateCore:
    """The private step of one plan under one set of keys. `prove` comes before anything else touches the engine."""

    def __init__(
        self, plan: PrivacyPlan, clip: ClipEngine, engine: Engine, derive: Derive, ranks: Ranks,
        noise: NoiseKind = "aes", begun_after: int = 0,
    ) -> None:  # fmt: skip
        """`begun_after`: the step after which the segment of the keys begins."""
        self.plan, self.clip, self.engine, self.ranks = plan, clip, engine, ranks
        self._derive, self._source, self._begun_after = derive, source_for(noise, plan), begun_after
        self._ahead: NoiseAhead | None = None

    def prove(self, synthetic: SyntheticRecords, ranks_per_copy: int, micro_batch: int) -> SelfTestReport:
        # Of a key of its own: the test looks at its noise, which must never be that of a step.
        noise = self.noise("self-test", begun_after=0)
        if self.engine.device.type == "cuda":
            require_room(self.engine, synthetic, micro_batch, self.ranks)
        try:
            return self_test(self.engine, self.clip, noise, ranks_per_copy, synthetic, micro_batch, self.ranks)
        except torch.OutOfMemoryError:  # the optimizer's state and the sums that are compared come on top
            raise too_large(micro_batch, self.engine.device) from None

    def noise(self, purpose: Purpose, begun_after: int | None = None) -> Noise:
        first = (self._begun_after if begun_after is None else begun_after) + 1
        draws = self._source.of(self._derive(purpose), self.plan, self.engine.trainable_elements)
        return over_steps(draws, self.plan, first)

    def sampler(self) -> DrawnInParts:
        keys = self._derive("sampling"), self._derive("sampling-digest")
        return make_sampler(self.plan.sampling, *keys, self.plan.records)

    def step(
        self, phase: int, journal: StepLedger | None, records: Records[Draw], stop: StopRequest, *,
        stepping: Engine | None = None, first_norm: float | None = None, noise: Noise | None = None,
        probes: Callable[[int], bool] | None = None,
    ) -> PrivateStep:  # fmt: skip
        """`stepping` is the engine with what may be mixed into its updates; `first_norm` is C of the next step where C
        adapts; `probes`: which steps also measure the loss along the last move; an audit may give a `noise` of its
        own."""
        if noise is None:
            noise = self.noise("noise")
            if (ahead := self._source.ahead) is not None:
                fragments = [fragment for shard in self.engine.shards() for fragment in shard.fragments]
                noise = self._ahead = ahead(noise, fragments)
        metrics = norm = None
        if self.plan.metrics:
            # Most plans release nothing but weights.
            from murmuration.train.engines.measures import PASSES
            from murmuration.train.noise.metrics import MetricRelease

            metrics = MetricRelease(self._derive("metric-noise"), self.plan, self.ranks, self._source.of_metric)
            measured = records.micro_batches
            for metric in metrics.planned:
                found = PASSES[metric.name](self.engine, metrics, self.ranks, probes) if metric.name in PASSES else None
                measured = measured if found is None else found.around(measured)
            records = Records(records.draw, measured)
        if self.plan.adaptive is not None:
            assert first_norm is not None, "the ledger knows the clipping norm of the next step"
            norm = AdaptiveNorm(self.plan, first_norm)
        engine = stepping or self.engine
        return PrivateStep(phase, journal, records, self.clip, noise, engine, self.ranks, stop, metrics, norm)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


def make_clip(rule: ClipRule, computation: Computation, micro_batch: int = 0) -> ClipEngine:
    """`micro_batch`: the records of those in which blocks may run as compiled code."""
    # What is only for checking is not loaded otherwise: Opacus takes seconds.
    if computation.clip_engine == "reference":
        from murmuration.train.clip.reference import ReferenceClip

        return ReferenceClip(rule)
    if computation.clip_engine == "opacus":
        from murmuration.train.clip.reference import OpacusClip

        return OpacusClip(rule)
    return BookKeepingClip(
        rule, computation.precision, HOLD[computation.clip_memory],
        compiled=micro_batch if computation.compile == "blocks" else 0,
        checkpointed=computation.gradient_checkpointing,
    )  # fmt: skip
