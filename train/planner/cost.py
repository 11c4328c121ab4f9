"""What one record costs in arithmetic and memory, counted by running the model on tensors without data.

The real forward and backward pass runs under PyTorch's fake tensors: every product is counted (by PyTorch's own FLOP
counter) and every tensor that is kept for the backward pass is measured, but nothing is computed or allocated. A model
of a billion weights takes seconds and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from murmuration.train.clip.engine import Precision, autocast
from murmuration.train.clip.norms import gram_cost

# Two sizes, so that costs that do not grow with the micro-batch cancel; broadcasting would treat size 1 specially.
SIZES = (2, 4)

Inputs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape, without the batch, and type of the model's inputs, by name."""


@dataclass(frozen=True)
class RecordCost:
    """The cost of one record: floating-point operations, and bytes that grow with the micro-batch."""

    forward_flops: float
    step_flops: float
    """Forward and backward of a non-private step."""
    clipping_flops: float
    """What the norms of per-record gradients need in addition."""
    kept_bytes: float
    """Activations that wait for the backward pass."""
    working_bytes: float
    """The gradient of the largest activation, held beside it as the backward pass begins; and scratch for one norm."""

    @property
    def private_flops(self) -> float:
        return self.step_flops + self.clipping_flops

    @property
    def bytes(self) -> float:
        return self.kept_bytes + self.working_bytes


def count(model: nn.Module, inputs: Inputs, precision: Precision, rows: int = 1) -> RecordCost:
    """`model` may lie on the meta device; a record has `rows` rows."""
    small, large = (_pass(model, inputs, precision, size, rows) for size in SIZES)
    more = SIZES[1] - SIZES[0]
    return RecordCost(
        forward_flops=(large.forward - small.forward) / more,
        step_flops=(large.forward + large.backward - small.forward - small.backward) / more,
        clipping_flops=(large.norms - small.norms) / more,
        kept_bytes=(large.kept - small.kept) / more,
        working_bytes=large.largest / SIZES[1] + large.scratch,
    )


@dataclass(frozen=True)
class _Pass:
    forward: float
    backward: float
    norms: float
    kept: int
    largest: int
    scratch: float


def _pass(model: nn.Module, inputs: Inputs, precision: Precision, size: int, rows: int) -> _Pass:
    with FakeTensorMode(allow_non_fake_inputs=True):
        states = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        for name, parameter in model.named_parameters():
            states[name].requires_grad_(parameter.requires_grad)
        batch = {name: torch.zeros((size * rows, *shape), dtype=dtype) for name, (shape, dtype) in inputs.items()}
        kept, norms = _Kept([*states.values(), *batch.values()]), _Norms(size)
        forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with forward, kept.watching(), norms.watching(model), autocast(precision, torch.device("cpu")):
            losses = functional_call(model, states, (batch,))
        with backward:
            trained = [tensor for tensor in states.values() if tensor.requires_grad]
            torch.autograd.grad(losses.float().sum(), trained, allow_unused=True)
    return _Pass(
        forward.get_total_flops(),
        backward.get_total_flops(),
        norms.flops,
        sum(kept.sizes.values()),
        kept.largest,
        norms.scratch,
    )


class _Kept:
    """Storages that autograd keeps, each counted once; parameters and inputs are not."""

    def __init__(self, known: list[Tensor]) -> None:
        self._held: list[Any] = [tensor.untyped_storage() for tensor in known]  # so that no address is used twice
        self._known = {storage._cdata for storage in self._held}
        self.sizes: dict[int, int] = {}

    @property
    def largest(self) -> int:
        return max(self.sizes.values(), default=0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage._cdata not in self.sizes:
            self._held.append(storage)
            self.sizes[storage._cdata] = storage.nbytes()
        return tensor


class _Norms:
    """The cheaper way to each layer's norms, as the book-keeping engine takes it: Gram matrices or whole gradients."""

    def __init__(self, records: int) -> None:
        self.flops, self.scratch, self._records = 0.0, 0.0, records

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._see)
            for module in model.modules()
            if getattr(getattr(module, "weight", None), "requires_grad", False) and not isinstance(module, nn.Embedding)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, inputs: Any, output: Any) -> None:
        weight = module.weight
        if not (isinstance(weight, Tensor) and isinstance(output, Tensor) and weight.dim() >= 2):
            return
        columns = weight.shape[0]
        rows = weight.numel() // columns
        tokens = output.numel() // self._records // columns
        if tokens > 1:
            gram, whole = gram_cost(tokens, rows, columns), rows * columns
            self.flops += 2.0 * tokens * min(gram, whole) * self._records
            # Two Gram matrices and their product, or the gradient and its square, in fp32.
            self.scratch = max(self.scratch, 12.0 * tokens**2 if gram < whole else 8.0 * whole)
