"""What detectors and segmenters share: the encoder as a backbone, pictures in their own size, the training, and answers
that a stopped command need not compute again.

After each epoch the state is on the disk. Draws belong to seed, epoch, and record or step, so a command that continues
makes the same ones.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source
from murmuration.data.decode.decode import BadRecord, decode, picture_in
from murmuration.data.index.folders import FolderIndex
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.fine_tuning import TrainingSettings, groups_of
from murmuration.evaluation.models.weights import digest_of_model
from murmuration.evaluation.protocols.augmented import seed_all
from murmuration.evaluation.protocols.shared_training import (
    STATE,
    TrainingState,
    TrainingTask,
    own_part,
    train_together,
)
from murmuration.evaluation.session.answers import Answers, MicroBatchAnswers
from murmuration.evaluation.session.features import places_of_micro_batches
from murmuration.evaluation.session.result import Result
from murmuration.evaluation.session.session import Chosen, Session
from murmuration.model.build import ENCODER_PREFIXES
from murmuration.model.encoder import Encoder
from murmuration.train.clip.engine import autocast

# A plain vision transformer as the backbone of a detector or segmenter: four maps made of its last tokens alone.
#
# Plain transformers have one resolution. The maps of other resolutions are learnt from it by transposed convolutions
# and one pooling (Li et al., arXiv 2203.16527).

SCALES = (4.0, 2.0, 1.0, 0.5)
"""The scale of each map, in cells per patch and side."""


class FeaturePyramid(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        half, quarter = max(1, width // 2), max(1, width // 4)
        larger = [
            [
                nn.ConvTranspose2d(width, half, 2, 2), LayerNorm2d(half), nn.GELU(),
                nn.ConvTranspose2d(half, quarter, 2, 2),
            ],
            [nn.ConvTranspose2d(width, half, 2, 2)],
            [],
            [nn.MaxPool2d(2, 2, ceil_mode=True)],
        ]  # fmt: skip
        widths = (quarter, half, width, width)
        self.stages = nn.ModuleList(
            nn.Sequential(
                *stage, nn.Conv2d(given, channels, 1, bias=False), LayerNorm2d(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False), LayerNorm2d(channels),
            )
            for stage, given in zip(larger, widths, strict=True)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """[B, width, rows, columns] -> maps of all scales, the largest first."""
        return [stage(tokens) for stage in self.stages]


class Backbone(nn.Module):
    """Normalised pictures [B, 3, side, side] -> the pyramid's maps, under the names "0" to "3"."""

    def __init__(self, encoder: Encoder, channels: int) -> None:
        super().__init__()
        self.encoder, self.out_channels = encoder, channels
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(name.startswith(ENCODER_PREFIXES))
        self.pyramid = FeaturePyramid(encoder.shape.encoder.width, channels)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        grid = self.encoder.shape.grid
        tokens = self.encoder.tokens(images)[:, 1:]
        maps = self.pyramid(tokens.transpose(1, 2).unflatten(2, (grid, grid)))
        return OrderedDict((str(number), each) for number, each in enumerate(maps))


@dataclass(frozen=True)
class DenseSettings(TrainingSettings):
    """Published trainings of detectors and segmenters differ, so the command has defaults for each."""

    channels: int = 256
    """The width of the pyramid's maps, and of what reads them."""

    def batch_of(self, records: int) -> int:
        return max(2, min(self.batch, records))


SCORED = -1
"""In the place of an epoch: the picture as it is scored, not changed."""


class WholePictures(Dataset[Any], ABC):
    """Item (epoch, record): what the task makes of a picture in its own size, or why it cannot."""

    def __init__(self, index: RecordIndex, seed: int) -> None:
        self.index, self.seed = index, seed
        self._reader: ShardReader | None = None

    @abstractmethod
    def made(self, pixels: np.ndarray, record: int, draws: np.random.Generator | None) -> Any:
        """`draws` is None for a picture that is scored. BadRecord if it does not fit to its annotation."""

    def __getitem__(self, item: tuple[int, int]) -> tuple[int, Any, str | None]:
        epoch, record = item
        if self.index.left_out(record):
            return record, None, "excluded"
        if self._reader is None:  # made in the process that reads
            self._reader = ShardReader(self.index, open_source(self.index, ReadOptions()))
        try:
            picture = picture_in(self._reader.read(record)) or b""
            draws = None if epoch == SCORED else np.random.default_rng([self.seed, epoch, record])
            return record, self.made(decode(picture), record, draws), None
        except BadRecord as error:
            return record, None, str(error)


