"""The way back: a classifier's weights under the names of timm and of Hugging Face, for tools built on those.

Names are those that `save_pretrained` writes, which all versions of transformers read. A model that those packages
would compute differently is refused.
"""

from __future__ import annotations

import re

from torch import Tensor

from murmuration.model.classifier import Classifier
from murmuration.model.load_report import WeightsError
from murmuration.model.trainable import merged

HF_FILE_NAMES = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
HF_FILE_LAYERS = {
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
}


def to_timm(model: Classifier) -> dict[str, Tensor]:
    """For `vision_transformer.VisionTransformer` with a class token, or `resnetv2.ResNetV2`."""
    state = _state(model)
    if model.shape.resnet is None:
        return state
    found = {name.removeprefix("body."): tensor for name, tensor in state.items() if not name.startswith("head.")}
    return found | {"head.fc.weight": state["head.weight"][:, :, None, None], "head.fc.bias": state["head.bias"]}


def to_hugging_face(model: Classifier) -> dict[str, Tensor]:
    """For `ViTForImageClassification`; set its `layer_norm_eps` to 1e-6, as here."""
    if model.shape.resnet is not None:
        raise WeightsError("Hugging Face's vision transformer has no place for a ResNet; use to_timm.")
    found: dict[str, Tensor] = {}
    for name, tensor in _state(model).items():
        layer = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if layer is None:
            stem, dot, end = name.rpartition(".") if name not in HF_FILE_NAMES else (name, "", "")
            found[HF_FILE_NAMES[stem] + dot + end] = tensor
            continue
        number, part, end = layer.groups()
        begin = f"vit.encoder.layer.{number}."
        if part == "attn.qkv":
            for kind, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"{begin}attention.attention.{kind}.{end}"] = piece.clone()
        else:
            found[f"{begin}{HF_FILE_LAYERS[part]}.{end}"] = tensor
    return found


def _state(model: Classifier) -> dict[str, Tensor]:
    if model.shape.resnet is None and model.shape.pooling != "class":
        raise WeightsError(
            "timm and Hugging Face pool the class token, and this model the mean of the other tokens; export a model "
            'with model.pooling = "class".'
        )
    return dict(merged(model.state_dict()))
