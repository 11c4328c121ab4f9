"""A class for each pixel: trains transformers' UPerNet on the encoder, and scores its overlap with the truth.

Files are laid out as ADE20K is: images/training/1.jpg has its classes in annotations/training/1.png, of which 0 says
that a pixel has none, and k that it has the k-th.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from murmuration.contrib.dense import training as dense
from murmuration.contrib.dense.training import SCALES, Backbone, DenseSettings
from murmuration.data.decode.decode import MAX_PIXELS, BadRecord, parsing
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import Estimate, bootstrap
from murmuration.evaluation.session.result import Outcome
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.train.storage.checkpoint_read import hash_of

INFO = "objectInfo150.txt"
RESIZED = (0.5, 2.0)
"""Between which training draws the size of a picture."""


UNMARKED = 255
"""A pixel without a class: it is neither learnt nor scored."""
MOST_CLASSES = UNMARKED - 1
DRAWS = 1000
"""Bootstrap draws of the pictures, for the intervals."""


@dataclass(frozen=True)
class PictureScaling:
    """How pictures are scaled and normalised."""

    side: int
    mean: Sequence[float]
    std: Sequence[float]

    def scaled(self, pixels: np.ndarray, factor: float = 1.0) -> Tensor:
        """Normalised, with a shorter side of `factor` times `side`."""
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        size = self.size(pixels.shape[0], pixels.shape[1], factor)
        image = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
        return (image - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]

    def size(self, height: int, width: int, factor: float) -> tuple[int, int]:
        scale = self.side * factor / min(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))


class MarkedPictures(dense.WholePictures):
    def __init__(
        self, index: RecordIndex, seed: int, marks: dict[int, Path], scaling: PictureScaling, classes: int
    ) -> None:  # fmt: skip
        super().__init__(index, seed)
        self.marks, self.scaling, self.classes = marks, scaling, classes

    def made(self, pixels: np.ndarray, record: int, draws: np.random.Generator | None) -> Any:
        marked = read_marks(self.marks[record], self.classes)
        if marked.shape != pixels.shape[:2]:
            raise BadRecord(f"its classes have {marked.shape[1]} × {marked.shape[0]} pixels, and it has others")
        if draws is None:
            return self.scaling.scaled(pixels), marked
        factor = float(draws.uniform(*RESIZED))
        image = self.scaling.scaled(pixels, factor)
        small = F.interpolate(torch.from_numpy(marked)[None, None].float(), image.shape[1:], mode="nearest")
        return _cropped(image, small[0, 0].long(), self.scaling.side, draws)


def read_marks(path: Path, classes: int) -> np.ndarray:
    """The class of each pixel, from 0; UNMARKED where there is none."""
    with parsing(f"{path.name} cannot be read"), Image.open(path, formats=("PNG",)) as image:
        if image.width * image.height > MAX_PIXELS or image.mode not in ("L", "P"):
            raise BadRecord(f"{path.name} is no PNG file with one number per pixel")
        found = np.array(image)
    if int(found.max(initial=0)) > classes:
        raise BadRecord(f"{path.name} has class {int(found.max())} of {classes}")
    return np.where(found == 0, UNMARKED, found - 1).astype(np.uint8)


def _cropped(image: Tensor, marked: Tensor, side: int, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A random square, filled up where the picture is smaller; mirrored half of the time."""
    height, width = image.shape[1:]
    beyond = (0, max(0, side - width), 0, max(0, side - height))
    image, marked = F.pad(image, beyond), F.pad(marked, beyond, value=UNMARKED)
    top, left = (int(draws.integers(0, length - side + 1)) for length in image.shape[1:])
    image, marked = (each[..., top : top + side, left : left + side] for each in (image, marked))
    return (image.flip(-1), marked.flip(-1)) if draws.random() < 0.5 else (image, marked)


