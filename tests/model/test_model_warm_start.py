"""First weights from files of every kind: the same outputs as the source, or one sentence and an untouched model."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining

from murmuration.model.build import build
from murmuration.model.foreign import hugging_face_weights, timm_weights
from murmuration.model.load_report import WeightsError
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select
from murmuration.model.warm_start import initialise_from, initialise_with
from murmuration.model.weight_files import read_weights
from tests.support import published
from tests.support.foreign_models import (
    ENCODER,
    IMAGES,
    captioner,
    classifier,
    hugging_face,
    moved,
    resnet,
    timm_bit,
    timm_vit,
)


def test_timms_transformer() -> None:
    theirs, ours = timm_vit(), classifier(init_seed=4)
    account = initialise_with(ours, theirs.state_dict(), take_head=True)
    torch.testing.assert_close(ours.logits(IMAGES), theirs(IMAGES), rtol=1e-4, atol=1e-5)
    assert account.keys("taken") and len(account.keys("taken")) == len(theirs.state_dict())
    fresh = classifier(classify_loss="sigmoid")
    account = initialise_with(fresh, theirs.state_dict())
    assert not bool(fresh.head.weight.any()) and bool((fresh.head.bias == -10).all())
    assert account.keys("ignored") == ["head.weight", "head.bias"] == account.keys("missing")
    torch.testing.assert_close(fresh.features(IMAGES), ours.features(IMAGES))
    # Another number of classes: asked for, and still left alone.
    other = classifier(classes=7)
    account = initialise_with(other, theirs.state_dict(), take_head=True)
    assert account.keys("missing") == ["head.weight", "head.bias"] and "stay as initialised" in str(account)


def test_timms_transformer_at_another_resolution() -> None:
    theirs, larger, ours = timm_vit(), timm_vit(img_size=27), classifier(image_size=27)
    state = theirs.state_dict()
    account = initialise_with(ours, state, take_head=True)
    assert account.keys("transformed") == ["pos_embed"] and "from 4x4 to 6x6" in str(account)
    state["pos_embed"] = timm.layers.pos_embed.resample_abs_pos_embed(state["pos_embed"], [6, 6])
    larger.load_state_dict(state)
    images = torch.randn(2, 3, 27, 27)
    torch.testing.assert_close(ours.logits(images), larger(images), rtol=1e-4, atol=1e-5)


def test_hugging_faces_transformer_in_memory_and_from_its_folder(tmp_path: Path) -> None:
    theirs = hugging_face()
    theirs.save_pretrained(tmp_path)
    expected = theirs(IMAGES).logits
    for source in (theirs.state_dict(), read_weights(tmp_path)):
        ours = classifier(init_seed=3)
        account = initialise_with(ours, source, take_head=True)
        torch.testing.assert_close(ours.logits(IMAGES), expected, rtol=1e-4, atol=1e-5)
        assert len(account.keys("transformed")) == 2 * 6 and not account.keys("missing")
        assert sorted(entry.key for entry in account.entries) == sorted(source)
    bare = {**theirs.vit.state_dict(), "pooler.dense.weight": torch.ones(24, 24)}
    assert initialise_with(classifier(), bare).keys("ignored") == ["pooler.dense.weight"]


def test_hugging_faces_masked_autoencoder_gives_its_encoder() -> None:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {
        "intermediate_size": 96,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
    }
    sizes |= {"image_size": 16, "patch_size": 4, "layer_norm_eps": 1e-6, "mask_ratio": 0.0}
    theirs = moved(ViTMAEForPreTraining(ViTMAEConfig(**sizes)))
    model = build(ModelSettings(family="mae", **ENCODER), "mae")
    account = initialise_with(model, theirs.state_dict())
    order = torch.arange(16).float().expand(2, -1)
    expected = theirs.vit(IMAGES, noise=order).last_hidden_state
    torch.testing.assert_close(model.tokens(IMAGES), expected, rtol=1e-4, atol=1e-5)
    assert all(key.startswith("decoder.") for key in account.keys("ignored"))
    assert "decoder_pred.weight" in account.keys("missing")


def test_timms_big_transfer() -> None:
    theirs, ours = timm_bit(), resnet()
    account = initialise_with(ours, theirs.state_dict(), take_head=True)
    torch.testing.assert_close(ours.logits(IMAGES), theirs(IMAGES), rtol=1e-4, atol=1e-5)
    assert len(account.keys("taken")) + len(account.keys("transformed")) == len(theirs.state_dict())
    assert account.keys("transformed") == ["head.fc.weight"] and not account.keys("missing")


def test_dpcap_starts_a_captioner_and_its_encoder_starts_others() -> None:
    state = published.dpcap(48, 2, 4, 4, 24, 1, 12, 50)
    model = captioner()
    account = initialise_with(model, {"model": state})
    memory = published.dpcap_memory(state, IMAGES, 6)
    torch.testing.assert_close(model.encode_images(IMAGES), memory, rtol=1e-4, atol=1e-4)
    assert account.keys("transformed") == ["text_decoder_pos_embed"] and "the first 9 of 12 places" in str(account)
    shorter = {**state, "text_decoder_pos_embed": state["text_decoder_pos_embed"][:, :9]}
    tokens = torch.randint(1, 50, (2, 9))
    expected = published.dpcap_loss(shorter, IMAGES, tokens, 6, 6)
    torch.testing.assert_close(model({"images": IMAGES, "tokens": tokens}), expected, rtol=1e-4, atol=1e-5)
    # Elsewhere the type token goes into the positions, and a layer without a bias is one whose bias is zero.
    other = classifier(width=48, heads=6, pooling="mean")
    account = initialise_with(other, state)
    torch.testing.assert_close(other.tokens(IMAGES), model.tokens(IMAGES), rtol=1e-4, atol=1e-4)  # pyright: ignore[reportCallIssue]
    assert {"pos_embed", "encoder_image_type_embedding"} <= set(account.keys("transformed"))
    assert "blocks.1.attn.qkv.bias" in account.keys("missing") and "zero" in str(account)
    words = captioner(vocabulary=60)
    account = initialise_with(words, state)
    kept = {"text_embedding.weight", "decoder_pred_text.1.weight", "decoder_pred_text.1.bias"}
    assert set(account.keys("missing")) == kept and "decoder.layers.0.linear1.weight" in account.keys("taken")


def test_vip_starts_a_captioner_with_biases() -> None:
    state = published.vip_mae(48, 2, 4, 4, 64, 1)
    model = captioner(qkv_bias=True)
    account = initialise_with(model, state)
    assert "decoder_pred.weight" in account.keys("ignored") and "text_embedding.weight" in account.keys("missing")
    assert torch.equal(model.pos_embed, state["pos_embed"]) and not bool(model.encoder_image_type_embedding.any())


@pytest.mark.parametrize("word", ["all", "lora"])
def test_our_own_export(tmp_path: Path, word: Any) -> None:
    source = classifier(head_scale=1.0)
    select(source, word, rank=2)
    moved(source)
    save_file(
        {name: tensor.contiguous() for name, tensor in source.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "export.json").write_text(json.dumps({"phase": 1, "step": 3, "objective": "classify", "shapes": {}}))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        model = classifier(init_seed=9)
        account = initialise_from(model, path)
        torch.testing.assert_close(model.logits(IMAGES), source.logits(IMAGES), rtol=1e-4, atol=1e-5)
        assert not account.keys("missing") and account.source == "this project's export"


def unpaired() -> dict[str, torch.Tensor]:
    state = hugging_face().state_dict()
    del state["vit.layers.0.attention.k_proj.weight"]
    return state


REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Mapping[str, torch.Tensor]]], str]] = {
    **{f"ours has {change}": (lambda c=change: (classifier(**c), timm_vit().state_dict()), said) for change, said in (
        ({"depth": 3}, r"has nothing for blocks\.2\.norm1\.weight and 11 more.*set model\.depth"),
        ({"depth": 1}, r"has blocks\.1\..* set model\.depth to the file's"),
        ({"width": 48}, r"cls_token is \[1, 1, 24\] in .* but \[1, 1, 48\] in the model; set model\.width"),
        ({"patch_size": 8}, r"patch_embed\.proj\.weight is .*patch_size"),
        ({"qkv_bias": False}, r"set model\.qkv_bias to true"),
    )},
    # Variants that compute something else.
    **{f"timm's has {more}": (lambda m=more: (classifier(), timm_vit(**m).state_dict()), said) for more, said in (
        ({"init_values": 0.1}, r"blocks\.0\.ls1\.gamma"), ({"qk_norm": True}, r"blocks\.0\.attn\.q_norm\.weight"),
        ({"reg_tokens": 2}, r"reg_token"), ({"global_pool": "avg"}, r"fc_norm"),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, r"has nothing for cls_token"),
    )},
    "a captioner without biases": (lambda: (captioner(), published.vip_mae(48, 2, 4, 4, 64, 1)),
                                   r"attn\.qkv\.bias.*set model\.qkv_bias to true"),
    "no known kind": (lambda: (classifier(), nn.Linear(2, 2).state_dict()), r"of no known kind"),
    "a part of Hugging Face's": (lambda: (classifier(), unpaired()), "without its two equally sized partners"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_weights_that_do_not_fit_are_refused_and_the_model_left_alone(what: str) -> None:
    make, said = REFUSED[what]
    model, state = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match=said):
        initialise_with(model, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Trap:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_files(tmp_path: Path) -> None:
    state = published.vip_mae(48, 1, 4, 4, 64, 1)
    whole = {"model": state, "optimizer": {"state": {}}, "epoch": 7, "scaler": None, "args": argparse.Namespace(lr=0.1)}
    torch.save(whole, tmp_path / "published.pth")
    torch.save({f"module.{key}": tensor for key, tensor in state.items()}, tmp_path / "parallel.pt")
    save_file(state, tmp_path / "plain.safetensors")
    for name in ("published.pth", "parallel.pt", "plain.safetensors"):
        found = read_weights(tmp_path / name)
        assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("whole", [True, False], ids=["torch", "plain pickle"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, whole: bool) -> None:
    victim, file = tmp_path / "ran", tmp_path / "trap.pth"
    content = {"model": {"cls_token": torch.ones(1)}, "args": Trap(victim)}
    if whole:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps({"args": Trap(victim)}))
    with pytest.raises(WeightsError, match=r"trap\.pth contains .*not run; save only its state dict"):
        read_weights(file)
    assert not victim.exists()


@pytest.mark.parametrize(
    "name", ["cut.pth", "cut.safetensors", "text.pth", "empty.pth", "gone.pth", "folder", "list.pth"]
)
def test_files_that_are_no_weights_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    state = {"a": torch.ones(4, 4)}
    if name == "folder":
        path.mkdir()
    elif name.startswith("cut"):
        save_file(state, path) if "safe" in name else torch.save(state, path)
        path.write_bytes(path.read_bytes()[:-40])
    elif name == "list.pth":
        torch.save([torch.ones(2)], path)
    elif name != "gone.pth":
        path.write_bytes(b"" if "empty" in name else b"no weights at all\n" * 20)
    with pytest.raises(WeightsError) as found:
        read_weights(path)
    assert name.split(".")[0] in str(found.value) and "\n" not in str(found.value) and str(found.value).endswith(".")


# A classifier's weights under the names of timm and Hugging Face: every bit, and the same outputs there.


def test_there_and_back(tmp_path: Path) -> None:
    """Under the names of others, with every bit; what they compute with it is what we do."""
    theirs = hugging_face()
    theirs.save_pretrained(tmp_path)
    ours, kept = classifier(init_seed=3), read_weights(tmp_path)
    initialise_with(ours, kept, take_head=True)
    back = hugging_face_weights(ours)
    assert back.keys() == kept.keys() and all(torch.equal(back[key].tensor, kept[key]) for key in kept)
    with torch.no_grad():
        ours.head.bias.add_(1.0)
        ours.blocks[1].attn.qkv.weight.mul_(1.5)
    changed = {name: entry.tensor.contiguous() for name, entry in hugging_face_weights(ours).items()}
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    other = ViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(other.eval()(IMAGES).logits, ours.logits(IMAGES), rtol=1e-4, atol=1e-5)
    for model, shape in ((timm_vit(), classifier()), (timm_bit(), resnet())):
        initialise_with(shape, model.state_dict(), take_head=True)
        again, state = timm_weights(shape), model.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(again[key].tensor, state[key]) for key in state)
    with pytest.raises(WeightsError, match="mean of the other tokens"):
        hugging_face_weights(classifier(pooling="mean"))
    with pytest.raises(WeightsError, match="no place for a ResNet"):
        hugging_face_weights(resnet())
