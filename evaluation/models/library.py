"""Networks of other libraries, so that other architectures stand in one table with ours.

The library computes them, and they are only evaluated: in training, layers such as BatchNorm would couple records.
Features are what the network's own head reads, so a probe replaces that head; a map of features becomes the mean over
its places.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from murmuration.accounting.escaping import first_line
from murmuration.evaluation.errors import EvaluationError
from murmuration.model.classifier import Classifier, classification_loss
from murmuration.model.encoder import Inputs, check_images
from murmuration.model.load_report import LoadReport
from murmuration.model.named import Named
from murmuration.model.settings import ModelSettings, Shape
from murmuration.model.sizes import Stack

HEAD = "head."
UNUSED = "num_batches_tracked"
"""BatchNorm's counter, which no output depends on and some files lack."""


class LibraryClassifier(Classifier):
    """`net` is the library's own module. If it has a head, that is under the library's name, not under ours."""

    def __init__(self, net: nn.Module, named: Named, side: int) -> None:
        super().__init__()
        self.net: Any = net.eval()
        self.shape = self._measured(named, side)

    @abstractmethod
    def read_by_head(self, images: Tensor) -> Tensor:
        """Features as the library gives them: [B, width], or a map [B, width, rows, columns]."""

    @abstractmethod
    def logits_of(self, images: Tensor) -> Tensor | None:
        """The library's own logits; None without a head."""

    def features(self, images: Tensor) -> Tensor:
        check_images(images, self.shape.image_size)
        return pooled(self.read_by_head(images))

    def logits(self, images: Tensor) -> Tensor:
        check_images(images, self.shape.image_size)
        found = self.logits_of(images)
        if found is None:
            raise EvaluationError(f"{self.shape.named} has no classifier here; measure its features with a probe")
        return found

    def forward(self, inputs: Inputs) -> Tensor:
        return classification_loss(self.logits(inputs["images"]), inputs["labels"], self.shape.head.loss)

    @torch.no_grad()
    def _measured(self, named: Named, side: int) -> Shape:
        """Widths are measured on a picture without content, since each library tells them under other names."""
        image = torch.zeros(1, 3, side, side)
        try:
            features = pooled(self.read_by_head(image))
            logits = self.logits_of(image)
            logits = torch.zeros(1, 1) if logits is None else logits
        except Exception as error:  # whatever a library raises on pictures of a size that it does not take
            raise EvaluationError(
                f"{named} does not run on pictures of {side} px ({first_line(error, 120)}); give it a size that it "
                "takes by --image-size, or name another model"
            ) from None
        if features.dim() != 2 or logits.dim() != 2:
            raise EvaluationError(
                f"{named} gives features {list(features.shape)} and logits {list(logits.shape)} of a picture, where a "
                "row of each was expected; name another model"
            )
        return shape_of(named, side, features.shape[1], logits.shape[1])


def pooled(found: Tensor) -> Tensor:
    return found.flatten(2).mean(dim=2) if found.dim() == 4 else found


def shape_of(named: Named, side: int, width: int, classes: int) -> Shape:
    sizes = {"width": 64, "depth": 1, "heads": 1, "image_size": side, "patch_size": side}
    settings = ModelSettings.model_validate({"family": "classifier", "classes": classes, **sizes})
    return replace(settings.resolved(), encoder=Stack(width, 1, 1), named=named)


def filled(net: nn.Module, state: Mapping[str, Tensor], heads: tuple[str, ...], report: LoadReport) -> None:
    """Fills `net` where name and shape fit. Tensors that the file lacks are told as missing, those of a head, which
    are below one of the names `heads`, by our name for it."""
    fitting: dict[str, Tensor] = {}
    for key, own in net.state_dict().items():
        found = state.get(key)
        if found is not None and found.shape == own.shape:
            fitting[key] = found
            report.add(key, "taken", found)
        elif not key.endswith(UNUSED):
            why = "" if found is None else f"the file's has the shape {list(found.shape)}"
            report.add(told_as(key, heads), "missing", own, why)
    for key in state.keys() - fitting.keys():
        report.add(key, "ignored", state[key], "the architecture has no such tensor")
    net.load_state_dict(fitting, strict=False)


def told_as(key: str, heads: tuple[str, ...]) -> str:
    """Our name for a tensor of a head; another one's own name, which may look like that."""
    head = next((name for name in heads if key.startswith(f"{name}.")), None)
    if head is not None:
        return HEAD + key.removeprefix(f"{head}.")
    return f"net.{key}" if key.startswith(HEAD) else key
