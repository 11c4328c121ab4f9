"""Fine-tunes all weights of an encoder on public records, and scores the classifier that comes of it.

After each epoch the state is on the disk, whole or not at all, and the command continues from there when it is started
again. The classifier is kept, too, as an export without a certificate; its metadata name the runs that its weights come
from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save
from torch import Tensor

from murmuration.accounting.certificate.provenance import Provenance
from murmuration.accounting.durable import atomic
from murmuration.data.batch.reader import DataSpec
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.selection import Selection
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.fine_tuning import HEAD_STD, FineTuneSettings, groups_of
from murmuration.evaluation.measures.interval import share
from murmuration.evaluation.models.weights import Evaluated, digest_of_model
from murmuration.evaluation.protocols.augmented import AugmentedPictures, mixed_batches, seed_all
from murmuration.evaluation.protocols.classify import places_of
from murmuration.evaluation.protocols.draws import ByDraw, FewRecords
from murmuration.evaluation.protocols.shared_training import STATE, TrainingState, TrainingTask, train_together
from murmuration.evaluation.session.answers import FOLDER
from murmuration.evaluation.session.public_records import digest_for_all
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen, Session, Work, by_list, numbered
from murmuration.model.build import build, take_encoder
from murmuration.model.classifier import TransformerClassifier
from murmuration.model.inputs import DROP_KEY
from murmuration.model.load_report import WeightsError
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.train.clip.engine import autocast
from murmuration.train.measures.ranking import MOST
from murmuration.train.recipe.pixels import as_json, metadata
from murmuration.train.recipe.warm_start import WarmStart
from murmuration.train.storage.model_note import MODEL

WEIGHTS, NOTE = "model.safetensors", "export.json"


@dataclass(frozen=True)
class FineTuning:
    """What each training of a command begins with."""

    session: Session
    sizes: ModelSettings
    spec: DataSpec
    classes: ClassList
    told: dict[str, Any]
    settings: FineTuneSettings

    def trained(self, train: Chosen, state: Path) -> TransformerClassifier:
        """`state`: the file from which a stopped training continues."""
        if len(train.ids) < 2:
            raise EvaluationError("mixing needs at least two training records; name more")
        seed_all([self.settings.seed])
        model = _started(self.session, self.sizes)
        groups = groups_of(model, model.shape.encoder.depth, self.settings)
        pictures = AugmentedPictures(train.index, self.spec, self.settings)
        task = MixedPictures(self.session, model, train, pictures, self.settings)
        count, known = len(train.ids), TrainingState(state, _identity(self.session, train, self.classes, self.told))
        train_together(
            task, self.session.sharing, model, groups, self.settings, count, self.settings.batch_of(count), known
        )
        return model

    def places(
        self, model: TransformerClassifier, digest: str, result: Result, test: Chosen, last: bool
    ) -> list[int]:  # fmt: skip
        """At which place each scored record's class comes; if these are the `last` answers, rank 0 alone returns."""
        before = self.session.model
        found = Evaluated(model, "classify", digest, before.report, before.pixels)

        def act(ids: Any, inputs: dict[str, Tensor], before: int) -> list[Any]:
            return places_of(model.logits(inputs["images"]).float(), inputs["labels"])

        answers = replace(self.session, model=found).answers(result, test, self.spec, act, last=last)
        return [place for _, place in answers]


