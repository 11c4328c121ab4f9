"""What a config may say about the model, and the filled-in, checked shape that the builders use.

Why two types: `ModelSettings` is what a person writes (a size name and a few overrides), `Shape` is what the
code needs (every number present, every divisibility checked). Nothing else in the package reads defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.sizes import TABLES, Family, Size, Stack


class SettingsError(ValueError):
    """The model settings cannot be built; the message is one sentence naming the mend."""


@dataclass(frozen=True)
class Shape:
    """A complete, consistent description of one model (of both objectives on one encoder)."""

    family: Family
    image_size: int
    patch_size: int
    encoder: Stack
    text: Stack
    pixels: Stack
    text_length: int
    vocabulary: int
    mask_ratio: float
    qkv_bias: bool
    init_seed: int

    @property
    def grid(self) -> int:
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.grid**2

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2

    @property
    def kept_patches(self) -> int:
        # 10 * (1 - 0.9) is 0.99999… in floating point; the small term keeps such products whole.
        return int(self.patches * (1.0 - self.mask_ratio) + 1e-9)


class ModelSettings(BaseModel):
    """The `model` section of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Family
    size: Size = "custom"
    image_size: int = Field(default=224, gt=0)
    patch_size: int = Field(default=16, gt=0)
    width: int | None = Field(default=None, gt=0)
    depth: int | None = Field(default=None, gt=0)
    heads: int | None = Field(default=None, gt=0)
    decoder_width: int | None = Field(default=None, gt=0)
    decoder_depth: int | None = Field(default=None, gt=0)
    decoder_heads: int | None = Field(default=None, gt=0)
    mae_decoder_width: int | None = Field(default=None, gt=0)
    mae_decoder_depth: int | None = Field(default=None, gt=0)
    mae_decoder_heads: int | None = Field(default=None, gt=0)
    text_length: int = Field(default=40, ge=2)
    vocabulary: int = Field(default=32768, ge=4)
    mask_ratio: float = Field(default=0.75, ge=0.0, lt=1.0)
    qkv_bias: bool | None = Field(
        default=None,
        description="biases on the encoder's fused query-key-value projection; the published MAE has them, "
        "the published captioner has not, and both phases of one recipe must agree",
    )
    init_seed: int = Field(default=0, ge=0, description="public: decides the initial weights, nothing else")

    @model_validator(mode="before")
    @classmethod
    def _published_patch_size(cls, given: Any) -> Any:
        # Huge is Huge/14 in the published tables; an explicit patch_size still wins.
        if isinstance(given, dict) and given.get("size") == "huge" and "patch_size" not in given:
            return {**given, "patch_size": TABLES["mae"]["huge"].patch_size}
        return given

    def resolved(self) -> Shape:
        """Fill every number from the size table and the overrides, then check that they fit together."""
        preset = TABLES[self.family].get(self.size)
        encoder = _stack("", preset.encoder if preset else None, self.width, self.depth, self.heads)
        # A custom model, or one with its width overridden, needs only its encoder spelled out: the text
        # decoder follows the encoder's width (as in every published size but Large), and depths stay.
        text = preset.text if preset else Stack(encoder.width, 6, encoder.heads)
        pixels = preset.pixels if preset else Stack(512, 4, 16)
        if self.width is not None and self.decoder_width is None:
            text = replace(text, width=encoder.width, heads=encoder.heads)
        shape = Shape(
            family=self.family,
            image_size=self.image_size,
            patch_size=self.patch_size,
            encoder=encoder,
            text=_stack("decoder_", text, self.decoder_width, self.decoder_depth, self.decoder_heads),
            pixels=_stack(
                "mae_decoder_", pixels, self.mae_decoder_width, self.mae_decoder_depth, self.mae_decoder_heads
            ),
            text_length=self.text_length,
            vocabulary=self.vocabulary,
            mask_ratio=self.mask_ratio,
            qkv_bias=(self.family == "mae") if self.qkv_bias is None else self.qkv_bias,
            init_seed=self.init_seed,
        )
        if shape.image_size % shape.patch_size:
            below = shape.image_size - shape.image_size % shape.patch_size
            raise SettingsError(
                f"model.image_size {shape.image_size} does not divide by model.patch_size "
                f"{shape.patch_size}; "
                f"set image_size to {below or shape.patch_size} or {below + shape.patch_size}."
            )
        return shape


def _stack(prefix: str, base: Stack | None, width: int | None, depth: int | None, heads: int | None) -> Stack:
    """One layer stack from its preset and overrides; `prefix` is that of the setting names."""
    named = {"width": width, "depth": depth, "heads": heads}
    missing = [name for name, value in named.items() if value is None] if base is None else []
    if missing:
        fields = ", ".join(f"model.{prefix}{name}" for name in missing)
        raise SettingsError(f'model.size "custom" needs {fields} as well; give them or name a published size.')
    filled = base or Stack(0, 0, 0)
    stack = Stack(width or filled.width, depth or filled.depth, heads or filled.heads)
    if stack.width % stack.heads:
        near = [h for h in range(1, stack.width + 1) if stack.width % h == 0]
        best = min(near, key=lambda h: abs(h - stack.heads))
        raise SettingsError(
            f"model.{prefix}width {stack.width} is not a multiple of model.{prefix}heads {stack.heads}; "
            f"set {prefix}heads to {best}, for example."
        )
    if stack.width % 4:
        raise SettingsError(
            f"model.{prefix}width {stack.width} is not a multiple of 4, which the sin-cos position table "
            f"needs; set {prefix}width to {stack.width + 4 - stack.width % 4}."
        )
    return stack
