"""Draws for few-shot classifiers: so many of each class, nested, by a seed; and published lists."""

from __future__ import annotations

import numpy as np
import pytest

from murmuration.evaluation.protocols.draws import FewShotError, draw_percent, draw_shots, listed

NAMES = ("ant", "bee", "cat")
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [10, 40, 200]))


def test_every_class_gives_as_many_and_more_shots_contain_fewer() -> None:
    five, one = draw_shots(LABELS, 5, 3, NAMES), draw_shots(LABELS, 1, 3, NAMES)
    assert np.bincount(LABELS[five]).tolist() == [5, 5, 5] and np.bincount(LABELS[one]).tolist() == [1, 1, 1]
    assert set(one) < set(five) and len(set(five)) == 15
    assert not np.array_equal(five, draw_shots(LABELS, 5, 4, NAMES)), "another seed draws others"


def test_each_record_of_a_class_is_drawn_equally_often() -> None:
    counts = np.zeros(len(LABELS), dtype=int)
    for seed in range(2000):
        counts[draw_shots(LABELS, 1, seed, NAMES)] += 1
    ants = counts[LABELS == 0]
    assert ants.sum() == 2000 and abs(ants - 200).max() < 5 * (2000 * 0.1 * 0.9) ** 0.5


def test_a_percentage_is_of_each_class_and_never_nothing() -> None:
    assert np.bincount(LABELS[draw_percent(LABELS, 1, 0, 3)]).tolist() == [1, 1, 2]
    assert np.bincount(LABELS[draw_percent(LABELS, 10, 0, 3)]).tolist() == [1, 4, 20]
    assert len(draw_percent(LABELS, 100, 0, 3)) == 250


def test_a_class_with_too_few_records_is_named() -> None:
    with pytest.raises(FewShotError, match="'ant' has 10 readable training records, fewer than 11 shots"):
        draw_shots(LABELS, 11, 0, NAMES)


def test_a_list_names_files_without_their_folders() -> None:
    files = ["n1/n1_10.JPEG", "n1/n1_2.JPEG", "n2/n2_7.JPEG"]
    assert listed(["n2_7.JPEG", "", "n1/n1_10.JPEG", "n2_7.JPEG"], files).tolist() == [0, 2]
    with pytest.raises(FewShotError, match="n3_1, which is none of the 3"):
        listed(["n3_1.JPEG"], files)
    with pytest.raises(FewShotError, match="have the same name"):
        listed(["a.png"], ["x/a.png", "y/a.png"])
