"""The masked autoencoder of ViP: it sees a few patches and predicts the pixels of the others, one loss per image.

Two choices make it cheap and suit private gradients. The masking order is an input (uniform noise made by
the caller under a keyed generator), so the forward pass has no randomness that could couple samples or be lost at a
restart. And the decoder runs on the shuffled order: attention does not depend on the order of its tokens
once each carries its own position, so nothing has to be put back in order, and the prediction head sees only the
removed patches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from murmuration.model.encoder import Encoder, Inputs, blocks, norm_layer, patchify, take_rows, unpatchify
from murmuration.model.inputs import weighted
from murmuration.model.positions import image_positions
from murmuration.model.settings import SettingsError, Shape


class Reconstruction(NamedTuple):
    """`images` keep the visible patches and show predictions elsewhere; `removed` [B, patches] marks where."""

    images: Tensor
    removed: Tensor


class MaskedAutoencoder(Encoder):
    """inputs: `images` [B, 3, H, W] and `mask_noise` [B, patches]; the patches with the smallest noise are kept."""

    decoder_pos_embed: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if not 0 < shape.kept_patches < shape.patches:
            raise SettingsError(
                f"model.mask_ratio {shape.mask_ratio} keeps {shape.kept_patches} of {shape.patches} patches, "
                f"but a masked autoencoder must keep and remove at least one; set it to 0.75, for example."
            )
        width = shape.pixels.width
        self.decoder_embed = nn.Linear(shape.encoder.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        table = image_positions(width, shape.grid)
        self.register_buffer("decoder_pos_embed", table.to(self.mask_token.device))
        self.decoder_blocks = blocks(shape.pixels, True, self.row_keys, shape.dropout)
        self.decoder_norm = norm_layer(width)
        self.decoder_pred = nn.Linear(width, shape.patch_values)

    def _order(self, noise: Tensor) -> Tensor:
        if noise.shape[-1] != self.shape.patches:
            raise ValueError(
                f"mask_noise has {noise.shape[-1]} columns but the image has {self.shape.patches} patches; "
                f"draw it with one uniform number per patch."
            )
        # Stable, so that a padded row (all zeros) has the same well-defined order on every device.
        return noise.argsort(dim=1, stable=True)

    def _predict(self, images: Tensor, order: Tensor) -> Tensor:
        """Pixels of the removed patches, in (row, column, channel) order: [B, removed, values]."""
        keep = self.shape.kept_patches
        seen = self.decoder_embed(self.tokens(images, order[:, :keep]))
        batch, width = seen.shape[0], seen.shape[-1]
        hidden = self.mask_token.to(seen.dtype).expand(batch, self.shape.patches - keep, width)
        table = self.decoder_pos_embed
        x = torch.cat([seen[:, :1] + table[:, :1], torch.cat([seen[:, 1:], hidden], 1) + table[0, 1:][order]], 1)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x[:, 1 + keep :]))

    def _targets(self, images: Tensor, order: Tensor) -> Tensor:
        size = self.shape.patch_size
        patches = take_rows(patchify(images, size), order[:, self.shape.kept_patches :])
        # (channel, row, column) as the projection reads them -> (row, column, channel) as the head writes them.
        cut = patches.reshape(*patches.shape[:2], 3, size * size)
        return cut.transpose(2, 3).reshape(patches.shape)

    def forward(self, inputs: Inputs) -> Tensor:
        """Per-sample losses [B]: mean over removed patches of the mean squared pixel error, in fp32."""
        return weighted(self.row_keys.around(self._losses, inputs), inputs)

    def _losses(self, inputs: Inputs) -> Tensor:
        images = inputs["images"]
        order = self._order(inputs["mask_noise"])
        error = self._predict(images, order).float() - self._targets(images, order).float()
        return error.square().mean(dim=(1, 2))

    @torch.no_grad()
    def reconstruct(self, inputs: Inputs) -> Reconstruction:
        """The images with their removed patches replaced by the prediction."""
        images, size, keep = inputs["images"], self.shape.patch_size, self.shape.kept_patches
        order = self._order(inputs["mask_noise"])
        guess = self._predict(images, order).float()
        cut = guess.reshape(*guess.shape[:2], size * size, 3).transpose(2, 3).reshape(guess.shape)
        hidden = order[:, keep:]
        patches = patchify(images, size).float()
        patches = patches.scatter(1, hidden[..., None].expand(-1, -1, patches.shape[-1]), cut)
        removed = torch.zeros_like(order, dtype=torch.bool).scatter(1, hidden, True)
        return Reconstruction(unpatchify(patches, size, self.shape.grid), removed)
