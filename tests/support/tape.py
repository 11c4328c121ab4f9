"""What a CUDA graph does, on the CPU: operations are recorded with the memory that they read and write, and a replay
runs them again on that memory. An answer to the host is refused, as during a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
ASKING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}


class _Taping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.split("::")[1] in ASKING:
            raise RuntimeError("operation not permitted when stream is capturing\n(further lines)")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class Tape:
    """A recorder (`micro_batch_graph.Recorder`)."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        with _Taping() as taping:
            found = run()
        self.recorded += 1

        @torch.no_grad()
        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, out in taping.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    # A view, or what was written in place, is there already.
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return found, replay
