"""Classifiers of timm that our own models do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.library import LibraryClassifier, filled
from murmuration.model.load_report import LoadReport
from murmuration.model.named import Named


class TimmClassifier(LibraryClassifier):
    def read_by_head(self, images: Tensor) -> Tensor:
        return self.net.forward_head(self.net.forward_features(images), pre_logits=True)

    def logits_of(self, images: Tensor) -> Tensor:
        return self.net(images)


def open_timm_classifier(
    net: Any, name: str, args: dict[str, Any], side: int, state: Mapping[str, Tensor]
) -> tuple[TimmClassifier, LoadReport]:
    """`net` as timm makes it, filled by `state`."""
    report = LoadReport(f"timm's {name}")
    filled(net, state, _heads(net, name), report)
    return TimmClassifier(net, Named.of("timm", name, args), side), report


def _heads(net: Any, name: str) -> tuple[str, ...]:
    """Where its last layers are: a linear layer, a convolution of one pixel, a norm before either, or several."""
    given = net.get_classifier()
    parts = given if isinstance(given, list | tuple) else (given,)
    wanted = {id(part) for part in parts if isinstance(part, nn.Module)}
    found = tuple(path for path, module in net.named_modules() if id(module) in wanted)
    if not found:
        raise EvaluationError(f"timm's {name} has no head whose place a classifier could take; name another")
    return found
