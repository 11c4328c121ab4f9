"""What one record costs in arithmetic and memory, counted by running the model on tensors without data.

The real forward and backward pass runs under PyTorch's fake tensors: every product is counted (by PyTorch's own FLOP
counter) and every tensor that is kept for the backward pass is measured, but nothing is computed or allocated. A model
of a billion weights takes seconds and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from murmuration.train.clip.blocks import repeated_blocks
from murmuration.train.clip.engine import Precision, autocast
from murmuration.train.clip.norms import gram_cost

# Two sizes, so that costs that do not grow with the micro-batch cancel; broadcasting would treat size 1 specially.
SIZES = (2, 4)
CPU = torch.device("cpu")

Inputs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape, without the batch, and type of the model's inputs, by name."""


@dataclass(frozen=True)
class RecordCost:
    """The cost of one record: floating-point operations, and bytes that grow with the micro-batch."""

    forward_flops: float
    step_flops: float
    """Forward and backward of a non-private step, with what checkpointed blocks compute again."""
    clipping_flops: float
    """What the norms of per-record gradients need in addition."""
    kept_bytes: float
    """Activations that wait for the backward pass. With checkpointed blocks, their inputs; or, if that is more, the
    operands of weight gradients that a private phase collects until it knows the norms."""
    working_bytes: float
    """The gradient of the largest activation, held beside it as the backward pass begins; and scratch for one norm.
    With checkpointed blocks, the activations of the largest one, and the gradients of two of them."""

    @property
    def private_flops(self) -> float:
        return self.step_flops + self.clipping_flops

    @property
    def bytes(self) -> float:
        return self.kept_bytes + self.working_bytes


def count(
    model: nn.Module, inputs: Inputs, precision: Precision, rows: int = 1, checkpointed: bool = False,
    private: bool = True,
) -> RecordCost:  # fmt: skip
    """`model` may lie on the meta device; a record has `rows` rows."""
    blocks = list(repeated_blocks(model)) if checkpointed else []
    small, large = (_pass(model, inputs, precision, size, rows, blocks) for size in SIZES)
    more = SIZES[1] - SIZES[0]
    # As the last block is computed again, those of all others are there.
    books = large.books * (1 - 1 / len(blocks)) if blocks and private else 0.0
    gradients = large.largest * (2 if blocks else 1)
    return RecordCost(
        forward_flops=(large.forward - small.forward) / more,
        step_flops=(large.forward + large.backward + large.again - small.forward - small.backward - small.again) / more,
        clipping_flops=(large.norms - small.norms) / more,
        kept_bytes=max((large.kept - small.kept) / more, books),
        working_bytes=gradients / SIZES[1] + large.scratch + (large.block - small.block) / more,
    )


@dataclass(frozen=True)
class _Pass:
    forward: float
    backward: float
    again: float
    """Of the blocks' forward pass, which is computed again."""
    norms: float
    kept: int
    block: int
    """What the largest block keeps while it is computed again."""
    largest: int
    scratch: float
    books: float
    """Operands of one record's weight gradients, or the gradients where they are smaller."""


def _pass(
    model: nn.Module, inputs: Inputs, precision: Precision, size: int, rows: int, blocks: Sequence[nn.Module]
) -> _Pass:
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
        again = _Again(kept, forward)
        with forward, kept.watching(), norms.watching(model), again.watching(blocks), autocast(precision, CPU):
            losses = functional_call(model, states, (batch,))
        with backward:
            trained = [tensor for tensor in states.values() if tensor.requires_grad]
            torch.autograd.grad(losses.float().sum(), trained, allow_unused=True)
    return _Pass(
        forward.get_total_flops(),
        backward.get_total_flops(),
        again.flops,
        norms.flops,
        sum(kept.sizes.values()),
        again.largest,
        kept.largest,
        norms.scratch,
        norms.books,
    )


class _Kept:
    """Storages that autograd keeps, each counted once; parameters and inputs are not."""

    def __init__(self, known: list[Tensor]) -> None:
        self._held: list[Any] = [tensor.untyped_storage() for tensor in known]  # so that no address is used twice
        self._known = {storage._cdata for storage in self._held}
        self.sizes: dict[int, int] = {}
        self.largest = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with saved_tensors_hooks(self.keep, lambda tensor: tensor):
            yield

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage._cdata not in self.sizes:
            self._held.append(storage)
            self.sizes[storage._cdata] = storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        return tensor


class _Again:
    """What a block keeps is kept only while it is computed again; in between, its inputs are."""

    def __init__(self, kept: _Kept, forward: FlopCounterMode) -> None:
        self.flops, self.largest = 0.0, 0
        self._kept, self._forward = kept, forward
        self._before: tuple[dict[int, int], int] = {}, 0

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        handles = [block.register_forward_pre_hook(self._begin) for block in blocks]
        handles += [block.register_forward_hook(self._end, with_kwargs=True) for block in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, block: nn.Module, inputs: Any) -> None:
        self._before = dict(self._kept.sizes), self._forward.get_total_flops()

    def _end(self, block: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
        outside, flops = self._before
        own = sum(self._kept.sizes.values()) - sum(outside.values())
        self._kept.sizes = outside
        if not own:
            return  # nothing in it is trained, or below it
        self.flops += self._forward.get_total_flops() - flops
        self.largest = max(self.largest, own)
        for tensor in tree_leaves((inputs, named)):
            if isinstance(tensor, Tensor):
                self._kept.keep(tensor)


class _Norms:
    """The cheaper way to each layer's norms, as the book-keeping engine takes it: Gram matrices or whole gradients."""

    def __init__(self, records: int) -> None:
        self.flops, self.scratch, self.books, self._records = 0.0, 0.0, 0.0, records

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._see)
            for module in model.modules()
            if any(p.requires_grad for p in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, inputs: Any, output: Any) -> None:
        weight = getattr(module, "weight", None)
        if not (isinstance(weight, Tensor) and isinstance(output, Tensor) and weight.dim() >= 2):
            return
        columns = weight.shape[0]
        rows = weight.numel() // columns
        tokens = output.numel() // self._records // columns
        for own in module.parameters(recurse=False):
            if own.requires_grad and own.dim() >= 2:  # of an adapter, those beside the weight
                operands = output.element_size() * tokens * (len(own) + own.numel() // len(own))
                self.books += min(4.0 * own.numel(), operands)
        if tokens > 1 and weight.requires_grad:
            gram, whole = gram_cost(tokens, rows, columns), rows * columns
            self.flops += 2.0 * tokens * min(gram, whole) * self._records
            # Two Gram matrices and their product, or the gradient and its square, in fp32.
            self.scratch = max(self.scratch, 12.0 * tokens**2 if gram < whole else 8.0 * whole)
