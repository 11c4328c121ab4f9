"""A classifier's weights under the names of timm and Hugging Face: every bit, and the same outputs there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import ViTForImageClassification

from murmuration.model.foreign_back import to_hugging_face, to_timm
from murmuration.model.load_report import WeightsError
from murmuration.model.warm_start import initialise_with
from murmuration.model.weight_files import read_weights
from tests.support.foreign_models import IMAGES, classifier, hugging_face, resnet, timm_bit, timm_vit


def test_there_and_back(tmp_path: Path) -> None:
    """Under the names of others, with every bit; what they compute with it is what we do."""
    theirs = hugging_face()
    theirs.save_pretrained(tmp_path)
    ours, kept = classifier(init_seed=3), read_weights(tmp_path)
    initialise_with(ours, kept, take_head=True)
    back = to_hugging_face(ours)
    assert back.keys() == kept.keys() and all(torch.equal(back[key], kept[key]) for key in kept)
    with torch.no_grad():
        ours.head.bias.add_(1.0)
        ours.blocks[1].attn.qkv.weight.mul_(1.5)
    save_file(
        {k: v.contiguous() for k, v in to_hugging_face(ours).items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    other = ViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(other.eval()(IMAGES).logits, ours.logits(IMAGES), rtol=1e-4, atol=1e-5)
    for model, shape in ((timm_vit(), classifier()), (timm_bit(), resnet())):
        initialise_with(shape, model.state_dict(), take_head=True)
        again, state = to_timm(shape), model.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(again[key], state[key]) for key in state)
    with pytest.raises(WeightsError, match="mean of the other tokens"):
        to_hugging_face(classifier(pooling="mean"))
    with pytest.raises(WeightsError, match="no place for a ResNet"):
        to_hugging_face(resnet())
