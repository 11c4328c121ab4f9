"""Published checkpoints: the same losses as the published architecture, every key accounted for, there and back."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.pos_embed import resample_abs_pos_embed

from murmuration.model.load_report import WeightsError
from murmuration.model.released import load_dpcap, load_vip_mae, read_dpcap, read_vip_mae, to_dpcap, to_vip_mae
from tests.support import published

KEYS = json.loads((Path(__file__).parent / "published_keys.json").read_text())
# width, depth, grid, patch, decoder width and depth, heads of both; the first has heads to be assumed, and rightly so.
VIPS = [(48, 2, 4, 4, 64, 1, 12, 16), (192, 1, 3, 8, 512, 2, 12, 16), (20, 3, 5, 2, 12, 2, 5, 3)]
# the same, then length and vocabulary.
CAPTIONERS = [(48, 2, 4, 4, 24, 1, 6, 6, 9, 50), (192, 1, 2, 8, 384, 2, 6, 6, 77, 31), (16, 1, 3, 4, 40, 3, 4, 5, 4, 5)]


def listed(keys: dict[str, list[int]]) -> dict[str, list[int]]:
    """`blocks.{12}.norm.weight` stands for blocks 0 to 11."""
    found: dict[str, list[int]] = {}
    for pattern, shape in keys.items():
        count = re.search(r"\{(\d+)\}", pattern)
        for number in range(int(count.group(1)) if count else 1):
            found[pattern.replace(count.group(0), str(number)) if count else pattern] = shape
    return found


def on_meta(keys: dict[str, list[int]]) -> published.State:
    return {key: torch.empty(shape, device="meta") for key, shape in listed(keys).items()}


def images_of(grid: int, patch: int, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, grid * patch, grid * patch, generator=torch.Generator().manual_seed(7))


def captions(length: int, vocabulary: int) -> torch.Tensor:
    tokens = torch.randint(1, vocabulary, (3, length), generator=torch.Generator().manual_seed(8))
    tokens[0, length - 1 :], tokens[1, length // 2 + 1 :] = 0, 0
    return tokens


@pytest.mark.parametrize(("width", "depth", "grid", "patch", "wide", "deep", "heads", "decoder_heads"), VIPS)
def test_vip_mae_has_the_published_losses(
    width: int, depth: int, grid: int, patch: int, wide: int, deep: int, heads: int, decoder_heads: int
) -> None:
    state = published.vip_mae(width, depth, grid, patch, wide, deep)
    given = {"heads": heads, "decoder_heads": decoder_heads} if width == 20 else {}
    told: list[str] = []
    model = load_vip_mae({"model": state, "epoch": 3}, say=told.append, **given)
    images, noise = images_of(grid, patch), torch.rand(3, grid**2, generator=torch.Generator().manual_seed(9))
    expected = published.vip_mae_loss(state, images, noise, heads, decoder_heads, 0.75)
    torch.testing.assert_close(model({"images": images, "mask_noise": noise}), expected, rtol=1e-5, atol=1e-6)
    assert ("ASSUMED" in told[0]) == (width == 48) and f"{len(state)} taken, 0 transformed, 0 ignored" in told[0]
    back = to_vip_mae(model)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("width", "depth", "grid", "patch", "wide", "deep", "heads", "text_heads", "length", "vocabulary"), CAPTIONERS
)
def test_dpcap_has_the_published_losses(
    width: int, depth: int, grid: int, patch: int, wide: int, deep: int, heads: int, text_heads: int, length: int,
    vocabulary: int, biases: bool,
) -> None:  # fmt: skip
    state = published.dpcap(width, depth, grid, patch, wide, deep, length, vocabulary, biases)
    given = {"heads": heads, "decoder_heads": text_heads} if width == 16 else {}
    model, account = read_dpcap(state, **given)
    images, tokens = images_of(grid, patch), captions(length, vocabulary)
    expected = published.dpcap_loss(state, images, tokens, heads, text_heads, relu=biases)
    torch.testing.assert_close(model({"images": images, "tokens": tokens}), expected, rtol=1e-5, atol=1e-5)
    exact = {key: tensor.double() for key, tensor in state.items()}
    memory = copy.deepcopy(model).double().encode_images(images.double())
    torch.testing.assert_close(memory, published.dpcap_memory(exact, images.double(), heads), rtol=1e-9, atol=1e-9)
    assert sorted(entry.key for entry in account.entries) == sorted(state)
    assert len(account.keys("ignored")) == 4 + deep and all(e.why for e in account.entries if e.fate == "ignored")
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["cls_token"]
    back = to_dpcap(model, account.unused)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    # Without what the import kept, what captioning does not use is made anew, and the losses are the same.
    again = load_dpcap(to_dpcap(model), say=lambda _: None, **given)
    assert torch.equal(again({"images": images, "tokens": tokens}), model({"images": images, "tokens": tokens}))


@pytest.mark.parametrize("name", KEYS["vip_mae"])
def test_published_vip_mae_keys(name: str) -> None:
    state = on_meta(KEYS["vip_mae"][name])
    model, account = read_vip_mae(state)
    assert account.keys("taken") == list(to_vip_mae(model)) and set(account.keys("taken")) == set(state)
    assert {key: tensor.shape for key, tensor in to_vip_mae(model).items()} == {k: t.shape for k, t in state.items()}
    assert model.shape.encoder.heads == (16 if "large" in name else 12) and model.shape.pixels.heads == 16


@pytest.mark.parametrize("name", KEYS["dpcap"])
@pytest.mark.parametrize("length", [40, 77])
def test_published_dpcap_keys(name: str, length: int) -> None:
    state = on_meta(KEYS["dpcap"][name])
    for key in ("text_pos_embed", "text_decoder_pos_embed"):
        state[key] = state[key].new_empty(1, length, state[key].shape[2])
    model, account = read_dpcap(state)
    assert sorted(entry.key for entry in account.entries) == sorted(state)
    assert {key: tensor.shape for key, tensor in to_dpcap(model).items()} == {k: t.shape for k, t in state.items()}
    size = re.search(r"vit_(\w+?)_patch", name)
    assert size is not None
    expected = {"nano": (6, 6), "tiny": (6, 6), "small": (12, 12), "base": (12, 12), "large": (16, 12)}[size.group(1)]
    assert (model.shape.encoder.heads, model.shape.text.heads) == expected
    assert (model.shape.text_length, model.shape.vocabulary) == (length, 30522)


@pytest.mark.parametrize("grid", [3, 6])
def test_positions_are_interpolated_for_another_image_size(grid: int) -> None:
    state = published.vip_mae(48, 1, 4, 4, 64, 1)
    model, account = read_vip_mae(state, image_size=4 * grid)
    for key in ("pos_embed", "decoder_pos_embed"):
        expected = resample_abs_pos_embed(state[key], [grid, grid])
        torch.testing.assert_close(model.get_buffer(key), expected)
        why = next(entry.why for entry in account.entries if entry.key == key)
        assert why == f"interpolated from 4x4 to {grid}x{grid} positions"
    assert account.keys("transformed") == ["pos_embed", "decoder_pos_embed"]
    assert "positions are interpolated" in str(account)
    images = images_of(grid, 4)
    resized = state | {key: model.get_buffer(key) for key in ("pos_embed", "decoder_pos_embed")}
    noise = torch.rand(3, grid**2)
    expected = published.vip_mae_loss(resized, images, noise, 12, 16, 0.75)
    torch.testing.assert_close(model({"images": images, "mask_noise": noise}), expected, rtol=1e-5, atol=1e-6)


def test_the_account_has_one_line_for_layers_alike() -> None:
    _, account = read_vip_mae(published.vip_mae(48, 3, 4, 4, 64, 1))
    lines = str(account).splitlines()
    assert "  taken       blocks.{0..2}.attn.qkv.weight [144x48]" in lines and len(lines) < 45
    assert lines[-1] == f"  in all: {len(account.entries)} taken, 0 transformed, 0 ignored, 0 missing"


def damaged(kind: str) -> dict[str, Any]:
    state: dict[str, Any] = published.vip_mae(48, 2, 4, 4, 64, 1)
    match kind:
        case "missing":
            del state["blocks.1.mlp.fc1.bias"]
        case "missing block":
            state = {key: tensor for key, tensor in state.items() if not key.startswith("blocks.0.")}
        case "no size":
            del state["pos_embed"]
        case "extra":
            state["blocks.0.ls1.gamma"] = torch.ones(48)
        case "wrong shape":
            state["decoder_pred.weight"] = torch.ones(47, 64)
        case "wrong dimensions":
            state["patch_embed.proj.weight"] = torch.ones(48, 48)
        case "not square":
            state["pos_embed"] = torch.ones(1, 16, 48)
        case "not finite":
            state["norm.weight"][3] = float("nan")
        case "integers":
            state["norm.weight"] = torch.ones(48, dtype=torch.int64)
        case "no tensor":
            state["norm.weight"] = [1.0] * 48
        case "huge number":
            state["blocks.999999999999.norm1.weight"] = torch.ones(48)
        case "empty":
            return {"model": {}}
        case "optimizer":
            return {"model": state | {"optimizer": {"lr": 1.0}}}
        case _:
            state["cls_token"] = torch.ones(1, 1, 45)
    return state


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("missing", r"lacks blocks\.1\.mlp\.fc1\.bias; pass all of its weights"),
        ("missing block", r"lacks some of blocks\.0"),
        ("no size", r"lacks pos_embed; pass a whole checkpoint"),
        ("extra", r"has blocks\.0\.ls1\.gamma, which that architecture lacks"),
        ("wrong shape", r"decoder_pred\.weight is \[47, 64\] where the other weights require \[48, 64\]"),
        ("wrong dimensions", r"patch_embed\.proj\.weight is \[48, 48\], which is not 4-dimensional"),
        ("not square", r"pos_embed has 16 rows, not 1 \+ a square"),
        ("not finite", r"norm\.weight contains values that are not finite"),
        ("integers", r"norm\.weight is int64, not a floating-point weight"),
        ("no tensor", r"a list under 'norm\.weight' where a tensor should be"),
        ("huge number", r"lacks some of blocks\.0"),
        ("empty", r"contains no tensors"),
        ("optimizer", r"a dict under 'optimizer' where"),
        ("odd width", r"pass heads="),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused_in_one_sentence(kind: str, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence) as found:
        read_vip_mae(damaged(kind))
    assert str(found.value).count(". ") == 0 and str(found.value).endswith(".") and "\n" not in str(found.value)


def test_a_mask_that_is_not_causal_and_wrong_heads_are_refused() -> None:
    state = published.dpcap(48, 1, 4, 4, 24, 1, 9, 50)
    with pytest.raises(WeightsError, match=r"decoder_heads = 7 does not divide the width 24"):
        read_dpcap(state, decoder_heads=7)
    state["decoder.layers.0.self_attn.bias"] = torch.ones(1, 1, 128, 128)
    with pytest.raises(WeightsError, match=r"not a causal mask"):
        read_dpcap(state)


def test_half_precision_is_told() -> None:
    state = published.vip_mae(48, 1, 4, 4, 64, 1)
    model, account = read_vip_mae({f"module.{key}": tensor.half() for key, tensor in state.items()})
    assert sorted(account.keys("transformed")) == sorted(state) and "float16 in the file" in str(account)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
