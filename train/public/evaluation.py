"""What is measured on public held-out records, at durable checkpoints only: loss, right answers, signal and noise."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from murmuration.data.batch.loader import Reader, iterate
from murmuration.data.batch.reader import RIGHT_CLASSES, TARGET, BatchReader
from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import classification_loss
from murmuration.model.trainable import select
from murmuration.train.clip.engine import Precision, autocast, clipped_totals
from murmuration.train.config.root import ZeroShot
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine, evaluating
from murmuration.train.measures.ranking import Tally, mean_average_precision
from murmuration.train.measures.shares import MEAN_PRECISION, shares
from murmuration.train.measures.zero_shot import class_scores, zero_shot
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.recipe.held_out import LOSS, SIGNAL
from murmuration.train.recipe.ready_phase import ReadyPhase

SIGNAL_RECORDS = 256


def whole_model(phase: ReadyPhase, engine: Engine) -> nn.Module:
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


class Heard:
    """The latest output of a module, whichever engine runs it: a call of its own would be collective in some."""

    output: torch.Tensor

    def __init__(self, model: nn.Module, name: str) -> None:
        self._module = dict(model.named_modules())[name]

    def __enter__(self) -> Heard:
        self._hook = self._module.register_forward_hook(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _hear(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.output = output.detach()


def layer_of(parameter: str) -> str:
    """The block of a parameter, or its module where there are no numbered blocks."""
    parts = parameter.split(".")[:-1] or [parameter]
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: numbered + 1])


class HeldOutReader(Reader, Protocol):
    @property
    def bad_reasons(self) -> Mapping[int, str]: ...


class PublicEvaluator:
    def __init__(
        self, phase: ReadyPhase, engine: Engine, ranks: Ranks, micro_batch: int, mask_key: bytes,
        private: PrivatePhase | None = None, precision: Precision = "fp32", stored: HeldOutReader | None = None,
    ) -> None:  # fmt: skip
        """`private`: the phase, if it is. `stored` reads what was computed from the held-out records before, numbered
        as they are measured."""
        held = phase.measured
        assert held is not None
        self.engine, self.ranks, self.micro_batch = engine, ranks, micro_batch
        self.precision: Precision = precision
        self.phase, self.private, self.held, self._told = phase, private, held, False
        self.signals: dict[str, float] = {}
        """What `update_snr` is for each layer alone, by the latest measurement."""
        # Step 0 at every call: the same masks each time, so that the curve shows the weights alone.
        self.reader = stored or BatchReader(held.index, held.spec, held.text, mask_key=mask_key)
        self.ids = held.ids if stored is None else np.arange(len(held.ids))

    def measure(self) -> dict[str, float]:
        """Measures in the precision of training, and without dropout, even where training uses it."""
        found: dict[str, float] = {}
        with evaluating(self.engine.model), autocast(self.precision, self.engine.device):
            if self.held.spec.listed is not None:
                found |= self._listed()
            elif self.phase.settings.objective == "classify":
                found |= self._classified()
            elif self.held.has_loss:
                found |= {LOSS: public_loss(self._batches(self.ids), self._losses, self.ranks)}
            if self.held.zero_shot is not None:
                found |= self._zero_shot(self.held.zero_shot)
            if self.held.has_loss and self.private is not None:
                found[SIGNAL], self.signals = self._signal_to_noise(self.private)
        return found

    def news_of_unusable(self) -> str | None:
        """How many of the records could not be measured, and why one of them could not; None at a later call, since
        they are the same ones at every checkpoint. Called on all ranks together."""
        if self._told:
            return None
        self._told, bad = True, self.reader.bad_reasons
        found = self.ranks.gather((len(bad), next(iter(bad.values()), "")))
        count, reasons = sum(part[0] for part in found), [part[1] for part in found if part[0]]
        if not count:
            return None
        return f"{count:,} of {len(self.held.ids):,} public held-out records cannot be measured ({reasons[0]})"

    def _losses(self, batch: MicroBatch) -> torch.Tensor:
        return self.engine.model(self._model_inputs(batch))

    def _classified(self) -> dict[str, float]:
        """The loss and the shares of right answers, by one pass through the model."""
        tally = Tally(self.held.classes)

        def losses(batch: MicroBatch) -> torch.Tensor:
            self._losses(batch)
            self._count(tally, batch, head.output.float()[batch.present])
            # Of what the head says, since what trains it need not be a loss of its answers (trainable statistics).
            return classification_loss(head.output, batch.inputs[TARGET], self.phase.shape.head.loss)

        with Heard(self.engine.model, "head") as head:
            found = {LOSS: public_loss(self._batches(self.ids), losses, self.ranks)}
        return found | self._shares(tally)

    def _listed(self) -> dict[str, float]:
        """The loss and how well each class is ranked, where a record may have any number of classes."""
        scores: list[np.ndarray] = []
        right: list[np.ndarray] = []

        def losses(batch: MicroBatch) -> torch.Tensor:
            found = self._losses(batch)
            scores.append(head.output.float()[batch.present].cpu().numpy())
            right.append(batch.inputs[TARGET][batch.present].cpu().numpy())
            return found

        with Heard(self.engine.model, "head") as head:
            found = {LOSS: public_loss(self._batches(self.ids), losses, self.ranks)}
        parts = self.ranks.gather((scores, right))  # a rank without records has none of either
        every = [np.concatenate([rows for part in parts for rows in part[which]]) for which in (0, 1)]
        precision = mean_average_precision(*every)
        return found if precision is None else found | {MEAN_PRECISION: precision}

    def _zero_shot(self, settings: ZeroShot) -> dict[str, float]:
        model = cast(Captioner, whole_model(self.phase, self.engine))
        text = self.phase.text
        assert text is not None
        return self._by_class(model, settings, text) if self.held.classes else self._by_axis(model, settings, text)

    def _by_class(self, model: Captioner, settings: ZeroShot, text: TextEncoder) -> dict[str, float]:
        tally = Tally(self.held.classes)
        templates = (f"{settings.prompt} {{}}",)
        for batch in self._batches(self.ids):
            images = batch.inputs["images"][batch.present]
            if len(images):
                self._count(tally, batch, -class_scores(model, images, self.held.class_names, templates, text))
        return self._shares(tally)

    def _by_axis(self, model: Captioner, settings: ZeroShot, text: TextEncoder) -> dict[str, float]:
        """Share of right answers per axis."""
        axes = self.held.axes
        right = dict.fromkeys(axes, 0)
        count = 0
        for batch in self._batches(self.ids):
            images = batch.inputs["images"][batch.present]
            if not len(images):
                continue
            count += len(images)
            answers = zero_shot(model, images, axes, text, prompt=settings.prompt)
            for axis, answer in answers.items():
                right[axis] += int((answer == batch.inputs[axis][batch.present]).sum())
        parts = self.ranks.gather((count, right))
        total = max(1, sum(part[0] for part in parts))
        return {f"zero_shot_{axis}": sum(part[1][axis] for part in parts) / total for axis in axes}

    def _count(self, tally: Tally, batch: MicroBatch, scores: torch.Tensor) -> None:
        """`scores` are those of the records alone: padding is nobody's answer."""
        right = batch.inputs.get(RIGHT_CLASSES)
        tally.add(scores, batch.inputs[TARGET][batch.present], None if right is None else right[batch.present])

    def _shares(self, tally: Tally) -> dict[str, float]:
        counts = [sum(parts) for parts in zip(*self.ranks.gather(tally.counts()), strict=True)]
        return shares(counts, self.held.shares)

    def _model_inputs(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        asked = {*self.held.axes, RIGHT_CLASSES}
        return {name: tensor for name, tensor in batch.inputs.items() if name not in asked}

    def _signal_to_noise(self, private: PrivatePhase) -> tuple[float, dict[str, float]]:
        """Norm of the mean clipped gradient of public records over the norm of the noise on a step's mean: of the whole
        gradient, and of each layer's part."""
        ids = self.ids
        records = min(SIGNAL_RECORDS, len(ids))
        ids = ids[np.arange(records) * len(ids) // records] if self.held.folders else ids[:records]
        rule, plan = private.rule, private.plan
        sums: dict[str, torch.Tensor] = {}
        for batch in self._batches(ids):
            inputs = self._model_inputs(batch)
            totals, _ = clipped_totals(private.clip, self.engine.model, inputs, batch.present, self.engine.shapes, rule)
            for name, gradient in totals.items():
                sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient
        squares, elements = defaultdict[str, float](float), Counter[str]()
        for name, gradient in sums.items():
            layer = layer_of(name)
            squares[layer] += float(self.ranks.add(gradient).double().square().sum())
            elements[layer] += self.engine.shapes[name].numel()
        noise = plan.added_noise * rule.sensitivity / plan.divisor

        def ratio(squares: float, elements: int) -> float:
            return math.sqrt(squares) / records / (noise * math.sqrt(elements))

        layers = {layer: ratio(squares[layer], elements[layer]) for layer in elements}
        return ratio(sum(squares.values()), self.engine.trainable_elements), layers

    def _batches(self, ids: np.ndarray) -> Iterator[MicroBatch]:
        rows = slots(ids, self.ranks.rank, self.ranks.world, self.micro_batch)
        for batch in iterate(self.reader, rows, 0):
            yield batch.to(self.engine.device)
