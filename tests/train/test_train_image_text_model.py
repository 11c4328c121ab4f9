"""Image-text models of transformers by their folder: their losses, clipping record by record, adapters, a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from murmuration.accounting.certificate.verify import verify
from murmuration.data.text.encoder import TextEncoder
from murmuration.launch.init import main as init
from murmuration.model.build import build
from murmuration.model.image_text import ImageTextModel
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.model.trainable import TrainableError, select
from murmuration.model.warm_start import initialise_from
from murmuration.train.config.load import ConfigError, load
from murmuration.train.measures.captions import CaptionWriter
from murmuration.train.planner.cluster import Cluster
from murmuration.train.planner.forecast import forecast
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.parity_engines import (
    judged,
    only,
    prepared,
    rule_of,
    summed,
    with_adapters_that_do_something,
)
from tests.support.tars import indexed, png
from tests.support.texts import exports_agree
from tests.train.test_train_language_model import sentences, started
from tests.train.test_train_named_language_model import write_tokenizer

LENGTH, WORDS, SIDE, PLACES = 9, 14, 16, 4
IMAGE = WORDS - 1
TEXT: dict[str, Any] = {
    "model_type": "llama", "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 8, "hidden_size": 16, "projection_dim": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "attention_dropout": 0.1,
}  # fmt: skip
INTERN = VISION | {"model_type": "internvl_vision", "image_size": [SIDE, SIDE], "patch_size": [4, 4]}
KINDS: dict[str, dict[str, Any]] = {
    "llava": {"text_config": TEXT, "vision_config": VISION, "image_token_index": IMAGE},
    "vipllava": {
        "text_config": TEXT, "vision_config": VISION, "image_token_index": IMAGE, "vision_feature_layers": [-1, -2],
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"}, "vision_config": INTERN, "image_token_id": IMAGE,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def folder_of(kind: str, folder: Path) -> Any:
    """A folder of transformers with weights, a tokenizer and how images are prepared; and the model in it."""
    torch.manual_seed(1)
    net = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **KINDS[kind])).eval()
    with torch.no_grad():  # large enough that an image in another place would be seen
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    net.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())  # older ones state the decoder's words at the top as well
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["text_config"]["vocab_size"]}))
    write_tokenizer(folder, "<image>")
    half = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"height": SIDE, "width": SIDE}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": half}))
    return net


def model_of(folder: Path, trainable: str = "all") -> ImageTextModel:
    model = build(ModelSettings(family="hf", name=str(folder), text_length=LENGTH), "caption")
    assert isinstance(model, ImageTextModel)
    initialise_from(model, folder)
    select(model, trainable, rank=2)  # pyright: ignore[reportArgumentType]
    return model


def inputs_of(folder: Path, count: int) -> dict[str, Tensor]:
    text = TextEncoder(folder, LENGTH, of_language_model=True)
    said = [text.encode(each[: 12 + 6 * (number % 3)]) for number, each in enumerate(sentences(count, 3))]
    draw = torch.Generator().manual_seed(5)
    return {"images": torch.randn(count, 3, SIDE, SIDE, generator=draw), "tokens": torch.tensor(said)}


def as_the_library_reads(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One record, without padding, with the words in whose places the image is put."""
    words = inputs["tokens"][row]
    words = words[words >= 0]
    ids = torch.cat([words[:1], torch.full((PLACES,), IMAGE), words[1:]])[None]
    counted = torch.cat([torch.full((1 + PLACES,), -100), words[1:]])[None]
    return {"pixel_values": inputs["images"][row : row + 1], "input_ids": ids, "labels": counted}


@pytest.mark.parametrize("kind", KINDS)
def test_its_losses_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    theirs = folder_of(kind, tmp_path)
    inputs = inputs_of(tmp_path, 6)
    assert (inputs["tokens"] == -1).any()
    for row, loss in enumerate(model_of(tmp_path).eval()(inputs)):
        assert loss.item() == pytest.approx(theirs(**as_the_library_reads(inputs, row)).loss.item(), abs=1e-5)


