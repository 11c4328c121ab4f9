"""Encoders of timm and Hugging Face by name: what a name stands for, what is refused, and what weights become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2ForImageClassification

from murmuration.model.build import build, take_encoder
from murmuration.model.load_report import WeightsError
from murmuration.model.named_models import NamedCaptioner, NamedClassifier
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select
from murmuration.model.warm_start import initialise_from, initialise_with
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.parity_engines import prepared, rule_of, summed

VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
DINO: dict[str, Any] = {
    "family": "timm", "name": "vit_small_patch14_reg4_dinov2.lvd142m", "image_size": 28, "model_args": VIT,
    "classes": 5, "decoder_depth": 1, "text_length": 8, "vocabulary": 16,
}  # fmt: skip
CONVNEXT: dict[str, Any] = {
    "family": "timm", "name": "convnext_tiny", "image_size": 32, "classes": 5, "decoder_depth": 1, "text_length": 8,
    "vocabulary": 16, "model_args": {"dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
}  # fmt: skip
SWIN: dict[str, Any] = {
    "family": "timm", "name": "swin_tiny_patch4_window7_224", "image_size": 32, "classes": 5, "decoder_depth": 1,
    "text_length": 8, "vocabulary": 16,
    "model_args": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
}  # fmt: skip

LAST_STAGE = CONVNEXT | {"model_args": CONVNEXT["model_args"] | {"features_only": True}}
RESNET: dict[str, Any] = {
    "family": "timm", "name": "resnet18", "image_size": 32, "classes": 5, "decoder_depth": 1, "text_length": 8,
    "vocabulary": 16, "model_args": {"channels": [8, 16, 24, 32], "layers": [1, 1, 1, 1]},
}  # fmt: skip


def settings(given: dict[str, Any], **more: Any) -> ModelSettings:
    return ModelSettings.model_validate({**given, **more})


def batch(shape: Any, objective: str, count: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, shape.image_size, shape.image_size, generator=draw)
    if objective == "classify":
        return {"images": images, "labels": torch.randint(0, 5, (count,), generator=draw)}
    return {"images": images, "tokens": torch.randint(1, 16, (count, 8), generator=draw)}


def stirred(model: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
        for name, stored in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                stored.add_(torch.rand(stored.shape, generator=draw))
    return model


@pytest.mark.parametrize("kept", [torch.int64, torch.float32], ids=str)
def test_weights_with_counts_of_batches_fill_the_model_that_they_come_from(kept: torch.dtype) -> None:
    """A checkpoint keeps all as floats."""
    model, fresh = stirred(build(settings(RESNET), "classify")), build(settings(RESNET), "classify")
    weights = {name: t if t.is_floating_point() else t.to(kept) for name, t in model.state_dict().items()}
    assert any(name.endswith("num_batches_tracked") for name in weights)
    initialise_with(fresh, weights, {"ours": True})
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())


def hugging_face(folder: Path) -> dict[str, Any]:
    made = Dinov2Config(image_size=56, patch_size=14, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    Dinov2ForImageClassification(made).save_pretrained(folder)
    return {key: value for key, value in DINO.items() if key != "model_args"} | {"family": "hf", "name": str(folder)}


@pytest.mark.parametrize("objective", ["classify", "caption"])
@pytest.mark.parametrize(
    "given",
    [DINO, CONVNEXT, LAST_STAGE, SWIN, RESNET, None],
    ids=["dinov2", "convnext", "last stage", "swin", "resnet", "hugging face"],
)
def test_clipped_sums_equal_a_loop_over_records(given: dict[str, Any] | None, objective: Any, tmp_path: Path) -> None:
    chosen = settings(hugging_face(tmp_path / "model") if given is None else given)
    model = stirred(build(chosen, objective)).double()
    assert isinstance(model, NamedClassifier if objective == "classify" else NamedCaptioner)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in batch(model.shape, objective).items()}
    records = brute_force.records_of(model, inputs)
    bound, everyone = sorted(record.norm() for record in records)[1], torch.ones(4, dtype=torch.bool)
    factors = brute_force.factors_of(records, everyone, brute_force.flat(bound))
    clip = prepared("book-keeping", rule_of("flat", bound), model)
    totals, _ = summed(clip, model, [(inputs, everyone)], double=True)
    assert relative_error(totals, brute_force.clipped_sum(records, factors)) <= 1e-6
    assert min(factors) < 1 == max(factors)


def test_features_only_are_the_mean_of_timms_last_map_and_take_the_weights_of_the_whole_model(tmp_path: Path) -> None:
    name = "mobilenetv3_small_050"
    whole = stirred(timm.create_model(name, pretrained=False))
    torch.save(whole.state_dict(), tmp_path / "whole.pth")
    chosen = settings({"family": "timm", "name": name, "image_size": 32, "model_args": {"features_only": True}})
    model = build(chosen, "classify").eval()
    initialise_from(model, tmp_path / "whole.pth", take_head=False)
    theirs: Any = timm.create_model(name, pretrained=False, features_only=True).eval()
    theirs.load_state_dict({key: tensor for key, tensor in whole.state_dict().items() if key in theirs.state_dict()})
    images = batch(model.shape, "classify")["images"]
    expected = theirs(images)[-1].mean((2, 3))
    assert isinstance(model, NamedClassifier) and model.head.in_features == expected.shape[1] == 288
    torch.testing.assert_close(model.features(images), expected)
    # What is above the stage gets no gradient, so nothing of it is trained.
    trained = {key for key, parameter in model.body.net.named_parameters() if parameter.requires_grad}
    assert {key for key, _ in whole.named_parameters()} - trained == {
        "classifier.weight", "classifier.bias", "conv_head.weight", "conv_head.bias"
    }  # fmt: skip


class OnePlace(nn.Module):
    """A convolution of maps with one place, laid out as after a pooling over channels-last maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"][:, None, None].permute(0, 3, 1, 2)
        y = self.conv(x).flatten(1)
        return (y * y.roll(1, 1)).sum(1)


