"""The model section of a config, and the complete, checked shape that the builders use.

There are two types: `ModelSettings` is what a person writes (a size name and a few overrides), `Shape` is what the
code needs (every number present, every divisibility checked). Nothing else in the package reads defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from murmuration.model.named import (
    LIBRARIES,
    Library,
    Named,
    NamedError,
    completed,
    patch_of,
    reads_texts,
    require_whole,
    sees_and_writes,
)
from murmuration.model.sizes import RESNETS, TABLES, Activation, Family, Preset, ResNet, Size, Stack

Loss = Literal["softmax", "sigmoid"]
Positions = Literal["sincos", "learned"]
Pooling = Literal["class", "mean"]
# Sigmoid losses start where each of a thousand classes is unlikely; softmax losses are invariant to a common offset.
HEAD_BIAS = {"softmax": 0.0, "sigmoid": -10.0}
# Far above every known model: a typing error is reported at once instead of starting an endless construction.
MOST_PIXELS, MOST_WIDTH, MOST_BLOCKS, MOST_WORDS = 1 << 14, 1 << 17, 1 << 10, 1 << 24

OF_LANGUAGE_MODELS = {"family", "name", "model_args", "text_length", "vocabulary", "init_seed"}


class SettingsError(ValueError):
    """The model settings cannot be built; the message is one sentence that names the fix."""


@dataclass(frozen=True)
class Head:
    """The linear classifier on pooled features: weights N(0, scale²/inputs), one constant in all biases."""

    classes: int
    loss: Loss
    scale: float
    bias: float
    weights: tuple[float, ...] | None = None
    """By which losses are multiplied, for each class."""


@dataclass(frozen=True)
class Shape:
    """A complete, consistent description of one model (of all objectives on one encoder).

    `resnet` and `named` are None for our own transformers; if one is given, only the width of `encoder`, that of the
    features, has a meaning.
    """

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
    decoder_bias: bool
    decoder_activation: Activation
    positions: Positions
    pooling: Pooling
    head: Head
    resnet: ResNet | None
    drop_path: float
    dropout: float
    init_seed: int
    named: Named | None = None

    @property
    def drops(self) -> bool:
        """Whether a model in training mode drops units or paths, for which it needs a key with each record."""
        return self.drop_path > 0 or self.dropout > 0

    @property
    def reads_texts(self) -> bool:
        return self.family == "gpt2" or (
            self.family == "hf" and self.named is not None and reads_texts(self.named.arguments)
        )

    @property
    def sees_and_writes(self) -> bool:
        """Whether it is an image-text model of transformers."""
        return self.family == "hf" and self.named is not None and sees_and_writes(self.named.arguments)

    @property
    def words_of_library(self) -> bool:
        """Whether its texts are read by the tokenizer of a folder of transformers."""
        return self.named is not None and (self.reads_texts or self.sees_and_writes)

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
        # 10 * (1 - 0.9) is 0.99999… in floating point; the small term keeps such products whole numbers.
        return int(self.patches * (1.0 - self.mask_ratio) + 1e-9)


def _as_tuple(given: Any) -> Any:
    """A list as a tuple: strict JSON validation takes no list for a tuple once a "before" validator has run."""
    return tuple(given) if isinstance(given, list) else given


def _as_weights(given: Any) -> Any:
    if isinstance(given, str):
        raise ValueError(
            f"is a list of public numbers, one for each class, not {given!r:.40}: how many private records a class has "
            "is private, and nothing is charged for counting them"
        )
    return _as_tuple(given)


Weight = Annotated[float, Field(ge=0, le=1e6)]
Deviation = Annotated[float, Field(gt=0)]
Channels = Annotated[tuple[float, float, float], BeforeValidator(_as_tuple)]


class PixelSettings(BaseModel):
    """Statistics of red, green and blue, where 0 is black and 1 is full colour."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mean: Channels = Field(description="Subtracted from pixels.")
    std: Annotated[tuple[Deviation, Deviation, Deviation], BeforeValidator(_as_tuple)] = Field(
        description="Then divides them."
    )


