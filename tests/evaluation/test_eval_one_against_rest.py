"""Sensitivity, specificity and AUC are those of scikit-learn and of counting pairs; intervals hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, roc_auc_score

from murmuration.evaluation.measures.interval import mean, mean_share
from murmuration.evaluation.measures.one_against_rest import (
    auc,
    auc_estimate,
    confusion,
    sensitivity,
    specificity,
)
from murmuration.evaluation.protocols.classify import table_of_classes
from murmuration.evaluation.session.result import Result

DRAW = np.random.default_rng(3)


def world(inside: int, outside: int, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores with many ties, and who has the class, in no order."""
    has = DRAW.permutation(np.arange(inside + outside) < inside)
    return np.round(DRAW.normal(size=len(has)) + gap * has, 1), has


@pytest.mark.parametrize(("inside", "outside", "gap"), [(40, 60, 0.7), (5, 200, 2.0), (200, 5, -1.0), (1, 9, 0.5)])
def test_the_area_is_the_share_of_pairs_in_order(inside: int, outside: int, gap: float) -> None:
    scores, has = world(inside, outside, gap)
    above = scores[has][:, None] - scores[~has][None, :]
    pairs = float(((above > 0) + 0.5 * (above == 0)).mean())
    found = auc_estimate(scores, has)
    assert found is not None and found.low <= found.value <= found.high and found.low >= 0 and found.high <= 1
    assert auc(scores, has) == found.value == pytest.approx(pairs, abs=1e-12)
    assert found.value == pytest.approx(roc_auc_score(has, scores), abs=1e-12)


def test_the_interval_holds_the_true_area_about_as_often_as_it_says() -> None:
    """Of normal scores, whose area is Φ(gap/√2). A variance of half the size would hold it 83 % of the time."""
    gap, true, tries = 1.0, 0.760250, 600
    found = [auc_estimate(DRAW.normal(size=90) + gap * (np.arange(90) < 30), np.arange(90) < 30) for _ in range(tries)]
    holds = sum(each is not None and each.low <= true <= each.high for each in found)
    assert 0.915 <= holds / tries <= 0.98, "95 % ± 4 deviations of 600 tries"


def test_a_faultless_ranking_of_few_records_is_not_certain() -> None:
    scores = np.arange(10.0)
    faultless, reverse = auc_estimate(scores, scores >= 6), auc_estimate(scores, scores < 4)
    assert faultless is not None and faultless.value == 1 == faultless.high and 0.4 < faultless.low < 0.6
    assert reverse is not None and reverse.value == 0 == reverse.low and 0.4 < reverse.high < 0.6
    assert auc_estimate(scores, scores >= 0) is None is auc_estimate(scores, scores < 0)


def test_rates_and_confusion_are_counted() -> None:
    truth, called = DRAW.integers(0, 4, 300), DRAW.integers(0, 4, 300)
    matrix = confusion(truth, called, 5)
    assert matrix.tolist() == confusion_matrix(truth, called, labels=range(5)).tolist(), "a class without records, too"
    for place in range(4):
        found, other = sensitivity(called == place, truth == place), specificity(called == place, truth == place)
        assert found is not None and found.value == matrix[place, place] / matrix[place].sum()
        rest = np.delete(matrix, place, 0)
        assert other is not None and other.value == np.delete(rest, place, 1).sum() / rest.sum()
        assert found.low < found.value < found.high
    assert sensitivity(called == 4, truth == 4) is None


def test_an_interval_over_classes_stays_between_0_and_1() -> None:
    for values in ([1.0, 1.0, 0.2], [0.0, 0.0, 0.9]):
        found, free = mean_share(values), mean(values)
        assert 0 <= found.low <= found.value == free.value <= found.high <= 1
        assert free.low < 0 or free.high > 1, "Student's interval alone leaves the range"


def test_of_two_classes_the_second_is_looked_for_and_of_more_the_mean_is_told() -> None:
    for names in (("well", "ill"), ("well", "ill", "unsure")):
        truth, scores = np.arange(30) % len(names), DRAW.random((30, len(names)))
        result = Result("classify", {}, {}, None, {})
        rows = table_of_classes(result, names, np.arange(len(names)) == truth[:, None], scores, scores.argmax(1))
        assert [row[0] for row in rows] == ["class", *names]
        right = sensitivity(scores.argmax(1) == 1, truth == 1)
        assert right is not None and rows[2][2].startswith(f"{right.value:.3f} (")
        if len(names) == 2:
            assert list(result.numbers) == ["sensitivity for ill", "specificity for ill", "AUC for ill"]
            assert result.numbers["sensitivity for ill"]["value"] == right.value
        else:
            assert list(result.numbers) == ["balanced accuracy", "mean AUC"]