def test_records_whose_gradients_are_written_out_may_have_maps_of_one_place() -> None:
    """In fp64, PyTorch's kernels refuse strides that could be channels-last."""
    model = stirred(OnePlace()).double()
    inputs = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).double()}
    records, everyone = brute_force.records_of(model, inputs), torch.ones(4, dtype=torch.bool)
    clip = prepared("book-keeping", rule_of("flat", records[0].norm()), model)
    totals, _ = summed(clip, model, [(inputs, everyone)], double=True)
    factors = brute_force.factors_of(records, everyone, brute_force.flat(records[0].norm()))
    assert relative_error(totals, brute_force.clipped_sum(records, factors)) <= 1e-6


def test_weights_do_not_depend_on_the_global_random_state_and_head_and_body_follow_the_seed() -> None:
    first = build(settings(DINO, head_scale=1.0), "classify").state_dict()
    torch.manual_seed(99)
    torch.rand(7)
    again = build(settings(DINO, head_scale=1.0), "classify").state_dict()
    other = build(settings(DINO, head_scale=1.0, init_seed=1), "classify").state_dict()
    for name in ("head.weight", "body.net.blocks.0.attn.qkv.weight"):
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_a_name_stands_for_its_picture_size_and_settings_are_complete_without_the_folder(tmp_path: Path) -> None:
    assert settings({"family": "timm", "name": "vit_small_patch14_dinov2.lvd142m", "model_args": VIT}).image_size == 518
    folder = tmp_path / "model"
    given = hugging_face(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 42, "width": 42}}))
    del given["image_size"]
    found = settings(given)
    assert found.image_size == 42
    note = found.note()
    assert str(tmp_path) not in json.dumps(note)
    for file in folder.iterdir():
        file.unlink()
    assert settings(note).resolved() == found.resolved()


def test_a_library_drops_nothing_by_itself() -> None:
    model = build(settings(SWIN), "classify").train()
    inputs = batch(model.shape, "classify")
    assert torch.equal(model(inputs), model(inputs))


def test_weights_of_timm_give_the_logits_of_timm(tmp_path: Path) -> None:
    theirs = stirred(timm.create_model(DINO["name"], pretrained=False, num_classes=5, img_size=28, **VIT)).eval()
    torch.save(theirs.state_dict(), tmp_path / "dino.pth")
    ours = build(settings(DINO), "classify").eval()
    report = initialise_from(ours, tmp_path / "dino.pth", take_head=True)
    assert not report.left_as_initialised
    images = batch(ours.shape, "classify")["images"]
    with torch.no_grad():
        assert torch.allclose(ours.logits(images), theirs(images), atol=1e-6)
    wrong = build(settings(DINO, model_args=VIT | {"depth": 3}), "classify")
    before = {name: tensor.clone() for name, tensor in wrong.state_dict().items()}
    with pytest.raises(WeightsError, match=r"has nothing for blocks\.2"):
        initialise_from(wrong, tmp_path / "dino.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrong.state_dict().items())


def test_batch_norm_keeps_the_statistics_of_the_weights_in_every_mode(tmp_path: Path) -> None:
    theirs = stirred(timm.create_model(RESNET["name"], num_classes=5, **RESNET["model_args"])).eval()
    without_counts = {name: tensor for name, tensor in theirs.state_dict().items() if "num_batches" not in name}
    torch.save(without_counts, tmp_path / "resnet.pth")
    ours = build(settings(RESNET), "classify").train()
    assert not initialise_from(ours, tmp_path / "resnet.pth", take_head=True).left_as_initialised
    images = batch(ours.shape, "classify")["images"]
    before = {name: tensor.clone() for name, tensor in ours.named_buffers()}
    for mode in (True, False, True):
        with torch.no_grad():
            assert torch.allclose(ours.train(mode).logits(images), theirs(images), atol=1e-6)
    assert before and all(torch.equal(stored, before[name]) for name, stored in ours.named_buffers())


def test_weights_of_hugging_face_give_its_logits(tmp_path: Path) -> None:
    given = hugging_face(tmp_path / "model")
    theirs = Dinov2ForImageClassification.from_pretrained(tmp_path / "model").eval()
    ours = build(settings(given, classes=2), "classify").eval()
    assert not initialise_from(ours, tmp_path / "model", take_head=True).left_as_initialised
    images = batch(ours.shape, "classify")["images"]
    with torch.no_grad():
        assert torch.allclose(ours.logits(images), theirs(pixel_values=images).logits, atol=1e-6)


def test_an_encoder_goes_from_a_classifier_to_a_captioner() -> None:
    source = stirred(build(settings(DINO), "classify"))
    target = build(settings(DINO), "caption")
    taken = take_encoder(source.state_dict(), target)
    assert taken and all(torch.equal(target.state_dict()[name], source.state_dict()[name]) for name in taken)


@pytest.mark.parametrize("given", [DINO, CONVNEXT], ids=["dinov2", "convnext"])
def test_what_is_trained_is_what_the_config_says(given: dict[str, Any]) -> None:
    def chosen(what: Any) -> set[str]:
        return set(select(build(settings(given), "classify"), what, rank=2))

    names, head = chosen("all"), {"head.weight", "head.bias"}
    assert chosen("head") == head
    assert chosen("bias") == {name for name in names if name.endswith(".bias")} | head
    adapters = chosen("lora") - head
    assert adapters and all(name.startswith("body.net.") and "lora_" in name for name in adapters)
