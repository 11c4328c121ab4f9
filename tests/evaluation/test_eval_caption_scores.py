"""Retrieval and choices of captions on a model whose probabilities are written down, against tables made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from murmuration.evaluation.measures.caption_scores import (
    LEAST_ATTRIBUTION,
    all_scores,
    chosen_options,
    grouped,
    macro,
    micro,
    pair_scores,
    picture_ranks,
    text_ranks,
)
from murmuration.model.build import build
from murmuration.model.captioner import caption_loss
from murmuration.model.settings import ModelSettings

PAD, START, END, RED, BLUE = range(5)
# Of each picture: the probability of every next token, whatever came before.
CHANCES = {0: {END: 1 / 2, RED: 1 / 4, BLUE: 1 / 8, PAD: 1 / 8}, 1: {END: 1 / 4, RED: 1 / 8, BLUE: 1 / 2, PAD: 1 / 8}}
LN2 = math.log(2)


class Fixed:
    """Pictures are their own numbers."""

    def encode_images(self, images: Tensor) -> Tensor:
        return images

    def decode(self, memory: Tensor, tokens: Tensor) -> Tensor:
        table = torch.full((2, 5), -math.inf)
        for picture, chances in CHANCES.items():
            for token, chance in chances.items():
                table[picture, token] = math.log(chance)
        return table[memory.long()][:, None].expand(-1, tokens.shape[1], -1)

    def caption_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return caption_loss(logits, targets)


CAPTIONS = torch.tensor([[START, RED, END, PAD], [START, BLUE, END, PAD], [START, RED, RED, END]])
# In units of ln 2: the mean of each token's bits, the end token's among them.
BY_HAND = [[(2 + 1) / 2, (3 + 1) / 2, (2 + 2 + 1) / 3], [(3 + 2) / 2, (1 + 2) / 2, (3 + 3 + 2) / 3]]


@pytest.mark.parametrize("rows", [1, 2, 256])
def test_scores_are_mean_bits_per_token_and_padding_does_not_count(rows: int) -> None:
    found = all_scores(Fixed(), torch.tensor([0, 1]), CAPTIONS, rows)
    torch.testing.assert_close(found, torch.tensor(BY_HAND) * LN2)
    pairs = pair_scores(Fixed(), torch.tensor([0, 1]), torch.tensor([1, 0]), CAPTIONS[[2, 1]], rows)
    torch.testing.assert_close(pairs, torch.tensor([BY_HAND[1][2], BY_HAND[0][1]]) * LN2)


def test_a_captioners_scores_are_its_own_losses() -> None:
    settings = ModelSettings(family="captioner", image_size=16, patch_size=8, width=32, depth=1, heads=2,
                             decoder_depth=1, text_length=4, vocabulary=5)  # fmt: skip
    model = build(settings, "caption").eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [
            [float(model({"images": image[None], "tokens": row[None]})) for row in CAPTIONS] for image in images
        ]
        found = all_scores(model, model.encode_images(images), CAPTIONS)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


SCORES = np.array([
    [0.2, 0.1, 0.9, 0.3],
    [0.1, 0.5, 0.4, 0.6],
    [0.7, 0.6, 0.8, 0.1],
])  # fmt: skip
OWNER = np.array([0, 0, 1, 2])


def test_ranks_are_those_of_a_table() -> None:
    """Picture 0 owns captions 0 and 1, of which 1 is its first; captions are sorted down their columns."""
    assert text_ranks(SCORES, OWNER).tolist() == [0, 1, 0]
    assert picture_ranks(SCORES, OWNER).tolist() == [1, 0, 0, 0]


def test_on_ties_the_lower_number_comes_first() -> None:
    equal = np.ones((3, 3))
    assert text_ranks(equal, np.arange(3)).tolist() == picture_ranks(equal, np.arange(3)).tolist() == [0, 1, 2]
    assert text_ranks(equal, np.array([0, 0, 2])).tolist() == [0, -1, 2], "the picture in the middle has no caption"


def test_micro_and_macro_differ_where_groups_have_other_sizes() -> None:
    groups = ["on"] * 3 + ["under"] + ["in"] * 2
    right = [True, True, False, False, True, True]
    table = grouped(groups, right)
    assert [(each.name, each.right, each.cases) for each in table] == [("in", 2, 2), ("on", 2, 3), ("under", 0, 1)]
    assert micro(right).value == pytest.approx(4 / 6)
    found = macro(table)
    assert found is not None and found.value == pytest.approx((1 + 2 / 3 + 0) / 3) and found.n == 3


def test_pairs_of_attributes_with_fewer_than_25_cases_are_not_in_the_mean() -> None:
    table = grouped(["a"] * 25 + ["b"] * 24, [True] * 5 + [False] * 20 + [True] * 24)
    found = macro(table, LEAST_ATTRIBUTION)
    assert found is not None and found.value == pytest.approx(0.2) and found.n == 1
    assert macro(table, 26) is None


def test_the_least_surprising_option_is_chosen_and_the_first_on_ties() -> None:
    assert chosen_options([[0.3, 0.2, 0.9], [0.5, 0.5], [1.0, 0.0]]) == [1, 0, 1]
