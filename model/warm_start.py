"""A model's initial weights from a file: this project's export, ViP-MAE, DP-Cap, timm, Hugging Face.

    report = initialise_from(model, path)    # after build, before trainable.select
    print(report)

The file's kind is recognised by the names in it. The encoder must fit the model and is taken whole, with positions
interpolated if the image size differs; decoder and text parts are taken if they fit, and otherwise keep their initial
values. Nothing in the model changes if anything is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from murmuration.model.body import Body
from murmuration.model.fill import WeightEntries, fill_start, same_names
from murmuration.model.foreign import bit_pieces, hf_pieces, timm_pieces
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.named_weights import entries_of, is_foreign, is_ours
from murmuration.model.released import TEXT_EMBEDDING, dpcap_pieces, vip_mae_pieces
from murmuration.model.trainable import merged
from murmuration.model.weight_files import export_note, flat, read_weights

HEAD = ("head.weight", "head.bias")
OWN = "this project's export"
DP_CAP, VIP_MAE = "the DP-Cap checkpoint", "the ViP-MAE checkpoint"
HUGGING_FACE, BIT, TIMM = "the Hugging Face checkpoint", "timm's BiT checkpoint", "timm's checkpoint"
IMAGENET_PIXELS = (OWN, DP_CAP, VIP_MAE)
"""Weights whose pixels were normalised by ImageNet's statistics, unless an export of ours says otherwise."""


def initialise_from(model: nn.Module, path: Path | str, *, take_head: bool | None = None) -> LoadReport:
    """Fill `model` from a file or an export's folder. If it is on the meta device, only names and shapes are read, of
    safetensors, and refused as they would be.

    `take_head`: whether to take a classifier's head from the file, if it has as many classes; None takes it only from
    this project's exports, since a head for other classes is worse than the initial one.
    """
    path = Path(path)
    body = getattr(model, "body", None)
    if isinstance(body, Body) and is_foreign(path):
        report = LoadReport(str(path))
        return _filled(model, entries_of(path, model, report), report, take_head)
    header = next(model.parameters()).is_meta
    return initialise_with(model, read_weights(path, header), export_note(path), take_head=take_head)


def initialise_with(
    model: nn.Module, state_dict: Mapping[str, Any], note: Mapping[str, Any] | None = None, *,
    take_head: bool | None = None,
) -> LoadReport:  # fmt: skip
    """`initialise_from` for a state dict in memory; `note` is the content of an export's `export.json`."""
    state = merged(flat(state_dict))
    named = isinstance(getattr(model, "body", None), Body)
    report, entries = recognised(state, bool(note) or (named and is_ours(state)))
    shape = getattr(model, "shape", None)
    if shape is not None and shape.resnet is None and report.source != OWN:
        report.notes.append(f"{shape.encoder.heads} heads, as in the model; the weights do not show theirs")
    return _filled(model, entries, report, take_head)


def _filled(model: nn.Module, entries: WeightEntries, report: LoadReport, take_head: bool | None) -> LoadReport:
    if take_head is False or (take_head is None and report.source != OWN):
        for name in HEAD:
            if entry := entries.pop(name, None):
                report.add(entry.keys[0], "ignored", entry.tensor, "the head starts as the settings say")
    fill_start(model, entries, report)
    return report


def source_of(names: Collection[str], ours: bool = False) -> str | None:
    """The file's kind, by names that only one kind has; None if it is of no known kind."""
    if ours or "text_embedding.weight" in names or "body.stem.conv.weight" in names:
        return OWN
    if TEXT_EMBEDDING in names:
        return DP_CAP
    if "decoder_pred.weight" in names and "patch_embed.proj.weight" in names:
        return VIP_MAE
    if any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in names):
        return HUGGING_FACE
    if "stem.conv.weight" in names:
        return BIT
    return TIMM if "patch_embed.proj.weight" in names else None


def recognised(state: Mapping[str, Tensor], ours: bool = False) -> tuple[LoadReport, WeightEntries]:
    """The report and the entries for the file's kind."""
    source = source_of(state, ours)
    if source is None:
        first = ", ".join(list(state)[:3])
        raise WeightsError(
            f"the weights ({first}, …) are of no known kind; choose this project's export, ViP-MAE, DP-Cap, a "
            f"plain vision transformer of timm or Hugging Face, or timm's BiT."
        )
    report = LoadReport(source)
    if source == OWN:
        return report, same_names(state)
    if source == VIP_MAE:
        return report, vip_mae_pieces(state)
    renamed = {DP_CAP: dpcap_pieces, HUGGING_FACE: hf_pieces, BIT: bit_pieces, TIMM: timm_pieces}[source]
    return report, renamed(state, report)
