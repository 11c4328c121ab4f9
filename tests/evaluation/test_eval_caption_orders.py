"""Captions in other orders: which words may move, how often each order comes, and what a guess is worth."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from murmuration.evaluation.measures.caption_scores import (
    ADJECTIVES,
    MOST_WORDS,
    NOUNS,
    SHUFFLED,
    Tagged,
    chance,
    cleaned,
    options_of,
    trigrams_of,
    words_of,
)

CAPTION = "A small dog and two big cats sleep"
TAGS = ["DT", "JJ", "NN", "CC", "CD", "JJ", "NNS", "VBP"]
TAGGED: Tagged = list(zip(CAPTION.split(), TAGS, strict=True))


def test_each_order_moves_its_own_words_and_keeps_all_of_them() -> None:
    seen: list[set[str]] = [set() for _ in range(5)]
    words = CAPTION.lower().split()
    for seed in range(1200):
        options = options_of(CAPTION, TAGGED, seed, 3)
        assert options[0] == CAPTION.lower() and len(options) == 1 + len(SHUFFLED)
        for kind, option in zip(seen, options, strict=True):
            assert sorted(option.split()) == sorted(words)
            kind.add(option)
        named, others = options[1].split(), options[2].split()
        for place, tag in enumerate(TAGS):
            free = tag in NOUNS or tag in ADJECTIVES
            assert (named if not free else others)[place] == words[place]
        assert {named[2], named[6]} == {"dog", "cats"} and {named[1], named[5]} == {"small", "big"}
        within, between = options[3].split(), options[4].split()
        assert [sorted(part) for part in trigrams_of(within)] == [sorted(part) for part in trigrams_of(words)]
        whole = ["a small dog", "and two big", "cats sleep"]
        assert " ".join(between) in {" ".join(order) for order in permutations(whole)}
    assert [len(kind) for kind in seen] == [1, 2 * 2, 4 * 3 * 2, 6 * 6 * 2, 6], "every order comes, and no other"


def test_orders_are_equally_frequent() -> None:
    found = Counter(options_of("one two three four five six seven", None, 7, number)[2] for number in range(6000))
    assert len(found) == 6
    spread = sum((count - 1000) ** 2 / 1000 for count in found.values())
    assert spread < 25.7, "chi-square of 5 degrees of freedom: one draw in ten thousand is beyond"


def test_a_seed_gives_the_same_orders_and_tags_change_no_other_one() -> None:
    one = options_of(CAPTION, TAGGED, 5, 2)
    assert one == options_of(CAPTION, TAGGED, 5, 2)
    assert options_of(CAPTION, None, 5, 2) == (one[0], *one[3:])
    assert len({options_of(CAPTION, TAGGED, seed, 2) for seed in range(20)}) > 15
    assert len({options_of(CAPTION, TAGGED, 5, number) for number in range(20)}) > 15


def test_words_are_cut_and_cleaned_as_published() -> None:
    assert words_of("A man's dog, on a red-brown sofa.") == ["A", "man", "'s", "dog", ",", "on", "a", "red-brown",
                                                           "sofa", "."]  # fmt: skip
    assert cleaned('  A "Red"  dog; (two)\n#cats~! ') == "a red dog two cats"
    assert cleaned("it's here, there.") == "it's here, there"
    assert cleaned("word " * 50).count("word") == MOST_WORDS


@pytest.mark.parametrize(
    ("options", "true", "expected"),
    [(["a", "b", "c", "d", "e"], 0, 0.2), (["a", "a", "a"], 0, 1.0), (["a", "b", "a"], 0, 0.5),
     (["b", "a", "b"], 2, 0.0), (["false", "true"], 1, 0.5)],
)  # fmt: skip
def test_chance_is_that_of_a_guess(options: list[str], true: int, expected: float) -> None:
    assert chance(options, true) == pytest.approx(expected)
