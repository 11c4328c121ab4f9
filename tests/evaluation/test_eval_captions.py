"""Beam search and nucleus sampling: where they must agree with greedy captions, and what they may never do."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from murmuration.evaluation.captions import beam, greedy, log_likelihood, nucleus
from tests.evaluation.test_eval_label_trie import ID, Fixed, Words, images

LENGTH = 6
TEXT = Words()


def random_model(seed: int) -> Fixed:
    model = Fixed({})
    model.table = 2 * torch.randn(len(ID), len(ID), generator=torch.Generator().manual_seed(seed))
    return model


def memory_of(model: Fixed, count: int = 1) -> Tensor:
    return model.encode_images(images(count))


def likelihood(model: Fixed, words: list[int]) -> float:
    return log_likelihood(model, memory_of(model), words, TEXT, LENGTH)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy_and_a_wider_one_is_never_less_likely(seed: int) -> None:
    model = random_model(seed)
    plain = greedy(model, memory_of(model), TEXT, LENGTH)
    assert beam(model, memory_of(model), TEXT, LENGTH, 1) == plain
    for width in (2, 3, 8):
        assert likelihood(model, beam(model, memory_of(model), TEXT, LENGTH, width)[0]) >= likelihood(model, plain[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_all_captions_finds_the_likeliest(seed: int) -> None:
    model, length = random_model(seed), 4
    letters = [number for number in range(len(ID)) if number not in (TEXT.pad, TEXT.start, TEXT.end)]
    every = [list(words) for count in range(length) for words in product(letters, repeat=count)]
    best = max(log_likelihood(model, memory_of(model), words, TEXT, length) for words in every)
    found = beam(model, memory_of(model), TEXT, length, 2000)[0]
    assert log_likelihood(model, memory_of(model), found, TEXT, length) == pytest.approx(best)


def test_a_trap_for_greedy_is_seen_by_a_beam() -> None:
    """The likelier first word leads to many equally unlikely ones."""
    model = Fixed({"<start>": {"great": 6.0, "heron": 5.5}, "heron": {"<end>": 20.0}})
    assert greedy(model, memory_of(model), TEXT, LENGTH)[0][0] == ID["great"]
    assert beam(model, memory_of(model), TEXT, LENGTH, 2)[0] == [ID["heron"]]


def test_likelihood_sums_the_words_and_the_end() -> None:
    model = random_model(0)
    table = model.table.clone()
    table[:, [TEXT.start, TEXT.pad]] = float("-inf")
    scores = table.double().log_softmax(1)
    expected = scores[TEXT.start, 5] + scores[5, 6] + scores[6, TEXT.end]
    assert likelihood(model, [5, 6]) == pytest.approx(float(expected))
    # Cut off by the length, a caption has no end.
    assert log_likelihood(model, memory_of(model), [5, 6], TEXT, 3) == pytest.approx(
        float(scores[TEXT.start, 5] + scores[5, 6])
    )


def test_the_nucleus_holds_the_fewest_likely_words_that_reach_p() -> None:
    logits = {"great": 0.5, "white": 0.3, "shark": 0.15}
    model = Fixed({"<start>": {word: float(torch.tensor(share).log()) + 30 for word, share in logits.items()}})
    drawn = Counter(
        nucleus(model, memory_of(model), TEXT, 2, p=0.7, seed=0, records=[record])[0][0] for record in range(600)
    )
    assert set(drawn) == {ID["great"], ID["white"]}
    # 0.5 / 0.8 of 600 draws; five standard deviations are 60.
    assert abs(drawn[ID["great"]] - 375) < 60
    certain = nucleus(model, memory_of(model), TEXT, 2, p=1e-9, seed=0, records=[3])
    assert certain == [[ID["great"]]], "the likeliest word is always in it"


def test_a_records_draws_depend_on_the_seed_and_not_on_its_batch() -> None:
    model = random_model(1)
    together = nucleus(model, memory_of(model, 8), TEXT, LENGTH, p=0.95, seed=4, records=list(range(8)))
    apart = [
        nucleus(model, memory_of(model, 8)[row : row + 1], TEXT, LENGTH, p=0.95, seed=4, records=[row])[0]
        for row in range(8)
    ]
    assert together == apart and len({tuple(each) for each in together}) > 3
    assert together != nucleus(model, memory_of(model, 8), TEXT, LENGTH, p=0.95, seed=5, records=list(range(8)))
