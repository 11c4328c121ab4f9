"""Classifiers of single images: a body under one linear head; one loss per image. The body is a vision transformer,
or BiT's ResNet (`model/resnet.py`).

Called as `model({"images": [B, 3, H, W], "labels": [B]})` -> losses [B]. With "features" [B, width] in place of
"images" the body is skipped: a frozen body need run only once, and the same head is then trained on its cached features
with the same losses. Labels are class numbers; for the sigmoid loss they may also be [B, classes] of 0 and 1.

The head starts as its settings say. With zero weights it favours no feature, so that the first step's gradient is an
outer product of residuals and features, whose sign does not depend on any random draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.encoder import Encoder, Inputs
from murmuration.model.inputs import weighted
from murmuration.model.settings import Loss, Shape
from murmuration.model.statistics_head import StatisticsHead


def classification_loss(logits: Tensor, labels: Tensor, kind: Loss, weights: Tensor | None = None) -> Tensor:
    """[B, classes] and [B] -> [B] in fp32: cross-entropy, or the sum over classes of binary cross-entropies.

    `weights` [classes] multiply the loss of a record by its class, or each class's own part of the sum.
    A label that is not a class number gives a loss of 0: one record must not be able to stop a run.
    """
    logits, classes = logits.float(), logits.shape[1]
    weights = None if weights is None else weights.float()
    if labels.dim() > 1:
        if kind == "softmax":
            raise ValueError('labels [B, classes] are for classify_loss "sigmoid"; give one class number per image.')
        return F.binary_cross_entropy_with_logits(logits, labels.float(), weights, reduction="none").sum(1)
    known = (labels >= 0) & (labels < classes)
    if kind == "softmax":
        losses = F.cross_entropy(logits, labels.clamp(0, classes - 1), weights, reduction="none")
    else:
        wanted = labels[:, None] == torch.arange(classes, device=labels.device)
        losses = F.binary_cross_entropy_with_logits(logits, wanted.float(), weights, reduction="none").sum(1)
    return torch.where(known, losses, 0.0)


class Classifier(nn.Module, ABC):
    """The base of both kinds. `features` runs the body, which is everything outside the module `head`."""

    shape: Shape
    head: nn.Linear
    class_weights: Tensor | None

    def add_head(self, shape: Shape) -> None:
        self.head = nn.Linear(shape.encoder.width, shape.head.classes)
        weights = None if shape.head.weights is None else torch.tensor(shape.head.weights)
        self.register_buffer("class_weights", weights, persistent=False)

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """[B, shape.encoder.width]"""

    def logits(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def right(self, inputs: Inputs) -> Tensor:
        """Which rows' labels it predicts, [B]."""
        logits = self.head(inputs["features"]) if "features" in inputs else self.logits(inputs["images"])
        return logits.argmax(1) == inputs["labels"]

    def forward(self, inputs: Inputs) -> Tensor:
        """Per-image losses [B]."""
        features = inputs["features"] if "features" in inputs else self.features(inputs["images"])
        return weighted(self._losses(features, inputs["labels"]), inputs)

    def _losses(self, features: Tensor, labels: Tensor) -> Tensor:
        if not isinstance(self.head, StatisticsHead):
            return classification_loss(self.head(features), labels, self.shape.head.loss, self.class_weights)
        losses = self.head(features, labels)
        if not self.training:
            with torch.no_grad():  # whoever measures listens to what the head says last
                self.head(features)
        return losses


class TransformerClassifier(Classifier, Encoder):
    """The encoder, then the class token or the mean of the patches' tokens, then the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.add_head(shape)

    def features(self, images: Tensor) -> Tensor:
        tokens = self.tokens(images)
        return tokens[:, 0] if self.shape.pooling == "class" else tokens[:, 1:].mean(1)

    def forward(self, inputs: Inputs) -> Tensor:
        return self.row_keys.around(super().forward, inputs)
