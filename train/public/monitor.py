"""Bu et al.'s loss-improvement monitor: is it the noise, the clipping or the loss itself that slows a phase down?

Measured on public records alone, at checkpoints that are durable, like every other number that depends on the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.loader import iterate
from murmuration.data.batch.reader import BatchReader
from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.train.clip.bookkeeping import uncompiled
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine, evaluating
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.public.curvature import Curvature, PublicLoss, Vector, inner, measure
from murmuration.train.public.evaluation import whole_model
from murmuration.train.public.prediction import (
    Choice,
    Mechanism,
    Prediction,
    best_batch_at_fixed_noise,
    choices,
    predict,
    said,
    suggest,
    table,
)  # fmt: skip
from murmuration.train.recipe.ready_phase import ReadyPhase


class MonitorReading(NamedTuple):
    """Measurements for the public board and for people; they are published once the checkpoint is durable."""

    values: dict[str, float]
    lines: list[str]


class LossMonitor:
    def __init__(
        self, phase: ReadyPhase, engine: Engine, ranks: Ranks, micro_batch: int, mask_key: bytes,
        private: PrivatePhase | None = None,
    ) -> None:  # fmt: skip
        """`private`: the phase, if it is."""
        assert phase.monitored is not None and phase.settings.monitor is not None
        self.settings = phase.settings.monitor
        self.phase, self.engine, self.ranks, self.private = phase, engine, ranks, private
        self.micro_batch = self.settings.micro_batch or max(1, micro_batch // 4)
        self.records = min(self.settings.records, phase.monitored.records)
        # Step 0 at every call: the same masks each time. No augmentation, for the same reason.
        self._reader = BatchReader(phase.monitored, phase.data_spec(augment=False), phase.text, mask_key=mask_key)
        self._read: list[MicroBatch] | None = None
        self._choices: list[Choice] | None = None
        self._calls = 0

    def measure(self) -> MonitorReading | None:
        """Measures at every `settings.every`-th checkpoint; None at the others."""
        self._calls += 1
        if (self._calls - 1) % self.settings.every:
            return None
        # What is compiled cannot be differentiated twice.
        with uncompiled(), evaluating(self.engine.model):
            return self._measure()

    def _measure(self) -> MonitorReading:
        """Measures the loss without dropout, which is the one that should fall."""
        model = whole_model(self.phase, self.engine)
        first = self.ranks.rank * self.records // self.ranks.world
        loss = PublicLoss(model, self.engine.shapes, self._batches, self.ranks, self.records, first)
        if loss.present < 2:
            return MonitorReading({}, ["monitor: fewer than two of its public records can be read"])
        curvature, mean = measure(loss, self.settings.probes)
        mechanism, alignment = self._mechanism(model, mean, loss.present)
        found = predict(curvature, mechanism)
        values = self._values(curvature, mechanism, found, alignment)
        lines = self._lines(curvature, mechanism, found, values)
        return MonitorReading({name: value for name, value in values.items() if math.isfinite(value)}, lines)

    def _mechanism(self, model: nn.Module, mean: Vector, present: int) -> tuple[Mechanism, float]:
        """The mechanism of the phase's steps, with the mean clip factor that its clip engine gives to the public
        records; and how well their clipped mean gradient is aligned with the mean gradient."""
        if self.private is None:
            return Mechanism(float(self.phase.settings.batch or 1)), 1.0
        rule, plan = self.private.rule, self.private.plan
        factors, clipped = 0.0, {name: torch.zeros_like(part) for name, part in mean.items()}
        for batch in self._batches():
            totals, seen = clipped_totals(self.private.clip, model, batch.inputs, batch.present, rule=rule)
            factors += float(seen.factors[batch.present].double().sum())
            for name, part in totals.items():
                clipped[name] += part.view_as(clipped[name])
        for part in clipped.values():
            self.ranks.add(part)
        factor = sum(self.ranks.gather(factors)) / present
        lengths = math.sqrt(inner(mean, mean) * inner(clipped, clipped))
        alignment = inner(mean, clipped) / lengths if lengths > 0 else math.nan
        noise = plan.noise_multiplier * rule.sensitivity
        return Mechanism(plan.divisor, plan.sampling_rate, noise, factor), alignment

    def _values(
        self, curvature: Curvature, mechanism: Mechanism, found: Prediction | None, alignment: float
    ) -> dict[str, float]:  # fmt: skip
        values = {
            "gradient_norm_squared": curvature.slope, "curvature_along_gradient": curvature.along,
            "hessian_trace": curvature.trace, "hessian_covariance_trace": curvature.spread,
        }  # fmt: skip
        if found is not None:
            values["improvement_without_noise"] = found.without_noise
        if self.private is None:
            return {f"monitor_{name}": value for name, value in values.items()}
        plan = self.private.plan
        values |= {
            "clip_factor": mechanism.clip_factor, "clip_alignment": alignment,
            "sigma": plan.noise_multiplier, "batch": mechanism.batch,
        }  # fmt: skip
        if found is not None:
            values |= {"improvement": found.improvement, "decelerator_share": found.decelerator}
        fixed = best_batch_at_fixed_noise(curvature, mechanism)
        if fixed is not None:
            values["best_batch_at_fixed_noise"] = fixed
        suggested = suggest(curvature, mechanism, plan, self._affordable(plan))
        if suggested is not None:
            values["suggested_batch"], values["suggested_sigma"] = suggested
        return {f"monitor_{name}": value for name, value in values.items()}

    def _lines(
        self, curvature: Curvature, mechanism: Mechanism, found: Prediction | None, values: dict[str, float]
    ) -> list[str]:  # fmt: skip
        lines = [
            f"monitor on {curvature.records} public records: ‖g‖² {curvature.slope:.3g}, gᵀHg {curvature.along:.3g}, "
            f"tr(H) {curvature.trace:.3g}, tr(HΣ) {curvature.spread:.3g}"
        ]
        if found is None:
            return [*lines, "the loss does not curve upwards here: the formula has no best step"]
        if self.private is None:
            return [*lines, f"a best step of SGD is worth {found.without_noise:.3g}"]
        plan = self.private.plan
        lines.append(
            f"a best step of SGD is worth {found.improvement:.3g}, and {found.without_noise:.3g} without noise; the "
            f"noise's share is {found.decelerator:.3f}, the mean clip factor {values['monitor_clip_factor']:.3g}"
        )
        if "monitor_suggested_batch" in values:
            batch = said(values["monitor_suggested_batch"], self._affordable(plan))
            lines.append(
                f"for these weights, records go furthest at a batch of {batch} with "
                f"σ = {values['monitor_suggested_sigma']:.3f} (about the same ε, same records in all):"
            )
        return lines + table(curvature, mechanism, plan, self._affordable(plan))

    def _affordable(self, plan: PrivacyPlan) -> list[Choice]:
        if self._choices is None:
            self._choices = self.ranks.on_main(lambda: choices(plan))
        return self._choices

    def _batches(self) -> Iterator[MicroBatch]:
        """Read once and kept: the same public records at every checkpoint."""
        if self._read is None:
            rows = slots(np.arange(self.records), self.ranks.rank, self.ranks.world, self.micro_batch)
            self._read = list(iterate(self._reader, rows, 0))
        for batch in self._read:
            yield batch.to(self.engine.device)