def run(session: Session, work: Work) -> Outcome:
    arguments, settings = work.arguments, DenseSettings.of(work.arguments)
    train, test = (Chosen.of(work.records[name]) for name in ("train", "test"))
    backbone = dense.backbone_of(session, settings)
    learnt = _marks_of(train, arguments.marks, "--marks", "--data")
    true = _marks_of(test, arguments.test_marks, "--test-marks", "--test")
    names = _names(train, arguments.class_names)
    if len(train.ids) < 2:
        raise EvaluationError("BatchNorm needs at least two training pictures; name more")
    side, pixels = session.model.shape.image_size, session.model.pixels
    told = asdict(settings) | {"side": side, "classes": len(names)}
    told |= {"marks_sha256": _digest(learnt), "test_marks_sha256": _digest(true)}
    result = session.result("segment", told, {"train": train, "test": test})
    dense.seen_whole(result)
    model = Segmenter(backbone, len(names)).to(session.computing.device)
    seed, scaling = settings.seed, PictureScaling(side, pixels.mean, pixels.std)
    pictures, scored = (
        MarkedPictures(part.index, seed, marks, scaling, len(names)) for part, marks in ((train, learnt), (test, true))
    )
    _train(session, model, backbone, train, pictures, settings, told)
    # [pictures, 3, classes], as `overlaps_of` counts.
    device, classes = session.computing.device, scored.classes

    def act(item: tuple[Tensor, np.ndarray]) -> list[list[int]]:
        image, marked = item
        height, width = marked.shape
        found = marked_by(model, image.to(device), scored.scaling.side, height, width, classes)
        return overlaps_of(found, marked, classes).tolist()

    answers = dense.answers(session, result, model, test, scored, act, dense.identity_of(session, test, told))
    counts = np.array([counted for _, counted in answers])
    if not counts[:, 2].any():
        raise EvaluationError("no pixel of the pictures that can be read has a class; name others with --test-marks")
    overlap, right, by_class = mean_overlap(counts)
    result.add("mIoU", overlap)
    result.add("pixel accuracy", right)
    result.notes.append(
        f"The shorter side is scaled to {side} pixels (--image-size for another), and the picture is seen in windows "
        "of that side, which overlap by a third. Intervals come from drawing the pictures again with replacement."
    )
    return Outcome(result, table=[["class", "IoU"], *([names[each], f"{iou:.4f}"] for each, iou in by_class.items())])


def _train(
    session: Session, model: Segmenter, backbone: Backbone, part: Chosen, pictures: MarkedPictures,
    settings: DenseSettings, told: object,
) -> None:  # fmt: skip
    device = session.computing.device

    def loss_of(items: Sequence[Any]) -> Tensor:
        images, marked = (torch.stack([item[place] for item in items]).to(device) for place in (0, 1))
        return model.loss(images, marked)

    identity = dense.identity_of(session, part, told)
    dense.train(session, model, backbone, loss_of, part, pictures, settings, identity)


def _marks_of(part: Chosen, given: Path | None, option: str, where: str) -> dict[int, Path]:
    """The file with the classes of each picture."""
    files = dense.names_of(part, where)
    folder = given
    if folder is None:  # ADE/images/training -> ADE/annotations/training
        pictures = Path(part.index.root).resolve()  # pyright: ignore[reportAttributeAccessIssue]
        folder = pictures.parent.parent / "annotations" / pictures.name
    if not folder.is_dir():
        raise EvaluationError(
            f"{folder} does not exist; name the folder of the PNG files with {option}, or lay them out as ADE20K does: "
            "annotations/training beside images/training"
        )
    found = {int(record): folder / Path(name).with_suffix(".png") for record, name in zip(part.ids, files, strict=True)}
    if lacking := [path for path in found.values() if not path.is_file()]:
        raise EvaluationError(
            f"{len(lacking)} pictures have no PNG file in {folder}, such as {lacking[0].name}; name its folder with "
            f"{option}"
        )
    return found


def _names(train: Chosen, given: Path | None) -> list[str]:
    """One per line, or ADE20K's table, whose last column has them."""
    root = Path(train.index.root).resolve()  # pyright: ignore[reportAttributeAccessIssue]
    path = given or root.parent.parent / INFO
    if not path.is_file():
        raise EvaluationError(f"{path} does not exist; name a file with one class per line with --class-names")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"--class-names {path}: {error}") from None
    if lines and lines[0].split()[0] == "Idx":
        lines = [line.split("\t")[-1].strip() for line in lines[1:]]
    if not 0 < len(lines) <= MOST_CLASSES:
        raise EvaluationError(f"--class-names {path} has {len(lines)} classes; name a file with 1 to {MOST_CLASSES}")
    return lines


