"""Encoders of libraries, exported: what timm, transformers and PEFT read is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from murmuration.model.build import Objective, build
from murmuration.model.foreign_config import Preprocessing
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import DOWN, UP, merged, select
from murmuration.train.export import named_forms
from murmuration.train.export.finished import ExportError, Finished
from murmuration.train.export.forms import write_form
from tests.support.foreign_models import HF_TOYS, TIMM_TOYS, library_folder, moved

NAMES = ("ant", "bee", "cat", "dog", "elk")
PICTURES = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(3))


def trained(
    folder: Path, kind: str, objective: Objective = "classify", adapters: bool = False, **args: Any
) -> Finished:
    """A model on the toy encoder with weights that nothing else has, as if a run had ended with it."""
    sizes: dict[str, Any] = {"classes": 5, "image_size": 56, "vocabulary": 20, "text_length": 6, "decoder_depth": 1}
    if kind in HF_TOYS:
        sizes |= {"family": "hf", "name": str(library_folder(folder, kind))}
    else:
        name, given = TIMM_TOYS[kind]
        sizes |= {
            "family": "timm",
            "name": name,
            "model_args": {k: v for k, v in given.items() if k != "img_size"} | args,
        }
    settings = ModelSettings.model_validate({**sizes, "decoder_width": 16, "decoder_heads": 2})
    model = build(settings, objective)
    if adapters:
        select(model, "lora", rank=3)
    tensors = {name: tensor.clone() for name, tensor in moved(model).state_dict().items() if tensor.is_floating_point()}
    if adapters:
        model = build(settings, objective).eval()
        model.load_state_dict(merged(tensors), strict=False)
    model.requires_grad_(False)
    seen = Preprocessing(256, 224, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    return Finished(model, tensors, seen, NAMES if objective == "classify" else (), None, 7, metadata={"made": "here"})


def written(finished: Finished, out: Path, form: str) -> Path:
    out.mkdir()
    write_form(form, finished, out)
    return out


def close(found: Tensor, expected: Tensor) -> None:
    found = found.detach()
    assert expected.std() > 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", TIMM_TOYS)
def test_timm_loads_what_was_trained(tmp_path: Path, kind: str) -> None:
    finished = trained(tmp_path / "weights", kind)
    expected = finished.model.logits(PICTURES)  # pyright: ignore
    out = written(finished, tmp_path / "out", "timm")
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    close(model(PICTURES), expected)
    assert model.pretrained_cfg["mean"] == [0.1, 0.2, 0.3] and model.pretrained_cfg["label_names"] == list(NAMES)
    kept = json.loads((out / "renamed.json").read_text())["model.safetensors"]
    assert kept.keys() == finished.tensors.keys(), "every certified tensor is there bit by bit"


@pytest.mark.parametrize("kind", HF_TOYS)
def test_transformers_loads_what_was_trained(tmp_path: Path, kind: str) -> None:
    finished = trained(tmp_path / "weights", kind)
    expected = finished.model.logits(PICTURES)  # pyright: ignore
    out = written(finished, tmp_path / "out", "hf")
    model = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    close(model(PICTURES).logits, expected)
    assert list(model.config.id2label.values()) == list(NAMES)
    assert transformers.AutoImageProcessor.from_pretrained(out).image_mean == (0.1, 0.2, 0.3)
    kept = json.loads((out / "renamed.json").read_text())["model.safetensors"]
    stored = load_file(out / "model.safetensors")
    assert kept.keys() == finished.tensors.keys()
    for name, where in kept.items():
        assert torch.equal(stored[where["parts"][0]], finished.tensors[name])


@pytest.mark.parametrize(
    ("kind", "form"), [("timm dinov2", "timm"), ("dinov2", "hf"), ("clip vision", "hf"), ("siglip", "hf")]
)
def test_of_a_captioner_the_encoder_is_loaded(tmp_path: Path, kind: str, form: str) -> None:
    finished = trained(tmp_path / "weights", kind, "caption")
    tokens = finished.model.tokens(PICTURES)  # pyright: ignore
    out = written(finished, tmp_path / "out", form)
    if form == "timm":
        close(timm.create_model(f"local-dir:{out}", pretrained=True).eval()(PICTURES), tokens[:, 0])
    else:
        close(transformers.AutoModel.from_pretrained(out).eval()(PICTURES).last_hidden_state, tokens)


@pytest.mark.parametrize("kind", ["timm dinov2", "timm swin", "dinov2"])
def test_adapters_have_the_names_of_peft(tmp_path: Path, kind: str) -> None:
    """Added to the library's own model by what PEFT says of its files: W + alpha/r · B·A, and saved modules whole."""
    finished = trained(tmp_path / "weights", kind, adapters=True)
    out = written(finished, tmp_path / "out", "peft")
    base: nn.Module
    if kind in HF_TOYS:
        base = transformers.Dinov2ForImageClassification(transformers.AutoConfig.from_pretrained(tmp_path / "weights"))
        base.classifier = nn.Linear(base.classifier.in_features, 5)  # pyright: ignore
        head = "classifier"
    else:
        name, sizes = TIMM_TOYS[kind]
        base = timm.create_model(name, num_classes=5, **sizes)
        head = "head" if kind == "timm dinov2" else "head.fc"
    net = {name.removeprefix("body.net."): each for name, each in finished.tensors.items()}
    adapted = {name for name in net if name.endswith((DOWN, UP))}
    base.requires_grad_(False).load_state_dict({name: net[name] for name in net.keys() - adapted}, strict=False)
    told, stored = json.loads((out / "adapter_config.json").read_text()), load_file(out / "adapter_model.safetensors")
    assert (told["peft_type"], told["r"], told["modules_to_save"]) == ("LORA", 3, [head])
    layers = dict(base.named_modules())
    for target in told["target_modules"]:
        down, up = (stored.pop(f"base_model.model.{target}.lora_{which}.weight") for which in "AB")
        layers[target].weight += told["lora_alpha"] / told["r"] * up @ down  # pyright: ignore
    for end in ("weight", "bias"):
        getattr(layers[head], end).copy_(stored.pop(f"base_model.model.{head}.{end}"))
    assert not stored
    found = base.eval()(PICTURES)
    close(found if isinstance(found, Tensor) else found.logits, finished.model.logits(PICTURES))  # pyright: ignore


@pytest.mark.parametrize("form", ["timm", "peft"])
def test_a_head_on_the_last_stage_is_not_timms(tmp_path: Path, form: str) -> None:
    finished = trained(tmp_path / "weights", "timm swin", adapters=form == "peft", features_only=True)
    with pytest.raises(ExportError, match="reads its last stage"):
        written(finished, tmp_path / "out", form)


def test_what_a_form_cannot_say_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = trained(tmp_path / "weights", "timm convnext")
    for form, said in (("hf", "export it as timm"), ("vip", "encoders of ours"), ("peft", "trained none")):
        with pytest.raises(ExportError, match=said):
            written(finished, tmp_path / form, form)

    def changed(tensors: dict[str, Tensor], *rest: Any) -> None:
        save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, *rest)

    monkeypatch.setattr("murmuration.train.export.finished.save_file", changed)
    with pytest.raises(ExportError, match="computes something else"):
        written(finished, tmp_path / "timm", "timm")
    monkeypatch.undo()
    monkeypatch.setattr(named_forms, "write_json", lambda *_: None)
    with pytest.raises(ExportError, match="does not come back"):
        written(finished, tmp_path / "again", "timm")
