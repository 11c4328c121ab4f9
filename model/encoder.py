"""The vision transformer that all transformer families share, in timm's names.

timm's whole VisionTransformer is not used: a masked autoencoder should gather the kept patches *before* the patch
projection (a quarter of the work), and the projection must be a matrix product for per-sample gradients to be
cheap; a convolution under vmap becomes a grouped convolution. Parameter names are those of the published
checkpoints, which are timm's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.block import Block, norm_layer
from murmuration.model.drop import RowKeys
from murmuration.model.inputs import Inputs as Inputs
from murmuration.model.positions import image_positions
from murmuration.model.settings import Shape
from murmuration.model.sizes import Stack


def blocks(
    stack: Stack, qkv_bias: bool, row_keys: RowKeys, dropout: float = 0.0, drop_path: float = 0.0
) -> nn.ModuleList:
    """Pre-norm transformer blocks; `drop_path` is the last one's rate, and rates grow evenly from 0 at the first."""
    rates = [drop_path * number / max(1, stack.depth - 1) for number in range(stack.depth)]
    return nn.ModuleList(Block(stack, qkv_bias, row_keys, dropout, rate) for rate in rates)


def patchify(images: Tensor, size: int) -> Tensor:
    """[B, 3, H, W] -> [B, patches, 3·size·size], row by row, values in (channel, row, column) order."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)


def unpatchify(patches: Tensor, size: int, grid: int) -> Tensor:
    """The inverse of `patchify` for square images."""
    batch = patches.shape[0]
    cut = patches.reshape(batch, grid, grid, 3, size, size)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, 3, grid * size, grid * size)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, N, D], index [B, K] -> [B, K, D]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def check_images(images: Tensor, side: int) -> None:
    if tuple(images.shape[1:]) != (3, side, side):
        raise ValueError(
            f"the model was built for images [B, 3, {side}, {side}] but got {list(images.shape)}; "
            f"resize the images or set model.image_size."
        )


class PatchProjection(nn.Module):
    """A patch-embedding convolution on patches that are already cut out: the same numbers, from one matrix product."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 3, size, size))
        self.bias = nn.Parameter(torch.empty(width))
        bound = 1.0 / math.sqrt(3 * size * size)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """Holds the projection under the published name `patch_embed.proj`."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.proj = PatchProjection(width, size)

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        patches = patchify(images, self.size)
        return self.proj(patches if kept is None else take_rows(patches, kept))


class Encoder(nn.Module):
    """Image -> tokens. Subclasses add a decoder and a loss; this class has neither.

    Positions are a fixed table, or learned if the settings say so; then the class token has one too. A subclass
    computes its losses inside `row_keys.around`, so that modules that drop units have the rows' keys.
    """

    cls_token: nn.Parameter
    pos_embed: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.row_keys = RowKeys()
        self.patch_embed = PatchEmbed(shape.encoder.width, shape.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.encoder.width))
        if shape.positions == "learned":
            self.pos_embed = nn.Parameter(torch.zeros(1, 1 + shape.patches, shape.encoder.width))
        else:
            table = image_positions(shape.encoder.width, shape.grid)
            self.register_buffer("pos_embed", table.to(self.cls_token.device))
        self.blocks = blocks(shape.encoder, shape.qkv_bias, self.row_keys, shape.dropout, shape.drop_path)
        self.norm = norm_layer(shape.encoder.width)

    def _embed(self, images: Tensor, kept: Tensor | None) -> Tensor:
        check_images(images, self.shape.image_size)
        if self.shape.positions == "learned":
            # All patches that fit: a remainder at the right and bottom is left out, as by a convolution.
            side = self.shape.grid * self.shape.patch_size
            x = self.patch_embed(images[..., :side, :side])
            return torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1) + self.pos_embed
        x = self.patch_embed(images, kept)
        positions = self.pos_embed[:, 1:]
        x = x + (positions if kept is None else positions[0][kept])
        # The class token's row is zero in our tables, but not in published weights whose tables were trained.
        first = self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype) + self.pos_embed[:, :1]
        return torch.cat([first, x], dim=1)

    def tokens(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """[B, 1 + patches (or kept), width], after the last norm; `kept` [B, K] are patch numbers."""
        x = self._embed(images, kept)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def layers(self, images: Tensor) -> list[Tensor]:
        """The tokens after each block, without the last norm; ViP's linear probe pools over them."""
        x = self._embed(images, None)
        outputs: list[Tensor] = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return outputs
