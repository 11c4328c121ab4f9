"""What the self-test sends through the live engine instead of private records, and how it inspects the result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from murmuration.accounting.errors import RunError
from murmuration.data.draw.micro_batch import ROW_SHARE, MicroBatch
from murmuration.model.inputs import DROP_KEY, RECORD_WEIGHT
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.base import Engine, OptimizerShard
from murmuration.train.noise.update import Update

if TYPE_CHECKING:
    from murmuration.model.settings import Shape


SPECIAL = (0, 1, -1, -100)
"""Padding of most tokenizers, of RoBERTa's, missing labels, and labels that PyTorch ignores."""
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class Capture:
    """Lets the real update finish the gradient, and keeps the result."""

    def __init__(self, inner: Update) -> None:
        self.inner = inner
        self.found: list[tuple[Fragment, Tensor]] = []

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self.inner.finish(flat, fragments)
        self.found += [(fragment, fragment.of(flat).detach().cpu().clone()) for fragment in fragments]


class Push:
    """Sets the same gradient everywhere."""

    def __init__(self) -> None:
        self.elements = 0

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            fragment.of(flat).fill_(1.0)
            self.elements += fragment.length


def arrived_evenly(shard: OptimizerShard, fragment: Fragment, kept: Tensor) -> bool:
    """Whether the first moment shows that the same gradient arrived everywhere, apart from weight decay."""
    kind = next((name for name in FIRST_MOMENTS if name in shard.state), None)
    if kind is None:
        return True
    moment = fragment.of(shard.state[kind])
    if kind == "exp_avg":
        return not bool((moment != moment[0]).any())
    # momentum = ratio · (gradient + decay · weight): a straight line over the weights, whatever ratio and decay are.
    x, y = fragment.of(kept).double(), moment.double()
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x).clamp(min=1e-30)
    return float((y - slope * x).abs().max()) <= 1e-5 * float(moment.abs().max())


@dataclass(frozen=True)
class SyntheticRecords:
    """The source of a self-test's records: random inputs of the right form, from no data set."""

    make: Callable[[int, int], dict[str, Tensor]]
    """Takes a number of records and a seed; returns the model's inputs, each with one row per record."""
    hostile: tuple[str, ...] | None = None
    """Inputs in which a record may contain any number; None: all that are floating-point."""
    rows: int = 1
    """Rows of each record's slot."""

    @staticmethod
    def of(shape: Shape, objective: str, rows: int = 1) -> SyntheticRecords:
        # A text is whole numbers; what can make its loss hostile is the number that multiplies it.
        hostile = RECORD_WEIGHT if objective == "text" else "images"
        made = lambda size, seed: synthetic_batch(shape, objective, size, seed).inputs  # noqa: E731
        return SyntheticRecords(made, (hostile,), rows)

    @staticmethod
    def of_features(width: int, classes: int, rows: int) -> SyntheticRecords:
        """Where a step sees what a frozen body made of its records."""
        return SyntheticRecords.like({"features": torch.zeros(1, width), "labels": torch.arange(classes)}, rows)

    @staticmethod
    def like(example: Mapping[str, Tensor], rows: int = 1) -> SyntheticRecords:
        """Records of the form of public examples, each input with one row or more: normal numbers, and whole numbers
        from the least to the largest of the examples'."""
        form = {name: tensor.detach().cpu() for name, tensor in example.items()}

        def make(size: int, seed: int) -> dict[str, Tensor]:
            draw = torch.Generator().manual_seed(seed)
            return {name: _drawn(tensor, size, draw) for name, tensor in form.items()}

        return SyntheticRecords(make, rows=rows)

    def batch(self, size: int, seed: int) -> MicroBatch:
        inputs, present = self.make(size * self.rows, seed), torch.ones(size, dtype=torch.bool)
        if self.rows > 1:
            inputs = {**inputs, ROW_SHARE: torch.full((size * self.rows,), 1 / self.rows)}
        return MicroBatch(inputs, present)

    def scaled(self, inputs: dict[str, Tensor], factor: float) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The inputs, with those of the first record multiplied by the factor: in all of its rows; and, where it has
        several, in its last row alone. With words for which of them."""
        names = self.hostile
        if names is None:
            names = [name for name, tensor in inputs.items() if tensor.is_floating_point() and name != ROW_SHARE]
        places = {"": slice(0, self.rows)}
        if self.rows > 1:
            places[", in one row"] = slice(self.rows - 1, self.rows)
        for where, rows in places.items():
            scaled = {name: inputs[name].clone() for name in names}
            for tensor in scaled.values():
                tensor[rows] = tensor[rows] * factor
            yield where, {**inputs, **scaled}

    def at_their_ends(self, inputs: dict[str, Tensor], beyond: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The inputs, with each integer one of the first record set to numbers that mean something of their own: the
        least and the largest, padding, ignored labels. `beyond`: also numbers that the records do not have."""
        for name, tensor in inputs.items():
            if tensor.is_floating_point() or tensor.dtype == torch.bool or name == DROP_KEY or not tensor.numel():
                continue
            least, largest = int(tensor.min()), int(tensor.max())
            for value in (least, largest, *SPECIAL):
                # Never left out: every rank has numbers of its own, and runs the model as often as the others, which
                # wait for it where weights are gathered.
                value = value if beyond else min(max(value, least), largest)
                changed = tensor.clone()
                changed[: self.rows] = value
                yield f"{name} = {value}", {**inputs, name: changed}


