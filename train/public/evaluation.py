"""What is measured on public held-out records, at durable checkpoints only: loss, and signal against noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import nn

from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.reader import BatchReader, iterate
from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.text import CaptionModel
from murmuration.evaluation.zero_shot import zero_shot
from murmuration.model.build import build
from murmuration.model.trainable import select
from murmuration.train.clip.engine import ClipEngine, clipped_totals
from murmuration.train.clip.precision import Precision, autocast
from murmuration.train.config.root import ZeroShot
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import ShardedEngine, evaluating
from murmuration.train.noise.adaptive_norm import AdaptiveNorm, next_rule
from murmuration.train.recipe.ready_phase import ReadyPhase

SIGNAL_RECORDS = 256


def whole_model(phase: ReadyPhase, engine: ShardedEngine) -> nn.Module:
    """A model that each rank can call on its own, as often as its own outputs require. Calls of a partitioned model are
    collective, so its weights are copied into a whole one."""
    if not engine.partitioned:
        return engine.model
    whole = build(phase.shape, phase.settings.objective)
    select(whole, phase.settings.trainable)
    whole.load_state_dict(engine.whole_weights())
    return whole.to(engine.device).train(engine.model.training)


@torch.no_grad()
def public_loss(batches: Iterable[MicroBatch], losses: Callable[[MicroBatch], torch.Tensor], ranks: Ranks) -> float:
    """The mean loss over all ranks' readable public records. The caller has put the model in evaluation mode."""
    total, count = 0.0, 0
    for batch in batches:
        total += float(losses(batch).float()[batch.present].sum())
        count += int(batch.present.sum())
    parts = ranks.gather((total, count))
    return sum(part[0] for part in parts) / max(1, sum(part[1] for part in parts))


class PublicEvaluator:
    def __init__(
        self, phase: ReadyPhase, engine: ShardedEngine, ranks: Ranks, micro_batch: int, mask_key: bytes,
        clip: ClipEngine | None, plan: PrivacyPlan | None, norm: AdaptiveNorm | None = None,
        precision: Precision = "fp32",
    ) -> None:  # fmt: skip
        assert phase.held_out is not None and phase.settings.evaluation is not None
        self.engine, self.ranks, self.micro_batch = engine, ranks, micro_batch
        self.clip, self.plan, self.norm = clip, plan, norm
        self.precision: Precision = precision
        self.phase = phase
        self.records = min(phase.settings.evaluation.records, phase.held_out.records)
        # Step 0 at every call: the same masks each time, so that the curve shows the weights alone.
        spec = phase.evaluation_spec()
        self.zero_shot, self.text = phase.settings.evaluation.zero_shot, phase.text
        if self.zero_shot is not None:
            spec = replace(spec, labels=tuple(self.zero_shot.axes))
        self.axes = spec.labels
        self.reader = BatchReader(phase.held_out, spec, phase.text, mask_key=mask_key)

    def measure(self) -> dict[str, float]:
        """Measures in the precision of training, and without dropout, even where training uses it."""
        with evaluating(self.engine.model), autocast(self.precision, self.engine.device):
            found = {"public_loss": public_loss(self._batches(self.records), self._losses, self.ranks)}
            if self.zero_shot is not None and self.text is not None:
                found |= self._zero_shot(self.zero_shot, self.text)
            if self.clip is not None and self.plan is not None:
                found["update_snr"] = self._signal_to_noise(self.clip, self.plan)
        return found

    def _losses(self, batch: MicroBatch) -> torch.Tensor:
        return self.engine.model(self._model_inputs(batch))

    def _zero_shot(self, settings: ZeroShot, text: TextEncoder) -> dict[str, float]:
        """Share of right answers per axis."""
        model = cast(CaptionModel, whole_model(self.phase, self.engine))
        right = dict.fromkeys(settings.axes, 0)
        count = 0
        for batch in self._batches(self.records):
            images = batch.inputs["images"][batch.present]
            if not len(images):
                continue
            count += len(images)
            answers = zero_shot(model, images, settings.axes, text, prompt=settings.prompt)
            for axis, answer in answers.items():
                right[axis] += int((answer == batch.inputs[axis][batch.present]).sum())
        parts = self.ranks.gather((count, right))
        total = max(1, sum(part[0] for part in parts))
        return {f"zero_shot_{axis}": sum(part[1][axis] for part in parts) / total for axis in settings.axes}

    def _model_inputs(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in batch.inputs.items() if name not in self.axes}

    def _signal_to_noise(self, clip: ClipEngine, plan: PrivacyPlan) -> float:
        """Norm of the mean clipped gradient of public records over the norm of the noise on a step's mean."""
        records = min(SIGNAL_RECORDS, self.records)
        rule = next_rule(clip, self.norm)
        sums: dict[str, torch.Tensor] = {}
        for batch in self._batches(records):
            inputs = self._model_inputs(batch)
            totals, _ = clipped_totals(clip, self.engine.model, inputs, batch.present, self.engine.shapes, rule)
            for name, gradient in totals.items():
                sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient
        squares = 0.0
        for gradient in sums.values():
            squares += float(self.ranks.add(gradient).double().square().sum())
        signal = math.sqrt(squares) / records
        noise = plan.noise_multiplier * rule.sensitivity * math.sqrt(self.engine.trainable_elements) / plan.divisor
        return signal / noise

    def _batches(self, records: int) -> Iterator[MicroBatch]:
        rows = slots(np.arange(records), self.ranks.rank, self.ranks.world, self.micro_batch)
        for batch in iterate(self.reader, rows, 0):
            yield batch.to(self.engine.device)
