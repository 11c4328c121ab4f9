"""A model's initial weights from a file: this project's export, ViP-MAE, DP-Cap, timm, Hugging Face.

    account = initialise_from(model, path)    # after build, before trainable.select
    print(account)

The file's kind is recognised by the names in it. The encoder must fit the model and is taken whole, with positions
interpolated if the image size differs; decoder and text parts are taken if they fit, and otherwise keep their initial
values. Nothing in the model changes if anything is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from murmuration.model.fill import WeightEntries, fill_start, same_names
from murmuration.model.foreign import bit_pieces, hf_pieces, timm_pieces
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.released import TEXT_EMBEDDING, dpcap_pieces, vip_mae_pieces
from murmuration.model.trainable import DOWN, merged
from murmuration.model.weight_files import export_note, flat, read_weights

HEAD = ("head.weight", "head.bias")
OWN = "this project's export"


def initialise_from(model: nn.Module, path: Path | str, *, take_head: bool | None = None) -> LoadReport:
    """Fill `model` from a file or an export's folder.

    `take_head`: whether to take a classifier's head from the file, if it has as many classes; None takes it only from
    this project's exports, since a head for other classes is worse than the initial one.
    """
    return initialise_with(model, read_weights(path), export_note(path), take_head=take_head)


def initialise_with(
    model: nn.Module, state_dict: Mapping[str, Any], note: Mapping[str, Any] | None = None, *,
    take_head: bool | None = None,
) -> LoadReport:  # fmt: skip
    """`initialise_from` for a state dict in memory; `note` is the content of an export's `export.json`."""
    state = flat(state_dict)
    if any(name.endswith(f".{DOWN}") for name in state):
        state = merged(state)
    account, pieces = recognised(state, bool(note))
    if take_head is False or (take_head is None and account.source != OWN):
        for name in HEAD:
            if piece := pieces.pop(name, None):
                account.add(piece.keys[0], "ignored", piece.tensor, "the head starts as the settings say")
    shape = getattr(model, "shape", None)
    if shape is not None and shape.resnet is None and account.source != OWN:
        account.notes.append(f"{shape.encoder.heads} heads, as in the model; the weights do not show theirs")
    fill_start(model, pieces, account)
    return account


def recognised(state: Mapping[str, Tensor], ours: bool = False) -> tuple[LoadReport, WeightEntries]:
    """The account and the pieces for the file's kind, recognised by names that only one kind has."""
    if ours or "text_embedding.weight" in state or "body.stem.conv.weight" in state:
        return LoadReport(OWN), same_names(state)
    if TEXT_EMBEDDING in state:
        account = LoadReport("the DP-Cap checkpoint")
        return account, dpcap_pieces(state, account)
    if "decoder_pred.weight" in state and "patch_embed.proj.weight" in state:
        return LoadReport("the ViP-MAE checkpoint"), vip_mae_pieces(state)
    if any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in state):
        account = LoadReport("the Hugging Face checkpoint")
        return account, hf_pieces(state, account)
    if "stem.conv.weight" in state:
        account = LoadReport("timm's BiT checkpoint")
        return account, bit_pieces(state, account)
    if "patch_embed.proj.weight" in state:
        account = LoadReport("timm's checkpoint")
        return account, timm_pieces(state, account)
    first = ", ".join(list(state)[:3])
    raise WeightsError(
        f"the weights ({first}, …) are of no known kind; choose this project's export, ViP-MAE, DP-Cap, a "
        f"plain vision transformer of timm or Hugging Face, or timm's BiT."
    )
