"""Mask R-CNN of torchvision on a plain transformer, and the average precision of what it finds, by pycocotools."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from murmuration.contrib.dense.pyramid import SCALES, Backbone
from murmuration.data.draw.micro_batch import Normalisation
from murmuration.evaluation.measures.interval import Estimate, bootstrap

IouType = Literal["bbox", "segm"]
DRAWS = 200
"""Bootstrap draws of the pictures, for the intervals."""
LOOSE, STRICT = 0.5, 0.75
MOST_FOUND = 100
"""Per picture, as published."""


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
