"""Top-1, top-5, ReaL and mean average precision, compared with scikit-learn and with a loop over single records."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, top_k_accuracy_score
from torch import Tensor

from murmuration.train.measures.ranking import Tally, average_precision, mean_average_precision
from murmuration.train.measures.shares import REAL, TOP_1, TOP_5, share_names, shares

NAMES = [TOP_1, TOP_5, REAL]


def answers(records: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, own classes, and right classes: none for some records, several for others."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(records, classes, generator=draw)
    labels = torch.randint(0, classes, (records,), generator=draw)
    return scores, labels, torch.rand(records, classes, generator=draw) < 0.15


def counted(classes: int, parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[int]:
    tally = Tally(classes)
    for part in parts:
        tally.add(*part)
    return tally.counts()


def test_the_shares_are_scikit_learns() -> None:
    scores, labels, right = answers(300, 9)
    found = shares(counted(9, [(scores, labels, right)]), NAMES)
    for name, places in ((TOP_1, 1), (TOP_5, 5)):
        theirs = top_k_accuracy_score(labels.numpy(), scores.numpy(), k=places, labels=np.arange(9))
        assert found[name] == pytest.approx(theirs, abs=1e-12)
    firsts = [int(row.argmax()) for row in scores]
    asked = [number for number in range(300) if bool(right[number].any())]
    assert 0 < len(asked) < 300, "some records have no right class, and are not scored"
    by_hand = sum(bool(right[number, firsts[number]]) for number in asked) / len(asked)
    assert found[REAL] == by_hand != found[TOP_1]


def test_counts_of_uneven_parts_add_up_to_those_of_the_whole() -> None:
    """Means of means would not: the parts have other sizes, and one is empty."""
    scores, labels, right = answers(101, 7, seed=1)
    whole = counted(7, [(scores, labels, right)])
    cuts = [0, 1, 1, 40, 101]
    parts = [tuple(t[a:b] for t in (scores, labels, right)) for a, b in pairwise(cuts)]
    assert counted(7, parts) == whole  # pyright: ignore[reportArgumentType]
    apart = [counted(7, [part]) for part in parts]  # pyright: ignore[reportArgumentType]
    assert [sum(each) for each in zip(*apart, strict=True)] == whole
    means = [shares(each, [TOP_1])[TOP_1] for each in apart if each[-3]]
    assert shares(whole, [TOP_1])[TOP_1] != pytest.approx(sum(means) / len(means))


def test_of_equal_scores_the_lower_number_comes_first() -> None:
    scores = torch.zeros(2, 8)
    right = torch.zeros(2, 8, dtype=torch.bool)
    right[:, 0] = True
    found = shares(counted(8, [(scores, torch.tensor([0, 5]), right)]), NAMES)
    assert found == {TOP_1: 0.5, TOP_5: 0.5, REAL: 1.0}


def test_among_few_classes_there_is_no_top_5_and_of_no_record_no_share() -> None:
    assert share_names(4, real=True) == [TOP_1, REAL] and share_names(5, real=False) == [TOP_1, TOP_5]
    scores, labels, right = answers(10, 4)
    assert shares(counted(4, [(scores, labels, torch.zeros_like(right))]), share_names(4, True)).keys() == {TOP_1}
    assert shares(counted(4, []), share_names(4, True)) == {}


@pytest.mark.parametrize("levels", [3, 1000])
def test_each_class_is_scikit_learns_whatever_the_order_of_equal_scores(levels: int) -> None:
    draw = np.random.default_rng(levels)
    scores = draw.integers(0, levels, (200, 5)) / levels
    right = draw.random((200, 5)) < [0.02, 0.1, 0.5, 0.9, 1.0]
    for number in range(5):
        ours = average_precision(scores[:, number], right[:, number])
        assert ours == pytest.approx(average_precision_score(right[:, number], scores[:, number]), abs=1e-12)
    order = draw.permutation(200)
    assert mean_average_precision(scores, right) == pytest.approx(
        average_precision_score(right, scores, average="macro"), abs=1e-12
    )
    assert mean_average_precision(scores[order], right[order]) == pytest.approx(mean_average_precision(scores, right))


def test_a_class_that_no_record_has_does_not_count() -> None:
    scores, right = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[True, False], [False, False]])
    assert mean_average_precision(scores, right) == 1.0
    assert average_precision(scores[:, 1], right[:, 1]) is None
    assert mean_average_precision(scores, np.zeros((2, 2), dtype=bool)) is None
    assert mean_average_precision(np.zeros((0, 2)), np.zeros((0, 2), dtype=bool)) is None
