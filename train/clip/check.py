"""Checks a clip engine against the definition, on the live model: single records by plain autograd.

The record is given to the model alone, without `isolated.py`: what that computes in fp32 must be what the model means.

Engines are fast because they reason about layers. If a model does something that no rule foresaw, norms are wrong, and
with them the privacy guarantee. A few records at the start of a run reveal this, whatever the cause.

Deep ResNets amplify rounding tens of thousands of times, since a ReLU may fall on either side of zero, so that two
correct computations in fp32 differ by percents. Where a record does not agree in fp32, a copy of the model in fp64 is
compared instead, engine and all. In fp32 the norm must still be that of what is added, and the gradient not much
further off than plain autograd in fp32 is from fp64.

In half precision, three comparisons replace the single one, so that no tolerance has to cover how kernels round:

- in fp32, on the same live model, with the gradient of the record alone: an engine treats layers in the same way in
  all precisions;
- the norm that the engine measures of a record with the size of what it adds for that record: the same numbers, to
  fp32, whatever was rounded before. The norm by which it clips may be larger, for what factors will round, but not
  smaller;
- what the engine adds for a record with the gradient in the same precision and the same micro-batch, hence by the same
  kernels. The remaining difference is that autograd rounds weight gradients to half precision, where engines keep
  fp32: by 2^-8 of an element in bf16, by 2^-11 in fp16. Some models amplify any rounding (deep ResNets multiply it by
  hundreds), so that two correct computations differ: by how much is measured by plain autograd alone, in half
  precision and fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from murmuration.accounting.escaping import first_line
from murmuration.model.safety import zeros_filled
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import LOSS_SCALE, ClipEngine, Precision, autocast, clipped_totals
from murmuration.train.clip.losses import losses_of, of_slots, slot_losses, uncompiled
from murmuration.train.clip.rule import ClipError

EXACT = 1e-3
# Five times the largest change from rounding a weight gradient once: a weight that is used more than once is rounded
# each time, and products may be added up in another order.
ROUNDED = 5 * 2.0**-8
# A record in fp32 may be so many times further from plain autograd than that is from fp64: what is amplified are single
# bits that fell otherwise, of which a computation may have more by chance. But never by more than so much of its size.
AMPLIFIED, MOST_AMPLIFIED = 10.0, 0.3


@dataclass(frozen=True)
class _Apart:
    """How far one record's contribution and norm are from what they should be, in units of its gradient's size."""

    gradient: float
    norm: float
    tolerance: float
    why: str = ""
    only_alone: bool = False
    """Whether the engine computes what an isolated pass does, and the model alone does something else."""

    @property
    def fits(self) -> bool:
        return self.gradient <= self.tolerance and self.norm <= EXACT


def check_gradients(
    clip: ClipEngine, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, records: int = 3, *,
    plain: nn.Module | None = None, shapes: Mapping[str, torch.Size] | None = None,
) -> None:  # fmt: skip
    """Compares norms and unclipped contributions of the first present records with their gradients; ClipError if one
    differs.

    Where parameters are sharded, plain autograd does not see them whole: then `plain` is an unsharded copy, and all
    ranks must call this; without a copy there is nothing to compare with.
    """
    reference = model if plain is None else plain
    if not all(p.numel() for p in reference.parameters() if p.requires_grad):
        return
    compared = _Compared(clip, model, reference, shapes)
    rows = present.nonzero().flatten()[:records]
    chosen, few = list(range(len(rows))), (of_slots(inputs, rows, len(present)), present[rows])
    if clip.precision == "fp32" and isinstance(clip, BookKeepingClip) and clip.blocks is not None:
        chosen, few = rows.tolist(), (inputs, present)  # only whole micro-batches run as compiled code
    found: list[_Apart] = []
    with ExitStack() as meanwhile:
        if plain is None:
            meanwhile.enter_context(zeros_filled(model))
        for row in chosen:
            with _in_precision(clip, "fp32"):
                found.append(compared.in_fp32(*few, row))
        for row in rows.tolist() if clip.precision != "fp32" else []:
            found.append(compared.in_half(inputs, present, row))
    # Only now: where calling the model is a collective operation, a rank that stopped earlier would hang the others.
    for apart in found:
        if apart.only_alone:
            raise ClipError(
                "the model computes another gradient of a test record alone than where each of several is isolated; "
                "models of transformers that see both ways do so where a mask hides nothing: give them no "
                "attention_mask, or one of [1, 1, length, length]"
            )
        if not apart.fits:
            raise ClipError(
                f"the clip engine's gradient of a test record is off by {apart.gradient:.2g} of its size, and its norm "
                f'by {apart.norm:.2g}{apart.why}; use run.clip_engine = "reference", or plainer layers'
            )


@dataclass(frozen=True)
class _Added:
    """What an engine adds for one record if nothing is clipped."""

    own: dict[str, Tensor]
    norm: float
    """As the engine measured it."""
    short: float
    """By how much it exceeds the norm that the engine clips by: what is added for the rounding of operands has nothing
    to allow for here, where all factors are 1."""

    def compared(self, expected: Mapping[str, Tensor], tolerance: float, same_size: bool) -> _Apart:
        size = _size(expected)
        off = [self.short, abs(self.norm - _size(self.own)), abs(self.norm - size) if same_size else 0.0]
        worst = math.nan if any(map(math.isnan, off)) else max(off)  # max() may pass over a NaN
        return _Apart(_share(_distance(self.own, expected), size), _share(worst, size), tolerance)


@dataclass(frozen=True)
class _Compared:
    """A clip engine and the live model, with the one that plain autograd runs: the same, or an unsharded copy."""

    clip: ClipEngine
    model: nn.Module
    reference: nn.Module
    shapes: Mapping[str, torch.Size] | None

    def in_fp32(self, inputs: Mapping[str, Tensor], present: Tensor, row: int) -> _Apart:
        only = _row(present, row)
        added = self._added(inputs, only)
        single = of_slots(inputs, only, len(present)), only[row : row + 1]
        expected = _gradient("fp32", self.reference, *single, alone=True)
        apart = added.compared(expected, EXACT, same_size=True)
        if apart.fits or not added.compared(expected, EXACT, same_size=False).norm <= EXACT:
            return apart
        try:  # the difference may be of rounding alone
            wide, exact = self.in_fp64(inputs, only, single)
            amplified = min(MOST_AMPLIFIED, AMPLIFIED * _share(_distance(expected, exact), _size(exact)))
            apart = wide if apart.gradient <= amplified else apart
        except Exception as error:
            # Whatever it is (a model that has no copy or insists on fp32, no memory), other ranks wait in the next
            # record.
            apart = replace(apart, why=f"; it could not be repeated in fp64: {first_line(error)}")
        as_isolated = added.compared(_gradient("fp32", self.reference, *single), EXACT, same_size=True)
        return replace(apart, only_alone=not apart.fits and as_isolated.fits)

    def in_fp64(
        self, inputs: Mapping[str, Tensor], only: Tensor, single: tuple[Mapping[str, Tensor], Tensor]
    ) -> tuple[_Apart, dict[str, Tensor]]:  # fmt: skip
        """Also the gradient itself. On one rank alone: the reference is whole."""
        model, clip = deepcopy(self.reference).double(), copy(self.clip)
        clip.prepare(model)
        exact = _gradient("fp32", model, _double(single[0]), single[1], alone=True)
        added = _Compared(clip, model, model, None)._added(_double(inputs), only)
        return added.compared(exact, EXACT, same_size=True), exact

    def in_half(self, inputs: Mapping[str, Tensor], present: Tensor, row: int) -> _Apart:
        only = _row(present, row)
        expected = _gradient(self.clip.precision, self.reference, inputs, only)
        single = of_slots(inputs, only, len(present)), only[row : row + 1]
        unrounded = _gradient("fp32", self.reference, *single)
        tolerance = max(ROUNDED, 1.5 * _share(_distance(expected, unrounded), _size(expected)))
        return self._added(inputs, only).compared(expected, tolerance, same_size=False)

    def _added(self, inputs: Mapping[str, Tensor], only: Tensor) -> _Added:
        # With one group and a bound that is never reached, the contribution is the gradient itself.
        unclipped = replace(self.clip.rule, kind="flat", bound=1e30, grouping="all")
        totals, seen = clipped_totals(self.clip, self.model, inputs, only, self.shapes, unclipped)
        row = int(only.nonzero())
        norm = float((seen.norms if seen.measured is None else seen.measured)[row])
        own = {name: total.double() for name, total in totals.items()}
        return _Added(own, norm, norm - float(seen.norms[row]))


def _double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def _row(present: Tensor, row: int) -> Tensor:
    only = torch.zeros_like(present)
    only[row] = True
    return only


def _gradient(
    precision: Precision, model: nn.Module, inputs: Mapping[str, Tensor], only: Tensor, alone: bool = False
) -> dict[str, Tensor]:  # fmt: skip
    """`alone`: of a single record, by the model as it is."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    scale = LOSS_SCALE[precision]
    with torch.enable_grad(), autocast(precision, only.device):
        with uncompiled():
            losses = slot_losses(model, inputs, 1) if alone else losses_of(model, inputs, len(only))
        loss = torch.where(only, losses, torch.zeros_like(losses)).sum() * scale
    found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if g is None else g.double() / scale
        for (name, p), g in zip(trainable.items(), found, strict=True)
    }


@contextmanager
def _in_precision(clip: ClipEngine, precision: Precision) -> Iterator[None]:
    own: Precision = clip.precision
    clip.precision = precision
    try:
        yield
    finally:
        clip.precision = own


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return _size({name: one[name] - other[name] for name in other})


def _share(part: float, size: float) -> float:
    return part / size if size else (math.inf if part else 0.0)


def _size(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradient.values()]).norm())
