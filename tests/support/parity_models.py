"""Small models that between them use every way a parameter can enter a loss: what clip engines are judged on.

Every model maps inputs of B records to B losses; none couples records. `parity_cases` gives them inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers.norm_act import GroupNormAct
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.model.captioner import PAD
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import Trainable, select

Inputs = dict[str, Tensor]
SHAPE = ModelSettings(
    family="captioner", image_size=32, patch_size=8, width=16, depth=1, heads=2, decoder_depth=1, mae_decoder_width=16,
    mae_decoder_depth=1, mae_decoder_heads=2, text_length=8, vocabulary=32, qkv_bias=True,
).resolved()  # fmt: skip


class OnX(nn.Module):
    """body(x), then a loss that is nonlinear in every output."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, inputs: Inputs) -> Tensor:
        return (self.body(inputs["x"]).sin() + 0.3).square().flatten(1).sum(1)


class MaeInOwnPrecision(nn.Module):
    """The shipped loss rounds to fp32; here it is taken in the model's precision, so that fp64 can be judged."""

    def __init__(self) -> None:
        super().__init__()
        self.mae = build(SHAPE, "mae")

    def forward(self, inputs: Inputs) -> Tensor:
        order = self.mae._order(inputs["mask_noise"])
        error = self.mae._predict(inputs["images"], order) - self.mae._targets(inputs["images"], order)
        return error.square().mean(dim=(1, 2))


class CaptionerInOwnPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.captioner = build(SHAPE, "caption")

    def forward(self, inputs: Inputs) -> Tensor:
        tokens = inputs["tokens"]
        logits = self.captioner.decode(self.captioner.encode_images(inputs["images"]), tokens[:, :-1])
        entropy = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return torch.where(tokens[:, 1:] != PAD, entropy, 0.0).mean(dim=1)


class Classifier(nn.Module):
    """timm's vision transformer: free class token and positions, layer scale, convolutional patch embedding."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.vit = timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5,
            init_values=0.5,
        )  # fmt: skip
        self.vit.set_grad_checkpointing(checkpointing)  # pyright: ignore[reportCallIssue]

    def forward(self, inputs: Inputs) -> Tensor:
        return F.cross_entropy(self.vit(inputs["images"]), inputs["label"], reduction="none")


class ShippedClassifier(nn.Module):
    """Ours: learned positions on a class token, or BiT; its losses in the model's precision."""

    def __init__(self, trainable: Trainable = "all", **settings: Any) -> None:
        super().__init__()
        given = {
            "family": "classifier",
            "image_size": 18,
            "patch_size": 4,
            "classes": 5,
            "head_scale": 1.0,
            "head_bias": -1,
        }
        self.classifier = build(ModelSettings.model_validate({**given, **settings}), "classify")
        select(self.classifier, trainable, rank=2)

    def forward(self, inputs: Inputs) -> Tensor:
        logits = self.classifier.logits(inputs["images"])
        if self.classifier.shape.head.loss == "softmax":
            return F.cross_entropy(logits, inputs["label"], reduction="none")
        wanted = (inputs["label"][:, None] == torch.arange(5)).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1)


class BigTransfer(nn.Module):
    """timm's ResNet v2: weight-standardised convolutions, GroupNorm, strides, a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        norm = partial(GroupNormAct, num_groups=4)
        self.net = ResNetV2(
            layers=[1, 1], channels=(16, 32), stem_chs=8, stem_type="fixed", num_classes=5, norm_layer=norm
        )  # fmt: skip

    def forward(self, inputs: Inputs) -> Tensor:
        return F.cross_entropy(self.net(inputs["images"]), inputs["label"], reduction="none")


class StandardisedConv(nn.Conv2d):
    """Not timm's: written out, as it comes in other people's code."""

    def forward(self, input: Tensor) -> Tensor:
        mean, std = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(input, (self.weight - mean) / (std + 1e-5), self.bias, self.stride, self.padding)


class SelfAttention(nn.Module):
    """PyTorch's own attention and encoder layer, with packed projections; and cross-attention of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True, add_bias_kv=False)
        self.same = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.layer(inputs["x"])
        x = x + self.cross(x, x[..., :6] * 2, x[..., 2:6], need_weights=False)[0]
        return self.same(x, x, x, need_weights=False)[0].square().sum((1, 2))


