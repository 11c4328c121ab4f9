"""Networks of other libraries give what the library gives, through the command's reader, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf
from torch import Tensor, nn

from murmuration.data.channels import HALF
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.index.folders import build_folder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.library import LibraryClassifier
from murmuration.evaluation.models.load import load
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Evaluated, Sizes, features_of, open_model
from murmuration.evaluation.protocols.draws import draw_shots
from murmuration.model.classifier import TransformerClassifier
from tests.support.evaluation_world import COLOURS, class_folders, evaluate, result, table
from tests.support.foreign_models import moved

HALVES = {"mean": list(HALF), "std": list(HALF)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    class_folders(folder / "train", 6)
    class_folders(folder / "test", 3, seed=500)
    return folder


def pictures(side: int) -> Tensor:
    return torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))


def spread(net: nn.Module) -> Any:
    """No weight and no running statistic at a special value."""
    draw = torch.Generator().manual_seed(2)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_var is not None and part.running_mean is not None:
            part.running_var.uniform_(0.5, 2.0, generator=draw)
            part.running_mean.normal_(0.0, 0.5, generator=draw)
    return moved(net)


def opened(folder: Path, headless: bool = False, **sizes: int) -> Evaluated:
    return open_model(Subject.at(folder), Sizes(**sizes), "half", headless)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}
TIMM: dict[str, dict[str, Any]] = {
    "resnetv2_18": {"channels": [8, 16, 24, 32], "layers": [1, 1, 1, 1], "stem_chs": 8},  # a convolution is its head
    "dla46_c": {},  # likewise, in another place
    "convnext_atto": {"dims": [8, 12, 16, 24], "depths": [1, 1, 1, 1]},  # pools, then a norm
    "convnext_atto_rms": {"dims": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "head_hidden_size": 20},
    "deit_tiny_distilled_patch16_224": VIT,  # two heads
    "vit_small_patch16_18x2_224": VIT,  # blocks of other parts than ours
}  # fmt: skip


@pytest.mark.parametrize("name", TIMM)
def test_a_network_of_timm_gives_its_own_features_and_logits(tmp_path: Path, name: str) -> None:
    side = TIMM[name].get("img_size", 32)
    told = {**HALVES, "input_size": (3, side, side)}
    theirs = spread(timm.create_model(name, num_classes=5, pretrained_cfg_overlay=told, **TIMM[name]))
    save_for_hf(theirs, str(tmp_path), model_args=TIMM[name])
    found, images = opened(tmp_path), pictures(side)
    assert isinstance(found.model, LibraryClassifier) and found.report.left_as_initialised == []
    with torch.no_grad():
        same(found.model.logits(images), theirs(images))
        expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        same(features_of(found, images, "dpcap"), expected)
    assert found.shape.encoder.width == expected.shape[1] and found.shape.head.classes == 5
    assert expected.abs().max() > 0.01, "features of nothing"


@pytest.mark.parametrize(("act_layer", "kind"), [("gelu", TransformerClassifier), ("relu", LibraryClassifier)])
def test_ours_take_the_place_of_timms_only_if_they_compute_the_same(
    tmp_path: Path, act_layer: str, kind: type[nn.Module]
) -> None:
    """An activation leaves no trace in the file."""
    told = {**HALVES, "input_size": (3, 16, 16)}
    args = {**VIT, "act_layer": act_layer}
    theirs = spread(timm.create_model("vit_base_patch16_224", num_classes=5, pretrained_cfg_overlay=told, **args))
    save_for_hf(theirs, str(tmp_path), model_args=args)
    found, images = opened(tmp_path), pictures(16)
    assert isinstance(found.model, kind)
    with torch.no_grad():
        same(found.model.logits(images), theirs(images))


def test_another_picture_size_is_taken_or_refused(tmp_path: Path) -> None:
    told = {**HALVES, "input_size": (3, 32, 32)}
    args = TIMM["resnetv2_18"]
    theirs = spread(timm.create_model("resnetv2_18", num_classes=5, pretrained_cfg_overlay=told, **args))
    save_for_hf(theirs, str(tmp_path / "resnet"), model_args=args)
    found = opened(tmp_path / "resnet", image_size=48)
    with torch.no_grad():
        same(found.model.logits(pictures(48)), theirs(pictures(48)))
    fixed = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=5, **VIT)
    save_for_hf(fixed, str(tmp_path / "deit"), model_args=VIT, model_config={"pretrained_cfg": HALVES})
    with pytest.raises(EvaluationError, match="does not run on pictures of 24 px"):
        opened(tmp_path / "deit", image_size=24)


def test_a_norm_below_a_head_is_not_taken_for_the_head(tmp_path: Path) -> None:
    """A probe may do without the head, but not without what comes before it."""
    args = TIMM["convnext_atto"]
    theirs = timm.create_model("convnext_atto", num_classes=5, **args)
    save_for_hf(theirs, str(tmp_path), model_args=args, model_config={"pretrained_cfg": HALVES})
    kept = theirs.state_dict()
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    for gone, lacks in (("head.fc.", None), ("head.norm.", "lacks net.head.norm.weight")):
        torch.save({k: v for k, v in kept.items() if not k.startswith(gone)}, tmp_path / "pytorch_model.bin")
        if lacks is None:
            assert opened(tmp_path, headless=True).shape.encoder.width == 24
            model = load(tmp_path)
            images = pictures(model.image_size)
            assert not model.classifies and model.class_names == ()
            assert model(images).shape == (len(images), 24) and torch.equal(model(images), model.features(images))
            with pytest.raises(EvaluationError, match="has no classes"):
                model.shares(images)
        else:
            with pytest.raises(EvaluationError, match=lacks):
                opened(tmp_path, headless=True)


def few(world: Path, shots: int) -> np.ndarray:
    index = build_folder(world / "train", world / "index")
    return draw_shots(np.arange(index.records) // 6, shots, 0, tuple(COLOURS))


def test_a_convolutional_head_is_classified_probed_and_learnt_from_few(world: Path, tmp_path: Path) -> None:
    args, told = TIMM["resnetv2_18"], {**HALVES, "input_size": (3, 32, 32)}
    theirs = spread(timm.create_model("resnetv2_18", num_classes=5, pretrained_cfg_overlay=told, **args))
    save_for_hf(theirs, str(tmp_path / "resnet"), model_args=args)
    common = [tmp_path / "resnet", "--public"]
    assert evaluate("classify", *common, "--data", world / "test", "--out", tmp_path / "classify") == 0
    model = load(tmp_path / "resnet")
    paths = sorted((world / "test").rglob("*.png"))
    with torch.no_grad():
        likely = theirs(model.see(paths)).softmax(dim=1)
    for row, values in zip(table(tmp_path / "classify" / "predictions.csv"), likely, strict=True):
        assert float(row["probability_1"]) == pytest.approx(float(values.max()), rel=1e-4)
    learning = ["--data", world / "train", "--test", world / "test"]
    assert evaluate("probe", *common, *learning, "--out", tmp_path / "probe") == 0
    assert evaluate("few-shot", *common, *learning, "--shots", 2, "--out", tmp_path / "few") == 0
    assert len(few(world, 2)) == 10 and "top-1, 2 per class" in result(tmp_path / "few")["numbers"]
    assert result(tmp_path / "probe")["numbers"]["top-1"]["value"] > 0.4, "chance is 0.2"


PLAIN = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "image_size": 16, "patch_size": 4}  # fmt: skip
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
STAGES = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "image_size": 32}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
DINO = {name: value for name, value in PLAIN.items() if name != "intermediate_size"}
CONFIGS: dict[str, Callable[[], Any]] = {
    "vit": lambda: transformers.ViTConfig(**PLAIN, num_labels=5),
    "deit": lambda: transformers.DeiTConfig(**PLAIN, num_labels=5),
    "beit": lambda: transformers.BeitConfig(**PLAIN, num_labels=5, use_relative_position_bias=True),
    "dinov2": lambda: transformers.Dinov2Config(**DINO, num_labels=5),
    "convnext": lambda: transformers.ConvNextConfig(**STAGES, num_labels=5),
    "resnet": lambda: transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    ),
    "swin": lambda: transformers.SwinConfig(**SWIN, num_labels=5),
    "clip": lambda: transformers.CLIPConfig(vision_config=PLAIN, text_config=TEXT, num_labels=5),
    "siglip": lambda: transformers.SiglipConfig(vision_config=PLAIN, text_config=TEXT, num_labels=5),
}
CLASSIFIERS: dict[str, Any] = {
    "deit": transformers.DeiTForImageClassification,
    "clip": transformers.CLIPForImageClassification, "siglip": transformers.SiglipForImageClassification,
}  # fmt: skip


def in_folder(net: Any, folder: Path, side: int) -> Path:
    net.save_pretrained(folder)
    seen = {"image_mean": HALVES["mean"], "image_std": HALVES["std"], "size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(seen))
    return folder


def side_of(config: Any) -> int:
    return getattr(getattr(config, "vision_config", config), "image_size", 32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_classifier_of_hugging_face_gives_its_own_features_and_logits(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]()
    made = CLASSIFIERS.get(name, transformers.AutoModelForImageClassification.from_config)
    theirs = spread(made(config))
    side = side_of(config)
    found, images = opened(in_folder(theirs, tmp_path, side)), pictures(side)
    assert isinstance(found.model, LibraryClassifier) and found.shape.image_size == side
    with torch.no_grad():
        logits = theirs(pixel_values=images).logits
        same(found.model.logits(images), logits)
        features = features_of(found, images, "dpcap")
        head = theirs.classifier[-1] if isinstance(theirs.classifier, nn.Sequential) else theirs.classifier
        same(head(features), logits)
    assert features.shape == (3, head.in_features) and found.shape.encoder.width == head.in_features
    assert found.class_names == tuple(f"LABEL_{number}" for number in range(5))


def test_two_heads_are_averaged_as_the_library_does(tmp_path: Path) -> None:
    theirs = spread(transformers.DeiTForImageClassificationWithTeacher(CONFIGS["deit"]()))
    found, images = opened(in_folder(theirs, tmp_path, 16)), pictures(16)
    with torch.no_grad():
        same(found.model.logits(images), theirs(pixel_values=images).logits)
        first = theirs.deit(pixel_values=images).last_hidden_state[:, 0]
        same(features_of(found, images, "dpcap"), first)


def encoded(theirs: Any, images: Tensor) -> Tensor:
    """Pooled features as the library gives them, of what sees in a model that also reads."""
    if hasattr(theirs, "text_model"):
        return theirs.vision_model(pixel_values=images).pooler_output
    return theirs(pixel_values=images).pooler_output.flatten(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_encoder_of_hugging_face_gives_its_own_pooled_features(
    tmp_path: Path, name: str
) -> None:  # fmt: skip
    config = CONFIGS[name]()
    theirs = spread(transformers.AutoModel.from_config(config))
    side = side_of(config)
    in_folder(theirs, tmp_path, side)
    with pytest.raises(EvaluationError, match=r"lacks head\.weight"):
        opened(tmp_path)
    found, images = opened(tmp_path, headless=True), pictures(side)
    with torch.no_grad():
        same(features_of(found, images, "dpcap"), encoded(theirs, images))


def test_an_autoencoder_hides_nothing_when_its_encoder_is_probed(tmp_path: Path) -> None:
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
               "decoder_intermediate_size": 32}  # fmt: skip
    theirs = spread(transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**PLAIN, **decoder)))
    found, images = opened(in_folder(theirs, tmp_path, 16), headless=True), pictures(16)
    theirs.vit.config.mask_ratio = 0.0
    with torch.no_grad():
        for noise in (torch.rand(3, 16), torch.rand(3, 16)):
            tokens = theirs.vit(pixel_values=images, noise=noise).last_hidden_state
            assert tokens.shape[1] == 17
            same(features_of(found, images, "dpcap"), tokens.mean(dim=1))


def test_features_are_of_tokens_where_the_file_has_no_weights_that_pool(tmp_path: Path) -> None:
    """A pooler that was never trained would be drawn anew at each start."""
    theirs = spread(transformers.DeiTModel(CONFIGS["deit"]()))
    in_folder(theirs, tmp_path, 16)
    path = tmp_path / "model.safetensors"
    kept = {key: tensor for key, tensor in load_file(path).items() if "pooler" not in key}
    save_file(kept, path, {"format": "pt"})
    found, images = opened(tmp_path, headless=True), pictures(16)
    with torch.no_grad():
        same(features_of(found, images, "dpcap"), theirs(pixel_values=images).last_hidden_state.mean(dim=1))
    save_file({key: tensor for key, tensor in kept.items() if "position" not in key}, path, {"format": "pt"})
    with pytest.raises(EvaluationError, match=r"lacks embeddings\.position_embeddings"):
        opened(tmp_path, headless=True)


def test_a_folder_of_hugging_face_through_the_command(world: Path, tmp_path: Path) -> None:
    theirs = spread(transformers.SiglipModel(CONFIGS["siglip"]()))
    in_folder(theirs, tmp_path / "siglip", 16)
    common = ["--public", "--data", world / "train", "--test", world / "test"]
    assert evaluate("probe", tmp_path / "siglip", *common, "--out", tmp_path / "probe") == 0
    told = result(tmp_path / "probe")["model"]
    assert told["form"] == "hugging-face" and told["architecture"] == 'Hugging Face\'s "siglip"'
    convnext = spread(transformers.AutoModelForImageClassification.from_config(CONFIGS["convnext"]()))
    in_folder(convnext, tmp_path / "convnext", 32)
    data = ["--public", "--data", world / "test", "--classes", world / "names.txt"]
    (world / "names.txt").write_text("\n".join(COLOURS))
    assert evaluate("classify", tmp_path / "convnext", *data, "--out", tmp_path / "classify") == 0
    images = load(tmp_path / "convnext").see(sorted((world / "test").rglob("*.png")))
    with torch.no_grad():
        likely = convnext(pixel_values=images).logits.softmax(dim=1)
    for row, values in zip(table(tmp_path / "classify" / "predictions.csv"), likely, strict=True):
        assert float(row["probability_1"]) == pytest.approx(float(values.max()), rel=1e-4)


def test_what_does_not_fit_is_refused_and_code_beside_weights_is_not_run(tmp_path: Path) -> None:
    folder = in_folder(spread(transformers.DeiTModel(CONFIGS["deit"]())), tmp_path / "deit", 16)
    told = json.loads((folder / "config.json").read_text())
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    changes: dict[str, dict[str, Any]] = {
        "makes no model": {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}},
        "weights are quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "lacks": {"hidden_size": 32},
        "does not run on pictures|cannot be read as bert": {"model_type": "bert"},
    }  # fmt: skip
    for reason, change in changes.items():
        (folder / "config.json").write_text(json.dumps({**told, **change}))
        with pytest.raises(EvaluationError, match=reason):
            opened(folder, headless=True)
    mapped = {"auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}, "attn_implementation": "own/kernel"}
    (folder / "config.json").write_text(json.dumps({**told, **mapped}))
    assert opened(folder, headless=True).shape.encoder.width == 24
    assert not (tmp_path / "ran").exists()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(EvaluationError, match=r"has no model\.safetensors"):
        opened(folder, headless=True)


def test_pixels_of_a_folder_are_those_of_its_preprocessing(tmp_path: Path) -> None:
    folder = in_folder(spread(transformers.DeiTModel(CONFIGS["deit"]())), tmp_path, 16)
    found = open_model(Subject.at(folder), Sizes(), headless=True)
    assert found.pixels == Normalisation(HALF, HALF)
