"""Renames the weights of timm's and Hugging Face's vision transformers, and of timm's BiT, to our modules' names.

Only models that compute the same here are accepted: a variant with other layers (layer scale, register tokens, a norm
after pooling) is refused by the name of its first unknown tensor. Notes report what the weights cannot show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from murmuration.model.fill import WeightEntries, WeightEntry
from murmuration.model.load_report import LoadReport, WeightsError

LAYER = r"(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)"
TIMM = re.compile(
    rf"cls_token|pos_embed|patch_embed\.proj\.(weight|bias)|blocks\.\d+\.{LAYER}|(norm|head)\.(weight|bias)"
)
BIT = re.compile(
    r"stem\.conv\.weight|stages\.\d+\.blocks\.\d+\.(conv[123]\.weight|norm[123]\.(weight|bias)|downsample\.conv\.weight)"
    r"|norm\.(weight|bias)|head\.fc\.(weight|bias)"
)
HF_NAMES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
}
# For each layer the name in files, then the name in memory in later versions.
HF_LAYERS = {
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "mlp.fc1": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.fc2": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
HF_PROJECTION = re.compile(r"attention\.(?:attention\.(query|key|value)|([qkv])_proj)")
HF_UNUSED = {
    "pooler.": "a layer on the class token that image classification does not use",
    "decoder.": "Hugging Face's pixel decoder is not read",
    "embeddings.mask_token": "stands for masked patches in another kind of pre-training",
}


def timm_pieces(state: Mapping[str, Tensor], account: LoadReport) -> WeightEntries:
    for key in state:
        if not TIMM.fullmatch(key):
            raise WeightsError(
                f"{account.source} has {key}, a layer that our encoder does not compute; choose weights of a plain "
                f"vision transformer with a class token."
            )
    return {key: WeightEntry(tensor, (key,)) for key, tensor in state.items()}


def bit_pieces(state: Mapping[str, Tensor], account: LoadReport) -> WeightEntries:
    pieces: WeightEntries = {}
    for key, tensor in state.items():
        if not BIT.fullmatch(key):
            raise WeightsError(
                f"{account.source} has {key}, a layer that BiT lacks; choose weights of timm's resnetv2_…_bit models."
            )
        if key == "head.fc.weight":
            pieces["head.weight"] = WeightEntry(tensor.flatten(1), (key,), "a convolution of one pixel")
        elif key == "head.fc.bias":
            pieces["head.bias"] = WeightEntry(tensor, (key,))
        else:
            pieces[f"body.{key}"] = WeightEntry(tensor, (key,))
    return pieces


def hf_pieces(state: Mapping[str, Tensor], account: LoadReport) -> WeightEntries:
    account.notes.append(
        "LayerNorm's epsilon is 1e-6 here and 1e-12 in most of Hugging Face's; outputs differ by about 1e-6"
    )
    pieces: WeightEntries = {}
    apart: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for key, tensor in state.items():
        plain = key.removeprefix("vit.")
        if why := next((why for prefix, why in HF_UNUSED.items() if plain.startswith(prefix)), None):
            account.add(key, "ignored", tensor, why)
            continue
        layer = re.fullmatch(r"(?:encoder\.layer|layers)\.(\d+)\.(.+?)\.(weight|bias)", plain)
        if layer is None:
            name, end = plain, ""
            if plain not in HF_NAMES:
                name, _, end = plain.rpartition(".")
            if name not in HF_NAMES:
                raise _strange(account, key)
            pieces[f"{HF_NAMES[name]}.{end}" if end else HF_NAMES[name]] = WeightEntry(tensor, (key,))
            continue
        number, name, end = layer.groups()
        if found := HF_PROJECTION.fullmatch(name):
            part = (found.group(1) or found.group(2))[0]
            apart.setdefault(f"blocks.{number}.attn.qkv.{end}", {})[part] = (key, tensor)
        elif name in HF_LAYERS:
            pieces[f"blocks.{number}.{HF_LAYERS[name]}.{end}"] = WeightEntry(tensor, (key,))
        else:
            raise _strange(account, key)
    for name, parts in apart.items():
        if set(parts) != set("qkv") or len({tensor.shape for _, tensor in parts.values()}) != 1:
            have = next(iter(parts.values()))[0]
            raise WeightsError(
                f"{account.source} has {have} without its two equally sized partners; query, key and value are needed."
            )
        keys, tensors = zip(*(parts[part] for part in "qkv"), strict=True)
        pieces[name] = WeightEntry(torch.cat(tensors), keys, "query, key and value as one projection")
    return pieces


def _strange(account: LoadReport, key: str) -> WeightsError:
    return WeightsError(
        f"{account.source} has {key}, a layer that our encoder does not compute; choose weights of a plain "
        f"ViTModel, ViTForImageClassification or ViTMAEModel."
    )
