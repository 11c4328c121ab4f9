"""Forms that other packages load: a folder of timm or of transformers, and the files of the published ViP and DP-Cap.

What a form cannot say of a model is refused in one sentence, rather than left for the reader to find out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD
from murmuration.data.text.built_in import is_built_in
from murmuration.data.text.encoder import TextEncoder, open_vocabulary
from murmuration.model.build import Model
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.foreign import hugging_face_weights, timm_weights
from murmuration.model.foreign_config import (
    hugging_face_config,
    hugging_face_preprocessor,
    timm_architecture,
    timm_arguments,
    timm_config,
)
from murmuration.model.language_model import LanguageModel
from murmuration.model.load_report import WeightsError
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.released import CAUSAL_MASK_SIDE, to_dpcap, to_vip_mae
from murmuration.train.export.finished import WEIGHTS, ExportError, Finished, Loading, write_json, write_weights
from murmuration.train.export.named_forms import NAMED_FORMS, write_peft

PUBLISHED = "checkpoint.pth"
IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)


Form = Callable[[Finished, Path], Loading]


def write_timm(finished: Finished, out: Path) -> Loading:
    model = finished.model
    write_json(out / "config.json", timm_config(model, finished.seen, finished.class_names))
    write_weights(timm_weights(model), finished, out / WEIGHTS)
    whole = ", ".join(f"{name}={value!r}" for name, value in timm_arguments(model).items())
    program = (
        "import timm\n"
        'model = timm.create_model("local-dir:DIR", pretrained=True).eval()\n'
        "see = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n\n"
        "# The same by the weights alone:\n"
        f'model = timm.create_model("{timm_architecture(model.shape)}", checkpoint_path="DIR/{WEIGHTS}",\n'
        f"    {whole}).eval()\n"
    )
    notes = ()
    if not isinstance(model, Classifier):
        what = "the class token" if model.shape.pooling == "class" else "the mean of the patches' tokens"
        features = f"The model gives features: {what} after the last norm, {model.shape.encoder.width} numbers."
        notes = (features, _left_out(model, "timm"))
    return Loading("timm", program, notes)


def _left_out(model: Model, package: str) -> str:
    if isinstance(model, Captioner):
        return (
            f"The text decoder is left out, since {package} has none like it: the forms dpcap and safetensors have it."
        )
    return f"The pixel decoder is left out, since {package} has none: the forms hf, vip and safetensors have it."


def write_hugging_face(finished: Finished, out: Path) -> Loading:
    model = finished.model
    told = hugging_face_config(model, finished.class_names)
    write_weights(hugging_face_weights(model), finished, out / WEIGHTS)
    write_json(out / "config.json", told)
    write_json(out / "preprocessor_config.json", hugging_face_preprocessor(model.shape.image_size, finished.seen))
    (name,) = told["architectures"]
    notes: tuple[str, ...] = ()
    more = ""
    if isinstance(model, Captioner):
        notes = (
            "Its last_hidden_state holds all tokens after the last norm, and its pooler_output the class token.",
            _left_out(model, "transformers"),
            *_write_tokenizer(finished.tokenizer, model, out),
        )
    elif isinstance(model, MaskedAutoencoder):
        more = _WHOLE_PICTURES
    program = (
        f"from transformers import AutoImageProcessor, {name}\n"
        f'model = {name}.from_pretrained("DIR").eval()\n'
        'see = AutoImageProcessor.from_pretrained("DIR")\n' + more
    )
    return Loading("transformers", program, notes)


_WHOLE_PICTURES = """
# Features of whole pictures: nothing is masked, and the noise keeps the patches in their order.
import torch
from transformers import ViTMAEModel
encoder = ViTMAEModel.from_pretrained("DIR", mask_ratio=0.0).eval()
patches = (encoder.config.image_size // encoder.config.patch_size) ** 2
tokens = encoder(pixel_values, noise=torch.arange(float(patches))[None].expand(len(pixel_values), -1)).last_hidden_state
"""


def _write_tokenizer(source: str | None, model: Captioner, out: Path) -> tuple[str, ...]:
    if source is None:
        return ()
    text, vocabulary = TextEncoder(source, model.shape.text_length), open_vocabulary(source)
    token = vocabulary.tokenizer.id_to_token
    special = {"pad_token": text.pad, "bos_token": text.start, "eos_token": text.end, "unk_token": text.unk}
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.shape.text_length,
        "clean_up_tokenization_spaces": False,
        **{name: token(number) for name, number in special.items() if number >= 0},
    }  # fmt: skip
    (out / "tokenizer.json").write_text(vocabulary.tokenizer.to_str(pretty=True), encoding="utf-8")
    write_json(out / "tokenizer_config.json", told)
    cleaned = "open_clip's lower-case cleaning comes before it; " if is_built_in(source) else ""
    return (f"The tokenizer is that of the captions: {cleaned}a row is the start token, words, the end token.",)


def write_vip(finished: Finished, out: Path) -> Loading:
    model = finished.model
    if not isinstance(model, MaskedAutoencoder):
        raise ExportError(f"vip is the published form of masked autoencoders, and this is {_kind(model)}; {_others()}")
    _require_usual_pixels(finished, "vip")
    torch.save({"model": to_vip_mae(model)}, out / PUBLISHED)
    shape = model.shape
    heads = f"heads={shape.encoder.heads}, decoder_heads={shape.pixels.heads}"
    return _published("load_vip_mae", heads, f"The masked share is not stored: it was {shape.mask_ratio:g}.")


def write_dpcap(finished: Finished, out: Path) -> Loading:
    model = finished.model
    if not isinstance(model, Captioner):
        raise ExportError(f"dpcap is the published form of captioners, and this is {_kind(model)}; {_others()}")
    _require_usual_pixels(finished, "dpcap")
    shape = model.shape
    if shape.decoder_bias != (shape.decoder_activation == "relu"):
        raise ExportError(
            "dpcap's text decoders have biases with ReLU and none with GELU, by which readers tell them apart, and "
            f"this one is otherwise; {_others()}"
        )
    if shape.text_length > CAUSAL_MASK_SIDE:
        raise ExportError(
            f"dpcap's text decoders have a mask of {CAUSAL_MASK_SIDE} tokens, and this one reads {shape.text_length}; "
            f"{_others()}"
        )
    torch.save({"model": to_dpcap(model)}, out / PUBLISHED)
    return _published("load_dpcap", f"heads={shape.encoder.heads}, decoder_heads={shape.text.heads}")


def _published(reader: str, heads: str, *notes: str) -> Loading:
    program = (
        f"from murmuration.model.released import {reader}\n"
        "from murmuration.model.weight_files import read_weights\n"
        f'model = {reader}(read_weights("DIR/{PUBLISHED}"), {heads}).eval()\n'
    )
    return Loading("pytorch", program, ("Numbers of heads are not stored: give them as above.", *notes))


def _require_usual_pixels(finished: Finished, form: str) -> None:
    if (finished.seen.mean, finished.seen.std) != IMAGENET:
        raise ExportError(
            f"{form} says nothing of pixels, so its readers normalise them by ImageNet's statistics, and this model "
            f"was trained with others; {_others()}"
        )


def _kind(model: Model) -> str:
    kinds = {MaskedAutoencoder: "a masked autoencoder", Captioner: "a captioner"}
    return next((name for kind, name in kinds.items() if isinstance(model, kind)), "a classifier")


def _others() -> str:
    return "export it as safetensors, or as timm or hf"


FORMS: dict[str, Form] = {
    "timm": write_timm, "hf": write_hugging_face, "peft": write_peft, "vip": write_vip, "dpcap": write_dpcap,
}  # fmt: skip


def write_form(form: str, finished: Finished, out: Path) -> Loading:
    if isinstance(finished.model, LanguageModel) and finished.model.shape.named is None:
        raise ExportError(f"{form} is a form of image models, and this is a language model; export it as safetensors")
    forms = FORMS if finished.model.shape.named is None else NAMED_FORMS
    if form not in forms:
        raise ExportError(
            f"{form} is the published form of encoders of ours, and this is {finished.model.shape.named}; export it as "
            "safetensors"
        )
    try:
        return forms[form](finished, out)
    except WeightsError as error:
        raise ExportError(str(error).rstrip(".")) from None
