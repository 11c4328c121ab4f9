"""An engine around another, which does one thing differently."""

from __future__ import annotations

from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.engine import Observation
from murmuration.train.clip.rule import ClipRule
from murmuration.train.engines.base import AppliedUpdate, Engine, OptimizerShard
from murmuration.train.noise.update import Update


class EngineAround:
    """The base of such engines: everything is forwarded to the inner one."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.device, self.model, self.shapes = inner.device, inner.model, inner.shapes
        self.trainable_elements, self.partitioned = inner.trainable_elements, inner.partitioned

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        self.inner.accumulate(batch, rule)

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        return self.inner.update(update, learning_rate)

    def discard(self) -> None:
        self.inner.discard()

    def observe(self) -> Observation:
        return self.inner.observe()

    def shards(self) -> list[OptimizerShard]:
        return self.inner.shards()

    def optimizer_step(self) -> int:
        return self.inner.optimizer_step()

    def set_optimizer_step(self, step: int) -> None:
        self.inner.set_optimizer_step(step)

    def whole_weights(self) -> dict[str, Tensor]:
        return self.inner.whole_weights()

    def plain_model(self) -> nn.Module | None:
        return self.inner.plain_model()

    def close(self) -> None:
        self.inner.close()
