"""Features of public records under a frozen model, computed once into a mapped file, and continued after a stop.

Records are encoded in fixed micro-batches. A micro-batch of which any row is missing is encoded again as a whole, so
that a row is the same bit for bit whether or not the extraction was interrupted: kernels may round a row by its
neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from murmuration.data.batch.loader import iterate
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.decode.resize import DECODER
from murmuration.data.draw.micro_batch import EMPTY
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.rows import Rows
from murmuration.evaluation.models.weights import Evaluated, Way, digest_of_model, features_of, width_of
from murmuration.evaluation.session.sharing import Sharing
from murmuration.train.clip.engine import Precision, autocast
from murmuration.train.storage.feature_store import PRESENT, FeatureFolder, RowWriter

CROPS = b"crops of a linear probe"
"""Public: two probes of the same records see the same crops."""


@dataclass(frozen=True)
class Computing:
    """How pictures are read and encoded; of these, only the precision and the micro-batch can change a feature."""

    device: torch.device
    precision: Precision
    micro_batch: int
    workers: int

    def reading(self) -> ReadOptions:
        return ReadOptions(self.workers, max(1, self.workers + 2))


ReadBatch = tuple[np.ndarray, dict[str, Tensor], Tensor]
"""Which records, their inputs on the device, and which rows are present."""


def places_of_micro_batches(numbers: np.ndarray, size: int, total: int) -> np.ndarray:
    """Where the records of some micro-batches are among all `total`."""
    places = (numbers[:, None] * size + np.arange(size)).reshape(-1)
    # The last micro-batch is filled up with empty slots by `batches`.
    return places[places < total]


def batches(
    reader: BatchReader, ids: np.ndarray, computing: Computing, step: int, progress: Callable[[int, int], object]
) -> Iterator[ReadBatch]:
    """Micro-batches of `ids` in order."""
    size = computing.micro_batch
    rows = np.full((-(-len(ids) // size), size), EMPTY, dtype=np.int64)
    rows.reshape(-1)[: len(ids)] = ids
    progress(0, len(ids))
    for number, batch in enumerate(iterate(reader, rows, step)):
        moved = batch.to(computing.device)
        yield rows[number], moved.inputs, batch.present
        progress(min(len(ids), (number + 1) * size), len(ids))


@dataclass(frozen=True)
class Extracted:
    """`views` hold the same readable records, each differently cropped."""

    views: list[Rows]
    unreadable: int


@torch.no_grad()
def extract(
    model: Evaluated, way: Way, index: RecordIndex, spec: DataSpec, views: int, folder: Path, computing: Computing,
    what: str, sharing: Sharing,
) -> Extracted:  # fmt: skip
    """`views` 0: one feature per record, of the view that `spec` names; otherwise so many random crops of each."""
    if views:
        spec = replace(spec, augment="random_resized_crop")
    count = max(1, views)
    told = f"{digest_of_model(model)} {way} {index.manifest_digest} {index.excluded_digest} {spec!r} {count}"
    told += (
        f" {spec.class_list.digest if spec.class_list else ''} {DECODER} {computing.precision} {computing.micro_batch}"
    )
    identity = hashlib.sha256(told.encode()).hexdigest()
    store = FeatureFolder.within(folder, identity, count * index.records, width_of(model, way))
    with claimed(store, sharing) as some:
        if some:
            reader = BatchReader(index, spec, augment_key=CROPS, reading=computing.reading())
            with closing(reader), closing(RowWriter(store)) as writer:
                for view in range(count):
                    part = RowsToFill(view * index.records, np.arange(index.records), view)
                    shown = f"features of {what}" + (f", view {view + 1} of {views}" if views > 1 else "")
                    filling = Filling(store, writer, reader, computing, sharing, shown)
                    filling.fill(part, lambda x: features_of(model, x, way))
    stored = store.rows()
    state = np.asarray(stored.state).reshape(count, index.records)
    # A record counts only if all of its views can be read, so that views can be mixed.
    readable = np.flatnonzero((state == PRESENT).all(axis=0))
    rows = [Rows(stored.features, stored.labels, view * index.records + readable) for view in range(count)]
    return Extracted(rows, index.records - len(readable))


@contextmanager
def claimed(store: FeatureFolder, sharing: Sharing) -> Iterator[bool]:
    """Whether rows are missing, which all ranks fill while rank 0 keeps others away. Entered by all together."""
    with ExitStack() as until_made:
        yield sharing.on_main(lambda: until_made.enter_context(store.claimed()))


@dataclass(frozen=True)
class RowsToFill:
    """The rows from `first` on, one for each of the records `ids`, which are read as in step `step`."""

    first: int
    ids: np.ndarray
    step: int = 0


@dataclass(frozen=True)
class Filling:
    """How rows come into a store, and under which name their progress is shown."""

    store: FeatureFolder
    writer: RowWriter
    reader: BatchReader
    computing: Computing
    sharing: Sharing
    what: str
    unit: str = "records"

    def fill(self, part: RowsToFill, values_of: Callable[[Tensor], Tensor]) -> None:
        """Computes the rows that are missing; `values_of` images [B, …] gives [B, width]."""
        records, computing, sharing = len(part.ids), self.computing, self.sharing
        # Told by one rank to all, before any of them fills a row.
        wanted = sharing.on_main(lambda: self._wanted(part))
        size = computing.micro_batch
        rest = len(places_of_micro_batches(wanted, size, records))
        progress = sharing.progress(self.what, self.unit, records - rest, records)
        places = places_of_micro_batches(sharing.mine(wanted), size, records)
        at = 0

        def put(read: ReadBatch) -> None:
            nonlocal at
            row, inputs, present = read
            with autocast(computing.precision, computing.device):
                values = values_of(inputs["images"])
            real = row != EMPTY
            here = places[at : at + int(real.sum())]
            at += len(here)
            found = values.float().cpu().numpy()
            there = present.numpy()
            bad_values = there & ~np.isfinite(found).all(axis=1)
            if bad_values.any():
                raise EvaluationError("the model gives values that are not finite; evaluate an earlier checkpoint")
            labels = inputs["labels"].cpu().numpy() if "labels" in inputs else np.zeros(len(row), dtype=np.int64)
            self.writer.put(part.first + here, found[real], labels[real], there[real])

        read = batches(self.reader, part.ids[places], computing, part.step, progress)
        sharing.share(len(wanted), read, put)

    def _wanted(self, part: RowsToFill) -> np.ndarray:
        """The micro-batches of which any row is missing."""
        missing = self.store.missing(0, 1) - part.first
        return np.unique(missing[(missing >= 0) & (missing < len(part.ids))] // self.computing.micro_batch)
