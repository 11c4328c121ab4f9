"""Image-text models of transformers by the code of the tutorial: their own losses, clipped record by record."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageTextToText

from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.rule import ClipError
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.launching import ROOT
from tests.support.parity_engines import factor_of, median_norm, rule_of

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
    bound = median_norm(records, present)
    expected = brute_force.clipped_sum(records, brute_force.factors_of(records, present, factor_of("flat", bound)))
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
