"""Micro-batches of records that a function or a map-style dataset returns: PyTorch's, Hugging Face's, or anything with
len() and []."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from murmuration.accounting.errors import InputError, RunError
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode.decode import BadRecord, parsing  # with it, Pillow's warnings reach no console
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, Fetched, MicroBatch
from murmuration.data.draw.poisson import StepKey, by_step

if TYPE_CHECKING:
    from murmuration.data.batch.reading_processes import ReadingProcesses, Take, Told

Read = Callable[[np.ndarray], Mapping[str, Tensor]]
"""Maps an array with the number of one record to the model's inputs, by name, each with one row, or with one for each
of the record's views."""
FIRST = 8
"""How many records are tried before a run begins. If all of them fail, it is the function that is wrong."""
FAILED = "read() failed"
COPIED = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip
"""Types of which PyTorch copies several rows at once."""
_one_at_a_time = threading.Lock()
"""Of all readers, since a process has one generator of each kind."""


@dataclass(frozen=True)
class Table:
    """The `Read` of a TensorDataset, or of a part of one. It runs nobody's code for a record, so its rows can be taken
    at once, which one by one would take as long as a small model's backward pass."""

    columns: dict[str, Tensor]
    places: Tensor
    """The row of each record."""

    @staticmethod
    def of(data: Any) -> Table | None:
        """None where reading one by one may give something else, or fail for some records alone."""
        # A subclass may return anything.
        if type(data) is TensorDataset and all(map(_is_plain, data.tensors)) and len(data):
            return Table({str(place): each for place, each in enumerate(data.tensors)}, torch.arange(len(data)))
        if type(data) is Subset and (whole := Table.of(data.dataset)) is not None:
            places = _places(data.indices, len(whole.places))
            return None if places is None else Table(whole.columns, whole.places[places])
        return None

    def is_like(self, rows: Mapping[str, Tensor]) -> bool:
        found = {name: (column.shape[1:], column.dtype, column.device) for name, column in self.columns.items()}
        return found == {name: (row.shape[1:], row.dtype, row.device) for name, row in rows.items()}

    def __call__(self, numbers: np.ndarray) -> dict[str, Tensor]:
        places = self.places[torch.from_numpy(numbers)]
        return {
            name: column.detach().index_select(0, places.to(column.device)) for name, column in self.columns.items()
        }


def _is_plain(column: Tensor) -> bool:
    return (
        type(column) in (Tensor, nn.Parameter)
        and column.layout is torch.strided and not column.is_nested and column.dtype in COPIED
    )  # fmt: skip


def _places(indices: Any, count: int) -> Tensor | None:
    """None unless each is a whole number that names one of so many rows."""
    if type(indices) not in (list, tuple, range, np.ndarray, Tensor):
        return None
    try:
        found = np.asarray(indices)
    except Exception:  # one by one, they fail for their own records
        return None
    if (
        found.ndim != 1
        or found.dtype.kind not in "iu"
        or not found.size
        or found.min() < -count
        or found.max() >= count
    ):
        return None
    return torch.from_numpy(found.astype(np.int64))


def repeated(data: Any) -> int:
    """How many records of a dataset are one of its others again, as far as PyTorch's own parts and chains of datasets
    show it. Each would be drawn and clipped for itself."""
    sources = _sources(data, {})
    return len(sources) - len(np.unique(sources))


def _sources(data: Any, begins: dict[int, int]) -> np.ndarray:
    """What each record is of the datasets that lie below, which are numbered one after the other."""
    if type(data) is Subset:
        sources = _sources(data.dataset, begins)
        if (places := _places(data.indices, len(sources))) is not None:
            return sources[places.numpy()]
    if type(data) is ConcatDataset:
        return np.concatenate([_sources(each, begins) for each in data.datasets])
    begin = begins.setdefault(id(data), len(begins) << 40)
    return begin + np.arange(len(data))


class ReadFailsError(RunError, ValueError):
    """The function returns no record at all."""


