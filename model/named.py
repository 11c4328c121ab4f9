"""Encoders of other libraries, by name: what a name stands for, found without building the model.

`timm` names an architecture of timm, with or without the tag of its weights. `hf` names a folder in the layout of
Hugging Face, whose config.json is copied into the settings, so that checkpoints and exports can be opened where the
folder is not. Nothing is downloaded. Picture size and pixel statistics are those that the library states for the name.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Library = Literal["timm", "hf", "torchvision"]
LIBRARIES: tuple[Library, ...] = ("timm", "hf")
"""Those whose encoders can be trained."""
TITLES: dict[Library, str] = {"timm": "timm", "hf": "Hugging Face", "torchvision": "torchvision"}
TOWER = "_vision_model"
IMAGE_TEXT = ("llava", "vipllava", "internvl")
"""Kinds of image-text models that are trained whole: their decoders read an image's features as if these were words."""
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
PROCESSOR, OF_IMAGES = "processor_config.json", "image_processor"
"""The same as one part, where transformers 5 saves it together with a tokenizer's."""
_START = 'start from weights by a phase with data.source "checkpoint"'
# Arguments that other keys of the config decide.
DECIDED = {
    "img_size": "set model.image_size", "num_classes": "set model.classes", "num_labels": "set model.classes",
    "pretrained": _START, "checkpoint_path": _START, "pretrained_cfg": _START, "cache_dir": _START,
    "in_chans": "pictures have three colours",
}  # fmt: skip
# Of config.json: names of classes, versions, and other people's code. The model is not made of these.
LEFT_OUT = {
    "architectures", "auto_map", "custom_pipelines", "dtype", "id2label", "label2id", "num_labels", "problem_type",
    "torch_dtype", "transformers_version", "_name_or_path",
}  # fmt: skip


class NamedError(ValueError):
    """There is no such model, or it cannot be used; one sentence that names the fix."""


@dataclass(frozen=True)
class Named:
    """One model of a library. `args` is a JSON object: arguments of timm's constructor, or Hugging Face's config."""

    library: Library
    name: str
    args: str

    @staticmethod
    def of(library: Library, name: str, args: dict[str, Any]) -> Named:
        # A folder's path says nothing: what it contained is in `args`.
        return Named(library, str(args["model_type"]) if library == "hf" else name, json.dumps(args, sort_keys=True))

    @property
    def arguments(self) -> dict[str, Any]:
        return json.loads(self.args)

    def __str__(self) -> str:
        return f'{TITLES[self.library]}\'s "{self.name}"'


def of_one_record(config: dict[str, Any]) -> dict[str, Any]:
    """A config with all rates of dropout at 0, since some layers drop by functions, whose rates no module holds; and
    without a router's load-balancing loss, which counts over a whole batch."""
    off: dict[str, Any] = {key: 0.0 for key, rate in config.items() if "drop" in key and isinstance(rate, int | float)}
    off |= {key: False for key in ("output_router_logits",) if key in config}
    parts = {key: of_one_record(part) for key, part in config.items() if isinstance(part, dict)}
    return config | parts | off


def cannot_be_built(named: Named, kind: str, error: Exception) -> NamedError:
    """`error`: what the library raised."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if {"text_config", "vision_config"} <= named.arguments.keys() and first.startswith("Unrecognized configuration"):
        return NamedError(
            f"{named} reads images together with texts, and of such models a config trains {_listed([*IMAGE_TEXT])}; "
            "train it through the library (docs/tutorials/language_models.md, image-text models), or name the folder "
            "of its encoder or decoder."
        )
    return NamedError(
        f"{named} cannot be built as {kind} ({first[:200]}); name the folder of one, or change model.model_args."
    )


def completed(given: dict[str, Any]) -> dict[str, Any]:
    """A `model` section with what its name stands for: the picture size, and of `hf` the folder's config."""
    name, args = given.get("name"), given.get("model_args") or {}
    if not isinstance(name, str) or not isinstance(args, dict):
        raise NamedError(
            'family "timm" needs a model.name of timm, such as "vit_base_patch16_224", and "hf" a folder with '
            "config.json; set it"
        )
    if odd := sorted(DECIDED.keys() & args.keys()):
        raise NamedError(f"model_args.{odd[0]} cannot be set; {DECIDED[odd[0]]}")
    of_folder = given["family"] == "hf" and "model_type" in args
    if rates := [] if of_folder else sorted(key for key, value in args.items() if "drop" in key and value):
        raise NamedError(
            f"model_args.{rates[0]} cannot be set: what other libraries draw is not keyed by record; leave it out"
        )
    if given["family"] == "timm":
        size = given.get("image_size")
        if "timm" not in sys.modules and isinstance(size, int) and not re.search(rf"_{size}(?!\d)", name):
            require_known(name)
            require_whole(size, patch_of("timm", name, args))
        side = pretrained_of(name).get("input_size", (3, 224, 224))[-1]
    else:
        args = _config(name, args)
        given = {**given, "model_args": args}
        if reads_texts(args):
            return {"vocabulary": args["vocab_size"], **given}
        side = side_of(name, args)
        if sees_and_writes(args):
            return {"image_size": side, "vocabulary": _words_of(args, name), **given}
    return {"image_size": side, **given}


def pretrained_of(name: str) -> dict[str, Any]:
    """What timm states for a name: picture size, mean, deviation, how its head is called."""
    require_known(name)
    plain, _, tag = name.partition(".")
    import timm  # only here: it brings PyTorch along

    if not timm.is_model(plain):
        raise _no_model(plain, timm.list_models())
    try:
        found = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:
        raise _no_weights(plain, tag, [each.partition(".")[2] for each in timm.list_pretrained(plain)]) from None
    return {} if found is None else found.to_dict()


