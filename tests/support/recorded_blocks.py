"""Blocks of a private pass as they are recorded, with each operation run by PyTorch and nothing compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor, nn

from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.compiled import Codes, divided


class RecordedClip(BookKeepingClip):
    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        if self.blocks is not None:
            self.blocks.compiler = operation_by_operation


def operation_by_operation(
    recorded: Any, like: list[Tensor], outputs: int, example: list[Tensor], lent: Sequence[int]
) -> Codes:
    del example
    forward, backward, taken = divided(recorded, like, outputs, lent)
    return Codes(make_boxed_func(forward.forward), make_boxed_func(backward.forward), taken)
