"""The image captioner of DP-Cap: vision encoder, causal post-norm text decoder, one loss per caption.

The class token, the type tokens and every position table are frozen on purpose. Those are the published
choices (they leave only linear, norm and embedding layers to the clipping engine), and exactly this set
reproduces the trainable counts of the published table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.attention import CausalSelfAttention, CrossAttention
from murmuration.model.drop import RowKeys, dropout
from murmuration.model.encoder import Encoder, Inputs
from murmuration.model.inputs import weighted
from murmuration.model.positions import image_positions, text_positions
from murmuration.model.settings import Shape
from murmuration.model.sizes import Activation

PAD = 0


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, MLP; each is added and then normed (post-norm).

    With biases and ReLU it is the layer of DP-Cap's older models, which was PyTorch's own. Dropout is applied in the
    same places as there, except to attention weights.
    """

    def __init__(
        self, width: int, heads: int, bias: bool, activation: Activation, drop_rate: float, row_keys: RowKeys
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = F.gelu if activation == "gelu" else F.relu
        self.self_attn = CausalSelfAttention(width, heads, bias)
        self.multihead_attn = CrossAttention(width, heads, bias)
        self.linear1 = nn.Linear(width, 4 * width, bias=bias)
        self.linear2 = nn.Linear(4 * width, width, bias=bias)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)
        self.dropout, self.dropout1 = dropout(drop_rate, row_keys), dropout(drop_rate, row_keys)
        self.dropout2, self.dropout3 = dropout(drop_rate, row_keys), dropout(drop_rate, row_keys)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout1(self.self_attn(x)))
        x = self.norm2(x + self.dropout2(self.multihead_attn(x, memory)))
        return self.norm3(x + self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x))))))


class Decoder(nn.Module):
    """A container that gives the layers their published names `decoder.layers.N`."""

    def __init__(self, shape: Shape, row_keys: RowKeys) -> None:
        super().__init__()
        text, bias, activation = shape.text, shape.decoder_bias, shape.decoder_activation
        self.layers = nn.ModuleList(
            DecoderLayer(text.width, text.heads, bias, activation, shape.dropout, row_keys) for _ in range(text.depth)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Captioner(Encoder):
    """inputs: `images` [B, 3, H, W] and `tokens` [B, text_length] (start, words, end, PAD…)."""

    encoder_image_type_embedding: Tensor
    decoder_pos_embed: Tensor
    text_decoder_pos_embed: Tensor
    decoder_image_type_embedding: Tensor
    decoder_text_type_embedding: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.cls_token.requires_grad_(False)
        self._add_text_decoder(shape, shape.encoder.width, placed=True)

    def _add_text_decoder(self, shape: Shape, width: int, placed: bool) -> None:
        """On tokens of `width`; `placed`: with a fixed table of the places of patches, and a type token below them."""
        text = shape.text
        self.decoder_embed = nn.Linear(width, text.width)
        # `build` draws it; nn.Embedding's own draw would, on the meta device, import PyTorch's compiler.
        self.text_embedding = nn.Embedding.from_pretrained(torch.empty(shape.vocabulary, text.width), freeze=False)
        device = self.text_embedding.weight.device
        if placed:
            self.register_buffer("decoder_pos_embed", image_positions(text.width, shape.grid).to(device))
        self.register_buffer("text_decoder_pos_embed", text_positions(text.width, shape.text_length).to(device))
        if placed:
            self.register_buffer("encoder_image_type_embedding", torch.zeros(1, 1, width))
        self.register_buffer("decoder_image_type_embedding", torch.zeros(1, 1, text.width))
        self.register_buffer("decoder_text_type_embedding", torch.zeros(1, 1, text.width))
        self.decoder = Decoder(shape, self.row_keys)
        self.decoder_pred_text = nn.Sequential(nn.LayerNorm(text.width), nn.Linear(text.width, shape.vocabulary))

    def _embed(self, images: Tensor, kept: Tensor | None) -> Tensor:
        """Published weights add one fixed vector to all tokens of the encoder; in a fresh model it is zero."""
        return super()._embed(images, kept) + self.encoder_image_type_embedding

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 1 + patches, decoder width]: the memory that the text decoder attends to; compute once per image."""
        memory = self.decoder_embed(self.tokens(images))
        return memory + self.decoder_pos_embed + self.decoder_image_type_embedding

    def decode(self, memory: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary]; row t predicts token t + 1 from tokens 0…t; T <= text_length."""
        if tokens.shape[1] > self.shape.text_length:
            raise ValueError(
                f"got {tokens.shape[1]} tokens but the model was built for {self.shape.text_length}; "
                f"shorten the text or set model.text_length."
            )
        x = self.text_embedding(tokens) + self.text_decoder_pos_embed[:, : tokens.shape[1]]
        return self.decoder_pred_text(self.decoder(x + self.decoder_text_type_embedding, memory))

    def forward(self, inputs: Inputs) -> Tensor:
        """Per-caption losses [B]: next-token cross-entropy, mean over the caption's own tokens, in fp32."""
        return weighted(self.row_keys.around(self._losses, inputs), inputs)

    def _losses(self, inputs: Inputs) -> Tensor:
        tokens = inputs["tokens"]
        logits = self.decode(self.encode_images(inputs["images"]), tokens[:, :-1])
        return self.caption_losses(logits, tokens[:, 1:])

    def caption_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return caption_loss(logits, targets)


def caption_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, T, V] and [B, T] -> [B]; PAD targets do not count, and a caption of only PAD has loss 0."""
    return mean_over(targets != PAD, logits, targets)


def mean_over(counted: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """[B]: each row's mean cross-entropy over the targets that count, 0 where none does."""
    entropy = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    # where, not a product: a PAD position with an infinite logit must not turn 0 · inf into NaN.
    total = torch.where(counted, entropy.view(targets.shape), 0.0).sum(dim=1)
    return total / counted.sum(dim=1).clamp(min=1)
