"""The book-keeping clip engine: one forward pass, one backward pass for activation gradients only, one product per
weight.

The backward pass keeps the operands of each weight gradient. They yield the norms of all records, the norms yield the
clip factors, and only then is one product per weight computed, with the factors inside: the clipped sum costs as much
as an ordinary weight gradient. There is no second forward pass, and no per-record gradient is kept that takes more
memory than `HOLD` allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules import module as every_module
from torch.utils.checkpoint import CheckpointError

from murmuration.train.clip.accumulator import NormAccumulator
from murmuration.train.clip.engine import LOSS_SCALE, Clipped, Precision, autocast, full_precision
from murmuration.train.clip.isolated import is_of_records
from murmuration.train.clip.layers import LAYER_RULES
from murmuration.train.clip.losses import blanked, incomputable, losses_of, rows_of, uncompiled
from murmuration.train.clip.rule import ClipError, ClipRule, Grouping, groups_of
from murmuration.train.clip.sums import ExactSums, GradientSums
from murmuration.train.clip.tracker import ParameterTracker

if TYPE_CHECKING:
    from murmuration.train.clip.compiled import CompiledBlocks

# Size of the largest per-record gradient that is kept, in units of the activations and output gradients that it
# replaces. At 1, keeping it costs no memory.
PLAIN_DISPATCH = getattr(Tensor, "__torch_dispatch__")  # noqa: B009
HOLD: dict[Literal["lean", "fast"], float] = {"lean": 1.0, "fast": 1.6}


@dataclass(frozen=True)
class Held:
    """The tensors of a model, found by one walk over its modules: a walk per micro-batch would slow small ones down."""

    model: nn.Module
    places: Sequence[tuple[Mapping[str, Tensor | None], str, Tensor, bool]]
    """Where each tensor was found, and whether it is trained."""
    lengths: Sequence[tuple[Sized, int]]
    """The length of each of these places, which a new tensor increases."""
    parameters: dict[str, nn.Parameter]
    _group_of: dict[Grouping, dict[str, int]]

    @staticmethod
    def by(model: nn.Module) -> Held:
        # The dictionaries that named_parameters() and buffers() read.
        owners = [place for module in model.modules() for place in (module._parameters, module._buffers)]
        places = [
            (place, name, tensor, tensor.requires_grad)
            for place in owners
            for name, tensor in place.items()
            if tensor is not None
        ]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_of_records(tensor):
                raise ClipError(f"forward() put a record's values in the place of {name}; let it write into nothing")
            acts = getattr(type(tensor), "__torch_dispatch__") is not PLAIN_DISPATCH  # noqa: B009
            if acts and not type(tensor).__module__.startswith("torch."):  # PyTorch's own shard or pretend
                raise ClipError(
                    f"{name} is a {type(tensor).__name__}, whose functions are given all records together; "
                    "use an ordinary tensor"
                )
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sizes = [(place, len(place)) for place in owners]
        return Held(model, places, sizes, parameters, {})

    def group_of(self, grouping: Grouping) -> dict[str, int]:
        if grouping not in self._group_of:
            self._group_of[grouping] = groups_of(self.parameters, grouping)
        return self._group_of[grouping]

    def changed(self, model: nn.Module) -> bool:
        """Also true where an engine replaced these tensors, as FSDP2 does while a layer runs."""
        return (
            model is not self.model
            or any(len(place) != size for place, size in self.lengths)
            or any(
                place.get(name) is not tensor or tensor.requires_grad is not trained or is_of_records(tensor)
                for place, name, tensor, trained in self.places
            )
        )


class BookKeepingClip:
    """`round_operands`: in bf16, whether the operand that carries the factor is rounded back to bf16, for products at
    full speed; each record's factor is reduced by what that may add. `together`: whether small layers share kernels.
    None: only on GPUs, where it pays. `compiled`: the records of the micro-batches in which the model's repeated blocks
    run as compiled code; 0: in none. `checkpointed`: whether the blocks run again in the backward pass."""

    def __init__(
        self, rule: ClipRule, precision: Precision = "fp32", hold: float = HOLD["lean"],
        round_operands: bool | None = None, together: bool | None = None, compiled: int = 0,
        checkpointed: bool = False,
    ) -> None:  # fmt: skip
        self._compiled, self._checkpointed = compiled, checkpointed
        self._again: Callable[[], AbstractContextManager[None]] | None = None
        self.blocks: CompiledBlocks | None = None
        self.round_operands, self.together = round_operands, together
        self.rule, self.hold = rule, hold
        self.precision: Precision = precision
        self._checked = False
        self.leaves_out = False
        """Whether records that the model cannot compute are left out: once it has shown that it computes others."""
        self.left_out = 0
        """How often that was done. Private."""
        self._held: Held | None = None

    @property
    def _scale(self) -> float:
        return LOSS_SCALE[self.precision]

    def prepare(self, model: nn.Module) -> None:
        """Checks that the model's gradients can be clipped; changes nothing in the model."""
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise ClipError("the model has no trainable parameter; unfreeze a part of it")
        halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4]
        if halves:
            raise ClipError(f"{halves[0]} is in half precision, and sums would be rounded; keep parameters in fp32")
        empty = [name for name, p in model.named_parameters() if p.requires_grad and not p.numel()]
        if empty:
            raise ClipError(f"{empty[0]} has no elements to train; freeze it with requires_grad_(False)")
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ClipError(
                    f"{name or 'the model'} is scripted: what it does with records cannot be seen; "
                    "run it as an ordinary module"
                )
            if (
                module._backward_hooks
                or module._backward_pre_hooks
                or every_module._global_backward_hooks
                or every_module._global_backward_pre_hooks
            ):
                raise ClipError(
                    f"{name or 'the model'} has a backward hook, which is not called where records are isolated; "
                    "remove it"
                )
        self._checked, self._held = False, None
        if self._compiled:
            from murmuration.train.clip.compiled import CompiledBlocks  # with PyTorch's compiler

            self.blocks = CompiledBlocks(model, self._compiled)
        if self._checkpointed:
            from murmuration.train.clip.blocks import checkpointed_blocks

            self._again = checkpointed_blocks(model)
        self.rule.require_groups(trainable)

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        with full_precision(present.device):
            return self._add(model, inputs, present, sums, rule or self.rule, defer=False)

    def add_if_ordinary(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        with full_precision(present.device):
            return self._add(model, inputs, present, sums, rule or self.rule, defer=True)

    def _add(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums, rule: ClipRule,
        defer: bool,
    ) -> Clipped:  # fmt: skip
        # A model's tensors are looked through once, and again only where another model or another tensor came.
        if self._held is None or self._held.changed(model):
            self._held = Held.by(model)
        held = self._held
        rounded = present.is_cuda if self.round_operands is None else self.round_operands
        together = present.is_cuda if self.together is None else self.together
        accumulator = NormAccumulator(
            held.group_of(rule.grouping), len(present), self.hold, rounded and self.precision == "bf16", present.device,
            together, defer, rows_of(inputs, len(present)),
        )  # fmt: skip
        tracker = ParameterTracker(held.parameters, len(present), present.device, accumulator.add, LAYER_RULES)
        losses, failed = present.new_empty(0), None
        with ExitStack() as running:  # the backward pass as well, in which checkpointed layers run again
            running.enter_context(uncompiled())
            if self._again is not None:
                running.enter_context(self._again())
            if self.blocks is not None:
                running.enter_context(self.blocks.running(tracker))
            try:
                losses = self._run(model, inputs, tracker)
            except (IndexError, RuntimeError) as error:  # nothing has been added yet
                failed = error
        if failed is not None:
            return self._without_incomputable(model, inputs, present, sums, rule, failed)
        with torch.no_grad():
            losses = losses.detach()
            # Norms first, then factors, then sums, all of the same operands: a second backward pass might round
            # otherwise, and norms of the first would not bound its gradients.
            # A record without a finite loss, and a slot without a record, add exactly nothing. Comparing is false for
            # NaN, where arithmetic would spread it.
            eligible = present & (losses.abs() < math.inf)
            norms = accumulator.norms(eligible)
            if self._scale != 1.0:  # the backward pass was of scaled losses, so that halves do not underflow
                norms = norms / self._scale
            precise = torch.float64 if losses.dtype == torch.float64 else torch.float32
            factors = torch.where(accumulator.keep, rule.group_factors(norms, precise), 0.0)
            accumulator.write_sums(factors if self._scale == 1.0 else factors / self._scale, sums)
        measured = None if accumulator.measured is None else _over_groups(accumulator.measured)
        factor = factors[0] if len(factors) == 1 else factors.amin(0)
        return Clipped(
            losses, _over_groups(norms), factor, rule.sensitivity, accumulator.doubtful, accumulator.ordinary, measured
        )

    def _without_incomputable(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums, rule: ClipRule,
        error: Exception,
    ) -> Clipped:  # fmt: skip
        """That a record ended the run would tell of it, and every start would draw it again. So one that the model
        cannot compute has no finite loss. Not on a GPU, which is lost after such an error, nor where ranks hold parts
        of the weights, and must call the model together."""
        lost = present.is_cuda or isinstance(error, torch.OutOfMemoryError)
        if not self.leaves_out or lost or not isinstance(sums, ExactSums):
            raise error
        with autocast(self.precision, present.device):
            odd = incomputable(model, inputs, present)
        if not odd.any():
            raise error
        self.left_out += int(odd.sum())
        found = self._add(model, blanked(inputs, odd), present & ~odd, sums, rule, defer=False)
        return replace(found, losses=torch.where(odd, math.nan, found.losses))

    def _run(self, model: nn.Module, inputs: Mapping[str, Tensor], tracker: ParameterTracker) -> Tensor:
        """Losses [B]; afterwards the book contains the pieces of every trainable parameter."""
        with torch.enable_grad(), autocast(self.precision, tracker.anchor.device):
            losses = losses_of(model, inputs, tracker.records, tracker)
        if unused := sorted(tracker.parameters.keys() - tracker.used.keys()):
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ClipError(
                f"the loss does not use {unused[0]}{more} in a way that can be clipped; freeze each weight whose .grad "
                "is None after a plain backward pass, or leave out reentrant checkpointing"
            )
        if not self._checked:  # once: walking a graph takes time
            _refuse_unseen(tracker, losses)
            self._checked = True
        tracker.counting = False
        # Every loss has a seed of its own, and no mean is taken over records: what arrives at a layer is each record's
        # own gradient, whoever else is in the micro-batch.
        seed = torch.full_like(losses, self._scale)
        # Not `torch.autograd.backward`, which would leave the mode: checkpointed layers run again and must be watched.
        try:
            with tracker:
                # Only the anchor's gradient is asked for, so autograd forms none of the weights.
                _engine_run_backward((losses,), (seed,), False, False, (tracker.anchor,), True, accumulate_grad=True)
            tracker.require_none_caught()
        except CheckpointError as error:
            raise ClipError(
                "a checkpointed layer computes something else when it runs again in the backward pass; let forward() "
                "keep nothing and choose nothing at random, or leave checkpointing out"
            ) from error
        return losses


def _over_groups(norms: Tensor) -> Tensor:
    """[groups, B] -> [B]"""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms, dim=0)


def _refuse_unseen(tracker: ParameterTracker, losses: Tensor) -> None:
    """Refuses trainable parameters that were used in a way that no rule saw: these are leaves of the graph."""
    own = {id(p): name for name, p in tracker.parameters.items()}
    waiting, seen = [losses.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in own:
            raise ClipError(
                f"{own[id(leaf)]} reaches the loss past the clip engine (scripted code does so); "
                "run that part as ordinary modules"
            )
        waiting += [below for below, _ in node.next_functions]
