"""UPerNet of transformers on a plain transformer, and the mean overlap of what it marks with the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.contrib.dense.pyramid import SCALES, Backbone
from murmuration.evaluation.measures.interval import Estimate, bootstrap

UNMARKED = 255
"""A pixel without a class: it is neither learnt nor scored."""
DRAWS = 1000
"""Bootstrap draws of the pictures, for the intervals."""


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
