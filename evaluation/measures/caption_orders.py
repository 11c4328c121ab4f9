"""Captions with their words in another order, as ARO makes them for COCO-Order and Flickr-Order.

A caption is cut into words by NLTK's tokenizer, and every three words are a trigram: one option shuffles the words
within each trigram, one the trigrams. Two more need tags of parts of speech: one shuffles nouns among themselves and
adjectives among themselves, the other all other words. At last all options, the true one too, lose capitals and some
punctuation and are cut to 30 words. An option may be the true caption again, where there is nothing to shuffle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

NOUNS = frozenset({"NN", "NNS", "NNP", "NNPS"})
ADJECTIVES = frozenset({"JJ", "JJR", "JJS"})
TRIGRAM = 3
MOST_WORDS = 30
REMOVED = re.compile(r'[.!"()*#:;~]')
SHUFFLED = ("nouns and adjectives", "all but nouns and adjectives", "within trigrams", "trigrams")
UNTAGGED = SHUFFLED[2:]
Tagged = Sequence[tuple[str, str]]
"""Words with their tags of the Penn Treebank."""


def cleaned(caption: str) -> str:
    words = re.sub(r"\s+", " ", REMOVED.sub(" ", caption.lower())).strip().split(" ")
    return " ".join(words[:MOST_WORDS])


def options_of(caption: str, tagged: Tagged | None, seed: int, number: int) -> tuple[str, ...]:
    """The true caption first, then those of SHUFFLED, or without tags those of UNTAGGED. Each is drawn by the seed, the
    caption's number and what is shuffled."""
    draws = [np.random.default_rng([seed, number, which]) for which in range(len(SHUFFLED))]
    made: list[list[str]] = []
    if tagged is not None:
        words, tags = [word for word, _ in tagged], [tag for _, tag in tagged]
        nouns, adjectives = (np.array([tag in kind for tag in tags], dtype=bool) for kind in (NOUNS, ADJECTIVES))
        made += [_shuffled(_shuffled(words, nouns, draws[0]), adjectives, draws[0])]
        made += [_shuffled(words, ~(nouns | adjectives), draws[1])]
    trigrams = trigrams_of(words_of(caption))
    made += [[each[place] for each in trigrams for place in draws[2].permutation(len(each))]]
    made += [[word for place in draws[3].permutation(len(trigrams)) for word in trigrams[place]]]
    return (cleaned(caption), *(cleaned(" ".join(words)) for words in made))


def words_of(caption: str) -> list[str]:
    """As NLTK cuts one sentence; where sentences end is known to its downloaded models only."""
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer().tokenize(caption)


def trigrams_of(words: list[str]) -> list[list[str]]:
    return [words[at : at + TRIGRAM] for at in range(0, len(words), TRIGRAM)]


def chance(options: Sequence[str], true: int) -> float:
    """How often a model that knows nothing would choose the true caption: ties go to the first of equal options."""
    return 0.0 if options.index(options[true]) < true else 1 / len(set(options))


def _shuffled(words: list[str], which: np.ndarray, draw: np.random.Generator) -> list[str]:
    """The words at `which` places in another order, the others where they are."""
    found = words.copy()
    places = np.flatnonzero(which)
    for place, taken in zip(places, draw.permutation(places), strict=True):
        found[place] = words[taken]
    return found
