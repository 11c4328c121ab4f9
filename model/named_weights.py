"""Renames the weights of a model of timm or Hugging Face to those of the same model with our head.

timm's own filters run first: they read the files of a model's first publication, too, and interpolate positions where
the picture size differs. Hugging Face's files are read by its library, which knows the names of earlier versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from murmuration.model.body import Body, HuggingFaceBody, TimmBody
from murmuration.model.fill import WeightEntries, WeightEntry
from murmuration.model.image_text_body import ImageTextBody
from murmuration.model.language_body import LanguageBody
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.named import CONFIG, Named, is_tower, json_object, pretrained_of
from murmuration.model.weight_files import export_note, read_weights

OURS = ("body.", "head.", "decoder", "text_")


def is_ours(state: Mapping[str, Tensor]) -> bool:
    return all(name.startswith(OURS) for name in state)


def timm_entries(state: Mapping[str, Tensor], body: Body, named: Named, report: LoadReport) -> WeightEntries:
    """`body.net.…`, and `head.…` where the file's head is one linear layer."""
    head = pretrained_of(named.name).get("classifier")
    heads = [head] if isinstance(head, str) else list(head or ())
    found: WeightEntries = {}
    for end in ("weight", "bias"):
        for each in heads:
            key = f"{each}.{end}"
            tensor = state.get(key)
            if tensor is not None and len(heads) == 1:
                found[f"head.{end}"] = WeightEntry(tensor.flatten(1) if end == "weight" else tensor, (key,))
            elif tensor is not None:
                report.add(key, "ignored", tensor, "one of several heads")
    rest = {key: tensor for key, tensor in state.items() if not key.startswith(tuple(f"{each}." for each in heads))}
    return found | _entries(_filtered(rest, body.net, report), body, named, report)


def _filtered(state: dict[str, Tensor], net: nn.Module, report: LoadReport) -> Mapping[str, Tensor]:
    own: Callable[..., Any] | None = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    if own is None:
        return state
    try:
        return own(state, net)
    except (KeyError, RuntimeError, ValueError, AttributeError, TypeError, AssertionError, IndexError) as error:
        raise WeightsError(
            f"{report.source}: timm cannot read it as weights of {type(net).__name__} ({error!r:.120}); name the "
            "architecture of the file in model.name."
        ) from None


def hugging_face_entries(
    path: Path, body: HuggingFaceBody | LanguageBody | ImageTextBody, named: Named, report: LoadReport
) -> WeightEntries:
    from transformers.utils import logging

    tower = (path / CONFIG).is_file() and is_tower(json_object(path / CONFIG))
    net: Any = body.encoder if tower and isinstance(body, HuggingFaceBody) else body.net
    # On the meta device there is nothing to fill: names and shapes are compared.
    header = next(net.parameters()).is_meta
    told_before, shown_before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # our own report says what becomes of each tensor
    logging.disable_progress_bar()
    try:
        theirs, told = type(net).from_pretrained(
            None if header else path, config=net.config, state_dict=read_weights(path, True) if header else None,
            local_files_only=True, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{path} cannot be read as {named} ({str(error)[:160]}); name its folder.") from None
    finally:
        logging.set_verbosity(told_before)
        if shown_before:
            logging.enable_progress_bar()
    state = dict(theirs.state_dict())
    gone = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
    prefix = "vision_model." if tower else ""
    state = {prefix + key: tensor for key, tensor in state.items() if key not in gone}
    found = {
        f"head.{end}": WeightEntry(state.pop(f"classifier.{end}"), (f"classifier.{end}",))
        for end in ("weight", "bias")
        if f"classifier.{end}" in state
    }
    return found | _entries(state, body, named, report)


def entries_of(path: Path, model: nn.Module, report: LoadReport) -> WeightEntries:
    """`model` has a body of a library, and the file or folder is that library's."""
    body: Any = model.body
    named: Named = model.shape.named  # pyright: ignore
    if isinstance(body, TimmBody):
        return timm_entries(read_weights(path, next(body.parameters()).is_meta), body, named, report)
    folder = path if path.is_dir() else path.parent
    return hugging_face_entries(folder, body, named, report)


def is_foreign(path: Path) -> bool:
    """Whether nothing beside or in the file says that it is one of ours."""
    return not export_note(path) and not is_ours(read_weights(path, header=True))


def _entries(state: Mapping[str, Tensor], body: Body, named: Named, report: LoadReport) -> WeightEntries:
    own = {name: tensor for name, tensor in body.net.state_dict().items() if tensor.is_floating_point()}
    if lacking := [name for name in own if name not in state]:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise WeightsError(
            f"{report.source} has nothing for {lacking[0]}{more} of {named}; set model.name to the "
            "architecture of the file."
        )
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            continue  # BatchNorm's count of batches
        if name not in own:
            report.add(name, "ignored", tensor, f"{named} has no such part without its head")
        elif own[name].shape != tensor.shape:
            raise WeightsError(
                f"{name} is {list(tensor.shape)} in {report.source} but {list(own[name].shape)} in {named}; set "
                "model.name, model.image_size and model.model_args to the file's."
            )
    return {f"body.net.{name}": WeightEntry(state[name], (name,)) for name in own}
