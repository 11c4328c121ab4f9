"""How likely a captioner finds given captions of given pictures, and what follows: retrieval, and choices of captions.

The score of a caption is the mean cross-entropy of its own tokens with the end token, the loss that captioners are
trained with: lower is better. Each picture is encoded once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from murmuration.evaluation.measures.interval import Estimate, mean, share
from murmuration.model.captioner import Captioner

NOUNS = frozenset({"NN", "NNS", "NNP", "NNPS"})
ADJECTIVES = frozenset({"JJ", "JJR", "JJS"})
TRIGRAM = 3
MOST_WORDS = 30
REMOVED = re.compile(r'[.!"()*#:;~]')
SHUFFLED = ("nouns and adjectives", "all but nouns and adjectives", "within trigrams", "trigrams")
UNTAGGED = SHUFFLED[2:]
Tagged = Sequence[tuple[str, str]]
"""Words with their tags of the Penn Treebank."""


LEAST_ATTRIBUTION = 25


ROWS = 256
"""Pairs of picture and caption that are decoded at once."""


@torch.no_grad()
def pair_scores(model: Captioner, memory: Tensor, pictures: Tensor, tokens: Tensor, rows: int = ROWS) -> Tensor:
    """[pairs]: row i of `tokens` [pairs, T] after the picture number `pictures[i]` of `memory`."""
    found = []
    for chosen, part in zip(pictures.split(rows), tokens.split(rows), strict=True):
        logits = model.decode(memory[chosen.to(memory.device)], part[:, :-1].to(memory.device))
        found.append(model.caption_losses(logits, part[:, 1:].to(memory.device)))
    return torch.cat(found) if found else memory.new_zeros(0)


def all_scores(model: Captioner, memory: Tensor, tokens: Tensor, rows: int = ROWS) -> Tensor:
    """[pictures, captions]"""
    pictures = torch.arange(len(memory)).repeat_interleave(len(tokens))
    return pair_scores(model, memory, pictures, tokens.repeat(len(memory), 1), rows).view(len(memory), len(tokens))


def text_ranks(scores: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """For each picture (row): at which place, from 0, the first of its own captions comes among all captions.

    `owner[j]` is the picture of caption j. The lower number comes first on ties. A picture without a caption gets -1.
    """
    found = np.full(len(scores), -1)
    for picture, row in enumerate(scores):
        own = np.flatnonzero(owner == picture)
        if len(own):
            found[picture] = min(_before(row, int(caption)) for caption in own)
    return found


def picture_ranks(scores: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """For each caption (column): at which place its picture comes among all pictures."""
    return np.array([_before(scores[:, caption], int(picture)) for caption, picture in enumerate(owner)])


def _before(values: np.ndarray, place: int) -> int:
    mine = values[place]
    return int((values < mine).sum() + (values[:place] == mine).sum())


def chosen_options(scores: Sequence[Sequence[float]]) -> list[int]:
    """For each case the option with the lowest score; the lower number on ties."""
    return [int(np.argmin(case)) for case in scores]


# Accuracy of chosen captions, as ARO counts it: over all cases, and as the mean over groups of cases.
#
# Groups are relations (VG-Relation, all of them) or pairs of attributes (VG-Attribution, those with at least 25
# cases).


@dataclass(frozen=True)
class Group:
    name: str
    right: int
    cases: int


def grouped(groups: Sequence[str], right: Sequence[bool]) -> list[Group]:
    """One for each name, in alphabetical order."""
    found: dict[str, list[bool]] = {}
    for name, each in zip(groups, right, strict=True):
        found.setdefault(name, []).append(each)
    return [Group(name, sum(values), len(values)) for name, values in sorted(found.items())]


def micro(right: Sequence[bool]) -> Estimate:
    return share(sum(right), len(right))


def macro(groups: Sequence[Group], least: int = 1) -> Estimate | None:
    """The mean of the groups' accuracies, with an interval over groups; None if no group has enough cases."""
    counted = [group.right / group.cases for group in groups if group.cases >= least]
    return mean(counted) if counted else None


# Captions with their words in another order, as ARO makes them for COCO-Order and Flickr-Order.
#
# A caption is cut into words by NLTK's tokenizer, and every three words are a trigram: one option shuffles the words
# within each trigram, one the trigrams. Two more need tags of parts of speech: one shuffles nouns among themselves
# and adjectives among themselves, the other all other words. At last all options, the true one too, lose capitals and
# some punctuation and are cut to 30 words. An option may be the true caption again, where there is nothing to
# shuffle.


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
