"""Sampled ids -> micro-batches of fixed shape, equally many on every rank.

Shapes and counts never depend on the data: padding fills the last micro-batch and idle ranks, because ranks
that disagree about the number of collectives hang, and because |S_t| is private. A bad record keeps its slot
with `present` False and zero inputs; putting another record in its place would let that one count twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from data.augment import KINDS, Kind, augment, mask_noise
from data.decode import BadRecord, decode
from data.index import RecordIndex
from data.shards import RangeSource, ShardReader
from data.text import TextEncoder

EMPTY = -1
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def slots(ids: np.ndarray, rank: int, world: int, micro_batch: int) -> np.ndarray:
    """This rank's rows of micro-batch ids, int64 [count, micro_batch], padded with -1.

    Ranks take contiguous slices of the sorted ids (neighbouring reads stay on one rank); `count` is the same
    on every rank and at least 1, so that an empty draw is still a step.
    """
    if not 0 <= rank < world or micro_batch < 1:
        raise ValueError(f"rank {rank} of {world} with micro-batches of {micro_batch}: not a possible layout")
    if np.any(ids[1:] < ids[:-1]):
        raise ValueError("ids must be sorted: every rank has to cut the same list at the same places")
    total = len(ids)
    mine = ids[rank * total // world : (rank + 1) * total // world]
    largest = (total + world - 1) // world
    count = max(1, (largest + micro_batch - 1) // micro_batch)
    rows = np.full(count * micro_batch, EMPTY, dtype=np.int64)
    rows[: len(mine)] = mine
    return rows.reshape(count, micro_batch)


@dataclass(frozen=True)
class DataSpec:
    """What the model needs of a record, and in which shape."""

    image_size: int
    augment: Kind = "none"
    mask_patches: int = 0  # > 0: `mask_noise` with that many columns
    labels: tuple[str, ...] = ()  # integer fields of the record's .json
    image_suffixes: tuple[str, ...] = ("jpg", "jpeg", "png", "webp")
    text_suffix: str = "txt"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.augment not in KINDS:
            raise ValueError(f"augment '{self.augment}' is unknown; choose one of {', '.join(KINDS)}")
        if self.image_size < 1:
            raise ValueError(f"image size {self.image_size} is not positive")


@dataclass
class MicroBatch:
    """Model inputs by name, each with first dimension B, and which of the B slots hold a record."""

    inputs: dict[str, torch.Tensor]
    present: torch.Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return MicroBatch(inputs, self.present.to(device, non_blocking=True))


@dataclass(frozen=True)
class _Parts:
    """One record, ready to be laid into its slot."""

    pixels: np.ndarray
    tokens: list[int]
    labels: list[int]


class BatchReader:
    """Reads rows of ids into MicroBatches. `bad_records` is private: its length is a function of the data."""

    def __init__(
        self,
        index: RecordIndex,
        spec: DataSpec,
        text: TextEncoder | None = None,
        augment_key: bytes = b"",
        mask_key: bytes = b"",
        *,
        threads: int = 1,
        pin_memory: bool = False,
        source: RangeSource | None = None,
    ) -> None:
        if spec.augment == "random_resized_crop" and not augment_key:
            raise ValueError("random_resized_crop needs an augmentation key; derive one from the run key")
        if spec.mask_patches and not mask_key:
            raise ValueError("mask noise needs a mask key; derive one from the run key")
        self.index, self.spec, self.text = index, spec, text
        self._augment_key, self._mask_key = augment_key, mask_key
        self._shards = ShardReader(index, source)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode") if threads > 1 else None
        self._pin = pin_memory
        self._bad: dict[int, str] = {}
        # In the form the uint8 pixels want: x * scale + shift.
        std = torch.tensor(spec.std, dtype=torch.float32)
        self._scale = (1 / (255 * std)).view(1, 3, 1, 1)
        self._shift = (-torch.tensor(spec.mean, dtype=torch.float32) / std).view(1, 3, 1, 1)

    @property
    def bad_records(self) -> list[int]:
        """Ids found bad so far, each once. For private sinks only."""
        return list(self._bad)

    @property
    def bad_reasons(self) -> dict[int, str]:
        return dict(self._bad)

    def read(self, ids_row: np.ndarray, step: int) -> MicroBatch:
        spec, count = self.spec, len(ids_row)
        pixels = np.zeros((count, spec.image_size, spec.image_size, 3), dtype=np.uint8)
        tokens = np.zeros((count, self.text.length if self.text else 0), dtype=np.int64)
        labels = np.zeros((count, len(spec.labels)), dtype=np.int64)
        noise = np.zeros((count, spec.mask_patches), dtype=np.float32)
        present = np.zeros(count, dtype=bool)
        for row, parts in enumerate(self._fetch([int(record) for record in ids_row], step)):
            if parts is None:
                continue
            pixels[row], tokens[row], labels[row] = parts.pixels, parts.tokens, parts.labels
            if spec.mask_patches:
                noise[row] = mask_noise(self._mask_key, step, int(ids_row[row]), spec.mask_patches)
            present[row] = True
        there = torch.from_numpy(present)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        images = images * self._scale + self._shift
        inputs = {"images": torch.where(there.view(-1, 1, 1, 1), images, torch.zeros(()))}
        if self.text is not None:
            inputs["tokens"] = torch.from_numpy(tokens)
        if spec.mask_patches:
            inputs["mask_noise"] = torch.from_numpy(noise)
        for column, name in enumerate(spec.labels):
            inputs[name] = torch.from_numpy(labels[:, column].copy())
        if self._pin:
            inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            there = there.pin_memory()
        return MicroBatch(inputs, there)

    def _fetch(self, records: list[int], step: int) -> Iterable[_Parts | None]:
        if self._pool is None:
            return (self._one(record, step) for record in records)
        return self._pool.map(self._one, records, [step] * len(records))

    def _one(self, record: int, step: int) -> _Parts | None:
        if record == EMPTY:
            return None
        members = self._shards.read(record)
        try:
            return self._prepare(members, record, step)
        except BadRecord as error:
            self._bad.setdefault(record, str(error))
            return None

    def _prepare(self, members: dict[str, bytes], record: int, step: int) -> _Parts:
        spec = self.spec
        suffix = next((suffix for suffix in spec.image_suffixes if suffix in members), None)
        if suffix is None:
            raise BadRecord(f"no image: the record holds {sorted(members)}")
        # Twice the size leaves something to crop from; below that, draft decoding would cost sharpness.
        pixels = decode(members[suffix], at_least=2 * spec.image_size)
        pixels = augment(pixels, spec.augment, spec.image_size, self._augment_key, step, record)
        return _Parts(pixels, self._tokens(members), self._labels(members))

    def _tokens(self, members: dict[str, bytes]) -> list[int]:
        if self.text is None:
            return []
        if self.spec.text_suffix not in members:
            raise BadRecord(f"no caption: the record holds {sorted(members)}")
        try:
            return self.text.encode(members[self.spec.text_suffix].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadRecord(f"the caption is not UTF-8 ({error.reason})") from error

    def _labels(self, members: dict[str, bytes]) -> list[int]:
        if not self.spec.labels:
            return []
        try:
            fields = json.loads(members["json"])
            return [int(fields[name]) for name in self.spec.labels]
        except (KeyError, ValueError, TypeError) as error:
            raise BadRecord(f"no labels {self.spec.labels} in the record's .json ({error})") from error


def iterate(reader: BatchReader, rows: np.ndarray, step: int) -> Iterator[MicroBatch]:
    """The micro-batches of `rows` in order, the next one being read while the caller computes."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as ahead:
        waiting = ahead.submit(reader.read, rows[0], step) if len(rows) else None
        for row in rows[1:]:
            assert waiting is not None
            ready, waiting = waiting, ahead.submit(reader.read, row, step)
            yield ready.result()
        if waiting is not None:
            yield waiting.result()
