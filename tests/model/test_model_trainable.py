"""What a phase trains: exactly the parameters that its word says, and adapters that change nothing at the start."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.model.build import Objective, build
from murmuration.model.classifier import Classifier
from murmuration.model.settings import ModelSettings
from murmuration.model.statistics_head import SHARE
from murmuration.model.trainable import merged, select, trained
from murmuration.model.whitened_head import WhitenedHead

TOY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 4, "classes": 5}
RESNET = ModelSettings(family="classifier", image_size=32, width=8, stages=(1, 1), classes=5)
CLASSIFIER = ModelSettings(family="classifier", **TOY)
MAE = ModelSettings(family="mae", mae_decoder_width=32, mae_decoder_depth=1, mae_decoder_heads=4, **TOY)
CAPTIONER = ModelSettings(family="captioner", decoder_depth=1, vocabulary=64, text_length=8, **TOY)
ADAPTED = [f"blocks.{n}.{layer}" for n in (0, 1) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


@pytest.mark.parametrize(
    ("settings", "objective", "head"),
    [
        (CLASSIFIER, "classify", {"head.weight", "head.bias"}),
        (RESNET, "classify", {"head.weight", "head.bias"}),
        (MAE, "mae", {"decoder_pred.weight", "decoder_pred.bias"}),
        (CAPTIONER, "caption", {f"decoder_pred_text.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}),
    ],
    ids=["transformer", "resnet", "mae", "captioner"],
)
def test_each_word_trains_what_it_says(settings: ModelSettings, objective: Objective, head: set[str]) -> None:
    built = build(settings, objective)
    everything = trained(built)
    assert select(built, "all") == everything
    assert set(select(build(settings, objective), "head")) == head
    biases = {name for name in everything if name.endswith(".bias")}
    expected = biases | (head if isinstance(built, Classifier) else set())
    assert set(select(build(settings, objective), "bias")) == expected
    # Nothing that was fixed comes loose.
    assert not set(select(built, "bias")) - set(everything)


@pytest.mark.parametrize(
    ("settings", "objective"),
    [(CLASSIFIER, "classify"), (MAE, "mae"), (CAPTIONER, "caption")],
    ids=["vit", "mae", "cap"],
)
def test_adapters_change_nothing_until_trained_and_can_be_merged(settings: ModelSettings, objective: Objective) -> None:
    plain, adapted = build(settings, objective), build(settings, objective)
    names = set(select(adapted, "lora", rank=3))
    heads = {"head.weight", "head.bias"} if objective == "classify" else set()
    assert names == heads | {f"{layer}.lora_{part}" for layer in ADAPTED for part in ("down", "up")}
    assert set(plain.state_dict()) < set(adapted.state_dict())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain.tokens(images), adapted.tokens(images))  # pyright: ignore[reportCallIssue]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name.endswith("lora_up"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    moved = adapted.tokens(images)  # pyright: ignore[reportCallIssue]
    assert not torch.allclose(plain.tokens(images), moved, atol=1e-2)  # pyright: ignore[reportCallIssue]
    plain.load_state_dict(merged(adapted.state_dict()))
    torch.testing.assert_close(plain.tokens(images), moved, rtol=1e-4, atol=1e-4)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("hidden", [0.0, 0.05, 0.4], ids=["no noise", "noise", "much noise"])
def test_a_whitened_head_shrinks_what_the_sums_show_and_can_be_folded(hidden: float) -> None:
    """Against NumPy; folded it is an ordinary head with the same outputs."""
    chance = np.random.default_rng(3)
    records = chance.standard_normal((500, 32)) * np.linspace(0.2, 1.0, 32) + 2.0  # nearly all one way
    units = records / np.linalg.norm(records, axis=1, keepdims=True)
    mean = units.T @ units / len(units)
    # As descent leaves it: the noise is not symmetric.
    noised = mean + hidden / math.sqrt(64) * chance.standard_normal((32, 32))
    sums = {"head.gram": torch.tensor(-math.sqrt(SHARE) * noised).float(), "head.solving": torch.tensor([1.0, hidden])}
    model = build(CLASSIFIER.model_copy(update={"head_scale": 1.0}), "classify")
    assert set(select(model, "whitened")) == {"head.weight", "head.bias"} and isinstance(model, Classifier)
    head = model.head
    assert isinstance(head, WhitenedHead)
    head.whiten(sums)
    assert not head.weight.any() and not head.bias.any(), "from zero"

    values, vectors = np.linalg.eigh((noised + noised.T) / 2)
    noise_alone = np.abs(values - values[15]) <= hidden  # the lower median of 32
    values[noise_alone] = values[noise_alone].mean()
    kept = max(hidden, 1 / 32)
    expected = (vectors * np.sqrt(kept / (np.maximum(values, 0) + kept))) @ vectors.T
    np.testing.assert_allclose(head.whitening.numpy(), expected, atol=2e-6)
    lengths = np.linalg.norm(units @ expected, axis=1)
    assert lengths.max() < 0.8 and np.linalg.eigvalsh(expected).max() < 1 + 1e-9

    features = torch.tensor(records).float()
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
        head.bias.normal_(generator=torch.Generator().manual_seed(2))
        plain = build(CLASSIFIER, "classify")
        plain.load_state_dict(merged(model.state_dict()))
        assert isinstance(plain, Classifier) and type(plain.head) is torch.nn.Linear
        torch.testing.assert_close(plain.head(features), head(features), rtol=1e-5, atol=1e-4)


def test_gradients_reach_the_chosen_parameters_alone() -> None:
    inputs = {"images": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 2])}
    for word in ("head", "bias", "lora"):
        model = build(CLASSIFIER.model_copy(update={"head_scale": 1.0}), "classify")
        names = select(model, word)
        model(inputs).sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is not None] == names


def test_select_twice_and_on_meta_is_the_same() -> None:
    model = build(CLASSIFIER, "classify", device="meta")
    first = select(model, "lora")
    assert select(model, "lora") == first and not any("lora" in name for name in select(model, "head"))
    assert sum(p.numel() for p in model.parameters() if p.is_meta) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "trainable", "said"),
    [
        (RESNET, "lora", "no transformer blocks"), (CLASSIFIER, "lora", r"rank 32 is not between 1 and 31"),
        (CLASSIFIER, "everything", "no trainable"), (None, "head", "no known head"),
        (MAE, "statistics", "predicts no classes"), (MAE, "whitened", "predicts no classes"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_alone_is_refused(given: ModelSettings | None, trainable: Any, said: str) -> None:
    objective = "mae" if given is MAE else "classify"
    model = torch.nn.Linear(2, 2) if given is None else build(given, objective)
    with pytest.raises(ValueError, match=said):
        select(model, trainable, rank=32)
