"""Encoders and classifiers of Hugging Face's library that our own models do not compute.

config.json names one of the library's own classes. Code that lies beside the weights is never run, and the weights are
read from safetensors. A classifier's features are what its head reads. A folder without one gives the library's pooled
features, if the file has all weights that pool, or else the mean of the last tokens; of a model of pictures and texts,
the part that sees is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from murmuration.accounting.escaping import first_line
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.library import LibraryClassifier, told_as
from murmuration.evaluation.models.subject import WEIGHT_FILES
from murmuration.model.load_report import LoadReport
from murmuration.model.named import LEFT_OUT, Named, side_of

HEADS = ("classifier", "cls_classifier", "distillation_classifier")
POOLS = "pooler."
NEEDED = {"architectures", "id2label", "label2id"}
"""Fields of LEFT_OUT that are needed here, for the classes."""


class HuggingFaceClassifier(LibraryClassifier):
    def read_by_head(self, images: Tensor) -> Tensor:
        read: list[Tensor] = []
        head = next(getattr(self.net, name) for name in HEADS if hasattr(self.net, name))
        hook = head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
        try:
            self.net(pixel_values=images)
        finally:
            hook.remove()
        return read[0]

    def logits_of(self, images: Tensor) -> Tensor:
        return self.net(pixel_values=images).logits


class HuggingFaceEncoder(LibraryClassifier):
    def __init__(self, net: Any, named: Named, side: int, pools: bool) -> None:
        self.pools = pools
        super().__init__(net, named, side)

    def read_by_head(self, images: Tensor) -> Tensor:
        given: dict[str, Tensor] = {}
        if self.net.config.model_type == "vit_mae":  # it hides no patch, but would shuffle them
            patches = self.net.embeddings.position_embeddings.shape[1] - 1
            given["noise"] = torch.arange(patches, dtype=torch.float32, device=images.device).expand(len(images), -1)
        found = self.net(pixel_values=images, **given)
        pooled = getattr(found, "pooler_output", None) if self.pools else None
        if pooled is not None:
            return pooled
        last = found.last_hidden_state
        return last.mean(dim=1) if last.dim() == 3 else last

    def logits_of(self, images: Tensor) -> None:
        return None


def open_hugging_face(
    folder: Path, told: dict[str, Any], state: Mapping[str, Tensor], side: int | None
) -> tuple[LibraryClassifier, LoadReport]:
    """`told` is the folder's config.json, `state` what its file of weights contains."""
    if not (folder / WEIGHT_FILES[0]).is_file():
        raise EvaluationError(f"{folder} has no {WEIGHT_FILES[0]}; save the model again, as safetensors")
    kept = {key: value for key, value in told.items() if key not in LEFT_OUT - NEEDED}
    config: Any = _config(kept)
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    known = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, ())
    names = {known} if isinstance(known, str) else set(known)
    classifies = not names.isdisjoint(config.architectures or ())
    # Of what sees and reads, what sees.
    config = config if classifies else getattr(config, "vision_config", config)
    if config.model_type == "vit_mae":
        config.mask_ratio = 0.0
    net, gone, unexpected = _loaded(folder, config, classifies)
    named = Named.of("hf", "", {key: value for key, value in kept.items() if key not in LEFT_OUT})
    side = side or side_of(str(folder), told)
    report = LoadReport(str(named))
    for key in unexpected:
        report.add(key, "ignored", state.get(key, torch.empty(0)), "the architecture has no such tensor")
    if classifies:
        _report(net, gone, report)
        return HuggingFaceClassifier(net, named, side), report
    pooling = {key for key in gone if POOLS in f"{key}."}
    _report(net, gone - pooling, report)
    report.add("head.weight", "missing", torch.empty(0), "the folder has an encoder without a classifier")
    return HuggingFaceEncoder(net, named, side, pools=not pooling), report


def _config(kept: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig

    if "quantization_config" in kept:
        raise EvaluationError("its config.json says that the weights are quantised; save them in full precision")
    plain = _without_kernels(kept)
    kind = plain.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **plain)
    except Exception as error:  # whatever a library raises on a config that it does not know
        raise EvaluationError(
            f"its config.json describes {kind!r:.80}, of which transformers makes no model "
            f"({first_line(error, 160)}); name another"
        ) from None


def _without_kernels(told: dict[str, Any]) -> dict[str, Any]:
    """Without the names of kernels, which the library would fetch."""
    found = {key: value for key, value in told.items() if "attn_implementation" not in key and "kernel" not in key}
    # The sizes of convolutions are numbers.
    found |= {key: value for key, value in told.items() if "kernel" in key and not isinstance(value, str | dict | bool)}
    return {key: _without_kernels(value) if isinstance(value, dict) else value for key, value in found.items()}


def _loaded(folder: Path, config: Any, classifies: bool) -> tuple[Any, set[str], list[str]]:
    """The model, the names of its tensors that the file has not or in another shape, and the file's that it has not."""
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForImageClassification
    from transformers.utils import logging

    told_before, shown_before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # our own report says what becomes of each tensor
    logging.disable_progress_bar()
    try:
        net, told = (AutoModelForImageClassification if classifies else AutoModel).from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, trust_remote_code=False,
            dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:  # whatever a library raises on weights that do not fit
        raise EvaluationError(
            f"{folder} cannot be read as {config.model_type} by transformers ({first_line(error, 160)}); name a "
            "folder with an image encoder"
        ) from None
    finally:
        logging.set_verbosity(told_before)
        if shown_before:
            logging.enable_progress_bar()
    gone = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
    return net, gone, sorted(told["unexpected_keys"])


def _report(net: Any, gone: set[str], report: LoadReport) -> None:
    for key, own in net.state_dict().items():
        if key not in gone:
            report.add(key, "taken", own)
        else:
            report.add(told_as(key, HEADS), "missing", own)
