"""torchvision's AlexNet, whose published file is a bare state dict: five convolutions `features.*` and three linear
layers `classifier.*`, wrapped or not by DataParallel. The features are what the last of these reads, 4,096 numbers
after the ReLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from murmuration.evaluation.models.library import LibraryClassifier, filled
from murmuration.model.load_report import LoadReport
from murmuration.model.named import Named

LAST = "classifier.6"
SIDE = 224


class AlexNet(LibraryClassifier):
    def read_by_head(self, images: Tensor) -> Tensor:
        net = self.net
        return net.classifier[:-1](net.avgpool(net.features(images)).flatten(1))

    def logits_of(self, images: Tensor) -> Tensor:
        return self.net(images)


def read_alexnet(state: Mapping[str, Tensor], side: int | None) -> tuple[AlexNet, LoadReport] | None:
    """The model, if the tensors are AlexNet's."""
    # Without the names that DataParallel adds around the whole model, or, as torchvision's own training does, around
    # its convolutions.
    outer = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    state = {name.replace("features.module.", "features.", 1): tensor for name, tensor in outer.items()}
    if not _is_alexnet(state):
        return None
    from torchvision.models import alexnet

    last = state.get(f"{LAST}.bias")
    net = alexnet(weights=None, num_classes=1000 if last is None else len(last))
    report = LoadReport("torchvision's AlexNet")
    filled(net, state, (LAST,), report)
    return AlexNet(net, Named.of("torchvision", "alexnet", {}), side or SIDE), report


def _is_alexnet(state: Mapping[str, Tensor]) -> bool:
    """Whether all tensors below the last layer have its names and shapes; VGG's files have the same names."""
    from torchvision.models import alexnet

    with torch.device("meta"):
        own = alexnet(weights=None).state_dict()
    body = {name: tensor.shape for name, tensor in own.items() if not name.startswith(LAST)}
    return (
        all(name in state and state[name].shape == shape for name, shape in body.items()) and state.keys() <= own.keys()
    )