def backbone_of(session: Session, settings: DenseSettings) -> Backbone:
    model = session.model.model
    if not isinstance(model, Encoder) or model.shape.named is not None:
        what = session.model.shape.named or "a ResNet"
        raise EvaluationError(
            f"{session.subject.path} is {what}, and the pyramid is built on the patches of a transformer of ours; name "
            "a masked autoencoder, a captioner or a vision transformer"
        )
    if session.computing.precision == "fp16":
        raise EvaluationError("fp16 gradients underflow without a loss scale; train with --precision bf16 or fp32")
    seed_all([settings.seed])
    return Backbone(model, settings.channels)


def names_of(part: Chosen, option: str) -> list[str]:
    """Files below the folder that was named. Annotations are found by them."""
    if not isinstance(part.index, FolderIndex):
        raise EvaluationError(
            f"{option}: annotations name files, and these records are none; name a folder of pictures"
        )
    return [part.name(int(record)) for record in part.ids]


def seen_whole(result: Result) -> None:
    """Takes back that pictures were resized and cropped as classifiers see them."""
    for name in ("view", "resize", "crop"):
        result.settings.pop(name, None)


def identity_of(session: Session, part: Chosen, told: object) -> str:
    computing, index = session.computing, part.index
    words = [
        digest_of_model(session.model), index.manifest_digest, index.excluded_digest, part.ids.tobytes(), told,
        computing.precision, computing.micro_batch,
    ]  # fmt: skip
    return hashlib.sha256(repr(words).encode()).hexdigest()


def train(
    session: Session, model: nn.Module, backbone: Backbone, loss_of: Callable[[Sequence[Any]], Tensor],
    part: Chosen, pictures: WholePictures, settings: DenseSettings, identity: str,
) -> None:  # fmt: skip
    """`loss_of` some items is their mean loss."""
    task = DensePictures(session, loss_of, part, pictures, settings)
    state, count = TrainingState(session.out / STATE, identity), len(part.ids)
    train_together(
        task, session.sharing, model, _groups(model, backbone, settings), settings, count, settings.batch_of(count),
        state,
    )  # fmt: skip


@dataclass(frozen=True)
class DensePictures(TrainingTask[dict[int, list[Any]]]):
    """This rank's micro-batches of a batch, by their numbers."""

    session: Session
    loss_of: Callable[[Sequence[Any]], Tensor]
    part: Chosen
    pictures: WholePictures
    settings: DenseSettings
    name = "training"

    def nothing_read(self) -> str:
        return "none of the training pictures can be read; name others"

    def batches(self, epoch: int) -> Iterator[dict[int, list[Any]]]:
        return _batches(self.session, self.pictures, self.settings, self.part.ids, epoch)

    def records(self, part: dict[int, list[Any]]) -> int:
        return sum(map(len, part.values()))

    def backward(self, part: dict[int, list[Any]], count: int, epoch: int, step: int) -> float:
        computing, total = self.session.computing, 0.0
        for number, items in part.items():
            seed_all([self.settings.seed, epoch, step, 1, number])  # torchvision samples its proposals
            with autocast(computing.precision, computing.device):
                loss = self.loss_of(items) * (len(items) / count)
            loss.backward()
            total += float(loss.detach())
        return total


def _groups(model: nn.Module, backbone: Backbone, settings: DenseSettings) -> list[dict[str, Any]]:
    """Layer decay for the encoder; what is new learns at the full rate."""
    encoder = backbone.encoder
    known = {id(parameter) for parameter in encoder.parameters()}
    new = [parameter for parameter in model.parameters() if id(parameter) not in known and parameter.requires_grad]
    parted = ([each for each in new if each.dim() > 1], [each for each in new if each.dim() == 1])
    decays = (settings.weight_decay, 0.0)
    return groups_of(encoder, encoder.shape.encoder.depth, settings) + [
        {"params": parameters, "scale": 1.0, "weight_decay": decay}
        for parameters, decay in zip(parted, decays, strict=True)
    ]


