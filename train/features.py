"""Features of a frozen body, computed once, and training on them: each record is decoded and encoded a single time.

For a head on frozen features without augmentation, a step over features is the same step as one over pictures, at the
speed of memory. They are rows of a memory-mapped file, filled in stretches by all ranks; a stopped run goes on where a
row is missing. Features of private records are private like the records: owner's eyes only, in RUN_DIR/secret.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data.batches import EMPTY, BatchReader, DataSpec, Fetched, MicroBatch
from data.durable import atomic
from model.classifier import Classifier
from train.fingerprint import bytes_of
from train.modes import evaluating
from train.precision import Precision, autocast
from train.ranks import Ranks
from train.recipe import ReadyPhase
from train.recipe_error import RecipeError
from train.run_context import RunContext

ABSENT, PRESENT, BAD = 0, 1, 2
HEADER = "features.json"


@dataclass(frozen=True)
class FeatureStore:
    """Rows of features, their labels, and which rows are there."""

    features: np.ndarray
    labels: np.ndarray
    state: np.ndarray

    @staticmethod
    def create(folder: Path, records: int, width: int, identity: str) -> None:
        """Keeps what is there if it is of the same records, weights and pictures; else begins anew. On one rank."""
        header = {"identity": identity, "records": records, "width": width}
        if _header(folder) == header:
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = {HEADER, *(name for name, _, _ in _files(records, width))}
        found = (path.name for path in folder.iterdir() if not path.name.startswith(f".{HEADER}."))
        if others := sorted(set(found) - ours):
            raise RecipeError(f"features.folder {folder} holds other things ({others[0]}); name a folder of its own")
        for name in ours:
            (folder / name).unlink(missing_ok=True)
        for name, dtype, shape in _files(records, width):
            file = folder / name
            os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
            np.lib.format.open_memmap(file, "w+", dtype, shape).flush()
        with atomic(folder / HEADER, 0o600) as file:  # the last: without it, the others are begun anew
            file.write(json.dumps(header).encode())

    @staticmethod
    def open(folder: Path) -> FeatureStore:
        found = (np.lib.format.open_memmap(folder / name, "r+") for name, _, _ in _files(1, 1))
        return FeatureStore(*found)

    def missing(self, rank: int, world: int) -> np.ndarray:
        """This rank's rows that are not there yet."""
        total = len(self.state)
        low, high = rank * total // world, (rank + 1) * total // world
        return low + np.flatnonzero(self.state[low:high] == ABSENT)

    def put(self, ids: np.ndarray, features: np.ndarray, labels: np.ndarray, present: np.ndarray) -> None:
        """A row counts as there only after its content."""
        self.features[ids], self.labels[ids] = np.where(present[:, None], features, 0.0), np.where(present, labels, 0)
        self.flush()
        self.state[ids] = np.where(present, PRESENT, BAD)

    def flush(self) -> None:
        for part in (self.features, self.labels, self.state):
            if isinstance(part, np.memmap):
                part.flush()


def _header(folder: Path) -> object:
    try:
        return json.loads((folder / HEADER).read_text())
    except (OSError, ValueError):
        return None


def _files(records: int, width: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [("features.npy", "<f4", (records, width)), ("labels.npy", "<i8", (records,)),
            ("state.npy", "|u1", (records,))]  # fmt: skip


class FeatureReader:
    """In the place of a BatchReader: the same micro-batches, with "features" where "images" were."""

    in_flight = 1

    def __init__(self, store: FeatureStore, bad_reasons: dict[int, str] | None = None) -> None:
        self.store = store
        self.bad_reasons = bad_reasons or {}

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        del step
        rows = np.maximum(ids_row, 0)
        if len(rows) and ids_row[0] >= 0 and bool((np.diff(ids_row) == 1).all()):
            rows = slice(int(rows[0]), int(rows[-1]) + 1)  # neighbours, as in a step over all records: no gathering
        present = (ids_row != EMPTY) & (self.store.state[rows] == PRESENT)
        features = np.where(present[:, None], self.store.features[rows], np.float32(0))
        labels = np.where(present, self.store.labels[rows], 0)
        inputs = {"features": torch.from_numpy(features), "labels": torch.from_numpy(labels)}
        return Fetched(MicroBatch(inputs, torch.from_numpy(present)), {})

    def report(self, fetched: Fetched) -> None:
        """Bad records were reported when their features were to be computed."""

    def close(self) -> None:
        """Mapped files close with their last reader."""


def feature_reader(run: RunContext, phase: ReadyPhase, model: nn.Module, reader: BatchReader) -> FeatureReader:
    """Computes what is missing, on all ranks, and gives a reader of it. The pictures' reader is closed."""
    assert isinstance(model, Classifier) and phase.settings.features is not None
    ranks = run.ranks
    given = phase.settings.features.folder
    folder = Path(given) if given is not None else run.folder.key.parent / f"features-{phase.name}"
    precision = run.config.run.precision
    model.to(ranks.device)
    identity = identity_of(model, phase.index.manifest_digest, phase.data_spec(augment=True), precision)
    width = model.head.in_features
    ranks.on_main(lambda: FeatureStore.create(folder, phase.index.records, width, identity))
    store = FeatureStore.open(folder)
    missing = store.missing(ranks.rank, ranks.world)
    total = ranks.sum(len(missing))
    whose = "public" if phase.settings.data.public else "private, like the records"
    run.board.say(
        f"{phase.name}  features of {phase.index.records:,} records in {folder} ({whose}); {total:,} are to be made"
    )
    try:
        fill(store, model, reader, missing, run.config.train_micro_batch_size_per_gpu, ranks, precision, run)
    finally:
        reader.close()
    return FeatureReader(store, reader.bad_reasons)


@torch.no_grad()
def fill(
    store: FeatureStore, model: Classifier, reader: BatchReader, missing: np.ndarray, micro_batch: int, ranks: Ranks,
    precision: Precision, run: RunContext | None = None,
) -> None:  # fmt: skip
    """Row by row of micro-batches; all ranks make as many rounds, so that a request to stop finds them together."""
    rounds = max(ranks.gather(-(-len(missing) // micro_batch)))
    for number in range(rounds):
        if run is not None:
            run.stop.check(ranks)
        ids = missing[number * micro_batch : (number + 1) * micro_batch]
        if not len(ids):
            continue
        batch = reader.read(ids, 0)
        with evaluating(model), autocast(precision, ranks.device):
            features = model.features(batch.inputs["images"].to(ranks.device))
        values = features.float().cpu().numpy()
        store.put(ids, values, batch.inputs["labels"].numpy(), batch.present.numpy())
    store.flush()
    ranks.barrier()


def identity_of(model: Classifier, manifest_digest: str, spec: DataSpec, precision: Precision) -> str:
    """Of everything that a row depends on: records, which pixels and labels of them, body, shape, precision."""
    found = hashlib.sha256(f"{manifest_digest} {precision} {spec!r} {model.shape!r}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("head."):
            found.update(name.encode())
            found.update(bytes_of(tensor))
    return found.hexdigest()
