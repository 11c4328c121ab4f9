"""A phase without steps: it loads weights from a checkpoint, or only measures the weights it is given.

It leaves a checkpoint like any phase, so that the next one, a resume and the certificate need not know the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.model.build import build
from murmuration.train.clip.engine import Observation
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.data import CheckpointData
from murmuration.train.engines.base import AppliedUpdate, OptimizerShard
from murmuration.train.noise.update import Update, UpdateError
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.recipe.pixels import IMAGENET, in_words
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.recipe.warm_start import hand_over
from murmuration.train.run.context import RunContext
from murmuration.train.run.declare import declare, header
from murmuration.train.storage.checkpoint import Loaded, Position


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


def run_without_steps(run: RunContext, phase: ReadyPhase, loaded: Loaded | None) -> None:
    """Loads or keeps weights, saves them, and measures them on public records if asked."""
    ranks = run.ranks
    ranks.on_main(lambda: declare(run, phase))
    model = build(phase.shape, phase.settings.objective)
    if phase.start is not None and isinstance(phase.settings.data, CheckpointData):
        report = phase.start.fill(model)
        run.board.say(f"{phase.name}  starts from {phase.start.path.name}\n{report}")
        if phase.pixels != IMAGENET:
            run.board.say(f"{phase.name}  pixels are normalised by {in_words(phase.pixels)}")
    elif loaded is not None:
        hand_over(loaded.weights(), model)
    engine = StillEngine(model, ranks.device)
    measured: dict[str, float] = {}
    unusable = None
    if phase.held_out is not None:
        key = run.derive(phase.number, None)("public-masks")
        micro_batch = run.config.micro_batch
        evaluator = PublicEvaluator(phase, engine, ranks, micro_batch, key, None, None)
        measured, unusable = evaluator.measure(), evaluator.news_of_unusable()
    run.checkpoints.begin(Position(phase.number, 0), engine, 1, ranks.on_main(lambda: header(run, phase)))
    run.checkpoints.settle(lambda digest: run.writer.checkpointed(phase.number, 0, digest), measured)
    if measured:
        run.board.measured(phase.settings, 0, measured, unusable)
