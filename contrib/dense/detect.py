"""Objects with their outlines: trains torchvision's Mask R-CNN on the encoder, and scores it as COCO does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.accounting.durable import atomic
from murmuration.contrib.dense import training as dense
from murmuration.contrib.dense.coco_objects import Instance, Objects, read_objects
from murmuration.contrib.dense.training import SCALES, Backbone, DenseSettings
from murmuration.data.decode.decode import BadRecord, parsing
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import Estimate, bootstrap
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.train.storage.checkpoint_read import hash_of

DETECTIONS = "detections.json"
SMALLEST = 1.0
"""Pixels of a side; thinner boxes are not learnt, since torchvision refuses empty ones."""
KINDS: dict[str, IouType] = {"box": "bbox", "mask": "segm"}


IouType = Literal["bbox", "segm"]
DRAWS = 200
"""Bootstrap draws of the pictures, for the intervals."""
LOOSE, STRICT = 0.5, 0.75
MOST_FOUND = 100
"""Per picture, as published."""


class PicturedObjects(dense.WholePictures):
    """Pictures [3, H, W] from 0 to 1 with their objects, of which half are mirrored in training."""

    def __init__(self, index: RecordIndex, seed: int, objects: Objects) -> None:
        super().__init__(index, seed)
        self.objects = objects

    def made(self, pixels: np.ndarray, record: int, draws: np.random.Generator | None) -> Any:
        known = self.objects.pictures[record]
        height, width = pixels.shape[:2]
        if (width, height) != (known.width, known.height):
            raise BadRecord(f"it has {width} × {height} pixels, and its annotation says {known.width} × {known.height}")
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        if draws is None:
            return image
        objects = list(filter(_is_learnt, known.objects))
        from pycocotools import mask

        shapes = np.zeros((len(objects), height, width), dtype=np.uint8)
        with parsing("an outline cannot be drawn"):
            for number, each in enumerate(objects):
                code = each.shape
                if isinstance(code, list):
                    code = mask.merge(mask.frPyObjects(code, height, width))
                elif isinstance(code["counts"], list):
                    code = mask.frPyObjects(code, height, width)
                shapes[number] = mask.decode(code)
        boxes = torch.tensor([each.box for each in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target = {
            "boxes": boxes,
            "labels": torch.tensor([each.category + 1 for each in objects], dtype=torch.int64),
            "masks": torch.from_numpy(shapes),
        }
        if draws.random() >= 0.5:
            return image, target
        boxes = target["boxes"].clone()
        boxes[:, [0, 2]] = image.shape[2] - boxes[:, [2, 0]]
        return image.flip(2), {**target, "boxes": boxes, "masks": target["masks"].flip(2)}


def run(session: Session, work: Work) -> Outcome:
    settings = DenseSettings.of(work.arguments)
    train, test = (Chosen.of(work.records[name]) for name in ("train", "test"))
    if find_spec("pycocotools") is None:
        raise EvaluationError("detect needs pycocotools; install it: pip install 'murmuration[detect]'")
    backbone = dense.backbone_of(session, settings)
    train, learnt, learnt_from = _annotated(train, work.arguments.objects, "--objects", "--data")
    test, true, scored_by = _annotated(test, work.arguments.test_objects, "--test-objects", "--test")
    # The pictures that have an object to learn from.
    ids = [int(record) for record in train.ids if any(map(_is_learnt, learnt.pictures[int(record)].objects))]
    if len(ids) < 2:
        raise EvaluationError(f"{learnt_from} has fewer than two pictures with objects to learn from; name more")
    train = Chosen(train.index, np.array(ids))
    if learnt.categories != true.categories:
        raise EvaluationError(
            f"{learnt_from} and {scored_by} list other categories; name files of one set with --objects and "
            "--test-objects"
        )
    side, classes = session.model.shape.image_size, len(learnt.categories)
    told = asdict(settings) | {
        "side": side, "categories": classes, "objects_sha256": hash_of(learnt_from),
        "test_objects_sha256": hash_of(scored_by),
    }  # fmt: skip
    result = session.result("detect", told, {"train": train, "test": test})
    dense.seen_whole(result)
    model = mask_rcnn(backbone, classes, side, session.model.pixels).to(session.computing.device)
    _train(session, model, backbone, train, learnt, settings, told)
    found, places = _found(session, result, model, test, true, told)
    truth = true.as_truth(places)
    if not truth["annotations"]:
        raise EvaluationError(f"no picture that can be read has an object in {scored_by}; name others")
    _write(found, test, true, session.out / DETECTIONS)
    result.notes.append(
        f"Pictures are scaled so that the longer side has {side} pixels (--image-size for another). Intervals come "
        "from drawing the pictures again with replacement."
    )
    return Outcome(result, table=_scored(result, truth, found, true.categories), table_title="By category")


def _train(
    session: Session, model: nn.Module, backbone: Backbone, part: Chosen, objects: Objects, settings: DenseSettings,
    told: object,
) -> None:  # fmt: skip
    device = session.computing.device

    def loss_of(items: Sequence[Any]) -> Tensor:
        images = [image.to(device) for image, _ in items]
        targets = [{name: tensor.to(device) for name, tensor in target.items()} for _, target in items]
        return torch.stack(list(model(images, targets).values())).sum()

    identity = dense.identity_of(session, part, told)
    pictures = PicturedObjects(part.index, settings.seed, objects)
    dense.train(session, model, backbone, loss_of, part, pictures, settings, identity)


def _found(
    session: Session, result: Result, model: nn.Module, part: Chosen, objects: Objects, told: object
) -> tuple[list[dict[str, Any]], list[int]]:
    """What was found, and in which pictures something could be."""
    device = session.computing.device
    pictures = PicturedObjects(part.index, 0, objects)
    identity = dense.identity_of(session, part, told)
    answers = dense.answers(
        session, result, model, part, pictures, lambda image: found_by(model, image.to(device)), identity
    )
    found = [{"image_id": record, **each} for record, listed in answers for each in listed]
    return found, [record for record, _ in answers]


def _scored(
    result: Result, truth: dict[str, Any], found: list[dict[str, Any]], names: Sequence[str]
) -> list[list[str]]:
    by_kind = {title: average_precision(truth, found, kind) for title, kind in KINDS.items()}
    for title, measured in by_kind.items():
        result.add(f"{title} AP", measured.mean)
        result.add(f"{title} AP50", measured.loose)
        result.add(f"{title} AP75", measured.strict)
    numbers = by_kind["box"].by_category
    rows = [[names[each], *(f"{by_kind[kind].by_category[each]:.4f}" for kind in KINDS)] for each in numbers]
    return [["category", *(f"{title} AP" for title in KINDS)], *rows]


def _annotated(part: Chosen, given: Path | None, option: str, where: str) -> tuple[Chosen, Objects, Path]:
    """The pictures that the annotations list, in the order of the files."""
    files = dense.names_of(part, where)
    folder = Path(part.index.root).resolve()  # pyright: ignore[reportAttributeAccessIssue]
    # COCO/train2017 -> COCO/annotations/instances_train2017.json
    path = given or folder.parent / "annotations" / f"instances_{folder.name}.json"
    objects = read_objects(path, files, option)
    # Places among the files are numbers of records, since all of an index is named.
    return Chosen(part.index, np.array(sorted(objects.pictures))), objects, path


def _is_learnt(each: Instance) -> bool:
    return not each.crowd and min(each.box[2:]) >= SMALLEST


def _write(found: list[dict[str, Any]], test: Chosen, objects: Objects, path: Path) -> None:
    listed = [
        {"file_name": test.name(each["image_id"]), "category": objects.categories[each["category_id"]], **each}
        for each in found
    ]
    with atomic(path) as file:
        file.write(json.dumps(listed).encode())


def mask_rcnn(backbone: Backbone, classes: int, side: int, pixels: Normalisation) -> nn.Module:
    """`classes` without the background. Pictures of any size are scaled so that the longer side is `side`, and filled
    up with zeros to a square. Anchors have eight times the side of a map's cell. Everything is as wide as the pyramid;
    256 channels give torchvision's own heads."""
    from torchvision.models.detection import anchor_utils, faster_rcnn, mask_rcnn
    from torchvision.ops import MultiScaleRoIAlign

    patch, channels = backbone.encoder.shape.patch_size, backbone.out_channels
    sizes = tuple((round(8 * patch / scale),) for scale in SCALES)
    names = [str(number) for number in range(len(SCALES))]
    cells, hidden = 7, 4 * channels
    return mask_rcnn.MaskRCNN(
        backbone, min_size=side, max_size=side, size_divisible=side, image_mean=list(pixels.mean),
        image_std=list(pixels.std), box_detections_per_img=MOST_FOUND,
        rpn_anchor_generator=anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        box_roi_pool=MultiScaleRoIAlign(names, cells, 2), mask_roi_pool=MultiScaleRoIAlign(names, 2 * cells, 2),
        box_head=faster_rcnn.TwoMLPHead(channels * cells**2, hidden),
        box_predictor=faster_rcnn.FastRCNNPredictor(hidden, classes + 1),
        mask_head=mask_rcnn.MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=mask_rcnn.MaskRCNNPredictor(channels, channels, classes + 1),
    )  # fmt: skip