def _digest(marks: dict[int, Path]) -> str:
    """Digest of all files' names and contents."""
    told = hashlib.sha256()
    for record, path in marks.items():
        told.update(f"{record} {path.name} {hash_of(path)}\n".encode())
    return told.hexdigest()


class Segmenter(nn.Module):
    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        from transformers.models.upernet.configuration_upernet import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        channels = backbone.out_channels
        given: Any = {"num_labels": classes}  # of the base of all configs
        config = UperNetConfig(hidden_size=channels, auxiliary_channels=channels, loss_ignore_index=UNMARKED, **given)
        widths: Any = [channels] * len(SCALES)
        self.backbone, self.beside = backbone, config.auxiliary_loss_weight
        self.head, self.auxiliary = UperNetHead(config, widths), UperNetFCNHead(config, widths)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes, side, side]."""
        return self._large(self.head(self._maps(images)), images)

    def loss(self, images: Tensor, marked: Tensor) -> Tensor:
        """`marked` [B, side, side]: classes, or UNMARKED."""
        maps = self._maps(images)
        parts = [self._large(head(maps), images).float() for head in (self.head, self.auxiliary)]
        # Not the library's mean, which is not a number where no pixel of the batch has a class.
        count = (marked != UNMARKED).sum().clamp(min=1)
        main, beside = (F.cross_entropy(part, marked, ignore_index=UNMARKED, reduction="sum") / count for part in parts)
        return main + self.beside * beside

    def _maps(self, images: Tensor) -> Any:
        return list(self.backbone(images).values())

    def _large(self, logits: Tensor, images: Tensor) -> Tensor:
        return F.interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)


def windows(length: int, side: int) -> list[int]:
    """Where windows of `side` begin that cover `length` and overlap by a third at least."""
    step = max(1, side * 2 // 3)
    count = -(-max(0, length - side) // step) + 1
    return [min(number * step, max(0, length - side)) for number in range(count)]


def marked_by(model: Segmenter, image: Tensor, side: int, height: int, width: int, classes: int) -> np.ndarray:
    """The classes [height, width] of one normalised picture [3, H, W], H and W at least `side`: logits are averaged
    where windows overlap, then scaled to the size of the truth."""
    total = torch.zeros(1, classes, *image.shape[1:], device=image.device)
    seen = torch.zeros(1, 1, *image.shape[1:], device=image.device)
    for top in windows(image.shape[1], side):
        for left in windows(image.shape[2], side):
            here = (..., slice(top, top + side), slice(left, left + side))
            total[here] += model(image[None][here]).float()
            seen[here] += 1
    large = F.interpolate(total / seen, (height, width), mode="bilinear", align_corners=False)
    return large[0].argmax(dim=0).cpu().numpy()


def overlaps_of(found: np.ndarray, truth: np.ndarray, classes: int) -> np.ndarray:
    """[3, classes]: pixels of each class that are found and true, found, and true, of those that have a class."""
    known = truth != UNMARKED
    found, truth = found[known], truth[known]
    return np.stack([np.bincount(part, minlength=classes) for part in (truth[found == truth], found, truth)])


def mean_overlap(pictures: np.ndarray) -> tuple[Estimate, Estimate, dict[int, float]]:
    """[pictures, 3, classes] -> mean IoU over the classes that are found or true somewhere, the share of right pixels,
    and the IoU of each class."""

    def both(counts: np.ndarray) -> np.ndarray:
        ious = np.array([iou for _, iou in _ious(counts)])
        right, _, true = counts.sum(axis=1)
        return np.array([ious.mean() if len(ious) else np.nan, right / true if true else np.nan])

    whole = pictures.sum(axis=0)
    measured = bootstrap(both(whole), lambda places: both(pictures[places].sum(axis=0)), len(pictures), DRAWS)
    return measured[0], measured[1], dict(_ious(whole))


def _ious(counts: np.ndarray) -> Iterator[tuple[int, float]]:
    right, found, true = counts
    for number in np.flatnonzero(found + true):
        yield int(number), float(right[number] / (found[number] + true[number] - right[number]))
