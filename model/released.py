"""Published ViP-MAE and DP-Cap checkpoints: their weights in our modules, and back under their names.

Every size is read from the shapes of the weights, except the numbers of heads, which leave no trace in them: those of
the published class of that width are used and named in the report, or can be given. Stored position tables are used
unchanged and not recomputed, because ViP's DP training changed its own.

    model = load_vip_mae(torch.load(path, weights_only=True))      # or `read_weights(path)`, which refuses code
    model, report = read_dpcap(state, image_size=384)             # positions interpolated
    torch.save({"model": to_vip_mae(model)}, path)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.fill import IMAGE_TABLES, WeightEntries, WeightEntry, fill_whole, resized_piece, same_names
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.positions import text_positions
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.model.sizes import TABLES
from murmuration.model.weight_files import flat

TEXT_EMBEDDING = "text_embedding_layer_SimVLM.weight"
CAUSAL_MASK_SIDE = 128
DPCAP_UNUSED = {
    "text_pos_embed": "positions of a text encoder that captioning does not run",
    "mask_token": "stands for masked patches, and captioning masks none",
    "mask_token_text": "stands for masked words in parallel decoding, which is off",
    "encoder_text_type_embedding": "of a text encoder that captioning does not run",
}


def load_vip_mae(
    state_dict: Mapping[str, Any], *, image_size: int | None = None, heads: int | None = None,
    decoder_heads: int | None = None, say: Callable[[str], object] = print,
) -> MaskedAutoencoder:  # fmt: skip
    """Our module with the weights of a ViP-MAE checkpoint of any size; `say` gets the report."""
    model, report = read_vip_mae(state_dict, image_size=image_size, heads=heads, decoder_heads=decoder_heads)
    say(str(report))
    return model


def load_dpcap(
    state_dict: Mapping[str, Any], *, image_size: int | None = None, heads: int | None = None,
    decoder_heads: int | None = None, say: Callable[[str], object] = print,
) -> Captioner:  # fmt: skip
    """Our module with the weights of a DP-Cap checkpoint of any size; `say` gets the report."""
    model, report = read_dpcap(state_dict, image_size=image_size, heads=heads, decoder_heads=decoder_heads)
    say(str(report))
    return model


def read_vip_mae(
    state_dict: Mapping[str, Any], *, image_size: int | None = None, heads: int | None = None,
    decoder_heads: int | None = None,
) -> tuple[MaskedAutoencoder, LoadReport]:  # fmt: skip
    state, report = flat(state_dict), LoadReport("the ViP-MAE checkpoint")
    entries = vip_mae_pieces(state)
    sizes = _Sizes(state, report, "mae", image_size)
    width = sizes.of("mask_token", 3, -1)
    settings = sizes.settings(
        heads=heads,
        mae_decoder_width=width,
        mae_decoder_depth=sizes.depth("decoder_blocks"),
        mae_decoder_heads=_heads(report, "decoder ", width, {512: 16}, (16, 12), decoder_heads),
    )
    model = _built(settings, "mae", state)
    fill_whole(model, sizes.resized(entries), report)
    return model, report


def read_dpcap(
    state_dict: Mapping[str, Any], *, image_size: int | None = None, heads: int | None = None,
    decoder_heads: int | None = None,
) -> tuple[Captioner, LoadReport]:  # fmt: skip
    state, report = flat(state_dict), LoadReport("the DP-Cap checkpoint")
    entries = dpcap_pieces(state, report)
    sizes = _Sizes(state, report, "captioner", image_size)
    vocabulary, width = sizes.of(TEXT_EMBEDDING, 2, 0), sizes.of(TEXT_EMBEDDING, 2, 1)
    biases = "decoder.layers.0.linear1.bias" in state
    if biases:
        report.notes.append("ReLU in the decoder: the file cannot say, but published layers with biases have it")
    known = {192: 6, 384: 6, 512: 16, 576: 12, 768: 12}
    settings = sizes.settings(
        heads=heads,
        decoder_width=width,
        decoder_depth=sizes.depth("decoder.layers"),
        decoder_heads=_heads(report, "decoder ", width, known, (6, 12, 16) if width < 576 else (12, 16), decoder_heads),
        text_length=sizes.of("text_decoder_pos_embed", 3, 1),
        vocabulary=vocabulary,
        decoder_bias=biases,
        decoder_activation="relu" if biases else "gelu",
    )
    model = _built(settings, "caption", state)
    fill_whole(model, sizes.resized(entries), report)
    return model, report


def to_vip_mae(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """Copies of the weights under the published keys."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def to_dpcap(model: Captioner, unused: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copies of the weights under the published keys. `unused` tensors come from the report of an import; without it
    they are recomputed or zero."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        state[TEXT_EMBEDDING if name == "text_embedding.weight" else name] = tensor.detach().clone()
    like, width = state["cls_token"], model.shape.encoder.width
    side = CAUSAL_MASK_SIDE
    mask = torch.ones(side, side, device=like.device).tril()[None, None]
    made = {
        "text_pos_embed": text_positions(width, model.shape.text_length).to(like.device),
        "mask_token": like.new_zeros(1, 1, model.shape.text.width),
        "mask_token_text": like.new_zeros(1, 1, model.shape.text.width),
        "encoder_text_type_embedding": like.new_zeros(1, 1, width),
    }
    made |= {f"decoder.layers.{n}.self_attn.bias": mask.clone() for n in range(model.shape.text.depth)}
    return state | made | {name: tensor for name, tensor in (unused or {}).items() if name in made}


def vip_mae_pieces(state: Mapping[str, Tensor]) -> WeightEntries:
    return same_names(state)


