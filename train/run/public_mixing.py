"""Public records in a private phase: what is measured on them, and their gradients beside the noised ones, as
alpha · public + (1 - alpha) · private, after the noise.

The mixture is made of what is released anyway and of public records, so the promise of the noised part stands as it is:
every step is drawn, clipped, noised and charged whatever alpha is. Public records have a sampler of their own, by
ordinary epochs, and never meet the private ones before this file. (A step with alpha = 1 is charged, too: put steps
that should cost nothing into a phase of their own.)
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from murmuration.accounting.keys import Derive
from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.draw.micro_batch import MicroBatch, even_width
from murmuration.data.index.epochs import PublicEpochs, PublicOrder
from murmuration.train.clip.engine import Precision, autocast
from murmuration.train.config.phase import Mixing, Phase
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.around import EngineAround
from murmuration.train.engines.base import AppliedUpdate, Engine
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate, Update, UpdateError
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor, MonitorReading
from murmuration.train.recipe.read_options import reading_options
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.board import Board
from murmuration.train.run.cached_features import HeldOutFeatures
from murmuration.train.run.context import RunContext


def alpha(mixing: Mixing, step: int, steps: int, expected_batch: float) -> float:
    """Weight of the public gradient at step t = 1, 2, … of a phase of `steps` steps."""
    if mixing.shape == "sample-ratio":
        return mixing.batch / (mixing.batch + expected_batch)
    assert mixing.start is not None
    if mixing.shape == "constant" or mixing.end is None:
        return mixing.start
    last = mixing.steps or steps
    passed = min(1.0, (step - 1) / last)
    if mixing.shape == "switch":
        return mixing.start if passed < 1.0 else mixing.end
    left = math.cos(math.pi / 2 * passed) if mixing.shape == "cosine" else 1.0 - passed
    return mixing.end + (mixing.start - mixing.end) * left


class MixedUpdate:
    """Finishes the noised mean by its own rules, then mixes. (In a non-private twin, it is the plain mean.)"""

    def __init__(self, first: Update, public: Mapping[str, Tensor], weight: float) -> None:
        self._first, self._public, self._weight = first, public, weight

    @property
    def elements(self) -> int:
        return self._first.elements

    @torch.no_grad()
    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self._first.finish(flat, fragments)
        for fragment in fragments:
            public = self._public[fragment.name].view(-1)[fragment.start : fragment.start + fragment.length]
            fragment.of(flat).mul_(1.0 - self._weight).add_(public.to(flat), alpha=self._weight)


class PublicGradient:
    """The mean gradient over a step's public records, on every rank."""

    def __init__(
        self, model: nn.Module, micro_batches: Callable[[int], Iterator[MicroBatch]], ranks: Ranks,
        precision: Precision = "fp32",
    ) -> None:  # fmt: skip
        self._model, self._micro_batches, self._ranks = model, micro_batches, ranks
        self._precision: Precision = precision
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def of_step(self, step: int) -> dict[str, Tensor]:
        totals = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._trained.items()}
        count = 0
        for batch in self._micro_batches(step):
            batch = batch.to(self._ranks.device)
            with autocast(self._precision, self._ranks.device):
                losses = self._model(batch.inputs)
            present = batch.present & torch.isfinite(losses.detach())
            loss = torch.where(present, losses, torch.zeros_like(losses)).sum()
            # torch.autograd.grad does not fire the engine's hooks, which wait for the private sum.
            found = torch.autograd.grad(loss, list(self._trained.values()), allow_unused=True)
            for name, gradient in zip(self._trained, found, strict=True):
                if gradient is not None:
                    totals[name].add_(gradient)
            count += int(present.sum())
        count = max(1, self._ranks.sum(count))
        return {name: self._ranks.add(total).div_(count) for name, total in totals.items()}


