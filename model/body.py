"""Builds an encoder of timm or Hugging Face, and finds out what it gives: pooled features, and tokens.

The library draws the initial weights, in the order in which it makes its layers, from a generator that the caller has
seeded. BatchNorm normalises by the statistics that came with the weights, which makes it a fixed map of one record.
Other layers that couple records are refused here, by the rules of `model.safety`, before anything is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from murmuration.model.named import Named, NamedError, cannot_be_built, of_one_record
from murmuration.model.safety import CouplingError, keeps_statistics, refuse_coupling

FEATURES_ONLY = "features_only"
"""timm's argument."""


class Body(nn.Module, ABC):
    """Everything below the head. The library's own module is `net`, with the library's own names."""

    net: nn.Module

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features that the library's own head would read: [B, width]."""

    @abstractmethod
    def tokens(self, images: Tensor) -> Tensor:
        """[B, tokens, width]: before pooling, one for each place, and class and register tokens if there are any."""

    def train(self, mode: bool = True) -> Body:
        """What has stored statistics stays in evaluation mode, whatever becomes of the rest."""
        super().train(mode)
        for part in self.net.modules():
            if keeps_statistics(part):
                part.training = False
        return self


def made_by_timm(named: Named, image_size: int, classes: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """timm's module, and the arguments that make it, without the number of classes."""
    import timm

    arguments = {name: value for name, value in named.arguments.items() if name != FEATURES_ONLY}
    sized = {**arguments, "img_size": image_size}
    try:
        try:
            return timm.create_model(named.name, pretrained=False, num_classes=classes, **sized), sized
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            # It takes pictures of any size.
            return timm.create_model(named.name, pretrained=False, num_classes=classes, **arguments), arguments
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError, AttributeError) as error:
        raise NamedError(
            f"{named} cannot be built with pictures of {image_size} px and model.model_args = {named.args} "
            f"({_first_line(error)}); change these."
        ) from None


class TimmBody(Body):
    """With `features_only`, its last stage: what timm's module of that name would give, but under the names of the
    whole model, which are those of its weights. The layers above the stage are not computed."""

    def __init__(self, named: Named, image_size: int) -> None:
        super().__init__()
        self.net = made_by_timm(named, image_size)[0]
        self.last_stage = bool(named.arguments.get(FEATURES_ONLY))
        if self.last_stage and not hasattr(self.net, "forward_intermediates"):
            raise NamedError(f"{named} does not give its stages; leave model_args.{FEATURES_ONLY} out.")
        drop_nothing(self.net)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        return self.tokens(images).mean(1) if self.last_stage else self.net(images)

    def tokens(self, images: Tensor) -> Tensor:
        if self.last_stage:
            stages: Any = self.net.forward_intermediates(images, indices=1, intermediates_only=True)  # pyright: ignore
            return stages[-1].flatten(2).transpose(1, 2)
        return _as_tokens(self.net.forward_features(images), self.net.num_features)  # pyright: ignore


class HuggingFaceBody(Body):
    """The library's image classifier without its last linear layer."""

    def __init__(self, named: Named, image_size: int) -> None:
        del image_size  # its config says it
        super().__init__()
        from transformers.models.auto.configuration_auto import AutoConfig
        from transformers.models.auto.modeling_auto import AutoModelForImageClassification

        given = of_one_record(named.arguments)
        try:
            config = AutoConfig.for_model(given.pop("model_type"), **given)
            net: Any = AutoModelForImageClassification.from_config(config)
        except (TypeError, ValueError, AssertionError, RuntimeError, KeyError, AttributeError) as error:
            raise cannot_be_built(named, "an image classifier", error) from None
        if not isinstance(getattr(net, "classifier", None), nn.Linear):
            raise NamedError(
                f"{named} has no linear layer `classifier`, in whose place ours could be put; name another model."
            )
        net.classifier = nn.Identity()
        self.net = drop_nothing(net)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(pixel_values=images).logits

    @property
    def encoder(self) -> Any:
        """What is below the classifier; of a model of pictures and texts, what sees."""
        net: Any = self.net
        return getattr(net, "vision_model", net.base_model)

    def tokens(self, images: Tensor) -> Tensor:
        found = self.encoder(pixel_values=images).last_hidden_state
        return _as_tokens(found, found.shape[1] if found.dim() == 4 else found.shape[-1])


