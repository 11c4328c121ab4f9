"""Scales for any model, and gradients that are scaled by the definition, with nothing from train/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from murmuration.accounting.scale_table import ScaleTable
from tests.support.brute_force import Record


def random_table(model: nn.Module, reach: int = 3, seed: int = 0, but: Sequence[str] = ()) -> ScaleTable:
    """Exponents from -reach to reach for all that is trained `but` some."""
    draw = torch.Generator().manual_seed(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(-reach, reach + 1, (count,), generator=draw).tolist())

    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad and name not in but}
    return ScaleTable({name: (some(rows_of(shape)), some(columns_of(shape))) for name, shape in shapes.items()})


def rows_of(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def columns_of(shape: Sequence[int]) -> int:
    return torch.Size(shape[1:]).numel()


def scales(table: ScaleTable, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The factor on each element, in fp64; 1 where the table has none."""
    found = {name: torch.ones(tuple(shape), dtype=torch.float64) for name, shape in shapes.items()}
    for name, (rows, columns) in table.weights.items():
        for row, of_row in enumerate(rows):
            for column, of_column in enumerate(columns):
                found[name].view(len(rows), len(columns))[row, column] = 2.0 ** (of_row + of_column)
    return found


def scaled(records: Sequence[Record], table: ScaleTable) -> list[Record]:
    factors = scales(table, {name: gradient.shape for name, gradient in records[0].gradient.items()})
    return [Record(r.loss, {name: g * factors[name] for name, g in r.gradient.items()}) for r in records]