class MixingEngine(EngineAround):
    """The phase's engine, which mixes a public gradient into each update."""

    def __init__(
        self, inner: Engine, gradient: PublicGradient, weight: Callable[[int], float],
        close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        if inner.partitioned:
            raise UpdateError("public gradients need whole weights on every rank; use a ZeRO stage below 3")
        super().__init__(inner)
        self._gradient, self._weight, self._close = gradient, weight, close

    @staticmethod
    def of(run: RunContext, phase: ReadyPhase, batch: float, inner: Engine, key: bytes) -> MixingEngine:
        mixing, index = phase.settings.mixing, phase.mixed
        assert mixing is not None and index is not None
        ranks, steps = run.ranks, phase.settings.steps
        reader = BatchReader(
            index, mixed_spec(phase), phase.text,
            augment_key=_key(key, b"augmentation"), mask_key=_key(key, b"masks"), dropout_key=_key(key, b"dropout"),
            reading=reading_options(mixing.data.reading, index, ranks), pin_memory=ranks.device.type == "cuda",
        )  # fmt: skip
        epochs = PublicEpochs(index.records, mixing.batch, _key(key, b"order"))
        micro_batch = even_width(mixing.batch, ranks.world, run.config.micro_batch)
        loader = Loader(
            reader, PublicOrder(epochs), ranks.rank, ranks.world, micro_batch, last=steps, device=ranks.device
        )
        gradient = PublicGradient(inner.model, lambda step: loader.step(step)[1], ranks, run.config.run.precision)
        return MixingEngine(inner, gradient, lambda step: alpha(mixing, step, steps, batch), loader.close)

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        if not isinstance(update, NoisyUpdate | PlainUpdate):
            raise UpdateError(f"public gradients are mixed into a step's update, not into {type(update).__name__}")
        mixed = MixedUpdate(update, self._gradient.of_step(update.step), self._weight(update.step))
        return self.inner.update(mixed, learning_rate)

    def close_public(self) -> None:
        """Closes the public loader only: the engine itself belongs to the phase."""
        self._close()


def mixed_spec(phase: ReadyPhase) -> DataSpec:
    """The spec of the phase's own records, but with the augmentation and the weights of the data to mix in."""
    mixing = phase.settings.mixing
    assert mixing is not None
    return replace(phase.data_spec(augment=True), augment=mixing.data.augment, weight=mixing.weight)


def _key(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, purpose, hashlib.sha256).digest()


class PublicRecords:
    def __init__(
        self, phase: Phase, board: Board, evaluator: PublicEvaluator | None, monitor: LossMonitor | None = None
    ) -> None:  # fmt: skip
        self._phase, self._board, self._evaluator, self._monitor = phase, board, evaluator, monitor
        self._values: dict[str, float] = {}
        self._unusable: str | None = None
        self._monitored: MonitorReading | None = None

    @staticmethod
    def of(
        run: RunContext, phase: ReadyPhase, engine: Engine, derive: Derive, private: PrivatePhase | None = None,
        stored: HeldOutFeatures | None = None,
    ) -> PublicRecords:  # fmt: skip
        parts = phase, engine, run.ranks, run.config.micro_batch, derive("public-masks"), private
        return PublicRecords(
            phase.settings, run.board,
            PublicEvaluator(*parts, run.config.run.precision, stored) if phase.held_out is not None else None,
            LossMonitor(*parts) if phase.monitored is not None else None,
        )  # fmt: skip

    def measure(self) -> dict[str, float]:
        if self._evaluator is not None:
            self._values, self._unusable = self._evaluator.measure(), self._evaluator.news_of_unusable()
        if self._monitor is not None:
            self._monitored = self._monitor.measure()
        return self._values

    def publish(self, step: int) -> None:
        """Shows what was measured since it was called last; the checkpoint of `step` is durable."""
        values, self._values = self._values, {}
        if values and self._evaluator is not None:
            self._board.measured(self._phase, step, values, self._unusable)
            self._board.signals(self._phase.name, step, self._evaluator.signals)
        monitored, self._monitored = self._monitored, None
        if monitored is not None:
            self._board.public(self._phase.name, step, monitored.values)
            for text in monitored.lines:
                self._board.say(f"{self._phase.name}  {text}")
