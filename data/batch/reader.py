"""Sampled ids -> micro-batches of fixed shape, the same number on every rank.

Shapes and counts never depend on the data: padding fills the last micro-batch and idle ranks, because ranks
that disagree about the number of collectives hang, and because |S_t| is private. A bad record keeps its slot
with `present` False and zero inputs; another record in its place would count twice. The slot of an excluded record is
as empty as padding: nothing is read for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from itertools import chain

import numpy as np
import torch

from murmuration.data.batch.shard_reader import ReadOptions, RecordReader, ShardReader, open_source
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode.augment import AREAS, drop_key, mask_noise
from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.pool import MOST, DecodePool, Verdict, Wanted
from murmuration.data.decode.record import TARGET, DataSpec, RecordMaker
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, Fetched, MicroBatch
from murmuration.data.draw.normalisation import Normalisation, Pixels, zeros
from murmuration.data.draw.poisson import StepKey, by_step
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex
from murmuration.data.store.stored import RangeSource, StoredRecords
from murmuration.data.text.encoder import TextEncoder

RIGHT_CLASSES = "right_classes"
WEIGHT = "record_weight"


class _Rows:
    """One micro-batch; a row stays zero until a record is written into it. `pinned`: in page-locked memory, from which
    a GPU fetches it while host and GPU do other things."""

    def __init__(self, slots: int, rows: int, spec: DataSpec, text_length: int, pinned: bool) -> None:
        count = slots * rows

        def zeroed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=True) if pinned else zeros(shape, dtype)

        self.tensors = {
            "pixels": zeroed(count, spec.image_size, spec.image_size, 3, dtype=torch.uint8),
            "tokens": zeroed(count, text_length, dtype=torch.int64),
            "labels": zeroed(len(spec.labels), count, dtype=torch.int64),
            "listed": zeroed(count, spec.classes if spec.listed is not None else 0, dtype=torch.bool),
            "right": zeroed(count, spec.right_classes, dtype=torch.bool),
            "noise": zeroed(count, spec.mask_patches, dtype=torch.float32),
            "drop_keys": zeroed(count, dtype=torch.int64),
            "weights": zeroed(count, dtype=torch.float32),
            "shares": zeroed(count, dtype=torch.float32),
            "present": zeroed(slots, dtype=torch.bool),
        }
        self._arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """To be written into."""
        return self._arrays[name]


class BatchReader:
    """Reads rows of ids into MicroBatches. `bad_records` is private: its length is a function of the data.

    `read` may be called from several threads; the records of all rows go through one thread pool in order of arrival.

    `slots` says which records, and how many rows, belong to a number that was drawn. The rows of a record differ in
    what is drawn by key: crop, mask, caption, dropout.
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
        slots: SlotRows | None = None,
    ) -> None:
        if spec.mask_patches and not mask_key:
            raise ValueError("mask noise needs a mask key; derive one from the run key")
        if spec.drop_keys and not dropout_key:
            raise ValueError("drop keys need a dropout key; derive one from the run key")
        if spec.augment in AREAS and not augment_key:
            raise ValueError(f"{spec.augment} needs an augmentation key; derive one from the run key")
        reading = reading or ReadOptions()
        self.slot_rows = slots or SlotRows()
        self.index, self.spec, self.text = index, spec, text
        self._mask_key, self._dropout_key = by_step(mask_key), by_step(dropout_key)
        self._cancelled = threading.Event()
        self._records: RecordReader
        # Decoding processes read what lies on this machine; the rest is read here.
        self._stored: StoredRecords | None = None
        if isinstance(index, RecordReader):
            self._records = index
        else:
            if source is None and isinstance(index, StoredRecords):
                self._stored = index
            source = source or open_source(index, reading)
            self._records = ShardReader(index, source, cancelled=self._cancelled)
        encode, length = (text.encode, text.length) if text is not None else (None, 0)
        left_out = index.filter if isinstance(index, ShardIndex) else None
        self._maker = RecordMaker(spec, self.slot_rows.views, encode, length, left_out)
        # Asked of no step where nothing is random, because some records are needed outside any step.
        self._key_of = by_step(augment_key if augment_key and self._maker.by_key else b"")
        self._scratch = threading.local()
        self._processes = None
        if reading.workers:
            self._processes = DecodePool(self._maker, reading.workers, self._key_of, reading.limits)
        self.in_flight = max(reading.in_flight, MOST * reading.workers)
        # Each message to a process has a thread that waits for it, and one more prepares the next.
        threads = max(reading.workers + 1, reading.in_flight // MOST) if reading.workers else reading.in_flight
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="records") if threads > 1 else None
        self._reads = ThreadPoolExecutor(reading.in_flight, thread_name_prefix="reads") if reading.workers else None
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
        rows = _Rows(len(ids_row), self.slot_rows.count, self.spec, self._maker.text_length, self._pin)
        records = [int(record) for record in chosen.reshape(-1)]
        usable = np.zeros(len(records), dtype=bool)
        bad: dict[int, str] = {}
        wanted = [p for p, record in enumerate(records) if record != EMPTY and not self.index.left_out(record)]
        for place, verdict in zip(wanted, self._made(wanted, records, step, rows), strict=True):
            if isinstance(verdict, BadRecord):
                bad[records[place]] = str(verdict)
            else:
                usable[place] = verdict
        usable = usable.reshape(chosen.shape)
        rows["present"][:], rows["shares"][:] = usable.any(1), self.slot_rows.shares(usable)
        pixels = Pixels(rows.tensors["pixels"], self._normalisation)
        return Fetched(MicroBatch(self._inputs(rows), rows.tensors["present"], pixels), bad)

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
        for pool in (self._pool, self._reads):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def _made(self, wanted: list[int], records: list[int], step: int, rows: _Rows) -> Iterable[Verdict]:
        """What became of the records at the wanted places; those that could be made are laid into the rows."""

        def lay(place: int, made: np.void) -> None:
            record = records[place]
            views = self.slot_rows.views
            own = slice(place * views, (place + 1) * views)
            if self.spec.pictures:
                rows["pixels"][own] = made["pixels"]
            rows["tokens"][own], rows["weights"][own] = made["tokens"], made["weight"]
            rows["labels"][:, own] = made["labels"][:, None]
            rows["listed"][own], rows["right"][own] = made["listed"], made["right"]
            for view in range(views):
                if self.spec.mask_patches:
                    rows["noise"][own][view] = mask_noise(
                        self._mask_key(step), step, record, self.spec.mask_patches, view
                    )
                if self.spec.drop_keys:
                    rows["drop_keys"][own][view] = self.drop_key(record, step, view)

        try:
            if self._processes is None:
                each = map if self._pool is None else self._pool.map
                return each(lambda place: self._here(place, records[place], step, lay), wanted)
            assert self._pool is not None
            parts = [wanted[first : first + MOST] for first in range(0, len(wanted), MOST)]
            made = partial(self._by_process, self._processes, records=records, step=step, lay=lay)
            return chain.from_iterable(self._pool.map(made, parts))
        except RuntimeError:  # another thread closed the pool between two records
            if self._cancelled.is_set():
                raise CancelledError from None
            raise

    def _here(self, place: int, record: int, step: int, lay: Callable[[int, np.void], None]) -> Verdict:
        members = self._records.read(record)
        if not hasattr(self._scratch, "row"):
            self._scratch.row = np.zeros(1, self._maker.row)[0]
        try:
            made = self._maker.make(members, record, step, self._key_of(step), self._scratch.row)
        except BadRecord as error:
            return error
        if made:
            lay(place, self._scratch.row)
        return made

    def _by_process(
        self, processes: DecodePool, part: list[int], records: list[int], step: int, lay: Callable[[int, np.void], None]
    ) -> list[Verdict]:
        asked = [records[place] for place in part]
        stored = [None if self._stored is None else self._stored.stored(record) for record in asked]
        away = [record for record, place in zip(asked, stored, strict=True) if place is None]
        assert self._reads is not None
        # All of them before a process is asked for, which would wait for the store as well.
        found = dict(zip(away, self._reads.map(self._records.read, away), strict=True))
        wanted = [
            Wanted(record, place, partial(self._records.read, record) if place else partial(dict, found[record]))
            for record, place in zip(asked, stored, strict=True)
        ]
        return processes.make(wanted, step, lambda at, made: lay(part[at], made))