def drop_nothing(net: nn.Module) -> nn.Module:
    """Sets the rates that an architecture has by itself to 0: their draws are not keyed by record."""
    for part in net.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
        elif isinstance(getattr(part, "drop_prob", None), float):
            part.drop_prob = 0.0  # pyright: ignore[reportArgumentType]
    return net


def _as_tokens(x: Tensor, width: int) -> Tensor:
    """Maps of features [B, width, rows, columns] or [B, rows, columns, width] become tokens, row by row."""
    if x.dim() == 4:
        return x.flatten(2).transpose(1, 2) if x.shape[1] == width else x.flatten(1, 2)
    return x


def make_body(named: Named, image_size: int) -> Body:
    return (TimmBody if named.library == "timm" else HuggingFaceBody)(named, image_size)


@dataclass(frozen=True)
class Facts:
    """What a body gives, and the parameters that this does not depend on (a mask token, a norm that is not used)."""

    width: int
    unused: frozenset[str]
    statistics: str | None
    """The first layer that normalises by stored statistics, which only trained weights have."""
    patch: int
    """Side of the patches that a transformer cuts a picture into; 1 if it says none."""


@lru_cache(maxsize=64)
def facts_of(named: Named, image_size: int) -> Facts:
    """Refuses a body that couples records or gives no features."""
    return _facts(named, image_size, lambda body, images: body(images), "features")


@lru_cache(maxsize=64)
def token_facts_of(named: Named, image_size: int) -> Facts:
    return _facts(named, image_size, lambda body, images: body.tokens(images), "tokens")


def _facts(named: Named, image_size: int, run: Callable[[Body, Tensor], Tensor], what: str) -> Facts:
    """Runs the model on tensors without data; a few architectures compute with numbers, and run on the CPU."""
    try:
        return _measured(named, image_size, run, what, "meta")
    except NamedError:
        raise
    except Exception:
        pass
    try:
        return _measured(named, image_size, run, what, "cpu")
    except NamedError:
        raise
    except Exception as error:  # whatever a library raises on pictures of a size that it does not take
        raise NamedError(
            f"{named} does not run on pictures of {image_size} px ({_first_line(error)}); set model.image_size to the "
            "size that it is made for."
        ) from None


def _measured(
    named: Named, image_size: int, run: Callable[[Body, Tensor], Tensor], what: str, device: str
) -> Facts:  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device(device):
        body = make_body(named, image_size)
        try:
            refuse_coupling(body.net)
        except CouplingError as error:
            raise NamedError(f"{named} cannot be trained record by record: its layer {error}") from None
        with torch.enable_grad():
            found = run(body, torch.zeros(2, 3, image_size, image_size))
        wanted = 2 if what == "features" else 3
        if not isinstance(found, Tensor) or found.dim() != wanted:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise NamedError(f"{named} gives {shape} where {what} were expected; name another model.")
        unused = unused_by(body, found)
    stored = next((path for path, part in body.net.named_modules() if keeps_statistics(part)), None)
    return Facts(found.shape[-1], unused, stored, _patch_of(body.net))


def unused_by(body: Body, found: Tensor) -> frozenset[str]:
    """Parameters that `found` does not depend on."""
    named_parameters = dict(body.named_parameters())
    gradients = torch.autograd.grad(found.sum(), list(named_parameters.values()), allow_unused=True)
    return frozenset(name for name, each in zip(named_parameters, gradients, strict=True) if each is None)


def _patch_of(net: Any) -> int:
    config = getattr(net, "config", None)
    said = getattr(getattr(net, "patch_embed", None), "patch_size", None)  # timm
    said = getattr(getattr(config, "vision_config", config), "patch_size", None) if said is None else said
    said = said[0] if isinstance(said, list | tuple) and said else said
    return said if isinstance(said, int) and said > 0 else 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
