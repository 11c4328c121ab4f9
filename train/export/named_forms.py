"""Models of timm and Hugging Face, trained here, as their own library loads them; and their adapters as PEFT does.

The library builds the model with its own kind of head and reads the folder back. Unless that gives what was trained
gives, nothing is exported: some architectures have other layers below a head than without one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from murmuration.accounting.escaping import first_line
from murmuration.model.body import made_by_timm
from murmuration.model.build import Model
from murmuration.model.classifier import Classifier
from murmuration.model.fill import WeightEntries, WeightEntry
from murmuration.model.foreign_config import hugging_face_classes, hugging_face_preprocessor
from murmuration.model.image_text import ImageTextModel
from murmuration.model.language_model import NamedLanguageModel
from murmuration.model.named import TITLES, Library, Named
from murmuration.model.named_models import named_of
from murmuration.model.trainable import DOWN, UP
from murmuration.train.export.finished import WEIGHTS, ExportError, Finished, Loading, write_json, write_weights
from murmuration.train.storage.checkpoint_read import listed_digest

ADAPTER = "adapter_model.safetensors"
NET = "body.net."
TOKENIZER = "The tokenizer is that of the folder that the run's config names."
TOLERANCE = 1e-5
"""Of the largest output."""


@torch.no_grad()
def write_timm(finished: Finished, out: Path) -> Loading:
    import timm

    model, named = finished.model, _of("timm", finished)
    classes = model.shape.head.classes if isinstance(model, Classifier) else 0
    net, arguments = made_by_timm(named, model.shape.image_size, classes)
    ours: nn.Module = model.body.net  # pyright: ignore
    entries = {name: WeightEntry(tensor, (NET + name,)) for name, tensor in ours.state_dict().items()}
    entries |= _timm_head(net, model, named) if isinstance(model, Classifier) else {}
    known: dict[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    kept = ("fixed_input_size", "pool_size", "first_conv", "classifier")
    side = model.shape.image_size
    seen = {
        **{name: known[name] for name in kept if name in known}, "input_size": [3, side, side],
        "crop_pct": finished.seen.crop / finished.seen.resize, "interpolation": "bicubic", "crop_mode": "center",
        "mean": list(finished.seen.mean), "std": list(finished.seen.std), "num_classes": classes,
    }  # fmt: skip
    names = {"label_names": list(finished.class_names)} if finished.class_names else {}
    told = {
        "architecture": named.name.partition(".")[0], "num_classes": classes, "num_features": model.shape.encoder.width,
        "model_args": arguments, "pretrained_cfg": seen, **names,
    }  # fmt: skip
    write_json(out / "config.json", told)
    write_weights(entries, finished, out / WEIGHTS)
    picture = _picture(model)
    expected = model.logits(picture) if isinstance(model, Classifier) else model.body(picture)  # pyright: ignore
    _must_agree(named, expected, lambda: timm.create_model(f"local-dir:{out}", pretrained=True).eval()(picture))
    program = (
        "import timm\n"
        'model = timm.create_model("local-dir:DIR", pretrained=True).eval()\n'
        "see = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
    )
    return Loading("timm", program, () if isinstance(model, Classifier) else (_left_out("timm"),))


@torch.no_grad()
def write_hugging_face(finished: Finished, out: Path) -> Loading:
    model, named = finished.model, _of("hf", finished)
    net: Any = model.body.net  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(model, NamedLanguageModel):
        return _write_language_model(model, finished, out)
    if isinstance(model, ImageTextModel):
        return _write_image_text_model(model, finished, out)
    picture = _picture(model)
    if isinstance(model, Classifier):
        expected = model.logits(picture)
        net.classifier = model.head
        for key, value in hugging_face_classes(model.shape.head, finished.class_names).items():
            setattr(net.config, key, value)
    else:
        net = model.body.encoder  # pyright: ignore[reportAttributeAccessIssue]
        expected = net(pixel_values=picture).last_hidden_state
    kind = type(net)
    _save_under_their_names(net, finished, out)
    _write_json_of_pixels(finished, out)

    def theirs() -> Tensor:
        found = kind.from_pretrained(out, local_files_only=True).eval()(pixel_values=picture)
        return found.logits if isinstance(model, Classifier) else found.last_hidden_state

    _must_agree(named, expected, theirs)
    program = (
        f"from transformers import AutoImageProcessor, {kind.__name__}\n"
        f'model = {kind.__name__}.from_pretrained("DIR").eval()\n'
        'see = AutoImageProcessor.from_pretrained("DIR")\n'
    )
    return Loading("transformers", program, () if isinstance(model, Classifier) else (_left_out("transformers"),))


def _write_language_model(model: NamedLanguageModel, finished: Finished, out: Path) -> Loading:
    kind: Any = type(model.body.net)
    tokens = torch.arange(min(model.shape.text_length, model.shape.vocabulary))[None]
    expected = model.logits(tokens)
    _save_under_their_names(model.body.net, finished, out)
    _must_agree(
        named_of(model.shape), expected,
        lambda: kind.from_pretrained(out, local_files_only=True).eval()(input_ids=tokens).logits,
    )  # fmt: skip
    program = f'from transformers import {kind.__name__}\nmodel = {kind.__name__}.from_pretrained("DIR").eval()\n'
    return Loading("transformers", program, (TOKENIZER,))


def _write_image_text_model(model: ImageTextModel, finished: Finished, out: Path) -> Loading:
    """Compared with the library's own forward pass, in whose texts a word stands in each of the image's places."""
    kind: Any = type(model.body.net)
    picture, word = _picture(model), model.body.placeholder
    words = torch.arange(min(model.shape.text_length, model.shape.vocabulary))[None]
    words = torch.where(words == word, 0, words)
    memory = model.encode_images(picture)
    expected = model.decode(memory, words)
    _save_under_their_names(model.body.net, finished, out)
    _write_json_of_pixels(finished, out)
    ids = torch.cat([words[:, :1], words.new_full((1, memory.shape[1]), word), words[:, 1:]], dim=1)

    def theirs() -> Tensor:
        net = kind.from_pretrained(out, local_files_only=True).eval()
        return net(input_ids=ids, pixel_values=picture).logits[:, memory.shape[1] :]

    _must_agree(named_of(model.shape), expected, theirs)
    program = (
        f"from transformers import AutoImageProcessor, {kind.__name__}\n"
        f'model = {kind.__name__}.from_pretrained("DIR").eval()\n'
        'see = AutoImageProcessor.from_pretrained("DIR")\n'
    )
    place = f"The image stands behind the first token of a text, in {memory.shape[1]} places, with no words around it."
    return Loading("transformers", program, (TOKENIZER, place))


def _save_under_their_names(net: Any, finished: Finished, out: Path) -> None:
    net.save_pretrained(out, max_shard_size="1TB")
    # transformers chose the names. The same bytes are the same tensor.
    ours: dict[str, list[str]] = {}
    for name, tensor in finished.tensors.items():
        ours.setdefault(listed_digest(tensor), []).append(name)
    stored = load_file(out / WEIGHTS)
    entries: WeightEntries = {}
    for name, tensor in stored.items():
        same = ours.get(listed_digest(tensor), [])
        entries[name] = WeightEntry(tensor, (same.pop(0),) if same else ())
    write_weights(entries, finished, out / WEIGHTS)


def write_peft(finished: Finished, out: Path) -> Loading:
    """Adapters and head; the frozen weights stay where they came from."""
    model, tensors = finished.model, finished.tensors
    named = model.shape.named
    layers = [name.removesuffix(f".{DOWN}") for name in tensors if name.endswith(f".{DOWN}")]
    if named is None or not isinstance(model, Classifier | NamedLanguageModel | ImageTextModel) or not layers:
        raise ExportError(
            'peft is the form of adapters (trainable "lora") of a language model of Hugging Face, or of a classifier '
            "on an encoder of timm or Hugging Face, and this run trained none; export it as timm, hf or safetensors"
        )
    if isinstance(model, NamedLanguageModel | ImageTextModel):
        kind, entries = type(model.body.net).__name__, WeightEntries()
        program = f'from transformers import {kind}\nbase = {kind}.from_pretrained("BASE")\n'
    elif named.library == "timm":
        net, arguments = made_by_timm(named, model.shape.image_size, model.shape.head.classes)
        entries = _timm_head(net, model, named)
        given = "".join(f", {name}={value!r}" for name, value in arguments.items())
        program = f'import timm\nbase = timm.create_model("{named.name}", pretrained=True, num_classes='
        program += f"{model.shape.head.classes}{given})\n"
    else:
        entries = {f"classifier.{end}": WeightEntry(tensors[f"head.{end}"], (f"head.{end}",)) for end in _ENDS}
        kind = type(model.body.net).__name__  # pyright: ignore[reportAttributeAccessIssue]
        program = f'from transformers import {kind}\nbase = {kind}.from_pretrained("BASE", num_labels='
        program += f"{model.shape.head.classes}, ignore_mismatched_sizes=True)\n"
    heads = sorted({name.rpartition(".")[0] for name in entries})
    for layer in layers:
        for theirs, own in (("lora_A", DOWN), ("lora_B", UP)):
            name = f"{layer}.{own}"
            entries[f"{layer.removeprefix(NET)}.{theirs}.weight"] = WeightEntry(tensors[name], (name,))
    entries = {f"base_model.model.{name}": entry for name, entry in entries.items()}
    rank = tensors[f"{layers[0]}.{DOWN}"].shape[0]
    told = {
        "peft_type": "LORA", "task_type": None if heads else "CAUSAL_LM",
        "base_model_name_or_path": None, "inference_mode": True,
        "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "target_modules": [layer.removeprefix(NET) for layer in layers], "modules_to_save": heads or None,
    }  # fmt: skip
    write_json(out / "adapter_config.json", told)
    if heads:
        _write_json_of_pixels(finished, out)
    write_weights(entries, finished, out / ADAPTER)
    program = f'from peft import PeftModel\n{program}model = PeftModel.from_pretrained(base, "DIR").eval()\n'
    note = (
        "The frozen weights are not in this folder: take those from which the last phase began. If that began from "
        "others than the library has by this name, or an earlier phase trained them, use the form safetensors instead."
    )
    return Loading("peft", program, (note,))


_ENDS = ("weight", "bias")


def _of(library: Library, finished: Finished) -> Named:
    named = finished.model.shape.named
    assert named is not None
    if named.library != library:
        raise ExportError(f"this model is {named}, not one of {TITLES[library]}; export it as {named.library}")
    return named


def _timm_head(net: Any, model: Classifier, named: Named) -> WeightEntries:
    """Under timm's name, in the shape that it has there: some heads are convolutions of one pixel."""
    if model.body.last_stage:  # pyright: ignore[reportAttributeAccessIssue]
        raise ExportError(f"the head on {named} reads its last stage, and timm's reads more; export it as safetensors")
    head = net.get_classifier()
    path = next((path for path, part in net.named_modules() if part is head), None)
    own = net.state_dict()
    found: WeightEntries = {}
    for end in _ENDS:
        tensor, place = getattr(model.head, end), own.get(f"{path}.{end}")
        if place is None or place.numel() != tensor.numel():
            raise ExportError(f"{named} has no single linear layer as its head in timm; export it as safetensors")
        found[f"{path}.{end}"] = WeightEntry(tensor.detach().reshape(place.shape), (f"head.{end}",))
    return found


def _picture(model: Model) -> Tensor:
    side = model.shape.image_size
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))


def _must_agree(named: Named, expected: Tensor, theirs: Callable[[], Tensor]) -> None:
    try:
        found, why = theirs(), "it computes something else"
    except Exception as error:  # whatever a library raises on a folder that it cannot read
        found, why = expected.new_tensor(torch.nan), first_line(error, 120)
    if found.shape != expected.shape or not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
        raise ExportError(
            f"{named} does not come back from the folder that its library would load ({why}); export it as safetensors"
        )


def _left_out(package: str) -> str:
    return f"The text decoder is left out, since {package} has none like it: the form safetensors has it."


def _write_json_of_pixels(finished: Finished, out: Path) -> None:
    told = hugging_face_preprocessor(finished.model.shape.image_size, finished.seen)
    write_json(out / "preprocessor_config.json", told)


NAMED_FORMS = {"timm": write_timm, "hf": write_hugging_face, "peft": write_peft}