def dpcap_pieces(state: Mapping[str, Tensor], report: LoadReport) -> WeightEntries:
    """The weights under our names; tensors that captioning does not use are reported and left out."""
    entries: WeightEntries = {}
    for key, tensor in state.items():
        if key in DPCAP_UNUSED:
            report.add(key, "ignored", tensor, DPCAP_UNUSED[key])
        elif key.startswith("decoder.layers.") and key.endswith(".self_attn.bias"):
            _check_mask(key, tensor)
            report.add(key, "ignored", tensor, "the causal mask, which is recomputed")
        elif key == TEXT_EMBEDDING:
            entries["text_embedding.weight"] = WeightEntry(tensor, (key,))
        else:
            entries[key] = WeightEntry(tensor, (key,))
    return entries


def _check_mask(key: str, mask: Tensor) -> None:
    side = mask.shape[-1] if mask.dim() else 0
    causal = mask.shape == (1, 1, side, side)
    if causal and not mask.is_meta:
        causal = bool(((mask[0, 0] != 0) == torch.ones(side, side, dtype=torch.bool).tril()).all())
    if not causal:
        raise WeightsError(f"{key} {list(mask.shape)} is not a causal mask; the checkpoint is of another architecture.")


class _Sizes:
    """The sizes given by the shapes of the encoder's weights; WeightsError where they do not give one."""

    def __init__(self, state: Mapping[str, Tensor], report: LoadReport, family: str, image_size: int | None) -> None:
        self.state, self.report, self.family = state, report, family
        self.width = self.of("cls_token", 3, -1)
        self.patch = self.of("patch_embed.proj.weight", 4, -1)
        rows = self.of("pos_embed", 3, 1)
        self.grid = math.isqrt(max(0, rows - 1))
        if self.grid < 1 or self.grid**2 != rows - 1:
            raise WeightsError(f"pos_embed has {rows} rows, not 1 + a square; only square images can be read.")
        self.image_size = image_size or self.grid * self.patch

    def of(self, key: str, dims: int, axis: int) -> int:
        if key not in self.state:
            raise WeightsError(f"{self.report.source} lacks {key}; pass a whole checkpoint of that class.")
        if self.state[key].dim() != dims:
            raise WeightsError(
                f"{key} is {list(self.state[key].shape)}, which is not {dims}-dimensional; the checkpoint is damaged "
                f"or of another architecture."
            )
        return self.state[key].shape[axis]

    def depth(self, prefix: str) -> int:
        numbers = {
            int(number)
            for key in self.state
            if key.startswith(f"{prefix}.") and (number := key.removeprefix(f"{prefix}.").split(".")[0]).isdecimal()
        }
        if numbers != set(range(len(numbers))) or not numbers:
            raise WeightsError(
                f"{self.report.source} lacks some of {prefix}.0, {prefix}.1, …; pass all of its weights."
            )
        return len(numbers)

    def settings(self, *, heads: int | None, **rest: Any) -> ModelSettings:
        known = {preset.encoder.width: preset.encoder.heads for preset in TABLES[self.family].values()}
        narrow = self.family == "captioner" and self.width < 576
        likely = (16, 12) if self.width >= 1024 else (6, 12, 16) if narrow else (12, 16)
        encoder = {
            "family": self.family,
            "image_size": self.image_size,
            "patch_size": self.patch,
            "width": self.width,
            "depth": self.depth("blocks"),
            "heads": _heads(self.report, "", self.width, known, likely, heads),
            "qkv_bias": "blocks.0.attn.qkv.bias" in self.state,
        }
        try:
            return ModelSettings.model_validate(encoder | rest)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise WeightsError(f"the weights' sizes fit no model of ours: {field}: {first['msg']}.") from None

    def resized(self, entries: WeightEntries) -> WeightEntries:
        """The entries, with position tables for the requested image size."""
        grid = self.image_size // self.patch
        if grid == self.grid:
            return entries
        self.report.notes.append(
            f"images of {self.image_size} pixels, not {self.grid * self.patch}: positions are interpolated"
        )
        return {n: resized_piece(p, 1 + grid**2) if n in IMAGE_TABLES else p for n, p in entries.items()}


def _heads(
    report: LoadReport, part: str, width: int, known: Mapping[int, int], likely: tuple[int, ...], given: int | None
) -> int:
    name = f"{part.strip()}_heads".lstrip("_")
    if given is not None:
        if given < 1 or width % given:
            raise WeightsError(
                f"{name} = {given} does not divide the width {width}; give the number it was trained with."
            )
        report.notes.append(f"{given} {part}heads, as given")
        return given
    if width in known:
        report.notes.append(f"{known[width]} {part}heads, as the published class of width {width} has")
        return known[width]
    fitting = [heads for heads in likely if width % heads == 0]
    if not fitting:
        raise WeightsError(
            f"the number of {part}heads cannot be read from weights, and no published class has width {width}; "
            f"pass {name}=."
        )
    report.notes.append(
        f"{fitting[0]} {part}heads ASSUMED: weights do not show it, and no published class has width {width}; a "
        f"wrong number gives wrong features and no error, so pass {name}= if it was another"
    )
    return fitting[0]


def _built(settings: ModelSettings, objective: Any, state: Mapping[str, Tensor]) -> Any:
    """The model without initial values, since all of them will come from the file."""
    try:
        model = build(settings, objective, device="meta")
    except SettingsError as error:
        raise WeightsError(f"the weights' sizes fit no model of ours: {error}") from None
    return model if any(tensor.is_meta for tensor in state.values()) else model.to_empty(device="cpu")
