"""The config.json of timm and of Hugging Face for our models, and what Hugging Face reads about pixels.

Every size is spelt out, so that for a transformer the name of timm's architecture decides nothing but the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from murmuration.model.build import Model
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.load_report import WeightsError
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.settings import Head, Shape

EPSILON = 1e-6
"""Epsilon of our LayerNorm; Hugging Face's default is another one."""
BICUBIC = 3
# Widths of timm's plain vision transformers; any other one is called base.
TIMM_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
TIMM_BIT: dict[tuple[int, tuple[int, ...]], str] = {
    (64, (3, 4, 6, 3)): "resnetv2_50x1_bit", (192, (3, 4, 6, 3)): "resnetv2_50x3_bit",
    (64, (3, 4, 23, 3)): "resnetv2_101x1_bit", (192, (3, 4, 23, 3)): "resnetv2_101x3_bit",
    (128, (3, 8, 36, 3)): "resnetv2_152x2_bit", (256, (3, 8, 36, 3)): "resnetv2_152x4_bit",
}  # fmt: skip
TIMM_PATCHES = {"tiny": (16,), "small": (32, 16), "base": (32, 16, 8), "large": (32, 16, 14), "huge": (14,)}


class Preprocessing(NamedTuple):
    """What is done to a picture: its shorter side is resized to `resize`, the middle `crop` are cut out, and colours
    from 0 to 1 are normalised. For a model of another side than `crop`, both are scaled alike."""

    resize: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def shorter_side(self, size: int) -> int:
        """To which a picture is resized for a model of this side."""
        return size * self.resize // self.crop


def timm_architecture(shape: Shape) -> str:
    if shape.resnet is not None:
        name = TIMM_BIT.get((shape.resnet.width, shape.resnet.stages))
        if name is None or shape.resnet.small_images:
            raise WeightsError(
                f"timm's BiT come in published sizes ({', '.join(TIMM_BIT.values())}), and this ResNet is of another "
                "one; export it as safetensors."
            )
        return name
    size = TIMM_SIZES.get(shape.encoder.width, "base")
    patches = TIMM_PATCHES[size]
    return f"vit_{size}_patch{shape.patch_size if shape.patch_size in patches else patches[-1]}_224"


def timm_arguments(model: Model) -> dict[str, Any]:
    """For `timm.create_model`, beside the architecture; a model that does not classify gives its features."""
    shape = model.shape
    classes = shape.head.classes if isinstance(model, Classifier) else 0
    if shape.resnet is not None:
        return {"num_classes": classes}
    return {
        "num_classes": classes, "img_size": shape.image_size, "patch_size": shape.patch_size,
        "embed_dim": shape.encoder.width, "depth": shape.encoder.depth, "num_heads": shape.encoder.heads,
        "qkv_bias": shape.qkv_bias, "global_pool": "token" if shape.pooling == "class" else "avg", "fc_norm": False,
    }  # fmt: skip


def timm_config(model: Model, seen: Preprocessing, class_names: Sequence[str]) -> dict[str, Any]:
    """As `timm.models.push_to_hf_hub` writes it; `create_model("local-dir:…")` reads it."""
    arguments = timm_arguments(model)
    classes = arguments.pop("num_classes")
    resnet = model.shape.resnet is not None
    told = {
        "input_size": [3, model.shape.image_size, model.shape.image_size], "fixed_input_size": not resnet,
        "interpolation": "bicubic", "crop_pct": seen.crop / seen.resize, "crop_mode": "center",
        "mean": list(seen.mean), "std": list(seen.std), "num_classes": classes,
        "pool_size": None, "first_conv": "stem.conv" if resnet else "patch_embed.proj",
        "classifier": "head.fc" if resnet else "head",
    }  # fmt: skip
    pool = "avg" if resnet else arguments["global_pool"]
    return {
        "architecture": timm_architecture(model.shape), "num_classes": classes,
        "num_features": model.shape.encoder.width, "global_pool": pool, "model_args": arguments,
        "pretrained_cfg": told, **({"label_names": list(class_names)} if class_names else {}),
    }  # fmt: skip


def hugging_face_config(model: Model, class_names: Sequence[str]) -> dict[str, Any]:
    shape = model.shape
    told: dict[str, Any] = {
        "model_type": "vit", "hidden_size": shape.encoder.width, "num_hidden_layers": shape.encoder.depth,
        "num_attention_heads": shape.encoder.heads, "intermediate_size": 4 * shape.encoder.width,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": EPSILON, "image_size": shape.image_size, "patch_size": shape.patch_size, "num_channels": 3,
        "qkv_bias": shape.qkv_bias, "dtype": "float32",
    }  # fmt: skip
    if isinstance(model, MaskedAutoencoder):
        return told | _autoencoder(shape)
    if isinstance(model, Captioner):
        return told | {"architectures": ["ViTModel"], "pooler_act": "linear"}
    return told | {"architectures": ["ViTForImageClassification"], **hugging_face_classes(shape.head, class_names)}


def hugging_face_classes(head: Head, class_names: Sequence[str]) -> dict[str, Any]:
    names = list(class_names) or [f"LABEL_{number}" for number in range(head.classes)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "single_label_classification" if head.loss == "softmax" else "multi_label_classification",
    }


def _autoencoder(shape: Shape) -> dict[str, Any]:
    # transformers keeps int(patches · (1 - ratio)), which rounding can make one patch fewer than ours.
    exact = int(shape.patches * (1 - shape.mask_ratio)) == shape.kept_patches
    return {
        "model_type": "vit_mae", "architectures": ["ViTMAEForPreTraining"], "qkv_bias": True,
        "decoder_hidden_size": shape.pixels.width, "decoder_num_hidden_layers": shape.pixels.depth,
        "decoder_num_attention_heads": shape.pixels.heads, "decoder_intermediate_size": 4 * shape.pixels.width,
        "mask_ratio": shape.mask_ratio if exact else 1 - (shape.kept_patches + 0.5) / shape.patches,
        "norm_pix_loss": False,
    }  # fmt: skip


def hugging_face_preprocessor(size: int, seen: Preprocessing) -> dict[str, Any]:
    """CLIP's processor is the one that resizes the shorter side and crops, whatever model follows."""
    return {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True,
        "do_resize": True, "size": {"shortest_edge": seen.shorter_side(size)}, "resample": BICUBIC,
        "do_center_crop": True, "crop_size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(seen.mean), "image_std": list(seen.std),
    }  # fmt: skip
