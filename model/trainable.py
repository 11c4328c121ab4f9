"""Which parameters a phase trains: all, the head, the biases, low-rank adapters beside frozen layers, the sums from
which a head is solved, or a head whose inputs those sums whiten.

The order is: `model = build(shape, objective)`, then loading the weights of an earlier phase or of a file, then
`select(model, trainable, rank=…)`, then the engine. A checkpoint of the phase itself is loaded after `select`, since
it contains the adapters. Weights that leave a "lora" phase go through `merged`, after which they fit `build`'s model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.build import normal_draw
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.encoder import Encoder
from murmuration.model.image_text import ImageTextModel
from murmuration.model.language_body import TiedHead
from murmuration.model.language_model import NamedLanguageModel
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.named_models import NamedCaptioner, NamedClassifier
from murmuration.model.statistics_head import StatisticsHead, solved_state
from murmuration.model.whitened_head import WhitenedHead, folded_state

Trainable = Literal["all", "head", "bias", "lora", "statistics", "whitened"]
DOWN, UP = "lora_down", "lora_up"


class TrainableError(ValueError):
    """The model has no such part to train; one sentence that names the fix."""


class LowRankLinear(nn.Linear):
    """A frozen layer, under its own names, plus x·downᵀ·upᵀ, which is zero at the start."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight = base.weight.requires_grad_(False)
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
        self.lora_down = nn.Parameter(base.weight.new_zeros(rank, base.in_features))
        self.lora_up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_down), self.lora_up)


def select(model: nn.Module, trainable: Trainable, *, rank: int = 8) -> list[str]:
    """Set `requires_grad` everywhere below a freshly built model and return the trained names, in order.

    - "all": as built (the published models keep some tokens fixed).
    - "head": the last layer of the objective: `head` of a classifier, the text or pixel prediction otherwise.
    - "bias": every bias; a classifier's whole head as well, because its weights start at zero.
    - "lora": adapters of `rank` on every linear layer in the encoder's blocks, or in a named encoder or language
      model below its head; a classifier's whole head as well.
    - "statistics": two sums over the features, from which a classifier's head is solved (`statistics_head.py`).
    - "whitened": a classifier's head on features that such sums have whitened (`whitened_head.py`).

    Parameters that `build` fixed stay fixed.
    """
    if trainable == "all":
        return trained(model)
    extra = ("head.",) if isinstance(model, Classifier) else ()
    match trainable:
        case "head":
            keep = {name for name in trained(model) if name.startswith(f"{head_of(model)}.")}
        case "bias":
            keep = {name for name in trained(model) if name.endswith(".bias") or name.startswith(extra)}
        case "lora":
            adapters = add_adapters(model, rank)
            keep = {name for name in trained(model) if name in adapters or name.startswith(extra)}
        case "statistics":
            replace_head(model, StatisticsHead)
            keep = {"head.gram", "head.cross"}
        case "whitened":
            replace_head(model, WhitenedHead)
            keep = {"head.weight", "head.bias"}
        case _:
            raise TrainableError(
                f'there is no trainable "{trainable}"; choose "all", "head", "bias", "lora", "statistics" or '
                '"whitened".'
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in keep)
    return trained(model)


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def head_of(model: nn.Module) -> str:
    """The module that a new task would replace."""
    if isinstance(model, Classifier):
        return "head"
    if isinstance(model, ImageTextModel):
        return _output_of(model)
    if isinstance(model, Captioner):
        return "decoder_pred_text"
    if isinstance(model, MaskedAutoencoder):
        return "decoder_pred"
    raise TrainableError(f'{type(model).__name__} has no known head; train it with trainable = "all".')


def _output_of(model: ImageTextModel) -> str:
    net: Any = model.body.net
    head = net.get_output_embeddings()
    if isinstance(head, TiedHead):
        raise TrainableError(f'{model.shape.named} has no head beside its table of words; train "all" or "lora".')
    return next(path for path, part in model.named_modules() if part is head)


@torch.no_grad()
def add_adapters(model: nn.Module, rank: int) -> set[str]:
    """Replace each linear layer of the encoder's blocks by a LowRankLinear; return the names of the adapters.

    A model that already has them is left unchanged.
    """
    by_library = isinstance(model, NamedLanguageModel | ImageTextModel)
    body = "body" if by_library or isinstance(model, NamedClassifier | NamedCaptioner) else "blocks"
    if not isinstance(model, Encoder | NamedClassifier | NamedLanguageModel):
        raise TrainableError(f"{type(model).__name__} has no transformer blocks to adapt; choose another `trainable`.")
    adapted_part, names = model.get_submodule(body), set[str]()
    net: Any = model.body.net if by_library else None
    head = None if net is None else net.get_output_embeddings()
    for path, layer in list(adapted_part.named_modules()):
        if not isinstance(layer, nn.Linear) or layer is head:
            continue
        if not isinstance(layer, LowRankLinear):
            if by_library and not layer.weight.requires_grad:
                continue  # the loss does not depend on it
            if not 0 < rank < min(layer.in_features, layer.out_features):
                raise TrainableError(
                    f"rank {rank} is not between 1 and {min(layer.in_features, layer.out_features) - 1}, below the "
                    f"sizes of {body}.{path}; choose 8, for example."
                )
            adapted = LowRankLinear(layer, rank)
            if not adapted.lora_down.is_meta:
                name, scale = f"{body}.{path}.{DOWN}", layer.in_features**-0.5
                normal_draw(adapted.lora_down, model.shape.init_seed, name, scale)
            parent, _, own = path.rpartition(".")
            setattr(adapted_part.get_submodule(parent), own, adapted)
        names |= {f"{body}.{path}.{DOWN}", f"{body}.{path}.{UP}"}
    if not names:
        raise TrainableError(f"{model.shape.named} has no linear layer to adapt; choose another `trainable`.")
    return names


def replace_head(model: nn.Module, kind: type[StatisticsHead | WhitenedHead]) -> None:
    """Replaces a classifier's head by one that its sums solve or whiten; one that is in place stays."""
    if not isinstance(model, Classifier):
        raise TrainableError(
            f"{type(model).__name__} predicts no classes; only a classifier's head is solved or whitened by sums."
        )
    if not isinstance(model.head, kind):
        model.head = kind(model.head)


@torch.no_grad()
def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An equivalent state dict without adapters (weight + up·down) and with an ordinary head in place of a solved or
    whitened one. If there are none, the tensors stay unchanged."""
    state = folded_state(solved_state(state))
    plain = {name: tensor for name, tensor in state.items() if not name.endswith((f".{DOWN}", f".{UP}"))}
    for name in state:
        if name.endswith(f".{DOWN}"):
            layer = name.removesuffix(f".{DOWN}")
            weight, down, up = (state[f"{layer}.{part}"] for part in ("weight", DOWN, UP))
            plain[f"{layer}.weight"] = (weight.double() + up.double() @ down.double()).to(weight.dtype)
    return plain
