"""Copies tensors from a weight file into a model: each is checked, fitted, copied and accounted for.

There are two ways. `fill_whole`: the file describes the model, so every tensor must be present and fit. `fill_start`:
the model already exists; its encoder must be filled, while other parts are filled if they fit and otherwise keep their
initial values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from murmuration.model.build import ENCODER_PREFIXES, TYPE_TOKEN
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.positions import resized

IMAGE_TABLES = ("pos_embed", "decoder_pos_embed")
TEXT_TABLE = "text_decoder_pos_embed"


@dataclass(frozen=True)
class WeightEntry:
    """A tensor under its name in the model, with the `keys` in the file it came from and `how` it was transformed."""

    tensor: Tensor
    keys: tuple[str, ...]
    how: str = ""

    def changed(self, tensor: Tensor, how: str, *keys: str) -> WeightEntry:
        return replace(self, tensor=tensor, keys=self.keys + keys, how=f"{self.how}; {how}" if self.how else how)


WeightEntries = dict[str, WeightEntry]


def same_names(state: Mapping[str, Tensor]) -> WeightEntries:
    return {name: WeightEntry(tensor, (name,)) for name, tensor in state.items()}


def fill_whole(model: nn.Module, pieces: WeightEntries, account: LoadReport) -> None:
    """Fill every tensor of the model from a piece of the same shape, and use every piece."""
    own = tensors_of(model)
    if missing := [name for name in own if name not in pieces]:
        raise WeightsError(
            f"{account.source} lacks {missing[0]}{_more(missing)}; pass all of its weights, or start another model's "
            f"encoder from it with initialise_from."
        )
    if extra := [pieces[name].keys[0] for name in pieces if name not in own]:
        raise WeightsError(
            f"{account.source} has {extra[0]}{_more(extra)}, which that architecture lacks; remove what is not part "
            f"of the model, or name the right model."
        )
    for name, tensor in own.items():
        piece = pieces[name]
        if piece.tensor.shape != tensor.shape:
            raise WeightsError(
                f"{piece.keys[0]} is {list(piece.tensor.shape)} where the other weights require {list(tensor.shape)}; "
                f"the checkpoint is damaged or of another architecture."
            )
    _copy(own, pieces, account)


def fill_start(model: nn.Module, pieces: WeightEntries, account: LoadReport) -> None:
    """Fill the model; the encoder (or the ResNet's body) must fit, the rest is taken where name and shape fit."""
    own = tensors_of(model)
    body = [name for name in own if name.startswith(ENCODER_PREFIXES)]
    counts = model.state_dict().keys() - own.keys()  # checkpoints keep them as floats
    pieces = {name: piece for name, piece in pieces.items() if name not in counts}
    pieces = _zero_biases(_type_token(pieces, own), own)
    if lacking := [name for name in body if name not in pieces]:
        raise WeightsError(
            f"{account.source} has nothing for {lacking[0]}{_more(lacking)} of the model's encoder; set model.depth "
            f"and the family to the file's."
        )
    if extra := [name for name in pieces if name.startswith(ENCODER_PREFIXES) and name not in own]:
        mend = "set model.qkv_bias to true" if extra[0].endswith("qkv.bias") else "set model.depth to the file's"
        raise WeightsError(
            f"{account.source} has {pieces[extra[0]].keys[0]}{_more(extra)}, which the model's encoder lacks; {mend}."
        )
    pieces = {name: _fitted(name, piece, own[name]) if name in own else piece for name, piece in pieces.items()}
    for name in body:
        if pieces[name].tensor.shape != own[name].shape:
            raise WeightsError(
                f"{pieces[name].keys[0]} is {list(pieces[name].tensor.shape)} in {account.source} but "
                f"{list(own[name].shape)} in the model; set model.width, heads and patch_size to the file's."
            )
    # The pieces that fit the model by name and shape; the account says why each of the others does not.
    usable: WeightEntries = {}
    for name, piece in pieces.items():
        if name not in own:
            account.add(piece.keys[0], "ignored", piece.tensor, "this model has no such part")
        elif piece.tensor.shape != own[name].shape:
            why = f"{list(piece.tensor.shape)} in the file; the model's {list(own[name].shape)} stay as initialised"
            account.add(piece.keys[0], "ignored", piece.tensor, why)
            account.add(name, "missing", own[name], "not of this shape in the file; as initialised")
        else:
            usable[name] = piece
    for name in own:
        if name not in pieces:
            account.add(name, "missing", own[name], "not in the file; as initialised")
    _copy({name: own[name] for name in usable}, usable, account)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, in the order of the state dict; without integers, which count (BatchNorm's batches)."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: named[name] for name in model.state_dict() if named[name].is_floating_point()}


def _type_token(pieces: WeightEntries, own: Mapping[str, Tensor]) -> WeightEntries:
    """A captioner keeps the vector that is added to its encoder's tokens; other models add it to their positions."""
    token = pieces.get(TYPE_TOKEN)
    if token is not None and TYPE_TOKEN not in own and "pos_embed" in pieces:
        table = pieces["pos_embed"]
        if token.tensor.shape[-1] == table.tensor.shape[-1]:
            how = "the encoder's type token is added to every position"
            pieces["pos_embed"] = table.changed(table.tensor + token.tensor, how, *token.keys)
            del pieces[TYPE_TOKEN]
    elif token is None and TYPE_TOKEN in own:
        pieces[TYPE_TOKEN] = WeightEntry(torch.zeros_like(own[TYPE_TOKEN]), (), "zero: the file's encoder adds none")
    return pieces


def _zero_biases(pieces: WeightEntries, own: Mapping[str, Tensor]) -> WeightEntries:
    """A layer without a bias is one whose bias is zero."""
    for name, tensor in own.items():
        if name not in pieces and name.endswith("attn.qkv.bias") and name.replace("bias", "weight") in pieces:
            keys = pieces[name.replace("bias", "weight")].keys
            pieces[name] = WeightEntry(
                torch.zeros_like(tensor), (), f"zero: the file's layers have none beside {keys[0]}"
            )
    return pieces


def _fitted(name: str, piece: WeightEntry, own: Tensor) -> WeightEntry:
    given = piece.tensor
    if given.shape == own.shape or given.dim() != 3 or given.shape[-1] != own.shape[-1]:
        return piece
    if name in IMAGE_TABLES:
        return resized_piece(piece, own.shape[1])
    if name == TEXT_TABLE and given.shape[1] > own.shape[1]:
        return piece.changed(given[:, : own.shape[1]], f"the first {own.shape[1]} of {given.shape[1]} places")
    return piece


def resized_piece(piece: WeightEntry, rows: int) -> WeightEntry:
    """The position table interpolated to `rows` = 1 + grid² rows."""
    before, after = round((piece.tensor.shape[1] - 1) ** 0.5), round((rows - 1) ** 0.5)
    try:
        table = resized(piece.tensor, after)
    except ValueError as error:
        raise WeightsError(f"{piece.keys[0]}: {str(error).rstrip('.')}; the checkpoint is damaged.") from None
    return piece.changed(table, f"interpolated from {before}x{before} to {after}x{after} positions")


@torch.no_grad()
def _copy(own: Mapping[str, Tensor], pieces: WeightEntries, account: LoadReport) -> None:
    """Copy checked pieces; values that are not finite or not floating-point are refused before anything is changed."""
    for piece in pieces.values():
        if not piece.tensor.is_floating_point() or piece.tensor.is_sparse:
            kind = "sparse" if piece.tensor.is_sparse else str(piece.tensor.dtype).removeprefix("torch.")
            raise WeightsError(f"{piece.keys[0]} is {kind}, not a floating-point weight; convert the checkpoint.")
        if not piece.tensor.is_meta and not bool(piece.tensor.isfinite().all()):
            raise WeightsError(f"{piece.keys[0]} contains values that are not finite; use an earlier checkpoint.")
    for name, tensor in own.items():
        piece = pieces[name]
        tensor.copy_(piece.tensor)
        how = piece.how
        if piece.tensor.dtype != tensor.dtype:
            cast = f"{str(piece.tensor.dtype).removeprefix('torch.')} in the file"
            how = f"{how}; {cast}" if how else cast
        if not piece.keys:
            account.add(name, "missing", tensor, how)
        for key in piece.keys:
            account.add(key, "transformed" if how else "taken", tensor, how)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