def _drawn(like: Tensor, size: int, draw: torch.Generator) -> Tensor:
    shape = (size, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=draw).to(like.dtype)
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=draw) < 0.5
    return torch.randint(int(like.min()), int(like.max()) + 1, shape, generator=draw, dtype=like.dtype)


def synthetic_batch(shape: Shape, objective: str, size: int, seed: int) -> MicroBatch:
    """Random inputs of the right form, from no data set."""
    draw = torch.Generator().manual_seed(seed)
    inputs = {"images": torch.randn(size, 3, shape.image_size, shape.image_size, generator=draw)}
    if objective == "mae":
        inputs["mask_noise"] = torch.rand(size, shape.patches, generator=draw)
    elif objective == "classify":
        inputs["labels"] = torch.randint(0, shape.head.classes, (size,), generator=draw)
    else:
        inputs["tokens"] = torch.randint(1, shape.vocabulary, (size, shape.text_length), generator=draw)
    if objective == "text":
        inputs[RECORD_WEIGHT] = torch.ones(size)
    if shape.drops:
        inputs[DROP_KEY] = torch.randint(-(1 << 63), (1 << 63) - 1, (size,), generator=draw)
    return MicroBatch(inputs, torch.ones(size, dtype=torch.bool))


# Whether the micro-batch fits into the memory of the device: found before anything is drawn, and by all ranks.


class RoomError(RunError, RuntimeError):
    """The device has too little memory for what it was asked to hold."""


def require_room(engine: Engine, records: SyntheticRecords, micro_batch: int, ranks: Ranks) -> None:
    """Tries a synthetic micro-batch. If one rank has no room for it, every rank names the largest that fits all."""
    if _fits(engine, records, micro_batch, ranks):
        return
    fitting = micro_batch // 2
    while fitting and not _fits(engine, records, fitting, ranks):
        fitting //= 2
    raise too_large(micro_batch, engine.device, fitting)


def largest_that_fits(engine: Engine, records: SyntheticRecords, most: int, ranks: Ranks) -> int:
    """A power of two, or `most`; of a GPU, half of its memory is left to what a step needs besides."""
    size = most
    while size > 1 and not _fits_into_half(engine, records, size, ranks):
        size = 1 << (size - 1).bit_length() - 1
    return size


def _fits_into_half(engine: Engine, records: SyntheticRecords, size: int, ranks: Ranks) -> bool:
    device = engine.device
    if device.type != "cuda":
        return _fits(engine, records, size, ranks)
    torch.cuda.reset_peak_memory_stats(device)  # that of a larger size, which did not fit, is no concern
    if not _fits(engine, records, size, ranks):
        return False
    most = torch.cuda.max_memory_allocated(device)
    return all(ranks.gather(2 * most <= torch.cuda.get_device_properties(device).total_memory))


def too_large(micro_batch: int, device: torch.device, fitting: int = 0) -> RoomError:
    fix = (
        f"{fitting} fit: lower train_micro_batch_size_per_gpu (PrivateTraining: micro_batch)"
        if fitting
        else 'use a smaller micro-batch, a higher zero_optimization.stage, run.engine = "fsdp2" or a smaller model'
    )
    return RoomError(f"a micro-batch of {micro_batch} records does not fit into {_memory(device)}; {fix}")


def _fits(engine: Engine, records: SyntheticRecords, size: int, ranks: Ranks) -> bool:
    fits = True
    try:
        engine.accumulate(records.batch(size, seed=ranks.rank).to(engine.device))
    except torch.OutOfMemoryError:
        fits = False
    # Only here, where the error and the tensors that its frames hold are gone.
    engine.discard()
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    return all(ranks.gather(fits))


def _memory(device: torch.device) -> str:
    if device.type != "cuda":
        return "memory"
    properties = torch.cuda.get_device_properties(device)
    return f"the {properties.total_memory / 2**30:.0f} GiB of {properties.name}"
