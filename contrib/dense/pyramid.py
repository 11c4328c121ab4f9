"""A plain vision transformer as the backbone of a detector or segmenter: four maps made of its last tokens alone.

Plain transformers have one resolution. The maps of other resolutions are learnt from it by transposed convolutions and
one pooling (Li et al., arXiv 2203.16527).
"""

from __future__ import annotations

from collections import OrderedDict

from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn

from murmuration.model.build import ENCODER_PREFIXES
from murmuration.model.encoder import Encoder

SCALES = (4.0, 2.0, 1.0, 0.5)
"""The scale of each map, in cells per patch and side."""


class FeaturePyramid(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        half, quarter = max(1, width // 2), max(1, width // 4)
        larger = [
            [
                nn.ConvTranspose2d(width, half, 2, 2), LayerNorm2d(half), nn.GELU(),
                nn.ConvTranspose2d(half, quarter, 2, 2),
            ],
            [nn.ConvTranspose2d(width, half, 2, 2)],
            [],
            [nn.MaxPool2d(2, 2, ceil_mode=True)],
        ]  # fmt: skip
        widths = (quarter, half, width, width)
        self.stages = nn.ModuleList(
            nn.Sequential(
                *stage, nn.Conv2d(given, channels, 1, bias=False), LayerNorm2d(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False), LayerNorm2d(channels),
            )
            for stage, given in zip(larger, widths, strict=True)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """[B, width, rows, columns] -> maps of all scales, the largest first."""
        return [stage(tokens) for stage in self.stages]


class Backbone(nn.Module):
    """Normalised pictures [B, 3, side, side] -> the pyramid's maps, under the names "0" to "3"."""

    def __init__(self, encoder: Encoder, channels: int) -> None:
        super().__init__()
        self.encoder, self.out_channels = encoder, channels
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(name.startswith(ENCODER_PREFIXES))
        self.pyramid = FeaturePyramid(encoder.shape.encoder.width, channels)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        grid = self.encoder.shape.grid
        tokens = self.encoder.tokens(images)[:, 1:]
        maps = self.pyramid(tokens.transpose(1, 2).unflatten(2, (grid, grid)))
        return OrderedDict((str(number), each) for number, each in enumerate(maps))
