"""Where a tensor that holds weights comes from: a parameter, a view of one, or something computed from parameters.

Pieces of per-record gradients are found for the tensor that a layer used; a source turns them into pieces of the
parameters behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from train.clip_pieces import Outer, Piece, Through, Whole, Written


@dataclass(frozen=True)
class Source:
    """`view` says how the tensor lies in its only parameter; None means that it was computed, by autograd's record.

    `leaves` are the parameters behind it, detached from the model, by name.
    """

    tensor: Tensor
    leaves: dict[str, Tensor]
    view: Literal["same", "transposed"] | None

    @property
    def value(self) -> Tensor:
        """What layers compute with. A parameter stays itself: its data may be elsewhere until they are needed."""
        return self.tensor if isinstance(self.tensor, torch.nn.Parameter) else self.tensor.detach()

    @property
    def shape(self) -> torch.Size:
        """As it was when the layer ran; a sharded parameter lets its data go afterwards."""
        whole = next(iter(self.leaves.values())) if isinstance(self.tensor, torch.nn.Parameter) else self.tensor
        return whole.shape

    def outer(self, left: Tensor, right: Tensor) -> list[Piece]:
        """leftᵀ·right, with the tensor seen as [rows, columns]."""
        if self.view == "transposed" and left.is_floating_point():
            left, right = right, left
        if self.view == "same" or (self.view == "transposed" and left.is_floating_point()):
            ((name, leaf),) = self.leaves.items()
            return [Outer(name, left, right, leaf.shape)]
        return self._through(Outer("", left, right, self.shape))

    def whole(self, value: Tensor) -> list[Piece]:
        """[B, *shape of the tensor]"""
        if self.view is None:
            return self._through(Whole("", value))
        ((name, leaf),) = self.leaves.items()
        if self.view == "transposed":
            value = value.transpose(1, 2)
        return [Whole(name, value.reshape(len(value), *leaf.shape))]

    def written(
        self,
        inputs: tuple[Tensor, ...],
        upstream: Tensor,
        write: Callable[[tuple[Tensor, ...], Tensor], Tensor],
        total: Callable[[tuple[Tensor, ...], Tensor], Tensor],
        terms: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None,
    ) -> list[Piece]:
        if self.view == "same":
            ((name, leaf),) = self.leaves.items()
            if leaf.shape == self.shape:
                return [Written(name, inputs, upstream, self.shape, write, total, terms)]
        return self._through(Written("", inputs, upstream, self.shape, write, total, terms))

    def _through(self, inner: Piece) -> list[Piece]:
        """Also for views, whose record by autograd is kept as well."""
        return [Through(name, inner, self.tensor, leaf) for name, leaf in self.leaves.items()]
