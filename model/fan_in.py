"""How many inputs a weight adds up, and how many it would add up in the same model at another width.

The sum over a layer's inputs is where width enters an update, so what rates need to know of a weight is its number of
inputs. A bias, a norm, a token, a row of an embedding and a filter of patches add up nothing that grows with width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.encoder import Encoder, PatchProjection
from murmuration.model.language_model import LanguageModel, WordTable
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.settings import SettingsError, Shape
from murmuration.model.sizes import RESNETS, TABLES, ResNet, Stack
from murmuration.model.trainable import LowRankLinear, add_adapters, trained


@dataclass(frozen=True)
class Widths:
    """Those of another model of the same family and depth: of a published size, or written out, which comes first."""

    size: str | None = None
    encoder: int | None = None
    text: int | None = None
    pixels: int | None = None


def fan_ins(model: nn.Module) -> dict[str, int]:
    """The number of inputs of each trained parameter whose updates add up over them, and 1 for the others."""
    found = {
        f"{path}.{name}" if path else name: _inputs(module, parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return {name: found[name] for name in trained(model)}


def _inputs(module: nn.Module, parameter: nn.Parameter) -> int:
    if parameter.dim() < 2:
        return 1
    # Rows of a table of words add up nothing, unless they are the weights of the logits as well.
    if isinstance(module, nn.Linear | nn.Conv2d | PatchProjection | WordTable):
        return parameter[0].numel()
    if type(module).__name__ == "Conv1D":  # of transformers, which stores [inputs, outputs]
        return parameter.shape[0]
    return 1


def fan_in_ratios(model: nn.Module, base: Widths) -> dict[str, float]:
    """By trained parameter: its inputs over those that it would have at the widths of `base`."""
    own, other = fan_ins(model), fan_ins(at_widths(model, base))
    return {name: own[name] / other[name] for name in own}


def at_widths(model: nn.Module, base: Widths) -> nn.Module:
    """The same model at other widths, without data: parts that `base` does not name keep theirs."""
    if not isinstance(model, Encoder | Classifier | LanguageModel) or model.shape.named is not None:
        raise SettingsError(
            "optimizer.width_transfer knows the widths of the families mae, captioner, classifier and gpt2, and this "
            "model is of none of them; leave it out, and give factors in optimizer.params.rules."
        )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        other = type(model)(_resnet_at(model.shape, base) if model.shape.resnet else _stacks_at(model, base))
    rank = next((m.lora_down.shape[0] for m in model.modules() if isinstance(m, LowRankLinear)), None)
    if rank is not None:
        try:
            add_adapters(other, rank)
        except ValueError as error:
            raise SettingsError(f"optimizer.width_transfer: at the width named there, {error}") from None
    for name, parameter in model.named_parameters():
        other.get_parameter(name).requires_grad_(parameter.requires_grad)
    return other


def _resnet_at(shape: Shape, base: Widths) -> Shape:
    assert shape.resnet is not None
    named = None if base.size is None else RESNETS.get(base.size)
    if base.size is not None and named is None:
        raise SettingsError(f'optimizer.width_transfer.size: a ResNet has no size "{base.size}"; {_known(RESNETS)}.')
    if named is not None and named.stages != shape.resnet.stages:
        raise _other_depth(base.size, str(list(named.stages)), str(list(shape.resnet.stages)))
    width = base.encoder or (named.width if named is not None else shape.resnet.width)
    if width % 8:
        raise SettingsError(f"optimizer.width_transfer.width: {width} is not a multiple of 8, as a ResNet's must be.")
    net = ResNet(width, shape.resnet.stages)
    return replace(shape, resnet=net, encoder=replace(shape.encoder, width=net.channels[-1]))


def _stacks_at(model: Encoder | Classifier | LanguageModel, base: Widths) -> Shape:
    shape, table = model.shape, TABLES[model.shape.family]
    if base.size is not None and base.size not in table:
        raise SettingsError(
            f'optimizer.width_transfer.size: family "{shape.family}" has no size "{base.size}"; {_known(table)}.'
        )
    preset = table[base.size] if base.size is not None else None
    encoder = _narrowed("width", shape.encoder, base.size, preset and preset.encoder, base.encoder)
    changed: dict[str, Stack] = {}
    for part, key, given, kind in (
        ("text", "decoder_width", base.text, Captioner),
        ("pixels", "mae_decoder_width", base.pixels, MaskedAutoencoder),
    ):
        own: Stack = getattr(shape, part)
        if isinstance(model, kind):
            changed[part] = _narrowed(key, own, base.size, preset and getattr(preset, part), given)
        elif given is not None:
            raise SettingsError(f"optimizer.width_transfer.{key}: the phase trains no such decoder; leave it out.")
    # As in a config, where one width is given for both.
    if (
        isinstance(model, Captioner)
        and preset is None
        and base.text is None
        and shape.text.width == shape.encoder.width
    ):
        changed["text"] = encoder
    if isinstance(model, LanguageModel):
        changed["text"] = encoder
    return replace(shape, encoder=encoder, **changed)


def _narrowed(key: str, own: Stack, size: str | None, preset: Stack | None, given: int | None) -> Stack:
    """No weight depends on the number of heads, so that it is 1."""
    if preset is not None and preset.depth != own.depth:
        raise _other_depth(size, str(preset.depth), str(own.depth))
    width = given or (preset.width if preset is not None else own.width)
    if width % 4:
        raise SettingsError(
            f"optimizer.width_transfer.{key}: {width} is not a multiple of 4, which the position tables need."
        )
    return Stack(width, own.depth, 1)


def _other_depth(size: str | None, its: str, own: str) -> SettingsError:
    return SettingsError(
        f'optimizer.width_transfer.size: "{size}" has {its} blocks and the model {own}, and rates are transferred '
        "across widths alone; give the width at which they were chosen in a model of this depth."
    )


def _known(names: Iterable[str]) -> str:
    return f"choose {', '.join(names)}"
