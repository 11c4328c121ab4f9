"""Dropout and drop-path whose masks depend only on a row's own key, the module and the place in the sample.

PyTorch's dropout uses one generator for the whole batch, so a record's contribution would depend on its row, its
neighbours, the world size and everything drawn before. Here the uniform numbers are a hash of integers (two rounds of
MurmurHash3's finaliser, with products wrapping as in C): the same bits on every device, in any batch, at a replay,
under vmap, and when a checkpointed layer runs again. Keys come with the records, as the input `drop_key` [B].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable

from murmuration.model.inputs import DROP_KEY

Drop = Callable[[Tensor], Tensor]
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads small numbers
_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


class RowKeys:
    """The keys of the rows that a model is computing; one object per model, shared by all its modules that drop.

    The keys are available during the forward pass and its backward pass, where checkpointed layers run again, but never
    before or after, so that no module can use the keys of another batch.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._modules = 0

    def number(self) -> int:
        """A number for the next module, in the order in which the model makes its modules."""
        self._modules += 1
        return self._modules

    def around(self, run: Callable[[dict[str, Tensor]], Tensor], inputs: dict[str, Tensor]) -> Tensor:
        """run(inputs), with the inputs' keys available to the modules."""
        keys = inputs.get(DROP_KEY) if self._modules else None
        if keys is None:
            return run(inputs)
        self._keys = keys
        try:
            losses = run(inputs)
        finally:
            self._keys = None
        # Whatever ran in between, a backward pass starts here, before any layer runs again.
        return _BeforeBackward.apply(lambda: self._recall(keys), losses)  # pyright: ignore[reportReturnType]

    def _recall(self, keys: Tensor) -> None:
        self._keys = keys
        Variable._execution_engine.queue_callback(self._forget)  # pyright: ignore[reportAttributeAccessIssue]

    def _forget(self) -> None:
        self._keys = None

    @property
    def keys(self) -> Tensor | None:
        return self._keys

    def kept(self, module: int, rate: float, rows: int, places: int) -> Tensor:
        """bool [rows, places], each False with probability `rate`."""
        keys = self._keys
        if keys is None:
            raise ValueError(
                "the model drops units but has no keys for it; add drop_key (int64 [B]) to its inputs, or call eval()."
            )
        if keys.shape != (rows,) or keys.dtype != torch.int64:
            raise ValueError(
                f"drop_key is {keys.dtype} {list(keys.shape)}, but dropout sees {rows} rows; give one int64 for "
                "each record, and keep records in the first dimension."
            )
        return _kept(keys, module, rate, places)


class _BeforeBackward(Function):
    """The same losses; `act` is called when their backward pass begins. A hook, of which vmap would know nothing."""

    @staticmethod
    def forward(act: Callable[[], None], losses: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return losses.view_as(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.act = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.act()
        return None, gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, act: Callable[[], None], losses: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del info
        return _BeforeBackward.apply(act, losses), in_dims[1]  # pyright: ignore[reportReturnType]


class _KeyedDrop(nn.Module):
    def __init__(self, rate: float, row_keys: RowKeys) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"a drop rate of {rate} is impossible; give one from 0 to below 1.")
        self.rate, self.row_keys, self.number = rate, row_keys, row_keys.number()
        self.scale: float | Tensor = 1.0 / (1.0 - rate)

    def kept(self, rows: int, places: int) -> Tensor:
        return self.row_keys.kept(self.number, self.rate, rows, places)

    def _drop(self, x: Tensor, places: torch.Size) -> Tensor:
        """Drop each of `places`, a shape that broadcasts to that of one sample; the values kept are scaled up."""
        kept = self.kept(x.shape[0], places.numel())
        return torch.where(kept.view(x.shape[0], *places), x, 0.0) * self.scale

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class KeyedDropout(_KeyedDrop):
    """Each value of a sample is zero with probability `rate`; in evaluation mode nothing happens."""

    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x, x.shape[1:]) if self.training else x


class KeyedDropPath(_KeyedDrop):
    """All values of a sample together are zero with probability `rate`; in evaluation mode nothing happens."""

    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x, torch.Size([1] * (x.dim() - 1))) if self.training else x


class Drops:
    """The modules within a block that drop. While the block is recorded for a compiler, masks and scales are lent to
    them: no integer is hashed in compiled code, and blocks that differ in nothing else share it."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = [module for module in block.modules() if isinstance(module, _KeyedDrop)]

    @property
    def keys(self) -> Tensor | None:
        """The keys of the rows, if anything is dropped now."""
        return next((each.row_keys.keys for each in self._modules if each.training), None)

    def kept(self, keys: Tensor, module: int, places: int) -> Tensor:
        """bool [*keys, places], of one of the modules."""
        own = self._modules[module]
        return _kept(keys.flatten(), own.number, own.rate, places).view(*keys.shape, places)

    def scales(self, device: torch.device) -> Tensor:
        return torch.tensor([each.scale for each in self._modules], dtype=torch.float64, device=device)

    @contextmanager
    def lent(self, kept: Callable[[int, int], Tensor], scales: Sequence[Tensor]) -> Iterator[None]:
        """`kept`: the mask of a module, by its number here and that of its places."""
        before = [each.scale for each in self._modules]
        try:
            for number, (module, scale) in enumerate(zip(self._modules, scales, strict=True)):
                module.scale = scale
                vars(module)["kept"] = lambda rows, places, number=number: kept(number, places)
            yield
        finally:
            for module, scale in zip(self._modules, before, strict=True):
                module.scale = scale
                vars(module).pop("kept", None)


def _kept(keys: Tensor, module: int, rate: float, places: int) -> Tensor:
    # The places' hashes are the same for all rows, so a row costs only one more round; each hash gives two numbers.
    own = _mixed(keys + _signed(module * _GOLDEN))
    place = _mixed(torch.arange(1, (places + 1) // 2 + 1, device=keys.device) * _signed(_GOLDEN))
    hashed, least = _mixed(own[:, None] ^ place), min(round(rate * 2**32), 2**32 - 1) - 2**31
    # Not as a view of int32, for which vmap has no rule before PyTorch 2.11.
    halves = torch.stack([hashed.int() >= least, hashed >= least << 32], dim=-1)
    return halves.flatten(1)[:, :places]


def dropout(rate: float, row_keys: RowKeys) -> Drop:
    """A dropout module, or a plain function if nothing is dropped."""
    return KeyedDropout(rate, row_keys) if rate else _unchanged


def _unchanged(x: Tensor) -> Tensor:
    return x


def _mixed(state: Tensor) -> Tensor:
    for factor in _FACTORS:
        state = (state ^ _shifted(state)) * _signed(factor)
    return state ^ _shifted(state)


def _shifted(state: Tensor) -> Tensor:
    """A logical shift by 33: torch's own keeps the sign."""
    return (state >> 33) & ((1 << 31) - 1)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
