"""Zero-shot scores against sums done by hand, and greedy captions, on toy and on scripted models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.settings import ModelSettings
from murmuration.train.measures.captions import greedy_captions
from murmuration.train.measures.zero_shot import score_labels, zero_shot

WORDS = ["a", "photo", "of", "red", "blue", "dark", "circle", "square"]


class Words:
    pad, start, end, unk = 0, 1, 2, 3

    def words(self, text: str) -> list[int]:
        return [4 + WORDS.index(word) if word in WORDS else self.unk for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[i - 4] for i in ids)


@pytest.fixture(scope="module")
def model() -> Captioner:
    settings = ModelSettings(
        family="captioner", image_size=16, patch_size=8, width=32, depth=1, heads=2, decoder_depth=1,
        text_length=12, vocabulary=12, init_seed=3,
    )  # fmt: skip
    return build(settings, "caption")


def by_hand(model: Captioner, image: Tensor, prompt: str, label: str, whole: bool) -> float:
    text = Words()
    opening, ending = [text.start, *text.words(prompt)], text.words(label)
    tokens = torch.tensor([opening + ending])
    logits = model.decode(model.encode_images(image[None]), tokens)[0].detach()
    first = 1 if whole else len(opening)
    losses = [float(F.cross_entropy(logits[t - 1], tokens[0, t])) for t in range(first, tokens.shape[1])]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("whole", [False, True])
def test_scores_are_the_mean_entropy_of_the_labels_tokens(model: Captioner, whole: bool) -> None:
    images = torch.randn(3, 3, 16, 16)
    prompts, labels = ["a photo of a", "a photo", "of"], ["red", "dark blue", "circle"]
    scores = score_labels(model, images, prompts, labels, Words(), rows=4, count_prompt=whole)
    assert not scores.requires_grad
    expected = [[by_hand(model, x, p, label, whole) for label in labels] for x, p in zip(images, prompts, strict=True)]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    again = score_labels(model, images, prompts, labels, Words(), count_prompt=whole)
    torch.testing.assert_close(again, scores, rtol=1e-5, atol=1e-5)


def test_bad_requests_are_refused(model: Captioner) -> None:
    images = torch.zeros(2, 3, 16, 16)
    for prompts, labels, reason in [
        (["a"], ["red"], "1 prompts for 2 images"),
        ("a", [], "no labels"),
        ("a", ["green"], "no tokens"),
        ("a", [""], "no tokens"),
    ]:
        with pytest.raises(ValueError, match=reason):
            score_labels(model, images, prompts, labels, Words())


class Scripted:
    """Reads the right words off the image: images[:, 0, 0] holds the token to say at each length."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode_images(self, images: Tensor) -> Tensor:
        self.encoded += len(images)
        return images[:, 0, :1]

    def decode(self, memory: Tensor, tokens: Tensor) -> Tensor:
        said = memory[:, 0].long()[:, 1 : tokens.shape[1] + 1]
        return F.one_hot(said, 12).float() * 9


def script(sentence: str) -> Tensor:
    text = Words()
    ids = [text.start, *text.words(sentence), text.end]
    image = torch.full((3, 12, 12), float(text.pad))
    image[0, 0, : len(ids)] = torch.tensor(ids, dtype=torch.float32)
    return image


def test_axes_are_predicted_in_order_with_one_encoding_per_axis() -> None:
    model = Scripted()
    images = torch.stack([script("a photo of a red square"), script("a photo of a blue circle")])
    axes = {"colour": ["red", "blue"], "shape": ["circle", "square"]}
    found = zero_shot(model, images, axes, Words())
    assert {axis: numbers.tolist() for axis, numbers in found.items()} == {"colour": [0, 1], "shape": [1, 0]}
    assert model.encoded == 4


def test_greedy_stops_at_the_end_token_and_at_the_length() -> None:
    images = torch.stack([script("a photo of a red square"), script("blue circle")])
    assert greedy_captions(Scripted(), images, Words(), length=12) == ["a photo of a red square", "blue circle"]
    assert greedy_captions(Scripted(), images, Words(), length=4) == ["a photo of", "blue circle"]
    assert greedy_captions(Scripted(), images[:0], Words(), length=4) == []


def test_greedy_on_the_real_model_repeats_and_ignores_batching(model: Captioner) -> None:
    images = torch.randn(5, 3, 16, 16)
    text = Words()
    text.decode = lambda ids: " ".join(map(str, ids))  # pyright: ignore[reportAttributeAccessIssue]
    first = greedy_captions(model, images, text, length=12)
    assert first == greedy_captions(model, images, text, length=12, batch=2)
    assert all(len(caption.split()) <= 11 for caption in first)


def test_the_projects_own_text_encoder_fits(model: Captioner, tmp_path: Path) -> None:
    text = TextEncoder(word_tokenizer(WORDS, tmp_path / "tokenizer.json"), length=12)
    assert text.vocabulary == 12
    images = torch.randn(2, 3, 16, 16)
    assert score_labels(model, images, "a photo of a", ["red", "blue"], text).shape == (2, 2)
    assert len(greedy_captions(model, images, text, length=12)) == 2
    with pytest.raises(ValueError, match="green"):
        score_labels(model, images, "a photo of a", ["green"], text)
