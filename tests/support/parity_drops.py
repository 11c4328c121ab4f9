"""Models that drop, for parity: masks come from each record's own key."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from murmuration.model.build import build
from murmuration.model.drop import KeyedDropout, KeyedDropPath, RowKeys
from murmuration.model.encoder import Inputs
from tests.support.parity_models import SHAPE, CaptionerInOwnPrecision, MaeInOwnPrecision

DROPPING = replace(SHAPE, encoder=replace(SHAPE.encoder, depth=2), dropout=0.3, drop_path=0.4)


class DroppingMae(MaeInOwnPrecision):
    """With dropout and drop-path, keyed by record."""

    def __init__(self) -> None:
        super().__init__()
        self.mae = build(DROPPING, "mae")

    def forward(self, inputs: Inputs) -> Tensor:
        return self.mae.row_keys.around(super().forward, inputs)


class DroppingCaptioner(CaptionerInOwnPrecision):
    def __init__(self) -> None:
        super().__init__()
        self.captioner = build(DROPPING, "caption")

    def forward(self, inputs: Inputs) -> Tensor:
        return self.captioner.row_keys.around(super().forward, inputs)


class DroppingCheckpoints(nn.Module):
    """Blocks that run again in the backward pass, and must drop again what they dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.row_keys = RowKeys()
        self.below = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(DroppingBlock(self.row_keys) for _ in range(2))

    def forward(self, inputs: Inputs) -> Tensor:
        return self.row_keys.around(self._losses, inputs)

    def _losses(self, inputs: Inputs) -> Tensor:
        x = self.below(inputs["x"])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().sum((1, 2))


class DroppingBlock(nn.Module):
    def __init__(self, row_keys: RowKeys) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), KeyedDropout(0.3, row_keys), nn.Linear(8, 8))
        self.path = KeyedDropPath(0.4, row_keys)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(self.body(x).tanh())