def _batches(
    session: Session, pictures: WholePictures, settings: DenseSettings, ids: np.ndarray, epoch: int
) -> Iterator[dict[int, list[Any]]]:
    """Each batch's micro-batches of this rank by their numbers: what can be read, if it is more than a single picture,
    which BatchNorm cannot see."""
    order, batch = ids[settings.order(len(ids), epoch)], settings.batch_of(len(ids))
    # A part for every process, if there are pictures enough.
    size = max(2, min(session.computing.micro_batch, -(-batch // session.sharing.ranks.world)))
    numbers = own_part(list(range(-(-batch // size))), session.sharing)
    places = [np.arange(number * size, min(batch, (number + 1) * size)) for number in numbers]
    own = np.concatenate([*places, np.zeros(0, dtype=np.int64)])
    rows = [
        [(epoch, int(record)) for record in order[at : at + batch][own]]
        for at in range(0, len(order) - batch + 1, batch)
    ]
    for items in _loaded(session, pictures, rows):
        of_number = [number for number, each in zip(numbers, places, strict=True) for _ in each]
        parts: dict[int, list[Any]] = {}
        for number, (_, item, reason) in zip(of_number, items, strict=True):
            if reason is None:
                parts.setdefault(number, []).append(item)
        yield {number: part for number, part in parts.items() if len(part) > 1}


def _loaded(
    session: Session, pictures: WholePictures, rows: list[list[tuple[int, int]]]
) -> Iterator[list[tuple[int, Any, str | None]]]:
    loader: Any = DataLoader(
        pictures, batch_sampler=rows, collate_fn=list, num_workers=session.computing.workers  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    yield from loader


@torch.no_grad()
def answers(
    session: Session, result: Result, model: nn.Module, part: Chosen, pictures: WholePictures,
    act: Callable[[Any], Any], identity: str,
) -> list[tuple[int, Any]]:  # fmt: skip
    """What `act` says of each readable picture that is scored; those of an earlier start are taken over. Of several
    processes, rank 0 alone returns."""
    ids, size = part.ids, session.computing.micro_batch
    # Rank 0's, after which all name their answers: counters of BatchNorm differ from rank to rank.
    digest = session.sharing.on_main(lambda: _digest(model))
    told = hashlib.sha256(f"{identity} {digest}".encode()).hexdigest()
    with Answers.kept(session.out, told, -(-len(ids) // size), session.sharing) as kept:
        missing = kept.missing()
        numbers = session.sharing.mine(missing)
        rows = [[(SCORED, int(record)) for record in ids[at : at + size]] for at in (numbers * size).tolist()]
        begun = len(ids) - len(places_of_micro_batches(missing, size, len(ids)))
        progress = session.sharing.progress(result.protocol, "pictures", begun, len(ids))
        progress(0, len(ids))
        done = 0

        def answer(loaded: tuple[int, list[tuple[int, Any, str | None]]]) -> None:
            nonlocal done
            number, items = loaded
            with autocast(session.computing.precision, session.computing.device):
                found = [(record, act(item)) for record, item, reason in items if reason is None]
            bad = {record: reason for record, _, reason in items if reason is not None}
            kept.add(MicroBatchAnswers(number, found, bad))
            done += size
            progress(done, len(ids))

        loaded = zip(numbers.tolist(), _loaded(session, pictures, rows), strict=True)
        session.sharing.share(len(missing), loaded, answer)
        session.sharing.rest_on_main()
        told_of, unreadable = kept.read()
        if len(unreadable) == len(ids):
            raise EvaluationError(
                f"none of the {len(ids)} pictures can be used ({min(unreadable.values())}); name others"
            )
        result.data["test"]["unreadable"] = len(unreadable)
        return told_of


def _digest(model: nn.Module) -> str:
    told = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        told.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return told.hexdigest()
