"""Blocks of a private pass as they are recorded, with each operation run by PyTorch and nothing compiled."""

from __future__ import annotations

from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor, nn

from murmuration.train.clip.bookkeeping import BookKeepingClip


class RecordedClip(BookKeepingClip):
    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        if self.blocks is not None:
            self.blocks.compiler = operation_by_operation


def operation_by_operation(recorded: Any, like: list[Tensor], outputs: int, example: list[Tensor]) -> Any:
    from torch._inductor.compile_fx import partition_fn

    del example
    return tuple(make_boxed_func(part.forward) for part in partition_fn(recorded, like, num_fwd_outputs=outputs))
