"""Features of a frozen body, computed once, and training on them: each record is decoded and encoded a single time.

For a head on frozen features without augmentation, a step over features is the same step as one over pictures, at the
speed of memory. They are rows of memory-mapped files; each rank fills a contiguous part, and a stopped run continues
with the rows that are missing. Features of private records are as private as the records: for the owner's eyes only, in
RUN_DIR/secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode.resize import DECODER
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, Fetched, MicroBatch
from murmuration.data.store.place import UnreadableError
from murmuration.model.classifier import Classifier
from murmuration.model.settings import Shape
from murmuration.train.clip.engine import Precision, autocast
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Ranks, on_all
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.engines.base import bytes_of, evaluating
from murmuration.train.private_phase import until_unreadable
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.context import RunContext
from murmuration.train.storage.feature_store import BAD, PRESENT, FeatureFolder, FeatureRows, RowWriter, settled

MOST_AT_ONCE = {"cpu": 4, "cuda": 128}
"""Pictures of 224 pixels that go through the body at once: a head's micro-batch may be thousands of records, too many
for it. On a processor, activations of few pictures stay in its caches."""
ENDING = (OSError, RecipeError)
"""Errors that end all ranks with one sentence: a full disk, a folder that another run is filling."""


class FeatureReader:
    """Replaces a BatchReader: the same micro-batches, with "features" instead of "images". `slots` says which records
    of a unit that was drawn take part; the features are those of records, whatever is protected."""

    in_flight = 1

    def __init__(self, stored: FeatureRows, slots: SlotRows | None = None) -> None:
        self.stored, self.slots = stored, slots or SlotRows()
        self.bad_reasons: dict[int, str] = {}
        """Empty: bad records were reported when the pictures were read."""

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        records = self.slots.records_of(ids_row, step).reshape(-1)
        rows, stored = np.maximum(records, 0), self.stored
        if len(rows) and records[0] >= 0 and bool((np.diff(records) == 1).all()):
            rows = slice(int(rows[0]), int(rows[-1]) + 1)  # consecutive, as in a step over all records: no gathering
        state, wanted = stored.state[rows], records != EMPTY
        if bool((wanted & ~settled(state)).any()):
            # All rows were there when the files were opened. Without an error, the record would count as one without a
            # gradient. The record is not named: that would reveal that the step drew it.
            raise UnreadableError(f"features that were computed are gone from {stored.path}; compute them again")
        present = wanted & (state == PRESENT)
        features = np.where(present[:, None], stored.features[rows], np.float32(0))
        labels = np.where(present, stored.labels[rows], 0)
        inputs = {"features": torch.from_numpy(features), "labels": torch.from_numpy(labels)}
        usable = present.reshape(len(ids_row), self.slots.count)
        if self.slots.count > 1:
            inputs[ROW_SHARE] = torch.from_numpy(self.slots.shares(usable))
        return Fetched(MicroBatch(inputs, torch.from_numpy(usable.any(1))), {})

    def report(self, fetched: Fetched) -> None:
        """Does nothing: bad records were reported when the features were computed."""

    def close(self) -> None:
        """Mapped files close with their last reader."""


def feature_reader(
    run: RunContext, phase: ReadyPhase, model: nn.Module, reader: BatchReader, slots: SlotRows | None = None
) -> FeatureReader:
    """Computes missing features on all ranks and returns a reader of all of them. Closes the reader of the pictures,
    which is one of records."""
    contents = run.ranks.on_main(lambda: run.contents(phase))
    records = " ".join(contents[name] for name in ("data", "data_excluded", "classes") if name in contents)
    spec, whose = phase.data_spec(augment=True), "public" if phase.settings.data.public else "private, like the records"

    def list_bad() -> None:
        run.board.bad_records(phase.name, run.ranks.rank, reader.bad_reasons)

    every = np.arange(phase.index.records)
    stored = _stored(run, phase, model, reader, spec, records, every, list_bad, f"records ({whose})")
    return FeatureReader(stored, slots)


class HeldOutFeatures(FeatureReader):
    """Of the public held-out records, numbered as they are measured: checkpoints, and other runs that share the folder,
    need not encode them again."""

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        rows = ids_row[ids_row != EMPTY]
        for row in rows[self.stored.state[rows] == BAD].tolist():
            self.bad_reasons[row] = "it could not be read when its features were computed"
        return super().fetch(ids_row, step)


def held_out_features(run: RunContext, phase: ReadyPhase, model: nn.Module) -> HeldOutFeatures | None:
    """None where the phase keeps no features, or measures what is not stored with them."""
    held = phase.measured
    if held is None or phase.settings.features is None or held.evaluation.real is not None:
        return None
    digest = run.ranks.on_main(lambda: held.index.manifest_digest)
    records = f"held out {digest} {len(held.ids)}"
    reader = BatchReader(held.index, held.spec, held.text)
    about = "public held-out records"
    return HeldOutFeatures(_stored(run, phase, model, reader, held.spec, records, held.ids, lambda: None, about))


def _stored(
    run: RunContext, phase: ReadyPhase, model: nn.Module, reader: BatchReader, spec: DataSpec, records: str,
    ids: np.ndarray, list_bad: Callable[[], None], about: str,
) -> FeatureRows:  # fmt: skip
    """Rows of the records `ids`, in their order; missing ones are computed by all ranks."""
    assert isinstance(model, Classifier) and phase.settings.features is not None
    ranks = run.ranks
    # Phases on the same records share what one of them has computed with the same body.
    so_far = [each for each in run.config.phases[: phase.number + 1] if each.data == phase.settings.data]
    given = [each.features.folder for each in so_far if each.features is not None and each.features.folder is not None]
    shared = Path(given[-1]) if given else run.folder.key.parent / "features"
    precision = run.config.run.precision
    model.to(ranks.device)
    folder = FeatureFolder.within(
        shared, identity_of(model, records, spec, precision), len(ids), model.head.in_features
    )  # fmt: skip
    with ExitStack() as until_made:
        until_made.callback(reader.close)
        # Also when stopped: once a row is marked bad, its record is not read again, so the reason would be lost.
        until_made.callback(list_bad)
        some = ranks.on_main(lambda: until_made.enter_context(folder.claimed()))
        missing = np.empty(0, np.int64)
        if some:
            missing = on_all(ranks, lambda: folder.missing(ranks.rank, ranks.world), *ENDING)
        run.board.say(
            f"{phase.name}  features of {folder.records:,} {about} in {folder.path}; {ranks.sum(len(missing)):,} to be "
            "computed"
        )
        if some:
            with closing(on_all(ranks, lambda: RowWriter(folder), *ENDING)) as writer:
                at_once = min(run.config.micro_batch, pictures_at_once(spec.image_size, ranks.device.type))

                def said(done: int, of: int) -> None:
                    run.board.progress(f"features {done:,} of {of:,}", done, of)

                fill(writer, model, reader, missing, ids, at_once, ranks, precision, run.stop, said)
        return on_all(ranks, folder.rows, *ENDING)


def pictures_at_once(side: int, device: str) -> int:
    """On a processor more of them, the smaller they are: then calls cost more than products."""
    most = MOST_AT_ONCE[device]
    return most if device != "cpu" else max(most, most * 224**2 // side**2)


@torch.no_grad()
def fill(
    writer: RowWriter, model: Classifier, reader: BatchReader, missing: np.ndarray, ids: np.ndarray, at_once: int,
    ranks: Ranks, precision: Precision, stop: StopRequest, said: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Fills missing rows, which are those of `ids` in their places, `at_once` of them per round; all ranks make the
    same number of rounds, so that an error on one ends all of them together. `said` hears of each twentieth of them.

    No rank returns before the last row of every rank is written.
    """

    def fetched(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        found = reader.fetch(ids, step)
        reader.report(found)
        yield found.batch

    read = until_unreadable(fetched, stop)

    def make(rows: np.ndarray) -> None:
        for batch in read(ids[rows], 0):
            if not len(batch.present):
                return  # could not be read: the next check for a stop ends all ranks
            images = batch.to(ranks.device).inputs["images"]
            if ranks.device.type == "cpu":  # which suits its convolutions
                images = images.contiguous(memory_format=torch.channels_last)
            with evaluating(model), autocast(precision, ranks.device):
                features = apart(model.features, images)
            values = features.float().cpu().numpy()
            writer.put(rows, values, batch.inputs["labels"].numpy(), batch.present.numpy())

    rounds = max(ranks.gather(-(-len(missing) // at_once)))
    for number in range(rounds):
        stop.check(ranks)
        rows = missing[number * at_once : (number + 1) * at_once]
        on_all(ranks, lambda rows=rows: make(rows) if len(rows) else None, *ENDING)
        if rounds >= 20 and (number + 1) % (rounds // 20) == 0:
            said(min((number + 1) * at_once, len(missing)), len(missing))
    stop.check(ranks)


def apart(features: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Features that depend on no other record's. Some processors' products in half precision are not finite for the
    record before one that is not finite, so such rows are computed again, each among zeros."""
    found = features(images)
    for row in (~found.isfinite()).flatten(1).any(1).nonzero().flatten().tolist():
        alone = torch.zeros_like(images)
        alone[row] = images[row]
        found[row] = features(alone)[row]
    return found


def identity_of(model: Classifier, records: str, spec: DataSpec, precision: Precision) -> str:
    """A digest of everything that a row depends on: the records (and which are excluded), which of their pixels and
    labels are read, and by what decoder, the body and the precision. Models that differ only in the head share it."""
    found = hashlib.sha256(f"{records} {precision} {spec!r} {DECODER} {_body(model.shape)!r}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("head."):
            found.update(name.encode())
            found.update(bytes_of(tensor))
    return found.hexdigest()


def _body(shape: Shape) -> tuple[object, ...]:
    """What the weights do not determine; the picture size is in the DataSpec, too. Seeds of weights show in the
    weights."""
    if shape.resnet is not None:
        return (shape.resnet, shape.image_size)
    if shape.named is not None:
        return (shape.named, shape.image_size)
    return (shape.encoder, shape.image_size, shape.patch_size, shape.positions, shape.pooling, shape.qkv_bias)
