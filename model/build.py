"""Builds initialised models from settings, and copies an encoder from one model to another.

Initial weights are drawn per tensor: each draw is seeded by (init_seed, the tensor's name), so weights do
not depend on construction order, on the objective, on the device or on the world size, and the program's
global random state is never touched. The seed is public; it decides only where training starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, overload

import torch
from torch import Tensor, nn

from murmuration.model.body import Body
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier, TransformerClassifier
from murmuration.model.encoder import Encoder, PatchProjection
from murmuration.model.image_text import ImageTextModel
from murmuration.model.language_model import LanguageModel, NamedLanguageModel
from murmuration.model.load_report import WeightsError
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.named_models import NamedCaptioner, NamedClassifier
from murmuration.model.settings import ModelSettings, SettingsError, Shape

Objective = Literal["mae", "caption", "classify", "text"]
Model = Encoder | Classifier | LanguageModel
ENCODER_PREFIXES = ("cls_token", "pos_embed", "patch_embed.", "blocks.", "norm.", "body.", "transformer.")
TYPE_TOKEN = "encoder_image_type_embedding"  # in captioners: a vector added to all tokens of the encoder


Device = str | torch.device


@overload
def build(settings: ModelSettings | Shape, objective: Literal["mae"], device: Device = ...) -> MaskedAutoencoder: ...
@overload
def build(settings: ModelSettings | Shape, objective: Literal["caption"], device: Device = ...) -> Captioner: ...
@overload
def build(settings: ModelSettings | Shape, objective: Literal["classify"], device: Device = ...) -> Classifier: ...
@overload
def build(settings: ModelSettings | Shape, objective: Literal["text"], device: Device = ...) -> LanguageModel: ...
@overload
def build(settings: ModelSettings | Shape, objective: Objective, device: Device = ...) -> Model: ...
def build(settings: ModelSettings | Shape, objective: Objective, device: Device = "cpu") -> Model:
    """The model for `objective` on the shape's encoder, float32, initialised; "meta" allocates nothing.

    All parameters are trainable except those that the objective's published model keeps fixed; `model.trainable.select`
    narrows that.
    """
    shape = settings.resolved() if isinstance(settings, ModelSettings) else settings
    kind = _kind(shape, objective)
    place = torch.device(device)
    # Layer constructors draw weights from the global generator of their device. Built on the CPU, inside a
    # fork, they leave no trace there; the draws themselves are overwritten below.
    # The layers of other libraries keep what their constructors draw, so their generator is seeded.
    with torch.random.fork_rng(devices=[]), torch.device("meta" if place.type == "meta" else "cpu"):
        torch.manual_seed(_seed(shape.init_seed, "body"))
        model = kind(shape)
    if place.type == "meta":
        return model
    initialise(model, shape.init_seed)
    return model.to(place)


def _kind(shape: Shape, objective: str) -> Callable[[Shape], Model]:
    kinds: dict[str, Callable[[Shape], Model]] = {
        "mae": MaskedAutoencoder,
        "caption": Captioner,
        "classify": TransformerClassifier if shape.resnet is None else _resnet,
        "text": LanguageModel,
    }
    if shape.named is not None:
        named: dict[str, Callable[[Shape], Model]] = {
            "mae": _no_autoencoder, "caption": NamedCaptioner, "classify": NamedClassifier, "text": NamedLanguageModel,
        }  # fmt: skip
        if shape.sees_and_writes:
            named |= {"caption": ImageTextModel, "classify": _no_classifier}
        kinds = named
    if shape.reads_texts != (objective == "text"):
        raise SettingsError(
            f'model.family "{shape.family}" cannot be trained with objective "{objective}"; objective "text" and a '
            "language model belong together."
        )
    if objective not in kinds:
        raise ValueError(f'there is no objective "{objective}"; choose "mae", "caption", "classify" or "text".')
    if shape.named is None and objective != "classify" and (shape.resnet is not None or shape.positions == "learned"):
        body = "a ResNet" if shape.resnet is not None else "an encoder with learned positions"
        raise SettingsError(
            f'{body} cannot be trained with objective "{objective}"; train it with "classify", or give a transformer '
            f'model.positions = "sincos".'
        )
    return kinds[objective]


def _resnet(shape: Shape) -> Model:
    from murmuration.model.resnet import ResNetClassifier  # which imports timm, and no other model does

    return ResNetClassifier(shape)


def _no_autoencoder(shape: Shape) -> Model:
    raise SettingsError(
        f'{shape.named} cannot be trained with objective "mae", which leaves patches out before the first layer; use '
        'model.family = "mae", or train with "classify".'
    )


def _no_classifier(shape: Shape) -> Model:
    raise SettingsError(
        f'{shape.named} writes texts and cannot be trained with objective "classify"; use "caption", or name the '
        "folder of its encoder."
    )


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Xavier-uniform matrices (the patch filter counts as one), zero biases, N(0, 0.02²) tokens and embeddings.

    Convolutions are He-normal by fan-in (weight-standardised ones are invariant to the scale); a classifier's head
    starts as its settings say.
    """
    for path, module in _drawn_here(model):
        prefix = f"{path}." if path else ""
        if isinstance(module, (nn.Linear, PatchProjection)):
            flat = module.weight.flatten(1)
            bound = (6.0 / (flat.shape[0] + flat.shape[1])) ** 0.5
            draw = torch.rand(module.weight.shape, generator=_generator(seed, f"{prefix}weight"))
            module.weight.copy_(draw * (2.0 * bound) - bound)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Conv2d):
            normal_draw(module.weight, seed, f"{prefix}weight", (2.0 / module.weight[0].numel()) ** 0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            normal_draw(module.weight, seed, f"{prefix}weight")
    tokens = [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]
    for name, tensor in tokens:
        learned = name == "pos_embed" and isinstance(tensor, nn.Parameter)
        # The encoder's type token stays zero: a captioner starts with the encoder of a masked autoencoder.
        drawn = name.endswith("_type_embedding") and name != TYPE_TOKEN
        if learned or drawn or name in {"cls_token", "mask_token"}:
            normal_draw(tensor, seed, name)
    if isinstance(model, Classifier):
        head = model.shape.head
        normal_draw(model.head.weight, seed, "head.weight", head.scale / model.head.in_features**0.5)
        model.head.bias.fill_(head.bias)


def _drawn_here(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those of a body whose library has drawn its weights."""
    for path, module in model.named_children():
        if not isinstance(module, Body):
            yield path, module
            yield from ((f"{path}.{inner}", part) for inner, part in module.named_modules() if inner)


def normal_draw(tensor: Tensor, seed: int, name: str, scale: float = 0.02) -> None:
    """Fill `tensor` with a normal draw that depends only on seed and name; for callers inside no_grad."""
    draw = torch.randn(tensor.shape, generator=_generator(seed, name))
    tensor.copy_(draw * scale if scale else torch.zeros_like(draw))


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(_seed(seed, name))


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"murmuration initial weights {seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def take_encoder(source_state: Mapping[str, Tensor], target: nn.Module) -> list[str]:
    """Copy the encoder's tensors from a state dict into `target`; return the names copied, in order.

    Nothing is copied unless everything fits (same names on both sides, same shapes), else WeightsError. A captioner's
    type token is added to the positions, which is equivalent, and every other encoder has positions.
    """
    own = dict(target.named_parameters()) | dict(target.named_buffers())
    wanted = {name: tensor for name, tensor in own.items() if name.startswith(ENCODER_PREFIXES)}
    given = {name: tensor for name, tensor in source_state.items() if name.startswith(ENCODER_PREFIXES)}
    biases = {name for name in wanted.keys() ^ given.keys() if name.endswith("attn.qkv.bias")}
    if biases:
        side = "the source has" if biases & given.keys() else "the target has"
        raise WeightsError(
            f"only {side} encoder query-key-value biases (such as {min(biases)}), and leaving them out would "
            f"change what the encoder computes; set model.qkv_bias to the same value for both models."
        )
    if odd := sorted(wanted.keys() ^ given.keys()):
        raise WeightsError(
            f"the two encoders differ in {len(odd)} tensors, the first of which is {odd[0]}; "
            f"build both with the same model.depth."
        )
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            raise WeightsError(
                f"{name} is {list(given[name].shape)} in the source but {list(tensor.shape)} in the target; "
                f"build both models with the same image_size, patch_size, width and depth."
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(given[name])
        if TYPE_TOKEN in own:
            own[TYPE_TOKEN].zero_()
        if TYPE_TOKEN in source_state:
            own["pos_embed"] += source_state[TYPE_TOKEN].to(own["pos_embed"].device)
    return list(wanted)
