"""Renames the weights of timm's and Hugging Face's vision transformers, and of timm's BiT, to our modules' names.

Only models that compute the same here are accepted: a variant with other layers (layer scale, register tokens, a norm
after pooling) is refused by the name of its first unknown tensor. Notes report what the weights cannot show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from murmuration.model.build import ENCODER_PREFIXES, TYPE_TOKEN, Model
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.fill import WeightEntries, WeightEntry, same_names
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.trainable import merged

HF_FILE_NAMES = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
HF_FILE_LAYERS = {
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
}
BLOCK = re.compile(r"(blocks|decoder_blocks)\.(\d+)\.(.+)\.(weight|bias)")
POSITIONS = "pos_embed"


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


# The way back: weights under the names of timm and of Hugging Face, for tools built on those.
#
# Names are those that `save_pretrained` writes, which all versions of transformers read. A model that those packages
# would compute differently is refused. Of a captioner and for timm of a masked autoencoder it is the encoder alone,
# since neither package has their decoders. `model/foreign_config.py` makes the config.json that belongs to the
# weights.


def timm_weights(model: Model) -> WeightEntries:
    """For `vision_transformer.VisionTransformer` with a class token, or `resnetv2.ResNetV2`."""
    if isinstance(model, Classifier) and model.shape.resnet is not None:
        entries: WeightEntries = {}
        for name, tensor in merged(model.state_dict()).items():
            theirs = name.replace("head.", "head.fc.") if name.startswith("head.") else name.removeprefix("body.")
            entries[theirs] = WeightEntry(tensor[:, :, None, None] if name == "head.weight" else tensor, (name,))
        return entries
    return _encoder(model)


def hugging_face_weights(model: Model) -> WeightEntries:
    """For `ViTForImageClassification`, `ViTMAEForPreTraining` or, of a captioner, `ViTModel`."""
    if model.shape.resnet is not None:
        raise WeightsError("Hugging Face's vision transformer has no place for a ResNet; use timm's form.")
    if isinstance(model, Captioner):
        return _hf_names(_encoder(model), "") | _class_token_pooler(model)
    if isinstance(model, MaskedAutoencoder):
        return _hf_names(_with_biases(same_names(merged(model.state_dict())), model), "vit.")
    if model.shape.pooling != "class":
        raise WeightsError(
            "Hugging Face's classifier reads the class token, and this model the mean of the other tokens; use timm's "
            "form."
        )
    return _hf_names(same_names(merged(model.state_dict())), "vit.")


def _encoder(model: Model) -> WeightEntries:
    """The tensors of the encoder, and of a classifier's head, which have the same names here and in timm."""
    state = merged(model.state_dict())
    kept = ENCODER_PREFIXES if not isinstance(model, Classifier) else (*ENCODER_PREFIXES, "head.")
    found = same_names({name: tensor for name, tensor in state.items() if name.startswith(kept)})
    if TYPE_TOKEN in state:
        # It is added to all tokens, and so are positions.
        found[POSITIONS] = WeightEntry(state[POSITIONS] + state[TYPE_TOKEN], (POSITIONS, TYPE_TOKEN), "their sum")
    return found


def _with_biases(pieces: WeightEntries, model: MaskedAutoencoder) -> WeightEntries:
    """With zeros where the encoder has no query-key-value biases: transformers gives both halves of a masked
    autoencoder biases, or neither, and our decoder has them."""
    made = dict(pieces)
    for number in range(model.shape.encoder.depth):
        name = f"blocks.{number}.attn.qkv.bias"
        if name not in made:
            made[name] = WeightEntry(torch.zeros(3 * model.shape.encoder.width), (), "zeros")
    return made


def _class_token_pooler(model: Captioner) -> WeightEntries:
    """`ViTModel` has a layer on the class token; drawn at random unless the file has it. With this one (and a linear
    activation in the config), its output is the class token."""
    width = model.shape.encoder.width
    return {
        "pooler.dense.weight": WeightEntry(torch.eye(width), (), "the identity"),
        "pooler.dense.bias": WeightEntry(torch.zeros(width), (), "zeros"),
    }


def _hf_names(pieces: Mapping[str, WeightEntry], prefix: str) -> WeightEntries:
    """`prefix` stands before the names of the encoder."""
    found: WeightEntries = {}
    for name, entry in pieces.items():
        block = BLOCK.fullmatch(name)
        if block is None:
            found[_hf_name(name, prefix)] = entry
            continue
        stack, number, part, end = block.groups()
        begin = f"{prefix}encoder.layer.{number}." if stack == "blocks" else f"decoder.decoder_layers.{number}."
        if part == "attn.qkv":
            for kind, piece in zip(("query", "key", "value"), entry.tensor.chunk(3), strict=True):
                found[f"{begin}attention.attention.{kind}.{end}"] = WeightEntry(piece.clone(), entry.keys)
        else:
            found[f"{begin}{HF_FILE_LAYERS[part]}.{end}"] = entry
    return found


def _hf_name(name: str, prefix: str) -> str:
    if name.startswith("head."):
        return name.replace("head", "classifier")
    if name == "mask_token" or name.startswith("decoder_"):
        return f"decoder.{name}"
    if name in HF_FILE_NAMES:
        return prefix + HF_FILE_NAMES[name]
    stem, _, end = name.rpartition(".")
    return f"{prefix}{HF_FILE_NAMES[stem]}.{end}"
