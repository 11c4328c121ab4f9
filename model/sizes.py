"""The published size tables, one per family.

Why two: ViP's masked autoencoders and DP-Cap's captioners share names (Nano to Large) but not heads
(Nano and Tiny have 12 there and 6 here), and a checkpoint read with the wrong number of heads gives no
error, only wrong features. So each family has its own table and the numbers are written out in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["mae", "captioner"]
Size = Literal["nano", "tiny", "small", "base", "large", "huge", "custom"]


@dataclass(frozen=True)
class Stack:
    """A stack of transformer layers."""

    width: int
    depth: int
    heads: int


@dataclass(frozen=True)
class Preset:
    """Everything a size name stands for; `text` is the captioner's decoder, `pixels` the MAE's."""

    encoder: Stack
    text: Stack
    pixels: Stack
    patch_size: int = 16


_PIXELS = Stack(512, 4, 16)
_PIXELS_HUGE = Stack(512, 8, 16)

CAPTIONER: dict[str, Preset] = {
    "nano": Preset(Stack(192, 12, 6), Stack(192, 6, 6), _PIXELS),
    "tiny": Preset(Stack(384, 12, 6), Stack(384, 6, 6), _PIXELS),
    "small": Preset(Stack(576, 12, 12), Stack(576, 6, 12), _PIXELS),
    "base": Preset(Stack(768, 12, 12), Stack(768, 6, 12), _PIXELS),
    "large": Preset(Stack(1024, 24, 16), Stack(768, 6, 12), _PIXELS),
    # No published class: DP-Cap's only huge model is an older one (ReLU, biases). Its widths are kept here
    # in the present layer style, so its parameter count answers to no published number.
    "huge": Preset(Stack(1280, 32, 16), Stack(512, 8, 16), _PIXELS_HUGE, patch_size=14),
}

MAE: dict[str, Preset] = {
    "nano": Preset(Stack(192, 12, 12), CAPTIONER["nano"].text, _PIXELS),
    "tiny": Preset(Stack(384, 12, 12), CAPTIONER["tiny"].text, _PIXELS),
    "small": Preset(Stack(576, 12, 12), CAPTIONER["small"].text, _PIXELS),
    "base": Preset(Stack(768, 12, 12), CAPTIONER["base"].text, _PIXELS),
    "large": Preset(Stack(1024, 24, 16), CAPTIONER["large"].text, _PIXELS),
    "huge": Preset(Stack(1280, 32, 16), CAPTIONER["huge"].text, _PIXELS_HUGE, patch_size=14),
}

TABLES: dict[str, dict[str, Preset]] = {"mae": MAE, "captioner": CAPTIONER}
