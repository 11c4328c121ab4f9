"""Canaries: extra records whose presence is decided by a coin, and two thin layers that put them into the real stack.

A gradient canary contributes the whole clipping bound along one coordinate of its own (the strongest record that
clipping lets through). It enters where clipped gradients are summed, so that accumulation, reduction, noise,
division and the optimizer's hook are those of every run. An input canary is a random picture with a random caption.
A canary whose coin says out keeps its place in n and in the draws, and contributes exactly zero.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.accounting.epsilon.audit_bound import AuditError
from murmuration.data.batch.reader import BatchReader
from murmuration.data.draw.micro_batch import EMPTY, MicroBatch, slots
from murmuration.data.draw.poisson import StepKey
from murmuration.model.inputs import DROP_KEY, RECORD_WEIGHT
from murmuration.train.clip.engine import ClipEngine, Clipped, Precision, clipped_totals
from murmuration.train.clip.losses import of_slots
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import GradientSums, trainable_shapes
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.noise.aes import AESNoise

CANARY = "canary"
ORDINARY, SILENT = -1, -2  # a real record; one that is present and contributes nothing


class CanaryError(AuditError):
    """The canaries do not fit this model or data; the message says why."""


def toss(count: int) -> np.ndarray:
    """Fair coins from the operating system."""
    return (np.frombuffer(secrets.token_bytes(count), np.uint8) & 1).astype(bool)


@dataclass(frozen=True)
class Coordinates:
    """One element of the trainable parameters for each canary; `flat` counts through all of them and is sorted."""

    names: tuple[str, ...]
    starts: np.ndarray
    flat: np.ndarray

    @staticmethod
    def choose(model: nn.Module, count: int) -> Coordinates:
        """Distinct coordinates. They are public: only the coins must be secret."""
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        starts = np.concatenate([[0], np.cumsum(list(sizes.values()), dtype=np.int64)])
        if count > starts[-1]:
            raise CanaryError(
                f"{count} canaries need as many parameters; the model has {starts[-1]}, so use fewer canaries"
            )
        flat = np.random.default_rng(0).choice(int(starts[-1]), size=count, replace=False)
        return Coordinates(tuple(sizes), starts, np.sort(flat))

    def within(self, parameter: int, elements: range) -> tuple[slice, np.ndarray]:
        """The canaries whose coordinate lies in these elements of a parameter, and where, counted from their start."""
        first = int(self.starts[parameter]) + elements.start
        low, high = np.searchsorted(self.flat, [first, first + len(elements)])
        return slice(int(low), int(high)), self.flat[low:high] - first


class CanaryClip:
    """A clip engine around the real one: adds the gradient canaries' clipped contributions to its sum.

    `known` is what the real records have added at the canaries' coordinates since it was last taken. The adversary in
    the definition of differential privacy knows every record but the one in question, so the auditor may subtract
    `known`. It is private, like everything before the noise.
    """

    def __init__(self, inner: ClipEngine, coordinates: Coordinates) -> None:
        self.inner, self.coordinates = inner, coordinates
        self.rule = inner.rule
        self.precision: Precision = inner.precision
        self.known = np.zeros(len(coordinates.flat))
        self.shapes: dict[str, torch.Size] = {}

    def take_known(self) -> np.ndarray:
        taken, self.known = self.known, np.zeros_like(self.known)
        return taken

    def prepare(self, model: nn.Module) -> None:
        self.shapes = trainable_shapes(model)
        self.inner.prepare(model)

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        # The self-test tries other precisions, and they must reach the engine that clips.
        self.inner.precision = self.precision
        rule = rule or self.rule
        if CANARY not in inputs:
            return self.inner.add_clipped(model, inputs, present, sums, rule)
        which = inputs[CANARY]
        others = {name: tensor for name, tensor in inputs.items() if name != CANARY}
        # Even if no record is ordinary: where parameters are sharded, each rank must take part in each forward pass.
        totals, found = clipped_totals(self.inner, model, others, present & (which == ORDINARY), self.shapes, rule)
        hits = which[present & (which >= 0)].cpu().numpy()
        for parameter, name in enumerate(self.coordinates.names):
            self._add_canaries(parameter, totals[name].view(-1), hits, rule.bound)
            sums.add(name, totals[name])
        return found

    def _add_canaries(self, parameter: int, total: Tensor, hits: np.ndarray, bound: float) -> None:
        here, offsets = self.coordinates.within(parameter, range(len(total)))
        if here.start == here.stop:
            return
        self.known[here] += total[torch.from_numpy(offsets).to(total.device)].double().cpu().numpy()
        mine = offsets[hits[(hits >= here.start) & (hits < here.stop)] - here.start]
        total.index_add_(0, torch.from_numpy(mine).to(total.device), total.new_full((len(mine),), bound))


@dataclass(frozen=True)
class CanaryBatches:
    """Sampled ids -> micro-batches, as `data.batch.reader` makes them, with canaries at ids from `first` on.

    `inputs` are the input canaries' own, with as many rows as a record has; None makes gradient canaries.
    """

    reader: BatchReader
    ranks: Ranks
    micro_batch: int
    first: int
    included: np.ndarray
    inputs: Mapping[str, Tensor] | None

    def __call__(self, ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        rows = slots(ids, self.ranks.rank, self.ranks.world, self.micro_batch)
        return map(partial(self._read, step=step), rows)

    def took_part(self, ids: np.ndarray) -> np.ndarray:
        """Per canary, whether it was drawn and its coin says in."""
        drawn = np.zeros_like(self.included)
        drawn[ids[ids >= self.first] - self.first] = True
        return drawn & self.included

    def _read(self, row: np.ndarray, step: int) -> MicroBatch:
        canary = row >= self.first
        which = np.where(canary, row - self.first, 0)
        batch = self.reader.read(np.where(canary, EMPTY, row), step)
        there = torch.from_numpy(canary & self.included[which])
        inputs = dict(batch.inputs)
        if self.inputs is None:
            inputs[CANARY] = torch.from_numpy(np.where(canary, which, ORDINARY))
        else:
            rows = there.repeat_interleave(batch.rows)
            asked = torch.from_numpy(which)[there]
            for name, own in of_slots(self.inputs, asked, len(self.included)).items():
                inputs[name] = inputs[name].clone()
                inputs[name][rows] = own.to(inputs[name].dtype)
            if RECORD_WEIGHT in inputs:
                inputs[RECORD_WEIGHT][rows] = 1.0
            if DROP_KEY in inputs:  # its own key at each step, like a record
                views = range(batch.rows)
                keys = [self.reader.drop_key(int(one), step, view) for one in row[there.numpy()] for view in views]
                inputs[DROP_KEY][rows] = torch.tensor(keys, dtype=torch.int64)
        return MicroBatch(inputs, batch.present | there)


@dataclass(frozen=True)
class SilentBatches:
    """As many present records as were drawn, each contributing zero: such a step releases noise alone."""

    example: MicroBatch
    ranks: Ranks

    def __call__(self, ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        del step
        size = len(self.example.present)
        for row in slots(ids, self.ranks.rank, self.ranks.world, size):
            inputs = {**self.example.inputs, CANARY: torch.full((size,), SILENT)}
            yield MicroBatch(inputs, torch.from_numpy(row != EMPTY))


class WeakenedNoise(AESNoise):
    """A planted fault that proves the audit's own power: it reports `std` and draws `scale` times that.

    A training run cannot create one: no config key and no flag of launch/train.py leads here.
    """

    def __init__(self, key: bytes | StepKey, std: float, divisor: float, scale: float) -> None:
        super().__init__(key, std, divisor)
        self.scale = scale

    def draw(
        self, step: int, parameter: int, start: int, length: int, dtype: type[np.floating] = np.float32
    ) -> np.ndarray:
        return super().draw(step, parameter, start, length, dtype) * dtype(self.scale)