def run(session: Session, work: Work) -> Outcome:
    settings, few = FineTuneSettings.of(work.arguments), FewRecords.of(work.arguments)
    label = work.arguments.label
    train, test = (Chosen.of(work.records[name]) for name in ("train", "test"))
    if session.computing.precision == "fp16":
        raise EvaluationError("fp16 gradients underflow without a loss scale; fine-tune with --precision bf16 or fp32")
    classes = numbered(train, work.classes, label)
    train, test = (by_list(part, classes) for part in (train, test))
    told = asdict(settings) | {"label": label, "classes": len(classes.names)} | (few.told() if few else {})
    read = Chosen(train.index, few.candidates(train)) if few else train
    result = session.result("fine-tune", told, {"train": read, "test": test})
    sizes = _sizes(session, len(classes.names), settings)
    spec = session.labelled(label, classes, len(classes.names))
    tuning = FineTuning(session, sizes, spec, classes, told, settings)
    if few:
        return _by_draw(tuning, train, read, test, few, result)
    model = tuning.trained(train, session.out / STATE)
    digest = session.sharing.on_main(lambda: _keep(session, model, sizes, train.index, session.out))
    places = tuning.places(model, digest, result, test, last=True)
    result.add("top-1", share(sum(place < 1 for place in places), len(places)))
    if len(classes.names) >= MOST:
        result.add("top-5", share(sum(place < MOST for place in places), len(places)))
    result.notes.append(f"The classifier lies beside this result, in {WEIGHTS}.")
    return Outcome(result)


def _by_draw(
    tuning: FineTuning, train: Chosen, read: Chosen, test: Chosen, few: FewRecords, result: Result
) -> Outcome:  # fmt: skip
    """A training for each draw from `train`, of which some records are `read`. What is done of them outlives a stop;
    the classifiers are not kept."""
    readable, labels = _labels(tuning, read, result)
    by_draw = ByDraw(len(tuning.classes.names))
    for draw in few.draws(train, readable, labels, tuning.classes):
        by_draw.add(draw, *_scored(tuning, Chosen(train.index, readable[draw.places]), test, result))
    tuning.session.sharing.rest_on_main()
    result.notes.append("The classifiers of draws are not kept.")
    return by_draw.outcome(result)


def _labels(tuning: FineTuning, train: Chosen, result: Result) -> tuple[np.ndarray, np.ndarray]:
    """The readable records with their classes: each picture is read once, because only readable ones are drawn."""

    def act(ids: Any, inputs: dict[str, Tensor], before: int) -> list[Any]:
        return inputs["labels"].tolist()

    found = tuning.session.answers(
        result, train, tuning.spec, act, depends_on="classes of all records", part="train", last=False
    )
    return np.array([record for record, _ in found]), np.array([label for _, label in found])


def _scored(tuning: FineTuning, train: Chosen, test: Chosen, result: Result) -> tuple[float, float]:
    """Shares of right answers after a training on `train`, which is not repeated if an earlier start ended it."""
    session = tuning.session
    name = _identity(session, train, tuning.classes, tuning.told)[:32]
    state, done = (session.out / FOLDER / f"{name}.{suffix}" for suffix in ("pt", "json"))
    sharing = session.sharing
    if told := sharing.on_main(lambda: json.loads(done.read_bytes()) if done.is_file() else None):
        result.data["test"]["unreadable"] = told["unreadable"]
        return told["top-1"], told["top-5"]
    model = tuning.trained(train, state)
    # Rank 0's, after which all name their answers.
    digest = sharing.on_main(lambda: hashlib.sha256(_tensors(model)).hexdigest())
    places = tuning.places(model, digest, result, test, last=False)
    top1, top5 = (sum(place < most for place in places) / len(places) for most in (1, MOST))

    def keep() -> None:
        with atomic(done) as file:
            told = {"top-1": top1, "top-5": top5, "unreadable": result.data["test"]["unreadable"]}
            file.write(json.dumps(told).encode())
        state.unlink(missing_ok=True)

    sharing.on_main(keep)
    return top1, top5


def _sizes(session: Session, classes: int, settings: FineTuneSettings) -> ModelSettings:
    shape = session.model.shape
    if shape.resnet is not None:
        raise EvaluationError("layer decay needs the blocks of a transformer, and this is a ResNet; name another model")
    if shape.named is not None:
        raise EvaluationError(
            f"layer decay needs the blocks of an encoder of ours, and this is {shape.named}; probe it"
        )
    encoder = shape.encoder
    return ModelSettings(
        family="classifier", size="custom", image_size=shape.image_size, patch_size=shape.patch_size,
        width=encoder.width, depth=encoder.depth, heads=encoder.heads, qkv_bias=shape.qkv_bias,
        positions=shape.positions, pooling="mean", classes=classes, drop_path=settings.drop_path,
        head_scale=HEAD_STD * encoder.width**0.5,
    )  # fmt: skip


