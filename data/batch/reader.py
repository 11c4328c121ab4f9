"""Sampled ids -> micro-batches of fixed shape, the same number on every rank.

Shapes and counts never depend on the data: padding fills the last micro-batch and idle ranks, because ranks
that disagree about the number of collectives hang, and because |S_t| is private. A bad record keeps its slot
with `present` False and zero inputs; another record in its place would count twice. The slot of an excluded record is
as empty as padding: nothing is read for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from murmuration.data.batch.shard_reader import ReadOptions, RecordReader, ShardReader, open_source
from murmuration.data.batch.slot_rows import SlotRows, UnitRecords, UnitReduce
from murmuration.data.decode.augment import Augment, caption_choice, drop_key, mask_noise, require_known
from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.decode import SUFFIXES, BadRecord, parsing, picture_in
from murmuration.data.decode.fields import captions_of, classes_listed, numbers_of, right_classes
from murmuration.data.decode.picture import PictureMaker
from murmuration.data.decode.pool import DecodePool
from murmuration.data.draw.micro_batch import (
    EMPTY,
    IMAGENET_MEAN,
    IMAGENET_STD,
    ROW_SHARE,
    Channels,
    Fetched,
    MicroBatch,
    Normalisation,
    Pixels,
)
from murmuration.data.draw.poisson import StepKey, by_step
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.local import RangeSource
from murmuration.data.store.place import RecordIndex
from murmuration.data.text.encoder import TextEncoder

TARGET = "labels"
RIGHT_CLASSES = "right_classes"
WEIGHT = "record_weight"


@dataclass(frozen=True)
class DataSpec:
    """The inputs that the model needs of a record, and their shapes."""

    image_size: int
    augment: Augment = "none"
    mask_patches: int = 0  # > 0: `mask_noise` with that many columns
    drop_keys: bool = False  # `drop_key`, for a model that drops units
    labels: tuple[str, ...] = ()  # integer fields of the record's .json; `cls` is its .cls or class folder
    target: str | None = None  # one of `labels`: the classifier's target, passed on as "labels"
    listed: str | None = None  # in place of `target`: a field that lists classes, "labels" then has 0 or 1 for each
    weight: str | None = None  # a number in the record's .json, passed on as WEIGHT
    classes: int = 0  # > 0: a record whose target is not in 0..classes-1 is bad
    class_list: ClassList | None = field(default=None, repr=False)  # numbers for the names that a .cls may contain
    right_classes: int = field(default=0, repr=False)  # > 0: RIGHT_CLASSES, with that many columns; for measurements
    pictures: bool = field(default=True, repr=False)  # False: texts alone; each picture is black, and nothing decoded
    image_suffixes: tuple[str, ...] = SUFFIXES
    text_suffix: str = "txt"
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD

    def __post_init__(self) -> None:
        require_known(self.augment)
        if self.image_size < 1:
            raise ValueError(f"image size {self.image_size} is not positive")
        if self.target is not None and (self.target not in self.labels or TARGET in {*self.labels} - {self.target}):
            raise ValueError(f"target '{self.target}' must be one of the labels, and no other may be called '{TARGET}'")
        if self.classes < 0:
            raise ValueError(f"{self.classes} classes: at least 1, or 0 for any number")
        if self.listed is not None and (self.target is not None or not self.classes):
            raise ValueError("a record lists several of a number of classes, or has one as its target")


@dataclass(frozen=True)
class _Parts:
    """One record, ready to be written into its rows, where its pixels are already."""

    tokens: list[list[int]]
    """For each view."""
    labels: list[int]
    listed: list[int]
    weight: float
    right: list[int]


class _Rows:
    """One micro-batch; a row stays zero until a record is written into it. `pinned`: in page-locked memory, from which
    a GPU fetches it while host and GPU do other things."""

    def __init__(self, slots: int, rows: int, spec: DataSpec, text_length: int, pinned: bool) -> None:
        count = slots * rows

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self.tensors = {
            "pixels": zeros(count, spec.image_size, spec.image_size, 3, dtype=torch.uint8),
            "tokens": zeros(count, text_length, dtype=torch.int64),
            "labels": zeros(len(spec.labels), count, dtype=torch.int64),
            "listed": zeros(count, spec.classes if spec.listed is not None else 0, dtype=torch.bool),
            "right": zeros(count, spec.right_classes, dtype=torch.bool),
            "noise": zeros(count, spec.mask_patches, dtype=torch.float32),
            "drop_keys": zeros(count, dtype=torch.int64),
            "weights": zeros(count, dtype=torch.float32),
            "shares": zeros(count, dtype=torch.float32),
            "present": zeros(slots, dtype=torch.bool),
        }
        self._arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """To be written into."""
        return self._arrays[name]


class BatchReader:
    """Reads rows of ids into MicroBatches. `bad_records` is private: its length is a function of the data.

    `read` may be called from several threads; the records of all rows go through one thread pool in order of arrival.

    With `units`, the numbers that were drawn are those of units, of which at most `rows_per_unit` records are read in a
    step, chosen by `unit_key`. Each record has `views` rows, which differ in what is drawn by key: crop, mask, caption,
    dropout. Rows are laid out and weighed as `SlotRows` says.
    """

    def __init__(
        self,
        index: RecordIndex,
        spec: DataSpec,
        text: TextEncoder | None = None,
        augment_key: bytes | StepKey = b"",
        mask_key: bytes | StepKey = b"",
        dropout_key: bytes | StepKey = b"",
        *,
        reading: ReadOptions | None = None,
        pin_memory: bool = False,
        source: RangeSource | None = None,
        units: UnitRecords | None = None,
        rows_per_unit: int = 1,
        unit_reduce: UnitReduce = "mean",
        unit_key: bytes | StepKey = b"",
        views: int = 1,
    ) -> None:
        if spec.mask_patches and not mask_key:
            raise ValueError("mask noise needs a mask key; derive one from the run key")
        if spec.drop_keys and not dropout_key:
            raise ValueError("drop keys need a dropout key; derive one from the run key")
        reading = reading or ReadOptions()
        self.slot_rows = SlotRows(units, rows_per_unit, unit_reduce, views, unit_key)
        pictures = PictureMaker(spec.image_size, spec.augment, augment_key, views)
        self.index, self.spec, self.text = index, spec, text
        self._mask_key, self._dropout_key = by_step(mask_key), by_step(dropout_key)
        self._caption_key = by_step(augment_key) if augment_key else None
        self._cancelled = threading.Event()
        self._records: RecordReader
        if isinstance(index, RecordReader):
            self._records = index
        else:
            source = source or open_source(index, reading)
            self._records = ShardReader(index, source, cancelled=self._cancelled)
        decoding = reading.workers and spec.pictures
        self._processes = DecodePool(pictures, reading.workers, reading.limits) if decoding else None
        self._pictures = pictures
        self.in_flight = threads = reading.in_flight
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="records") if threads > 1 else None
        self._pin = pin_memory
        self._bad: dict[int, str] = {}
        self._normalisation = Normalisation(spec.mean, spec.std)

    @property
    def bad_records(self) -> list[int]:
        """Ids of the bad records found so far, each once. For private sinks only."""
        return list(self._bad)

    @property
    def bad_reasons(self) -> dict[int, str]:
        return dict(self._bad)

    def drop_key(self, record: int, step: int, view: int = 0) -> int:
        return drop_key(self._dropout_key(step), step, record, view)

    def read(self, ids_row: np.ndarray, step: int) -> MicroBatch:
        """The model's inputs on the host."""
        fetched = self.fetch(ids_row, step)
        self.report(fetched)
        return fetched.batch.to("cpu")

    def report(self, fetched: Fetched) -> None:
        """Note the bad records of a batch that is used; those of batches read ahead and dropped are not noted."""
        for record, reason in fetched.bad.items():
            self._bad.setdefault(record, reason)

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        """Pictures as pixels, which `MicroBatch.to` normalises where they are needed."""
        chosen = self.slot_rows.records_of(ids_row, step)
        rows = _Rows(len(ids_row), self.slot_rows.count, self.spec, self.text.length if self.text else 0, self._pin)
        records = [int(record) for record in chosen.reshape(-1)]
        usable = np.zeros(len(records), dtype=bool)
        pixels = rows["pixels"].reshape(len(records), *self._pictures.shape)
        bad: dict[int, str] = {}
        for place, parts in enumerate(self._all(records, step, pixels)):
            if isinstance(parts, BadRecord):
                bad[records[place]] = str(parts)
            elif parts is not None:
                self._lay(parts, rows, place, records[place], step)
                usable[place] = True
        usable = usable.reshape(chosen.shape)
        rows["present"][:], rows["shares"][:] = usable.any(1), self.slot_rows.shares(usable)
        pixels = Pixels(rows.tensors["pixels"], self._normalisation)
        return Fetched(MicroBatch(self._inputs(rows), rows.tensors["present"], pixels), bad)

    def _lay(self, parts: _Parts, rows: _Rows, place: int, record: int, step: int) -> None:
        for view, tokens in enumerate(parts.tokens):
            row = place * self.slot_rows.views + view
            rows["tokens"][row], rows["labels"][:, row], rows["weights"][row] = tokens, parts.labels, parts.weight
            rows["listed"][row, parts.listed] = True
            if parts.right:
                rows["right"][row, parts.right] = True
            if self.spec.mask_patches:
                rows["noise"][row] = mask_noise(self._mask_key(step), step, record, self.spec.mask_patches, view)
            if self.spec.drop_keys:
                rows["drop_keys"][row] = self.drop_key(record, step, view)

    def _inputs(self, rows: _Rows) -> dict[str, torch.Tensor]:
        """The model's inputs from the rows, by name, but for the pictures."""
        spec, tensors = self.spec, rows.tensors
        inputs: dict[str, torch.Tensor] = {}
        if self.slot_rows.count > 1:
            inputs[ROW_SHARE] = tensors["shares"]
        if self.text is not None:
            inputs["tokens"] = tensors["tokens"]
        if spec.mask_patches:
            inputs["mask_noise"] = tensors["noise"]
        if spec.drop_keys:
            inputs["drop_key"] = tensors["drop_keys"]
        if spec.weight is not None:
            inputs[WEIGHT] = tensors["weights"]
        if spec.right_classes:
            inputs[RIGHT_CLASSES] = tensors["right"]
        for column, name in enumerate(spec.labels):
            inputs[TARGET if name == spec.target else name] = tensors["labels"][column]
        if spec.listed is not None:
            inputs[TARGET] = tensors["listed"]
        return inputs

    def close(self) -> None:
        """Close at once: reads in progress end with an error, and nothing waits for a slow store."""
        self._cancelled.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def _all(self, records: list[int], step: int, pixels: np.ndarray) -> Iterable[_Parts | BadRecord | None]:
        jobs = records, [step] * len(records), pixels
        if self._pool is None:
            return map(self._one, *jobs)
        try:
            return self._pool.map(self._one, *jobs)
        except RuntimeError:  # another thread closed the pool between two records
            if self._cancelled.is_set():
                raise CancelledError from None
            raise

    def _one(self, record: int, step: int, pixels: np.ndarray) -> _Parts | BadRecord | None:
        if record == EMPTY or self.index.left_out(record):
            return None
        members = self._records.read(record)
        if isinstance(self.index, ShardIndex) and not self.index.takes(members):
            return None
        try:
            return self._prepare(members, record, step, pixels)
        except BadRecord as error:
            return error

    def _prepare(self, members: dict[str, bytes], record: int, step: int, pixels: np.ndarray) -> _Parts:
        picture = picture_in(members, self.spec.image_suffixes)
        if picture is None and self.spec.pictures:
            raise BadRecord(f"no image: the record contains {sorted(members)}")
        # The cheap parts first: a record without a caption needs no decoding. The picture last: once it is in its slot,
        # nothing can go wrong any more.
        spec = self.spec
        with parsing("the caption or a number cannot be read"):
            tokens = self._tokens(members, record, step)
            labels, weight = numbers_of(members, spec.labels, spec.target, spec.classes, spec.weight, spec.class_list)
            listed = [] if spec.listed is None else classes_listed(members, spec.listed, spec.classes, spec.class_list)
        if picture is None or not spec.pictures:
            pass
        elif self._processes is not None:
            self._processes.make(picture, step, record, pixels)
        else:
            np.copyto(pixels, self._pictures.make(picture, step, record))
        return _Parts(tokens, labels, listed, weight, right_classes(members) if spec.right_classes else [])

    def _tokens(self, members: dict[str, bytes], record: int, step: int) -> list[list[int]]:
        """For each view, one of several captions, chosen by key; without a key, as in measurements, the first."""
        views = range(self.slot_rows.views)
        if self.text is None:
            return [[] for _ in views]
        captions = captions_of(members, self.spec.text_suffix)
        numbers = [0 for _ in views]
        if len(captions) > 1 and self._caption_key is not None:
            key = self._caption_key(step)
            numbers = [caption_choice(key, step, record, len(captions), view) for view in views]
        encoded = {number: self.text.encode(captions[number]) for number in set(numbers)}
        return [encoded[number] for number in numbers]