@pytest.mark.parametrize("trainable", ["all", "head", "bias", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_record_is_clipped_by_itself(kind: str, trainable: str, tmp_path: Path) -> None:
    folder_of(kind, tmp_path)
    if (kind, trainable) == ("internvl", "head"):
        with pytest.raises(TrainableError, match="no head beside its table of words"):
            model_of(tmp_path, trainable)
        return
    model = model_of(tmp_path, trainable)
    with_adapters_that_do_something(model)
    inputs = inputs_of(tmp_path, 8) | {"record_weight": torch.tensor([1.0, 1, 3, 1, 1, 1, 0, 1])}
    present = torch.ones(8, dtype=torch.bool)
    present[5] = False
    records = brute_force.records_of(model, inputs)
    bound, _, expected = judged(records, present)
    clip = prepared("book-keeping", rule_of("flat", bound), model)
    totals, _ = summed(clip, model, [(only(inputs, part), present[part]) for part in (slice(0, 4), slice(4, 8))])
    for name, tensor in expected.items():
        if not name.endswith("k_proj.bias"):  # to which a softmax is blind
            assert tensor.any(), f"{name} is trained, and the loss does not depend on it"
            assert relative_error({name: totals[name]}, {name: tensor}) <= 1e-4, name


def test_a_caption_of_a_tokenizer_without_padding_is_the_likeliest(tmp_path: Path) -> None:
    folder_of("llava", tmp_path)
    model, text = model_of(tmp_path).eval(), TextEncoder(tmp_path, LENGTH, of_language_model=True)
    memory = model.encode_images(inputs_of(tmp_path, 3)["images"])
    with torch.no_grad():  # the last word of all is the likeliest everywhere
        head = model.get_submodule("body.net.lm_head")
        head.weight.zero_()  # pyright: ignore
        head.register_parameter("bias", torch.nn.Parameter(torch.arange(float(WORDS))))
    assert CaptionWriter(model, text, 4).beam(memory, 1) == [[IMAGE] * 3] * 3


def private_records(folder: Path, count: int, seed: int) -> Path:
    told = zip(range(count), sentences(count, seed), strict=True)
    indexed(folder, ({"png": png(7 * number % 256, SIDE), "txt": said.encode()} for number, said in told))
    return folder


def test_a_run_from_a_folder_trains_adapters_and_goes_back_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of("llava", tmp_path / "model")
    private, public = private_records(tmp_path / "private", 300, 2), private_records(tmp_path / "public", 32, 1)
    path = tmp_path / "config.json"
    options = ["--data", str(private), "--held-out", str(public), "--start", str(tmp_path / "model"), "--public"]
    assert init(["caption", *options, "--out", str(path)]) == 0
    change = ["run.engine=local", f"run.dir={tmp_path / 'run'}", "model.text_length=9", "phases.1.steps=6",
              "phases.1.data.augment=none", "train_micro_batch_size_per_gpu=16"]  # fmt: skip
    for more, reason in (
        (["phases.1.monitor={\"path\":\"x\",\"public\":true}"], "curvature is not measured"),
        (["run.engine=fsdp2"], "which was not tried on weights that ZeRO-3 and FSDP2 shard"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            load(path, [*change, *more])
    config = load(path, change)
    assert config.phases[1].trainable == "lora" and config.model.vocabulary == WORDS
    planned = load(path, [*change, "run.engine=deepspeed"])
    (phase,) = forecast(planned, Cluster(1, 80.0, 100.0, 1.0, 1e8))
    done = started(tmp_path, config.model_dump(mode="json", by_alias=True, exclude_unset=True))
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = verify(tmp_path / "run")
    assert verdict.objection is None and verdict.committed == 6 and 7.9 < verdict.epsilon <= 8
    assert phase.checkpoints
    given = as_the_library_reads(inputs_of(tmp_path / "model", 1), 0)
    exports_agree(tmp_path, monkeypatch, AutoModelForImageTextToText, lambda net: net(**given).logits)
    said = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    assert (said["image_mean"], said["image_std"]) == ([0.5] * 3, [0.25] * 3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text_length": 61}, "of which an image takes 4; set model.text_length to at most 60"),
    ({"vocabulary": 12}, "has 14 tokens; leave it out"),
    ({"patch_size": 8}, "has no model.patch_size, for a model of images and texts"),
    ({"image_size": 24}, "does not run on pictures of 24 px"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_does_not_fit_is_refused_in_a_sentence(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder_of("llava", tmp_path)
    with pytest.raises(SettingsError, match=reason):
        ModelSettings.model_validate({"family": "hf", "name": str(tmp_path), "text_length": LENGTH} | change).resolved()


def test_other_objectives_and_other_models_are_refused_in_a_sentence(tmp_path: Path) -> None:
    folder_of("llava", tmp_path)
    settings = ModelSettings(family="hf", name=str(tmp_path), text_length=LENGTH)
    with pytest.raises(SettingsError, match='cannot be trained with objective "classify"; use "caption"'):
        build(settings, "classify")
    siglip = VISION | {"model_type": "siglip_vision_model"}
    told = {"model_type": "paligemma", "text_config": TEXT | {"model_type": "gemma"}, "vision_config": siglip}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(SettingsError, match="a config trains llava, vipllava or internvl; train it through the lib"):
        ModelSettings(family="hf", name=str(tmp_path)).resolved()