NamedPixels = Literal["imagenet", "half"]
NAMED_PIXELS: tuple[NamedPixels, ...] = ("imagenet", "half")


def read_pixels(text: str) -> NamedPixels | PixelSettings:
    """What --pixels says."""
    for name in NAMED_PIXELS:
        if name == text:
            return name
    try:
        return PixelSettings.model_validate_json(text)
    except ValidationError:
        raise SettingsError(
            f'--pixels {text}: write imagenet, half, or {{"mean": [r, g, b], "std": [r, g, b]}} with deviations above 0'
        ) from None


class ModelSettings(BaseModel):
    """The `model` section of a config. Widths, depths and heads that are null come with `size`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Family = Field(description="timm, hf: the encoder `name`; hf also a causal language or image-text model.")
    name: str | None = Field(
        default=None,
        description="timm's name, such as `vit_small_patch14_dinov2.lvd142m`, or the folder of a config.json.",
    )
    model_args: dict[str, Any] | None = Field(
        default=None,
        description="Arguments of timm's constructor, or keys of config.json.",
    )
    size: Size = Field(default="custom", description="A published size; custom: the numbers below.")
    pixels: NamedPixels | PixelSettings | None = Field(
        default=None,
        description="Normalisation. half: 0.5 and 0.5; null: the initial weights', else imagenet.",
    )
    image_size: int = Field(
        default=224,
        gt=0,
        le=MOST_PIXELS,
        description="Side of the image in pixels; timm, hf: the named model's.",
    )
    patch_size: int = Field(
        default=16,
        gt=0,
        le=MOST_PIXELS,
        description="Side of a patch in pixels; huge: 14.",
    )
    width: int | None = Field(
        default=None,
        gt=0,
        le=MOST_WIDTH,
        description="Of the encoder, or a ResNet's stem.",
    )
    depth: int | None = Field(default=None, gt=0, le=MOST_BLOCKS, description="Encoder blocks.")
    heads: int | None = Field(default=None, gt=0, le=MOST_WIDTH, description="Encoder attention heads.")
    decoder_width: int | None = Field(default=None, gt=0, le=MOST_WIDTH, description="Of the text decoder.")
    decoder_depth: int | None = Field(default=None, gt=0, le=MOST_BLOCKS, description="Text decoder blocks.")
    decoder_heads: int | None = Field(default=None, gt=0, le=MOST_WIDTH, description="Text decoder attention heads.")
    mae_decoder_width: int | None = Field(default=None, gt=0, le=MOST_WIDTH, description="Of the pixel decoder.")
    mae_decoder_depth: int | None = Field(default=None, gt=0, le=MOST_BLOCKS, description="Pixel decoder blocks.")
    mae_decoder_heads: int | None = Field(
        default=None, gt=0, le=MOST_WIDTH, description="Pixel decoder attention heads."
    )
    text_length: int = Field(default=40, ge=2, le=MOST_WIDTH, description="Tokens of a caption or text.")
    vocabulary: int = Field(default=32768, ge=4, le=MOST_WORDS, description="Tokens in the vocabulary.")
    mask_ratio: float = Field(default=0.75, ge=0.0, lt=1.0, description="Share of patches masked (MAE).")
    qkv_bias: bool | None = Field(
        default=None,
        description="Encoder's query-key-value biases; null: only in the MAE, as published.",
    )
    decoder_bias: bool | None = Field(default=None, description="Biases in the text decoder; null: as published.")
    decoder_activation: Activation | None = Field(
        default=None, description="Activation of the text decoder; null: as published."
    )
    positions: Positions | None = Field(
        default=None,
        description="sincos: fixed tables; null: learned for classifiers, else sincos.",
    )
    pooling: Pooling | None = Field(
        default=None,
        description="Features: class token or mean patch; null: class for classifiers, else mean.",
    )
    classes: int = Field(default=1000, gt=0, le=MOST_WORDS, description="Number of classes.")
    classify_loss: Loss = Field(default="softmax", description="sigmoid: summed over classes.")
    head_scale: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Head weights start as N(0, scale²/inputs).",
    )
    head_bias: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Initial bias; null: -10 for sigmoid, 0 for softmax.",
    )
    class_weights: Annotated[tuple[Weight, ...] | None, BeforeValidator(_as_weights)] = Field(
        default=None,
        description="Public numbers, one per class, that multiply losses before clipping.",
    )
    stages: Annotated[tuple[int, ...] | None, BeforeValidator(_as_tuple)] = Field(
        default=None, min_length=1, max_length=4, description="Blocks per stage; makes the classifier a ResNet."
    )
    drop_path: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Stochastic depth: rises from 0 to this at the encoder's last block.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Rate after attention and in MLPs.",
    )
    init_seed: int = Field(default=0, ge=0, description="Public seed of the initial weights.")

    @model_validator(mode="before")
    @classmethod
    def _what_names_stand_for(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("family") in LIBRARIES:
            return completed(given)
        # Huge is Huge/14 in the published tables; an explicit patch_size still wins.
        if isinstance(given, dict) and given.get("size") == "huge" and "patch_size" not in given:
            return {**given, "patch_size": TABLES["mae"]["huge"].patch_size}
        return given

    @model_validator(mode="after")
    def _one_weight_for_each_class(self) -> ModelSettings:
        weights = self.class_weights
        if weights is not None and (len(weights) != self.classes or not any(weights)):
            raise ValueError(
                f"class_weights has {len(weights)} numbers, and model.classes is {self.classes}; give one for each "
                "class, not all of them 0"
            )
        return self

    @property
    def reads_texts(self) -> bool:
        return self.family == "gpt2" or (self.family == "hf" and reads_texts(self.model_args or {}))

    @property
    def sees_and_writes(self) -> bool:
        return self.family == "hf" and sees_and_writes(self.model_args or {})

    @property
    def words_of_library(self) -> bool:
        return self.family == "hf" and (self.reads_texts or self.sees_and_writes)

    @property
    def title(self) -> str:
        """Family and size in a few words, without the path of a folder."""
        kind = (self.model_args or {}).get("model_type") if self.family == "hf" else self.name or self.size
        return f"{self.family}, {kind}"

    def note(self) -> dict[str, Any]:
        """All that is needed to build the model elsewhere, without the path of a folder on this machine."""
        told = self.model_dump(mode="json")
        return told | {"name": Path(self.name).name} if self.family == "hf" and self.name else told

    def resolved(self) -> Shape:
        """Fill every number from the size table and the overrides, then check that they fit together."""
        if self.family in LIBRARIES:
            if self.reads_texts:
                return self._named_language_model()
            return self._named_image_text_model() if self.sees_and_writes else self._named(self.family)
        if self.family == "gpt2":
            if self.size not in (*TABLES["gpt2"], "custom"):
                raise SettingsError(f'family "gpt2" has no model.size "{self.size}"; choose small, large or custom.')
            self._has_only(
                {"family", "size", "width", "depth", "heads", "text_length", "vocabulary", "init_seed"},
                "since it reads text alone",
            )
            shape = self._shape(TABLES["gpt2"].get(self.size), resnet=None)
            # What stands for a picture in its records is one black pixel, which the model does not look at.
            return replace(shape, image_size=1, patch_size=1, text=shape.encoder)
        if self.name is not None or self.model_args is not None:
            key = "name" if self.name is not None else "model_args"
            raise SettingsError(f'family "{self.family}" has no model.{key}; omit it, or set model.family to "timm".')
        if self.size in RESNETS or self.stages is not None:
            return self._shape(None, resnet=self._resnet())
        table = TABLES[self.family]
        if self.size != "custom" and self.size not in table:
            known = ", ".join([*table, *(RESNETS if self.family == "classifier" else ()), "custom"])
            raise SettingsError(f'family "{self.family}" has no model.size "{self.size}"; choose {known}.')
        shape = self._shape(table.get(self.size), resnet=None)
        # Classifiers with learned positions leave a remainder out, as H/14 does at 256 pixels.
        whole = shape.positions != "learned"
        if shape.image_size < shape.patch_size or (whole and shape.image_size % shape.patch_size):
            below = shape.image_size - shape.image_size % shape.patch_size
            raise SettingsError(
                f"model.image_size {shape.image_size} is not divisible by model.patch_size "
                f"{shape.patch_size}; "
                f"set image_size to {below or shape.patch_size} or {below + shape.patch_size}."
            )
        if shape.drop_path and shape.encoder.depth == 1:
            raise SettingsError(
                "model.drop_path grows from 0 at the first block, and an encoder of one block would drop nothing; set "
                "it to 0 or model.depth to 2."
            )
        return shape

    def _shape(self, preset: Preset | None, resnet: ResNet | None) -> Shape:
        if resnet is not None:
            encoder = Stack(resnet.channels[-1], sum(resnet.stages), 1)
        else:
            encoder = _stack("", preset.encoder if preset else None, self.width, self.depth, self.heads)
        # A custom model, or one with its width overridden, needs only its encoder spelled out: the text
        # decoder follows the encoder's width (as in every published size but Large), and depths stay.
        text = preset.text if preset else Stack(encoder.width, 6, encoder.heads)
        pixels = preset.pixels if preset else Stack(512, 4, 16)
        if self.width is not None and self.decoder_width is None:
            text = replace(text, width=encoder.width, heads=encoder.heads)
        plain = preset is not None and preset.plain_decoder and self.family == "captioner"
        classifies = self.family == "classifier"
        pixel_names = (self.mae_decoder_width, self.mae_decoder_depth, self.mae_decoder_heads)
        return Shape(
            family=self.family,
            image_size=self.image_size,
            patch_size=self.patch_size,
            encoder=encoder,
            text=_stack("decoder_", text, self.decoder_width, self.decoder_depth, self.decoder_heads),
            pixels=_stack("mae_decoder_", pixels, *pixel_names),
            text_length=self.text_length,
            vocabulary=self.vocabulary,
            mask_ratio=self.mask_ratio,
            qkv_bias=(self.family != "captioner" or plain) if self.qkv_bias is None else self.qkv_bias,
            decoder_bias=plain if self.decoder_bias is None else self.decoder_bias,
            decoder_activation=self.decoder_activation or ("relu" if plain else "gelu"),
            positions=self.positions or ("learned" if classifies else "sincos"),
            pooling=self.pooling or ("class" if classifies else "mean"),
            head=Head(
                self.classes,
                self.classify_loss,
                self.head_scale,
                HEAD_BIAS[self.classify_loss] if self.head_bias is None else self.head_bias,
                self.class_weights,
            ),
            resnet=resnet,
            drop_path=self.drop_path,
            dropout=self.dropout,
            init_seed=self.init_seed,
        )

    def _named(self, library: Library) -> Shape:
        odd = {"width": self.width, "depth": self.depth, "heads": self.heads, "stages": self.stages}
        odd |= {"positions": self.positions, "pooling": self.pooling, "qkv_bias": self.qkv_bias}
        odd |= {"drop_path": self.drop_path or None, "dropout": self.dropout or None}
        odd |= {"size": None if self.size == "custom" else self.size}
        if given := [name for name, value in odd.items() if value is not None]:
            raise SettingsError(
                f'model.{given[0]} is for our own encoders; omit it, or set what family "{library}" calls it in '
                "model.model_args."
            )
        # Only here: it imports the library.
        from murmuration.model.body import facts_of

        named = Named.of(library, self.name or "", self.model_args or {})
        try:
            width = facts_of(named, self.image_size).width
        except NamedError as error:
            raise SettingsError(str(error)) from None
        near = 64 * math.ceil(width / 64)
        preset = Preset(Stack(near, 1, 1), Stack(near, 6, near // 64), Stack(512, 4, 16))
        return replace(self._shape(preset, resnet=None), encoder=Stack(width, 1, 1), named=named)

    def require_whole_patches(self, built: bool = True) -> None:
        """Refuses pixels at the edge that no patch of an encoder by name holds, unless its library states this size.
        Without `built`, asks only what Hugging Face's config.json says, which takes no PyTorch."""
        if self.family not in LIBRARIES or self.reads_texts or self.sees_and_writes:
            return
        if built:
            from murmuration.model.body import facts_of

            named = self.resolved().named
            assert named is not None
            patch = facts_of(named, self.image_size).patch
        else:
            patch = patch_of("hf", self.name or "", self.model_args or {}) if self.family == "hf" else 1
        given = {"family": self.family, "name": self.name, "model_args": self.model_args}
        if self.image_size != completed(given)["image_size"]:
            try:
                require_whole(self.image_size, patch)
            except NamedError as error:
                raise SettingsError(str(error)) from None

    def stored_statistics(self) -> str | None:
        """The first layer of an encoder by name that normalises by statistics which came with its weights."""
        from murmuration.model.body import facts_of

        named = self.resolved().named
        return None if named is None or self.sees_and_writes else facts_of(named, self.image_size).statistics

    def _named_language_model(self) -> Shape:
        # Only here: it imports the library.
        from murmuration.model.language_body import width_of

        self._has_only(OF_LANGUAGE_MODELS, "since it reads text alone")
        named = Named.of("hf", self.name or "", self.model_args or {})
        try:
            width = width_of(named, self.text_length)
        except NamedError as error:
            raise SettingsError(str(error)) from None
        return replace(self._of_words(named, width, named.arguments["vocab_size"]), image_size=1, patch_size=1)

    def _named_image_text_model(self) -> Shape:
        # Only here: it imports the library.
        from murmuration.model.image_text_body import facts_of

        self._has_only(OF_LANGUAGE_MODELS | {"image_size", "pixels"}, "for a model of images and texts")
        named = Named.of("hf", self.name or "", self.model_args or {})
        try:
            width = facts_of(named, self.image_size, self.text_length).width
        except NamedError as error:
            raise SettingsError(str(error)) from None
        return self._of_words(named, width, named.arguments["text_config"]["vocab_size"])

    def _of_words(self, named: Named, width: int, words: int) -> Shape:
        if self.vocabulary != words:
            raise SettingsError(f"model.vocabulary is {self.vocabulary}, but {named} has {words} tokens; leave it out.")
        stack, other = Stack(width, 1, 1), Stack(512, 4, 16)
        shape = self._shape(Preset(Stack(64, 1, 1), Stack(64, 1, 1), other), resnet=None)
        return replace(shape, encoder=stack, text=stack, named=named)

    def _has_only(self, known: set[str], why: str) -> None:
        fields = type(self).model_fields
        if given := [name for name in fields if name not in known and getattr(self, name) != fields[name].default]:
            raise SettingsError(f'family "{self.family}" has no model.{given[0]}, {why}; omit it.')

    def _resnet(self) -> ResNet:
        preset = RESNETS.get(self.size)
        if self.family != "classifier":
            raise SettingsError('a ResNet can only be a classifier; set model.family to "classifier" or omit stages.')
        odd = {"depth": self.depth, "heads": self.heads, "positions": self.positions, "pooling": self.pooling}
        odd |= {"drop_path": self.drop_path or None, "dropout": self.dropout or None}
        if given := [name for name, value in odd.items() if value is not None]:
            raise SettingsError(
                f"a ResNet has no model.{given[0]}; omit it, and set the size by model.width and model.stages."
            )
        if preset is None and (self.width is None or self.stages is None):
            raise SettingsError(
                'model.size "custom" needs model.width with model.stages; give it or name a size such as r50x1.'
            )
        width, stages = self.width or (preset.width if preset else 0), self.stages or (preset.stages if preset else ())
        if width % 8 or min(stages) < 1:
            raise SettingsError(
                f"a ResNet's model.width must be a multiple of 8 and each of model.stages at least 1, not {width} and "
                f"{list(stages)}; set width to {max(8, width - width % 8)}, for example."
            )
        kind = ResNet if preset is None else type(preset)
        return kind(width, stages)


def _stack(prefix: str, base: Stack | None, width: int | None, depth: int | None, heads: int | None) -> Stack:
    """One layer stack from its preset and overrides; `prefix` is the prefix of the setting names."""
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