def found_by(model: nn.Module, image: Tensor) -> list[dict[str, Any]]:
    """What is found in one picture, in the form of COCO's results, but for the number of the picture. Categories are
    numbers from 0."""
    from pycocotools import mask

    (found,) = model([image])
    shapes = (found["masks"][:, 0] >= 0.5).byte().cpu().numpy()
    listed = []
    for box, label, score, shape in zip(
        found["boxes"].tolist(), found["labels"].tolist(), found["scores"].tolist(), shapes, strict=True
    ):
        left, top, right, bottom = box
        encoded: Any = mask.encode(np.asfortranarray(shape))
        listed.append(
            {
                "category_id": label - 1, "bbox": [left, top, right - left, bottom - top], "score": score,
                "segmentation": {"size": encoded["size"], "counts": encoded["counts"].decode()},
            }
        )  # fmt: skip
    return listed


@dataclass(frozen=True)
class Precision:
    """Average precision over ten overlaps, at half and at three quarters, and for each category that occurs."""

    mean: Estimate
    loose: Estimate
    strict: Estimate
    by_category: dict[int, float]


def average_precision(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]], kind: IouType) -> Precision:
    """`truth` has the form of COCO's instances, with the pictures that are scored alone.

    Intervals come from drawing as many pictures again with replacement, and counting what was matched in them.
    """
    from pycocotools.cocoeval import COCOeval

    with _silent():
        known = _opened(truth)
        results = known.loadRes([dict(each) for each in found]) if found else _opened({**truth, "annotations": []})
        scoring = COCOeval(known, results, kind)
        scoring.params.areaRng, scoring.params.areaRngLbl = scoring.params.areaRng[:1], scoring.params.areaRngLbl[:1]
        scoring.params.maxDets = [MOST_FOUND]
        scoring.evaluate()
        matched, pictures = scoring.evalImgs, len(scoring.params.imgIds)
        scoring.accumulate()
        whole = scoring.eval["precision"][:, :, :, 0, 0]

        def drawn(places: np.ndarray) -> np.ndarray:
            rows = range(0, len(matched), pictures)
            scoring.evalImgs = [matched[row + place] for row in rows for place in places]
            scoring.accumulate()
            return _means(scoring.eval["precision"][:, :, :, 0, 0], overlaps)

        overlaps = scoring.params.iouThrs
        estimates = bootstrap(_means(whole, overlaps), drawn, pictures, DRAWS)
    categories = {
        number: float(whole[:, :, place].mean())
        for place, number in enumerate(scoring.params.catIds)
        if whole[:, :, place].max() > -1
    }
    return Precision(*estimates, by_category=categories)


def _means(precision: np.ndarray, overlaps: np.ndarray) -> np.ndarray:
    """Over everything that can be measured; categories without an object have -1."""
    parts = (precision, precision[np.isclose(overlaps, LOOSE)], precision[np.isclose(overlaps, STRICT)])
    return np.array([part[part > -1].mean() if (part > -1).any() else np.nan for part in parts])


def _opened(document: Mapping[str, Any]) -> Any:
    from pycocotools.coco import COCO

    opened: Any = COCO()
    opened.dataset = dict(document)
    opened.createIndex()
    return opened


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """pycocotools prints each of its steps."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
