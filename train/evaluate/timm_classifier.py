"""Classifiers of timm that our own models do not compute, so that other architectures stand in one table with ours.

timm computes them, and they are only evaluated: in training, layers such as BatchNorm would couple records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from murmuration.model.classifier import Classifier
from murmuration.model.encoder import check_images
from murmuration.model.load_report import LoadReport
from murmuration.model.named import Named
from murmuration.model.settings import ModelSettings, Shape
from murmuration.model.sizes import Stack
from murmuration.train.evaluate.errors import EvaluationError

HEAD = "head."
UNUSED = "num_batches_tracked"
"""BatchNorm's counter, which no output depends on and some files lack."""


class TimmClassifier(Classifier):
    def __init__(self, net: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.net: Any = net
        self.shape, self.head = shape, self.net.get_classifier()

    def features(self, images: Tensor) -> Tensor:
        check_images(images, self.shape.image_size)
        return self.net.forward_head(self.net.forward_features(images), pre_logits=True)

    def logits(self, images: Tensor) -> Tensor:
        check_images(images, self.shape.image_size)
        return self.net(images)


def open_timm_classifier(
    net: Any, name: str, args: dict[str, Any], side: int, state: Mapping[str, Tensor]
) -> tuple[TimmClassifier, LoadReport]:
    """`net` as timm makes it, filled by `state`. Tensors that it lacks are told as missing, those of the head by our
    names."""
    head = net.get_classifier()
    if not isinstance(head, nn.Linear):
        raise EvaluationError(f"timm's {name} has no single linear layer as its head; name another")
    (prefix,) = (f"{path}." for path, module in net.named_modules() if module is head)
    report = LoadReport(f"timm's {name}")
    fitting: dict[str, Tensor] = {}
    for key, own in net.state_dict().items():
        found = state.get(key)
        if found is not None and found.shape == own.shape:
            fitting[key] = found
            report.add(key, "taken", found)
        elif not key.endswith(UNUSED):
            why = "" if found is None else f"the file's has the shape {list(found.shape)}"
            report.add(HEAD + key.removeprefix(prefix) if key.startswith(prefix) else key, "missing", own, why)
    for key in state.keys() - fitting.keys():
        report.add(key, "ignored", state[key], "the architecture has no such tensor")
    net.load_state_dict(fitting, strict=False)
    return TimmClassifier(net, _shape(net, head, name, args, side)), report


def _shape(net: Any, head: nn.Linear, name: str, args: dict[str, Any], side: int) -> Shape:
    sizes = {"width": 64, "depth": 1, "heads": 1, "image_size": side, "patch_size": min(side, 16)}
    settings = ModelSettings.model_validate({"family": "classifier", "classes": head.out_features, **sizes})
    named = Named.of("timm", name, args)
    return replace(settings.resolved(), encoder=Stack(head.in_features, 1, 1), named=named)