class FunctionReader:
    """A `Reader` for a `Loader`. A `read` that is no table is called for one record at a time, by one thread at a time
    or by each of `workers` processes, and what it draws from the generators of Python, NumPy and PyTorch is seeded by
    `key`, step and record. With one stream for all records, one that is there or not would decide how all later ones
    are cropped and flipped.

    A record for which it raises anything, or returns something else than `like` has (names, shapes, types that can be
    converted), is absent; n does not change. That a record ended a run would tell of it, and every start would draw it
    again. It may return up to `rows.views` rows for a record, whose losses are averaged. With `rows.units`, the numbers
    that were drawn are those of units, of which at most `rows.records` records are read in a step.
    """

    def __init__(
        self, read: Read, like: Mapping[str, Tensor], rows: SlotRows | None = None, key: bytes | StepKey = b"",
        workers: int = 0,
    ) -> None:  # fmt: skip
        self._read, self._slots, self._key = read, rows or SlotRows(), by_step(key)
        self._empty = {name: torch.zeros_like(tensor[:1]) for name, tensor in like.items()}
        at_once = isinstance(read, Table) and read.is_like(self._empty)
        self._table = read if at_once else None
        self._processes: ReadingProcesses | None = None
        self.in_flight = 1
        if workers and self._table is None:
            from murmuration.data.batch.reading_processes import MOST, ReadingProcesses  # by default a thread reads

            self._processes = ReadingProcesses(self._read_each, self._empty, self._slots.views, workers)
            self.in_flight = MOST * workers
        self.bad_reasons: dict[int, str] = {}

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        views, rows = self._slots.views, self._slots.count
        wanted = self._slots.records_of(ids_row, step)
        usable = np.zeros(wanted.shape, dtype=bool)
        count = len(ids_row) * rows
        inputs = {name: tensor.repeat(count, *[1] * (tensor.dim() - 1)) for name, tensor in self._empty.items()}
        shares = np.zeros(count, dtype=np.float32)
        bad: dict[int, str] = {}
        taken = np.nonzero(wanted != EMPTY)
        first = taken[0] * rows + taken[1] * views
        if self._table is not None:
            for name, found in self._table(wanted[taken]).items():
                inputs[name].index_copy_(0, torch.from_numpy(first), found)
            usable[taken], shares[first] = True, 1
        else:
            # As Python's own numbers, which are several times as fast one by one.
            records, places, firsts = wanted[taken].tolist(), list(zip(*taken, strict=True)), first.tolist()

            def take(place: int, found: Mapping[str, Tensor]) -> None:
                for name, tensor in found.items():  # at once: the function may use its memory again
                    inputs[name].narrow(0, firsts[place], len(tensor)).copy_(tensor)

            for place, told in enumerate(self._read_all(records, self._key(step), step, take)):
                if isinstance(told, str):
                    bad[records[place]] = told
                else:
                    shares[firsts[place] : firsts[place] + told] = 1 / told
                    usable[places[place]] = True
        if self._slots.reduce == "mean":
            shares /= np.maximum(usable.sum(1), 1).repeat(rows)
        if rows > 1:
            inputs[ROW_SHARE] = torch.from_numpy(shares)
        return Fetched(MicroBatch(inputs, torch.from_numpy(usable.any(1))), bad)

    def _read_all(self, records: list[int], key: bytes, step: int, take: Take) -> Told:
        if self._processes is not None:
            return self._processes.read(records, key, step, take)
        with _one_at_a_time, _generators_as_before():
            return self._read_each(records, key, step, take)

    def _read_each(self, records: Sequence[int], key: bytes, step: int, take: Take) -> Told:
        told: Told = []
        for place, record in enumerate(records):
            _seed(key, step, record)
            try:
                found = self._one(record)
                with parsing(FAILED):  # a subclass of tensors may refuse
                    take(place, found)
            except BadRecord as error:
                told.append(str(error))
            else:
                told.append(len(next(iter(found.values()))))
        return told

    def _one(self, record: int) -> dict[str, Tensor]:
        try:
            # An array of its own: the function may keep it, and must not change whose record is whose.
            with parsing(FAILED):
                return self._checked(dict(self._read(np.array([record]))))
        except (MemoryError, SystemExit) as error:  # of what this record asks for; the next one gets its turn
            raise BadRecord(f"{FAILED} ({type(error).__name__})") from error

    def _checked(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        if found.keys() != self._empty.keys():
            raise BadRecord(f"read() returns {sorted(found)}, but the synthetic records have {sorted(self._empty)}")
        shape = next(iter(found.values())).shape
        count = min(max(1, shape[0]), self._slots.views) if shape else 1
        for name, rows in found.items():
            like = self._empty[name]
            wanted = (count, *like.shape[1:])
            if rows.shape != wanted:
                raise BadRecord(f"{name} has shape {list(rows.shape)}, not {list(wanted)}")
            if rows.layout is not like.layout:
                raise BadRecord(f"{name} has the layout {rows.layout}, not {like.layout}")
            if rows.dtype is not like.dtype and not torch.can_cast(rows.dtype, like.dtype):
                raise BadRecord(f"{name} has type {rows.dtype}, which {like.dtype} cannot hold")
            if rows.requires_grad or rows.dtype is not like.dtype or rows.device != like.device:
                found[name] = rows.detach().to(like.device, like.dtype)
        return found

    def try_first(self, records: int) -> MicroBatch:
        """Before anything is charged: a few records (or units), spread over all. Refuses a function that fails for
        every one; nothing is said of a single one."""
        tried = np.unique(np.linspace(0, records - 1, FIRST).astype(np.int64))
        trial = copy(self)  # with its processes, in which much fails that succeeds here
        # Which records of a unit is no secret, and no step's key is used.
        trial._slots = slots = replace(self._slots, key=bytes(32))
        trial._key = by_step(b"")
        found = trial.fetch(tried, 0)
        if len(tried) > 1 and not found.batch.present.any():
            reasons = set(found.bad.values())
            if len(reasons) == 1 and not (form := reasons.pop()).startswith(FAILED):  # what a record holds is not told
                raise ReadFailsError(
                    f"example= or synthetic= is unlike all of {len(tried)} records that were tried: {form}; give one "
                    "item as the data has it, without a batch dimension"
                )
            one = slots.records_of(tried[:1], 0)[0, 0]
            raise ReadFailsError(
                f"read() failed for all of {len(tried)} records that were tried, so it is no single record's fault; "
                f"call read(np.array([{one}])) to see why: it must return tensors named {sorted(self._empty)} with one "
                "row, as the synthetic records have"
                + ("; forked processes read here, which cannot use a GPU: try workers=0" if self._processes else "")
            )
        return found.batch

    def report(self, fetched: Fetched) -> None:
        """Note the bad records. Private: which records are unusable reveals something about them."""
        for record, reason in fetched.bad.items():
            self.bad_reasons.setdefault(record, reason)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


@contextmanager
def _generators_as_before() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _seed(key: bytes, step: int, record: int) -> None:
    """The generators that transforms draw from; those of devices are left as they are."""
    seed = int.from_bytes(hashlib.blake2b(f"{step} {record}".encode(), key=key, digest_size=8).digest())
    random.seed(seed)
    np.random.seed(seed % 2**32)  # all that it takes as a number
    torch.default_generator.manual_seed(seed)


def is_dataset(data: Any) -> bool:
    """A dict or a tensor has len() and [], too, but its rows are no items."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | Tensor | str)


def as_read(data: Any, records: int | None, views: int = 1) -> tuple[Read, int]:
    """The function, and how many records there are. A dataset is asked `views` times for each record of a step."""
    if is_dataset(data):
        if records not in (None, len(data)):
            raise InputError(f"records = {records}, but the dataset has {len(data)}; leave records out")
        if views == 1 and (table := Table.of(data)) is not None:
            return table, len(data)

        def read(number: np.ndarray) -> Mapping[str, Tensor]:
            seen = [as_inputs(data[int(number[0])]) for _ in range(views)]
            return seen[0] if views == 1 else {name: torch.cat([each[name] for each in seen]) for name in seen[0]}

        return read, len(data)
    if not callable(data):
        raise InputError(
            f"data= must be a dataset with len() and [], or a function read(number), but is a {type(data).__name__}; "
            "an iterable one has no numbered records, which Poisson samples need"
        )
    if records is None:
        raise InputError("a function read(number) does not say how many records there are; give records=")
    read_of_program: Read = data  # pyright: ignore[reportAssignmentType]
    return read_of_program, records


def as_inputs(item: Any) -> dict[str, Tensor]:
    """One item as the model's inputs, with one row: a dict keeps its names, a tuple's are its places.

    >>> as_inputs(([1.5, 2.0], 7))
    {'0': tensor([[1.5000, 2.0000]]), '1': tensor([7])}
    """
    if isinstance(item, (tuple, list)):
        named = {str(place): value for place, value in enumerate(item)}
    elif isinstance(item, Mapping):
        named = {str(name): value for name, value in item.items()}
    else:
        raise InputError(f"an item must be a dict or a tuple of tensors and numbers, but is a {type(item).__name__}")
    found = dict[str, Tensor]()
    for name, value in named.items():
        try:
            found[name] = torch.as_tensor(value).unsqueeze(0)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"an item's {name} is a {type(value).__name__}, of which no tensor can be made; transform it in the "
                "dataset"
            ) from None
    return found
