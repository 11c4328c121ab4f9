"""The published size tables, one per family.

ViP's masked autoencoders and DP-Cap's captioners share names (Nano to Large) but not heads (Nano and Tiny have 12 in
the former and 6 in the latter), and a checkpoint read with the wrong number of heads gives no error, only wrong
features. So each family has its own table and the numbers are written out in full. Classifiers are vision transformers
or BiT's ResNets, which have their own tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar, Literal

Family = Literal["mae", "captioner", "classifier", "timm", "hf", "gpt2"]
Size = Literal[
    "nano", "tiny", "small", "base", "large", "huge",
    "r50x1", "r50x3", "r50x4", "r101x1", "r101x3", "r152x2", "r152x4", "wrn16x4", "custom",
]  # fmt: skip
Activation = Literal["gelu", "relu"]


@dataclass(frozen=True)
class Stack:
    """A stack of transformer layers."""

    width: int
    depth: int
    heads: int


@dataclass(frozen=True)
class ResNet:
    """BiT's pre-activation ResNet of bottlenecks. `width` is the stem's; the features are 2·2^stages times as wide."""

    small_images: ClassVar[bool] = False
    width: int
    stages: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """The channels of each stage's output; the inner convolutions of a bottleneck have a quarter as many."""
        return tuple(4 * self.width << number for number in range(len(self.stages)))

    @property
    def groups(self) -> int:
        """32 as published, or fewer in a narrow toy model: every layer has a multiple of `width` channels."""
        return gcd(32, self.width)


@dataclass(frozen=True)
class WideResNet(ResNet):
    """For small images: basic blocks, and no pooling after the stem."""

    small_images: ClassVar[bool] = True


@dataclass(frozen=True)
class Preset:
    """All that a size name stands for; `text` is the captioner's decoder, `pixels` the MAE's.

    `plain_decoder`: the text decoder is the older one, PyTorch's own (ReLU, biases), on an encoder with biases.
    """

    encoder: Stack
    text: Stack
    pixels: Stack
    patch_size: int = 16
    plain_decoder: bool = False


_PIXELS = Stack(512, 4, 16)
_PIXELS_HUGE = Stack(512, 8, 16)

CAPTIONER: dict[str, Preset] = {
    "nano": Preset(Stack(192, 12, 6), Stack(192, 6, 6), _PIXELS),
    "tiny": Preset(Stack(384, 12, 6), Stack(384, 6, 6), _PIXELS),
    "small": Preset(Stack(576, 12, 12), Stack(576, 6, 12), _PIXELS),
    "base": Preset(Stack(768, 12, 12), Stack(768, 6, 12), _PIXELS),
    "large": Preset(Stack(1024, 24, 16), Stack(768, 6, 12), _PIXELS),
    # DP-Cap's only huge model is of the older kind.
    "huge": Preset(Stack(1280, 32, 16), Stack(512, 8, 16), _PIXELS_HUGE, patch_size=14, plain_decoder=True),
}

MAE: dict[str, Preset] = {
    "nano": Preset(Stack(192, 12, 12), CAPTIONER["nano"].text, _PIXELS),
    "tiny": Preset(Stack(384, 12, 12), CAPTIONER["tiny"].text, _PIXELS),
    "small": Preset(Stack(576, 12, 12), CAPTIONER["small"].text, _PIXELS),
    "base": Preset(Stack(768, 12, 12), CAPTIONER["base"].text, _PIXELS),
    "large": Preset(Stack(1024, 24, 16), CAPTIONER["large"].text, _PIXELS),
    "huge": Preset(Stack(1280, 32, 16), CAPTIONER["huge"].text, _PIXELS_HUGE, patch_size=14),
}

# Vision transformers of the usual sizes: B/16, L/16 and H/14. They have no decoders; the decoder entries let an encoder
# be shared with the other families.
CLASSIFIER: dict[str, Preset] = {size: MAE[size] for size in ("base", "large", "huge")}

# BiT's rNxM: the stem is 64 times as wide as the factor after the x. No weights of r50x4 have been published.
RESNETS: dict[str, ResNet] = {
    "r50x1": ResNet(64, (3, 4, 6, 3)),
    "r50x3": ResNet(192, (3, 4, 6, 3)),
    "r50x4": ResNet(256, (3, 4, 6, 3)),
    "r101x1": ResNet(64, (3, 4, 23, 3)),
    "r101x3": ResNet(192, (3, 4, 23, 3)),
    "r152x2": ResNet(128, (3, 8, 36, 3)),
    "r152x4": ResNet(256, (3, 8, 36, 3)),
    # De et al.'s WRN-16-4, with GroupNorm and standardised weights.
    "wrn16x4": WideResNet(16, (2, 2, 2)),
}

# The published GPT-2 and GPT-2 Large. They see no pictures; encoder and text decoder are one stack.
GPT2: dict[str, Preset] = {
    name: Preset(stack, stack, _PIXELS, patch_size=1)
    for name, stack in (("small", Stack(768, 12, 12)), ("large", Stack(1280, 36, 20)))
}

TABLES: dict[str, dict[str, Preset]] = {
    "mae": MAE, "captioner": CAPTIONER, "classifier": CLASSIFIER, "gpt2": GPT2,
}  # fmt: skip
