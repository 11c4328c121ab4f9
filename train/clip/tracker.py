"""Sees every use of a trainable parameter while a model runs, without changing the model.

PyTorch passes each of its functions to a TorchFunctionMode before it runs. Parameters are recognised by identity, so
modules are called as usual (hooks that gather sharded weights fire, checkpointing and fused attention work) and tied
weights are seen wherever they are used. The model itself runs on one record at a time (`isolated.py`): a function that
has a rule is called with the tensors of all records, and a parameter used in any other way becomes one copy for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from murmuration.train.clip.functions import PerRecord
from murmuration.train.clip.isolated import (
    OneMicroBatch,
    arguments,
    directly,
    enter,
    in_checkpoint,
    is_of_records,
    leave,
    outside,
    within_memory,
)
from murmuration.train.clip.per_record import (
    Dense,
    OuterProduct,
    PerRecordGradient,
    Recomputed,
    Reported,
    TokenSum,
    ViaReparametrisation,
    over_tokens,
    wide,
)
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.standardised import Standardisation, ViaStandardisation


@dataclass(frozen=True)
class StandardisedRows:
    """How the rows of a tensor were standardised from those of the parameter `name`; `gain` is what they were then
    multiplied by, where that is trained too."""

    name: str
    by: Standardisation
    gain: TrackedTensor | None


# Where a tensor of weights comes from: a parameter, a view of one, or something computed from parameters.
#
# Pieces of per-record gradients are found for the tensor that a layer used; its source turns them into pieces of the
# parameters behind it.


@dataclass(frozen=True)
class TrackedTensor:
    """`view` says how the tensor is laid out in its only parameter; None means that it was computed, as autograd
    recorded.

    `leaves` are the parameters behind it, detached from the model, by name.
    """

    tensor: Tensor
    leaves: dict[str, Tensor]
    view: Literal["same", "transposed"] | None
    standardised: StandardisedRows | None = None
    again: Callable[[Callable[[Tensor], Tensor]], Tensor] | None = None
    """Computes the same of what stands in the place of the parameter; None if it is the parameter, or costs more."""

    @property
    def value(self) -> Tensor:
        """The tensor that layers compute with. A parameter is returned as it is: its data may be elsewhere until they
        are needed."""
        return self.tensor if isinstance(self.tensor, torch.nn.Parameter) else self.tensor.detach()

    @property
    def shape(self) -> torch.Size:
        """The shape when the layer ran; a sharded parameter releases its data afterwards."""
        whole = next(iter(self.leaves.values())) if isinstance(self.tensor, torch.nn.Parameter) else self.tensor
        return whole.shape

    def outer(self, left: Tensor, right: Tensor) -> list[PerRecordGradient]:
        """leftᵀ·right, with the tensor seen as [rows, columns]."""
        if self.view == "transposed" and left.is_floating_point():
            left, right = right, left
        if self.view == "same" or (self.view == "transposed" and left.is_floating_point()):
            ((name, leaf),) = self.leaves.items()
            return [OuterProduct(name, left, right, leaf.shape)]
        return self._through(OuterProduct("", left, right, self.shape))

    def whole(self, value: Tensor) -> list[PerRecordGradient]:
        """[B, *shape of the tensor]"""
        if self.view is None:
            return self._through(Dense("", value))
        ((name, leaf),) = self.leaves.items()
        if self.view == "transposed":
            value = value.transpose(1, 2)
        return [Dense(name, value.reshape(len(value), *leaf.shape))]

    def summed(self, over: Tensor) -> Sequence[Reported]:
        """The sum over tokens of [B, T, *shape of the tensor]."""
        if self.view != "same" or over.shape[1] == 1:
            return self.whole(over_tokens(over))
        ((name, leaf),) = self.leaves.items()
        return [TokenSum(name, over, leaf.shape)]

    def written(
        self,
        inputs: tuple[Tensor, ...],
        upstream: Tensor,
        write: Callable[[tuple[Tensor, ...], Tensor], Tensor],
        total: Callable[[tuple[Tensor, ...], Tensor], Tensor],
        terms: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None,
        row_dimension: int | None = None,
        write_halves: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> list[PerRecordGradient]:
        own = Recomputed("", inputs, upstream, self.shape, write, total, terms, row_dimension, write_halves)
        if self.view == "same":
            ((name, leaf),) = self.leaves.items()
            if leaf.shape == self.shape:
                return [replace(own, name=name)]
        return self._through(own)

    def _through(self, inner: PerRecordGradient) -> list[PerRecordGradient]:
        """Works for views too, since their autograd record is also kept."""
        if self.standardised is not None and _has_rows(inner, self.standardised.by):
            name, by, gain = self.standardised.name, self.standardised.by, self.standardised.gain
            piece = ViaStandardisation(name, inner, self.leaves[name], by)
            if gain is None:
                return [piece]
            # A row's gain scales ŵ, so its gradient is one of the sums that the norm of the weight's needs.
            sums = piece.row_sums()
            own = sums[2].to(wide(inner.dtype)).view(-1, *gain.shape)
            return [replace(piece, known=sums), *gain.whole(own)]
        return [ViaReparametrisation(name, inner, self.tensor, leaf) for name, leaf in self.leaves.items()]


def _has_rows(inner: PerRecordGradient, by: Standardisation) -> TypeGuard[OuterProduct | Recomputed]:
    """Whether the rows that were standardised are those of the piece, and can be scaled in it."""
    if isinstance(inner, OuterProduct):
        return not inner.sparse and (inner.rows, inner.columns) == tuple(by.shape)
    return isinstance(inner, Recomputed) and inner.row_dimension is not None and inner.terms is not None


# Views that keep the elements in order: the gradient's norm and its flat form are those of the parameter.
IN_ORDER = {
    "reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "view_as", "reshape_as", "to",
    "float", "half", "bfloat16", "double", "type", "type_as",
}  # fmt: skip
TRANSPOSING = {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "adjoint"}
SPREADING = {"expand", "expand_as", "repeat", "broadcast_to", "tile"}
ELEMENTWISE = {"add", "__radd__", "sub", "__rsub__", "rsub", "mul", "__rmul__", "div", "true_divide", "__rtruediv__"}
# What is cheap to do once more for each record, instead of following the chain rule through it: a class token with its
# position, say.
REPEATED = IN_ORDER | TRANSPOSING | SPREADING | ELEMENTWISE
# Functions that compute nothing: they inspect a tensor, or detach it from its gradient.
LOOKING = {
    "detach", "detach_", "data", "grad", "grad_fn", "is_leaf", "requires_grad", "size", "dim", "numel", "stride",
    "is_floating_point", "is_contiguous", "shape", "ndim", "dtype", "device", "is_cuda", "data_ptr", "__len__",
}  # fmt: skip

Handler = Callable[..., Any]


class ParameterTracker(OneMicroBatch):
    """For one forward and backward pass of `records` records. `report` takes pieces, and how often each weight is used.

    Nothing that it references may refer back to it: a cycle that waits for Python's garbage collector keeps a
    micro-batch in memory.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], records: int, device: torch.device,
        report: Callable[[Sequence[Reported], Mapping[str, int]], None] | None, layers: Mapping[Any, Handler],
        recorded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.records, self.recorded = records, recorded
        self._report = report
        self.used: dict[str, int] = {}
        self.counting = True
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._layers = layers
        self._names = {id(p): name for name, p in parameters.items()}
        self.parameters = parameters
        self._sources: dict[int, TrackedTensor] = {}
        self._copies: dict[int, Tensor] = {}
        self._lent = any(map(is_lent, parameters.values()))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rule = self._layers.get(func)
        if rule is not None and directly():
            return rule(self, *args, **kwargs)
        return self.otherwise(func, args, kwargs)

    def otherwise(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function that has no rule for these arguments."""
        known = any(id(x) in self._names or id(x) in self._sources for x in arguments(args, kwargs))
        if not torch.is_grad_enabled() or not known:
            return func(*args, **kwargs)
        name = _name(func)
        if name == "register_hook":
            raise ClipError(
                "a hook on what is computed from a weight is not called where records are isolated; remove it"
            )
        if name in LOOKING or name.startswith(("__set", "requires_grad")):
            return func(*args, **kwargs)
        if not any(is_of_records(x) for x in tensors_in(args, kwargs)):
            return self.computed(func, args, kwargs)
        # Of a record's own copy of a weight, too.
        args, kwargs = within_memory(func, swapped(args, self.copy_of), swapped(kwargs, self.copy_of))
        return func(*args, **kwargs)

    def source(self, tensor: Tensor) -> TrackedTensor | None:
        """The trainable parameters behind a tensor; None if there are none, or none is to be learnt from here."""
        if not torch.is_grad_enabled():
            return None
        found = self._sources.get(id(tensor))
        # A sharded parameter has its shape only while its layer runs; an entry from before is useless.
        stale = found is not None and found.tensor is tensor and found.shape != tensor.shape
        if id(tensor) in self._names and (found is None or stale):
            # A leaf of its own: what is computed from weights alone is recorded outside the records' graph.
            with outside():
                leaf = tensor.detach().requires_grad_()
            found = TrackedTensor(tensor, {self._names[id(tensor)]: leaf}, "same")
            self._sources[id(tensor)] = self._sources[id(leaf)] = found
        return found

    def use(self, source: TrackedTensor) -> None:
        """Counts the pieces that the backward pass will report; a checkpoint's second forward pass counts nothing."""
        self.count(dict.fromkeys(source.leaves, 1))

    def count(self, uses: Mapping[str, int]) -> None:
        if self.counting:
            for name, times in uses.items():
                self.used[name] = self.used.get(name, 0) + times

    def used_once(self, source: TrackedTensor) -> str | None:
        """The parameter that it is, in its own shape, if nothing else of the forward pass uses it: then its gradient
        meets no other, and may have an order of its own. To be asked in the backward pass."""
        if source.view != "same" or self.recorded:  # a block that is recorded does not know of others
            return None
        ((name, leaf),) = source.leaves.items()
        return name if leaf.shape == source.shape and self.used[name] == 1 else None

    def name_of(self, tensor: Tensor) -> str | None:
        """Of a trained parameter."""
        return self._names.get(id(tensor))

    def report(self, pieces: Sequence[Reported]) -> None:
        # Handling pieces is not a use of a parameter, so it need not pass through here.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            assert self._report is not None, "only parameters are reported"
            self._report(pieces, self.used)

    def on_records(self, function: Callable[..., Tensor], x: Tensor, rows: bool = True) -> Tensor:
        """Calls a function of rows with those of all records: [B·rows, …], or [B, …] if x has no dimension of rows."""
        whole = leave(x, self.records)
        if whole.dim() == 2 or not rows:
            with outside():
                return enter(function(whole))
        lead = whole.shape[:2]
        with outside():
            out = function(whole.flatten(0, 1))
            # No view for autograd: what changes it in place, as a ReLU does, would be recorded as a copy into it.
            return enter(torch.ops.aten._unsafe_view(out, (*lead, *out.shape[1:])))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """One copy of a weight for each record, from which ordinary autograd continues; other tensors as they are."""
        source = self.source(tensor)
        return tensor if source is None else self._per_record(source)

    def _per_record(self, source: TrackedTensor) -> Tensor:
        if source.again is not None:
            return source.again(self.copy_of)
        key = id(source.tensor)
        if key not in self._copies:
            self.use(source)
            held = ref(self)  # the copy's graph must not hold what holds the copy, which no collector would see

            def whole(gradient: Tensor) -> None:
                tracker = held()
                assert tracker is not None, "whoever runs the backward pass holds the tracker"
                tracker.report(source.whole(gradient))

            with outside():
                value = source.value.detach()
                self._copies[key] = enter(PerRecord.apply(self.anchor, value, self.records, whole))
        return self._copies[key]

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function of weights and constants alone, and records it, so that gradients reach the parameters."""
        known = [source for x in tensors_in(args, kwargs) if (source := self.source(x)) is not None]
        if not known:
            return func(*args, **kwargs)
        first, name = known[0], _name(func)
        with self._kept():
            out = func(*swapped(args, self._leaf), **swapped(kwargs, self._leaf))
        again = None
        if len(known) == 1 and name in REPEATED:
            again = lambda copy: func(*swapped(args, copy), **swapped(kwargs, copy))  # noqa: E731
        leaves = {leaf_name: leaf for source in known for leaf_name, leaf in source.leaves.items()}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if (
                isinstance(tensor, Tensor)
                and tensor.requires_grad
                and (id(tensor) not in self._sources or name.endswith("_"))
            ):
                view = _view(name, first, tensor, len(known))
                # The rows of a standardised tensor that was only given another shape, maybe that of
                # its own parameter.
                kept = name in IN_ORDER and leaves.keys() == first.leaves.keys() and tensor.dtype == first.tensor.dtype
                rows = first.standardised if kept else None
                self._sources[id(tensor)] = TrackedTensor(tensor, leaves, view, rows, again)
        return out

    def _kept(self) -> AbstractContextManager[object]:
        """Of what is made of weights, as autograd saves it."""
        # Where an engine reclaims a parameter's memory after use, it must be a copy.
        if self._lent:
            return saved_tensors_hooks(_copy, lambda x: x)
        # A backward pass to the weights is one of its own, in which a checkpointed layer would run again unwatched.
        return saved_tensors_hooks(Tensor.detach, lambda x: x) if in_checkpoint() else nullcontext()

    def standardised(self, made: Tensor, name: str, by: Standardisation, gain: TrackedTensor | None) -> None:
        """Says of a computed tensor how its rows were made."""
        self._sources[id(made)] = replace(self._sources[id(made)], standardised=StandardisedRows(name, by, gain))

    def _leaf(self, tensor: Tensor) -> Tensor:
        name = self._names.get(id(tensor))
        source = self.source(tensor)
        return tensor if name is None or source is None else source.leaves[name]

    @staticmethod
    def names(source: TrackedTensor) -> str:
        return " and ".join(source.leaves)


def is_lent(weight: Tensor) -> bool:
    """Whether an engine that shards weights gives it memory only while a layer runs."""
    return getattr(weight, "lent", False)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _view(name: str, source: TrackedTensor, out: Tensor, sources: int) -> Any:
    if sources > 1 or source.view is None:
        return None
    if name in IN_ORDER:
        return source.view if source.view == "same" else None
    if name in TRANSPOSING and out.dim() == source.tensor.dim() == 2:
        return "transposed" if source.view == "same" and len(next(iter(source.leaves.values())).shape) == 2 else None
    return None


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property: its getset descriptor knows the name
        return getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def tensors_in(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (x for x in arguments(args, kwargs) if isinstance(x, Tensor))


def swapped(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        return {key: swapped(value, change) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)(swapped(value, change) for value in values)
    return values