def require_known(name: str) -> None:
    """Refuses what is no name of timm's, as far as that can be told before it is imported."""
    if ":" in name or "/" in name:
        raise NamedError(
            f"model.name {name!r:.80} is a place of weights, and nothing is downloaded; save them by "
            "timm.models.save_for_hf, set model.name to their architecture, and start from the folder"
        )
    plain, _, tag = name.partition(".")
    if "timm" not in sys.modules:
        _require_in_source(plain, tag)


def _no_model(plain: str, known: list[str]) -> NamedError:
    close = difflib.get_close_matches(plain, known, n=3, cutoff=0.4)
    hint = f"did you mean {_listed(close)}?" if close else "timm.list_models() lists them"
    return NamedError(f"timm has no model {plain!r:.80}; {hint}")


def _no_weights(plain: str, tag: str, known: list[str]) -> NamedError:
    close = difflib.get_close_matches(tag, known, n=3, cutoff=0.0)
    which = f"choose {_listed(close)}, or leave the tag out" if close else "leave the tag out"
    return NamedError(f"timm's {plain} has no weights {tag!r:.80}; {which}")


def _require_in_source(plain: str, tag: str) -> None:
    """Refuses what timm's files do not mention: reading them takes a tenth of an import's time. A few names and tags
    are put together by code, so what is said here is only that a model is nowhere, or has other tags."""
    found = importlib.util.find_spec("timm")
    folders = (found and found.submodule_search_locations) or []
    text = "\n".join(
        path.read_text("utf-8") for folder in folders for path in sorted(Path(folder, "models").glob("*.py"))
    )
    if text and not re.search(rf"\b{re.escape(plain)}\b", text):
        raise _no_model(plain, sorted(re.findall(r"^@register_model\s+def (\w+)\(", text, re.MULTILINE)))
    tags = re.findall(rf"['\"]{re.escape(plain)}\.(\w+)['\"]", text)
    if tag and tags and tag not in tags:
        raise _no_weights(plain, tag, sorted(set(tags)))


def statistics_of(library: Library, name: str) -> dict[str, Any] | None:
    """What the library states of pixels, in the words of its own config file; None where it states nothing."""
    if library == "timm":
        return pretrained_of(name)
    return _preprocessor(Path(name))


def _preprocessor(folder: Path) -> dict[str, Any] | None:
    if (path := folder / PREPROCESSOR).is_file():
        return json_object(path)
    path = folder / PROCESSOR
    found = json_object(path).get(OF_IMAGES) if path.is_file() else None
    return found if isinstance(found, dict) else None


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _config(name: str, args: dict[str, Any]) -> dict[str, Any]:
    if "model_type" in args:  # of a checkpoint or an export, which have the whole config
        return args
    path = Path(name) / CONFIG
    found = json_object(path) if path.is_file() else {}
    if not isinstance(found.get("model_type"), str):
        why = "names no model_type" if found else "does not exist, and nothing is downloaded"
        raise NamedError(
            f"{path} {why}; set model.name to a folder with a model in Hugging Face's layout (hf download NAME "
            "--local-dir FOLDER makes one)"
        )
    found = {key: value for key, value in found.items() if key not in LEFT_OUT}
    if is_tower(found):  # transformers has image classifiers of the whole model alone
        found = {"model_type": found["model_type"].removesuffix(TOWER), "vision_config": found}
    return found | args


def reads_texts(config: dict[str, Any]) -> bool:
    """Whether it is a language model's. Some image models have a vocabulary too, of what patches look like."""
    if sees_and_writes(config):  # some of whose configs state the decoder's words at the top, too
        return False
    return isinstance(config.get("vocab_size"), int) and not {"image_size", "n_pixels"} & config.keys()


def sees_and_writes(config: dict[str, Any]) -> bool:
    """Whether it is an image-text model's that a config trains."""
    return config.get("model_type") in IMAGE_TEXT


def _words_of(config: dict[str, Any], name: str) -> int:
    found = config.get("text_config", {}).get("vocab_size")
    if not isinstance(found, int):
        raise NamedError(f"{Path(name) / CONFIG} has no text_config.vocab_size; write the decoder's number of tokens")
    return found


def is_tower(config: dict[str, Any]) -> bool:
    """Whether it is the part that sees of a model of pictures and texts, saved without the other."""
    return str(config.get("model_type")).endswith(TOWER)


def side_of(name: str, args: dict[str, Any]) -> int:
    """The side of the pictures that the folder's preprocessing makes, or else that of the model."""
    told = _preprocessor(Path(name)) or {}
    cropped = told.get("crop_size") if told.get("do_center_crop") else None
    for size in (cropped, told.get("size"), args.get("image_size"), args.get("vision_config", {}).get("image_size")):
        if isinstance(size, dict):
            size = size.get("height", size.get("shortest_edge"))
        if isinstance(size, list) and size:
            size = size[0]
        if isinstance(size, int) and size > 0:
            return size
    return 224


def patch_of(library: Library, name: str, args: dict[str, Any]) -> int:
    """Side of the patches that a folder's config says, or timm's name; 1 if they say none."""
    said = args.get("vision_config", args).get("patch_size")
    if said is None and library == "timm" and (named := re.search(r"patch(\d+)", name)):
        said = int(named[1])
    said = said[0] if isinstance(said, list) and said else said
    return said if isinstance(said, int) and said > 0 else 1


def require_whole(size: int, patch: int) -> None:
    """Refuses pixels at the edge that would be in no patch."""
    if left := size % patch:
        raise NamedError(
            f"model.image_size {size} leaves {left} pixels at the edge that are in no patch; set it to a multiple of "
            f"the patch, such as {max(patch, size - left)}"
        )


def json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NamedError(f"{path} is not a JSON object; fetch the model again")
    return found