class LowRank(nn.Module):
    """LoRA beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class TiedLanguageModel(nn.Module):
    """The embedding's table is the head's weight; a padding index; positions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=PAD)
        self.positions = nn.Embedding(7, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=True)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Inputs) -> Tensor:
        ids = inputs["ids"]
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.mix((self.embed(ids) + self.positions(place)).cumsum(1)).tanh()
        return F.cross_entropy(self.head(x[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


class UsedTwice(nn.Module):
    """One layer on sequences of two lengths, one norm twice, and a second module that holds the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.twin = nn.Linear(6, 6, bias=False)
        self.twin.weight = self.layer.weight

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.norm(self.layer(inputs["x"])).tanh()
        pooled = self.norm(self.layer(x[:, 1:]).sin()).mean(1)
        return (self.twin(pooled) + 0.2).square().sum(1)


class FreeParameters(nn.Module):
    """Parameters that no layer holds: a class token, positions, a mask token, a scale, a temperature, a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.positions = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 6, 6))
        self.mask_token, self.scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.ones(6))
        self.temperature, self.matrix = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(6, 4))
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs["x"]
        x = torch.where((x.mean(2) > 0)[..., None], x, self.mask_token.expand_as(x))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.positions
        x = (self.layer(x) * self.scale).softmax(-1) * self.temperature.exp()
        return (x @ self.matrix).square().sum((1, 2))


class MadeTables(nn.Module):
    """Tables made on the way, the same for all records, with as many rows as a micro-batch may have records."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.position = nn.Parameter(torch.randn(6)), nn.Linear(2, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs["x"]
        place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        waves = torch.stack([place.sin(), place.cos()], 1)
        table = self.position(waves).tanh() + self.scale * place[:, None] / len(place)
        return (self.mix(x).sin() * table + table).square().sum((1, 2))


class ScoreBias(nn.Module):
    """Attention with a learnt bias for each distance of two tokens, as in BEiT and Swin; each window is a row."""

    def __init__(self, windows: int = 2) -> None:
        super().__init__()
        self.windows, self.qkv = windows, nn.Linear(6, 18)
        self.table = nn.Parameter(torch.randn(5, 2))
        place = torch.arange(3)
        self.register_buffer("distance", place[:, None] - place[None, :] + 2)

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs["x"].unflatten(1, (self.windows, -1)).flatten(0, 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.distance].permute(2, 0, 1)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return found.square().sum((1, 2, 3)).unflatten(0, (-1, self.windows)).sum(1)


class Odd(nn.Module):
    """Layers that no fast rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.slope = nn.Bilinear(5, 5, 4), nn.PReLU(4)
        self.recurrent = nn.ConvTranspose1d(4, 3, 2)

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs["x"]
        x = self.slope(self.bilinear(x, x.flip(1)).transpose(1, 2).contiguous())
        return self.recurrent(x).square().sum((1, 2))


class SomeFrozen(nn.Module):
    """Frozen below, frozen in between, a weight without its bias, a bias without its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.first, self.between = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 3)
        frozen = (*self.below.parameters(), *self.between.parameters(), self.first.bias, self.norm.weight)
        for p in (*frozen, self.last.weight):
            p.requires_grad_(False)

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.first(self.below(inputs["x"]).relu()).tanh()
        return self.last(self.norm(self.between(x))).square().sum((1, 2))


class LastLayer(nn.Module):
    """A frozen body under a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten()), nn.Linear(8 * 36, 5)
        self.body.requires_grad_(False)

    def forward(self, inputs: Inputs) -> Tensor:
        return F.cross_entropy(self.head(self.body(inputs["images"])), inputs["label"], reduction="none")
