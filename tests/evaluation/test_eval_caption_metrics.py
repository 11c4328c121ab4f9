"""BLEU-4, ROUGE-L and CIDEr-D against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from murmuration.evaluation.protocols.caption import caption_metrics, words_of

BIRDS, SHIPS = "a flock of birds over the sea", "three old ships in a harbour"


def values(written: list[str], references: list[list[str]]) -> dict[str, float]:
    return {name: found.value for name, found in caption_metrics(written, references).items()}


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of("A dog's Bone, near 2 cats.") == ["a", "dog's", "bone", "near", "2", "cats"]


def test_the_captions_of_people_themselves_are_perfect() -> None:
    found = values([BIRDS, SHIPS], [[BIRDS], [SHIPS]])
    assert found["BLEU-4"] == pytest.approx(1) and found["ROUGE-L"] == pytest.approx(1)
    # All n-grams are of one picture alone, but for the word "a", which weighs ln(2/2) = 0.
    assert found["CIDEr-D"] == pytest.approx(10)


def test_what_shares_no_word_has_nothing() -> None:
    assert values(["one two three four five"], [[BIRDS]]) == {"BLEU-4": 0, "ROUGE-L": 0, "CIDEr-D": 0}
    assert values([""], [[BIRDS]]) == {"BLEU-4": 0, "ROUGE-L": 0, "CIDEr-D": 0}


def test_bleu_counts_over_the_set_clips_and_shortens() -> None:
    written = ["the the birds over the sea", SHIPS]
    references = [[BIRDS, "birds over the sea"], [SHIPS]]
    # Words: the 1 of 3 (once in a reference), birds, over, sea: 4 of 6, and 6 of 6. Pairs: birds over, over the,
    # the sea: 3 of 5, and 5 of 5. Threes: 2 of 4, and 4 of 4. Fours: 1 of 3, and 3 of 3. Lengths: 6 + 6; the nearest
    # references have 7 and 6.
    precisions = [10 / 12, 8 / 10, 6 / 8, 4 / 6]
    expected = math.exp(1 - 13 / 12) * math.prod(precisions) ** 0.25
    assert values(written, references)["BLEU-4"] == pytest.approx(expected)


def test_rouge_takes_the_best_precision_and_recall() -> None:
    # In order: birds over sea, of 4 written and 7 or 3 of the references.
    found = values(["birds fly over sea"], [[BIRDS, "birds over sea"]])["ROUGE-L"]
    precision, recall, weight = 3 / 4, 3 / 3, 1.44
    assert found == pytest.approx((1 + weight) * precision * recall / (recall + weight * precision))


def test_cider_weighs_rare_words_and_damps_other_lengths() -> None:
    written = ["birds sea", SHIPS]
    references = [["birds over sea"], ["ships over harbour"]]
    # Of the first: "birds" and "sea" weigh ln 2 each, "over" ln 1 = 0, so the words agree wholly but for the length;
    # its pair "birds sea" is in no reference, and it has no three words.
    damped = math.exp(-1 / 72)
    one = 10 * damped / 4
    # Of the second: "ships" and "harbour" among "three old ships in a harbour", whose other words are in no reference
    # and weigh ln(2 / 1); six words against three.
    cosine = 2 / (math.sqrt(6) * math.sqrt(2))
    two = 10 * cosine * math.exp(-9 / 72) / 4
    assert values(written, references)["CIDEr-D"] == pytest.approx((one + two) / 2)


def test_a_word_said_again_and_again_does_not_help() -> None:
    once, often = (values([text, SHIPS], [[BIRDS], [SHIPS]]) for text in (BIRDS, BIRDS + " birds birds birds"))
    assert all(often[name] < once[name] for name in once)
