"""Image-text models of transformers by the code of the tutorial: their own losses, clipped record by record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from murmuration.model.named import IMAGE_TEXT
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.rule import ClipError
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.launching import ROOT
from tests.support.parity_engines import judged, rule_of

IMAGE, PLACES = 39, 4
SEES = {"image_size": 14, "patch_size": 7, "projection_dim": 16}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
READS = SIZES | {"vocab_size": 40, "max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", **SIZES, **SEES},
        "text_config": {"model_type": "llama", **READS}, "image_token_index": IMAGE, "vision_feature_layer": -1,
    },
    "blip": {
        "vision_config": SIZES | SEES,
        "text_config": READS | {"encoder_hidden_size": 16, "hidden_dropout_prob": 0.0, "bos_token_id": 1,
                                "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "eos_token_id": 2,
                                "sep_token_id": 2},
    },
}  # fmt: skip


def llava_loss() -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    page = (ROOT / "docs" / "tutorials" / "language_models.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "llava_loss" in block)
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(code, names)
    return names["llava_loss"]


def blip_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, ids, real = batch
    logits = model(pixel_values=images, input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return (each * real[:, 1:]).sum(1) / real[:, 1:].sum(1).clamp(min=1)


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.loss(self.net, (inputs["images"], inputs["ids"], inputs["real"]))


def made(kind: str, lora: bool) -> nn.Module:
    torch.manual_seed(1)
    net = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **KINDS[kind])).eval()
    if lora:
        targets = ["q_proj", "v_proj"] if kind == "llava" else ["query", "value"]
        net = get_peft_model(net, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    for name, parameter in net.named_parameters():
        if "post_layernorm" in name and kind == "llava":
            parameter.requires_grad_(False)
    return net


def drawn() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids, real = torch.randint(3, IMAGE - 1, (8, 7), generator=draw), torch.ones(8, 7)
    ids[:, 0] = 1
    for row in range(8):
        real[row, 7 - row % 4 :] = 0
    return {"images": torch.randn(8, 3, 14, 14, generator=draw), "ids": ids, "real": real}


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_record_is_clipped_by_itself(kind: str, lora: bool) -> None:
    model = WithLoss(made(kind, lora), llava_loss() if kind == "llava" else blip_loss)
    inputs, present = drawn(), torch.ones(8, dtype=torch.bool)
    records = brute_force.records_of(model, inputs)
    bound, _, expected = judged(records, present)
    clip = BookKeepingClip(rule_of("flat", bound))
    clip.prepare(model)
    totals, _ = clipped_totals(clip, model, inputs, present)
    assert relative_error(totals, expected) <= 1e-5


def test_the_tutorials_loss_is_llavas_own_and_its_own_forward_pass_is_refused() -> None:
    net, inputs = made("llava", lora=False), drawn()
    ids, real = inputs["ids"], inputs["real"].bool()
    with_places = torch.cat([ids[:, :1], torch.full((8, PLACES), IMAGE), ids[:, 1:]], 1)
    targets = torch.cat([torch.full((8, 1 + PLACES), -100), ids[:, 1:].where(real[:, 1:], -100)], 1)
    found = WithLoss(net, llava_loss())(inputs)
    for row in range(8):
        one = {"pixel_values": inputs["images"][row : row + 1], "input_ids": with_places[row : row + 1]}
        assert found[row].item() == pytest.approx(net(**one, labels=targets[row : row + 1]).loss.item(), rel=1e-5)

    def own(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(pixel_values=batch[0], input_ids=batch[1]).logits.flatten(1).sum(1)

    model = WithLoss(net, own)
    clip = BookKeepingClip(rule_of("flat", 1.0))
    clip.prepare(model)
    with pytest.raises(ClipError, match="makes a text of it"):
        clipped_totals(clip, model, inputs | {"ids": with_places}, torch.ones(8, dtype=torch.bool))


@pytest.mark.parametrize("mask", ["none", "of all pairs", "that hides nothing"])
def test_a_model_that_is_another_one_record_at_a_time_is_refused(mask: str) -> None:
    """PaliGemma's decoder: without a mask it sees both ways, with one that is kept only backwards."""
    torch.manual_seed(1)
    told = SIZES | {"vocab_size": 40, "num_key_value_heads": 1, "head_dim": 8, "use_bidirectional_attention": True}
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma", **told), attn_implementation="sdpa").eval()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        ids = batch[1]
        given = {"none": None, "of all pairs": torch.ones(1, 1, 7, 7, dtype=torch.bool),
                 "that hides nothing": torch.ones_like(ids)}[mask]  # fmt: skip
        logits = model(input_ids=ids, attention_mask=given, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(len(ids), -1).mean(1)

    model, clip = WithLoss(net, loss), BookKeepingClip(rule_of("flat", 1.0))
    clip.prepare(model)
    if mask == "that hides nothing":
        with pytest.raises(ClipError, match="alone than where each of several is isolated"):
            check_gradients(clip, model, drawn(), torch.ones(8, dtype=torch.bool))
    else:
        check_gradients(clip, model, drawn(), torch.ones(8, dtype=torch.bool))


@pytest.mark.parametrize("more", [{}, {"vocab_size": 40}], ids=["", "with words of its own"])
@pytest.mark.parametrize("kind", KINDS.keys() - IMAGE_TEXT)
def test_a_config_that_names_one_is_sent_to_the_library(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind] | more | {"model_type": kind}))
    with pytest.raises(SettingsError, match="train it through the library"):
        ModelSettings.model_validate({"family": "hf", "name": str(tmp_path), "text_length": 7}).resolved()
