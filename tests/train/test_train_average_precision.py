"""Mean average precision is scikit-learn's, with equal scores and with classes that nobody has."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from murmuration.train.measures.ranking import average_precision, mean_average_precision


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
