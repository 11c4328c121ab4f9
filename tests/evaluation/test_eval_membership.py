"""Membership inference against scikit-learn's measures, and LiRA against the ratio of two densities."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm
from sklearn import metrics
from sklearn.linear_model import LogisticRegression

from murmuration.evaluation.measures.membership import (
    MembershipError,
    _halves,
    auc,
    by_classifier,
    by_threshold,
    f1,
    lira,
    recall_at,
)


def scored(count: int, apart: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    members = draw.random(count) < 0.4
    return np.round(draw.normal(size=count) + apart * members, 1), members  # rounded: with ties


def test_measures_are_scikit_learns() -> None:
    scores, members = scored(500, 0.7)
    attack = by_threshold(scores, members)
    found, called = attack.numbers(), attack.called
    assert auc(scores, members) == pytest.approx(metrics.roc_auc_score(members, scores))
    assert f1(called, members) == pytest.approx(metrics.f1_score(members, called))
    assert found["accuracy"].value == pytest.approx(metrics.accuracy_score(members, called))
    assert found["precision"].value == pytest.approx(metrics.precision_score(members, called))
    assert found["recall"].value == pytest.approx(metrics.recall_score(members, called))
    false, true, _ = metrics.roc_curve(members, scores, drop_intermediate=False)
    assert recall_at(scores, members, 0.05) == pytest.approx(true[false <= 0.05].max())
    for name in ("AUC", "F1"):
        assert found[name].low < found[name].value < found[name].high


def test_a_threshold_is_the_best_of_the_other_half() -> None:
    scores, members = scored(200, 1.0)
    attack = by_threshold(scores, members)
    for part in _halves(members):
        (cut,) = set(attack.threshold[part])
        best = max(((scores[~part] > each) == members[~part]).mean() for each in [-np.inf, *scores])
        assert ((scores[~part] > cut) == members[~part]).mean() == best


def test_the_classifier_is_scikit_learns_on_the_other_half() -> None:
    draw = np.random.default_rng(1)
    members = draw.random(300) < 0.5
    features = draw.normal(size=(300, 4)) * [1, 10, 0.1, 0] + members[:, None] * [1.5, 10, 0, 0]
    attack = by_classifier(features, members)
    for part in _halves(members):
        seen = features[~part]
        scale = np.where(seen.std(axis=0) > 0, seen.std(axis=0), 1)
        theirs = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
        theirs.fit((seen - seen.mean(0)) / scale, members[~part])
        expected = theirs.decision_function((features[part] - seen.mean(0)) / scale)
        np.testing.assert_allclose(attack.scores[part], expected, atol=1e-4)
    assert auc(attack.scores, members) > 0.6


def test_who_cannot_be_told_apart_is_guessed_half_the_time() -> None:
    scores, members = scored(4000, 0.0, seed=5)
    found = by_threshold(scores, members).numbers()
    assert found["AUC"].low < 0.5 < found["AUC"].high


def test_lira_is_the_log_of_a_ratio_of_densities() -> None:
    draw = np.random.default_rng(2)
    inside = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [0, 1], [1, 0]], dtype=bool)
    shadows, target = draw.normal(size=(6, 2)) + inside, np.array([0.3, 1.2])
    means = {kind: np.array([shadows[chosen[:, r], r].mean() for r in (0, 1)]) for kind, chosen in
             (("in", inside), ("out", ~inside))}  # fmt: skip
    deviations = {}
    for kind, chosen in (("in", inside), ("out", ~inside)):
        residuals = [shadows[chosen[:, r], r] - means[kind][r] for r in (0, 1)]
        deviations[kind] = np.sqrt(sum((each**2).sum() for each in residuals) / (6 - 2))
    expected = norm.logpdf(target, means["in"], deviations["in"]) - norm.logpdf(target, means["out"], deviations["out"])
    np.testing.assert_allclose(lira(target, shadows, inside), expected)


def test_without_shadows_that_saw_a_record_lira_asks_how_unusual_it_is() -> None:
    shadows, target = np.array([[0.0, 4.0], [2.0, 6.0]]), np.array([3.0, 5.0])
    outside = np.zeros((2, 2), dtype=bool)
    np.testing.assert_allclose(lira(target, shadows, outside), [2 / 2**0.5, 0])
    with pytest.raises(MembershipError, match="1 shadow models that were not trained on it"):
        lira(target, shadows[:1], outside[:1])