def _started(session: Session, sizes: ModelSettings) -> TransformerClassifier:
    try:
        model = build(sizes, "classify")
        take_encoder(session.model.model.state_dict(), model)
    except (SettingsError, WeightsError) as error:
        raise EvaluationError(f"{session.subject.path}: {error}") from None
    assert isinstance(model, TransformerClassifier)
    return model.to(session.computing.device)


def _identity(session: Session, train: Chosen, classes: ClassList, told: dict[str, Any]) -> str:
    computing, index = session.computing, train.index
    words = [
        digest_of_model(session.model), index.manifest_digest, index.excluded_digest, train.ids.tobytes(),
        classes.digest, told, computing.precision, computing.micro_batch,
    ]  # fmt: skip
    return hashlib.sha256(repr(words).encode()).hexdigest()


@dataclass(frozen=True)
class MixedPictures(TrainingTask[tuple[Tensor, Tensor, Tensor]]):
    """Pictures that are augmented and mixed in pairs, with the shares of their classes and their drop keys."""

    session: Session
    model: TransformerClassifier
    train: Chosen
    pictures: AugmentedPictures
    settings: FineTuneSettings
    name = "fine-tune"

    def nothing_read(self) -> str:
        return f"none of the training records can be read with a label {self.pictures.spec.target!r}; name others"

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        session = self.session
        return mixed_batches(
            self.pictures, self.settings, self.train.ids, epoch, session.computing.workers, session.sharing
        )

    def records(self, part: tuple[Tensor, Tensor, Tensor]) -> int:
        return len(part[0])

    def backward(self, part: tuple[Tensor, Tensor, Tensor], count: int, epoch: int, step: int) -> float:
        """`--micro-batch` pictures are computed at a time."""
        computing, total = self.session.computing, 0.0
        if not len(part[0]):
            return total
        for micro_batch in zip(*(tensor.split(computing.micro_batch) for tensor in part), strict=True):
            images, shares, keys = (tensor.to(computing.device) for tensor in micro_batch)

            def losses(inputs: dict[str, Tensor], shares: Tensor = shares) -> Tensor:
                logits = self.model.logits(inputs["images"]).float()
                return -(shares * logits.log_softmax(dim=1)).sum()

            with autocast(computing.precision, computing.device):
                loss = self.model.row_keys.around(losses, {"images": images, DROP_KEY: keys}) / count
            loss.backward()
            total += float(loss.detach())
        return total


def _keep(
    session: Session, model: TransformerClassifier, sizes: ModelSettings, trained_on: RecordIndex, out: Path
) -> str:
    """Writes the classifier as an export, and gives the digest of its tensors."""
    subject = session.subject
    start = WarmStart.at(subject.weights if subject.kind != "run" else subject.path)
    statistics = session.model.pixels
    whole = trained_on.whole if isinstance(trained_on, Selection) else trained_on
    seen = start.without_noise | {digest_for_all(whole)}
    content = _tensors(model, Provenance(start.origins, start.undeclared, seen).metadata() | metadata(statistics))
    with atomic(out / WEIGHTS) as file:
        file.write(content)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    note = {"objective": "classify", "shapes": shapes, MODEL: sizes.model_dump(mode="json"), **as_json(statistics)}
    with atomic(out / NOTE) as file:
        file.write(json.dumps(note, indent=2).encode() + b"\n")
    return hashlib.sha256(content).hexdigest()


def _tensors(model: TransformerClassifier, more: dict[str, str] | None = None) -> bytes:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    return save(state, more)
