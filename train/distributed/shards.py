"""A piece of one parameter in a flat tensor: the unit in which noise is drawn and shards are mapped and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + length) of one parameter, at `position` in a flat tensor of this rank."""

    name: str
    parameter: int
    start: int
    length: int
    position: int

    @property
    def elements(self) -> range:
        return range(self.start, self.start + self.length)

    def of(self, flat: Tensor) -> Tensor:
        return flat.view(-1)[self.position : self.position + self.length]


def whole_parameters(trainable: Mapping[str, nn.Parameter]) -> dict[int, tuple[Tensor, list[Fragment]]]:
    """Without sharding, the optimizer has the parameters themselves."""
    return {id(p): (p, [Fragment(name, index, 0, p.numel(), 0)]) for index, (name, p) in enumerate(trainable.items())}
