"""How near written captions come to those of people: BLEU-4, ROUGE-L and CIDEr-D, by their published formulas.

Words are lower-cased runs of letters, digits and apostrophes. Published numbers cut words by another program (that of
Stanford), so they differ by a little.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from murmuration.evaluation.measures.interval import Estimate, bootstrap, mean

LONGEST = 4
"""Words of an n-gram."""
RECALL_WEIGHT = 1.2
"""β of ROUGE-L."""
LENGTH_SPREAD = 6.0
"""σ of CIDEr-D: words by which lengths may differ."""
DRAWS = 1000
Words = list[str]
Grams = Counter[tuple[str, ...]]


def words_of(caption: str) -> Words:
    return re.findall(r"[\w']+", caption.lower())


def caption_metrics(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Estimate]:
    """Compares each written caption with one or more references of its picture."""
    captions = [words_of(caption) for caption in written]
    known = [[words_of(caption) for caption in each] for each in references]
    counts = np.array([_overlaps(one, others) for one, others in zip(captions, known, strict=True)], dtype=np.float64)

    def corpus(places: np.ndarray) -> np.ndarray:
        return np.array([_bleu(counts[places].sum(axis=0))])

    (bleu,) = bootstrap(corpus(np.arange(len(counts))), corpus, len(counts), DRAWS)
    rouge = mean([_rouge(one, others) for one, others in zip(captions, known, strict=True)])
    return {"BLEU-4": bleu, "ROUGE-L": rouge, "CIDEr-D": mean(_cider(captions, known))}


def _grams(words: Words, length: int) -> Grams:
    return Counter(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def _overlaps(caption: Words, references: Sequence[Words]) -> list[int]:
    """Right n-grams and all n-grams for each n, then the caption's length and that of the reference nearest to it."""
    found: list[int] = []
    for length in range(1, LONGEST + 1):
        here, most = _grams(caption, length), Counter[tuple[str, ...]]()
        for reference in references:
            most |= _grams(reference, length)
        found += [(here & most).total(), here.total()]
    nearest = min((abs(len(each) - len(caption)), len(each)) for each in references)[1]
    return [*found, len(caption), nearest]


def _bleu(counts: np.ndarray) -> float:
    """BLEU of the whole set: n-grams are counted over all captions, not averaged by caption."""
    right, whole = counts[0 : 2 * LONGEST : 2], counts[1 : 2 * LONGEST : 2]
    length, reference = counts[2 * LONGEST :]
    if not right.all():
        return 0.0
    short = min(0.0, 1.0 - reference / length)
    return math.exp(short + float(np.log(right / whole).mean()))


def _rouge(caption: Words, references: Sequence[Words]) -> float:
    common = [_longest_common(caption, each) for each in references]
    precision = max((each / len(caption) for each in common), default=0.0) if caption else 0.0
    recall = max(each / len(other) if other else 0.0 for each, other in zip(common, references, strict=True))
    if not precision or not recall:
        return 0.0
    weight = RECALL_WEIGHT**2
    return (1 + weight) * precision * recall / (recall + weight * precision)


def _longest_common(one: Words, other: Words) -> int:
    """Words of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before, row = row, [0]
        for place, against in enumerate(other):
            row.append(before[place] + 1 if word == against else max(row[place], before[place + 1]))
    return row[-1]


def _cider(captions: Sequence[Words], references: Sequence[Sequence[Words]]) -> list[float]:
    pictures, scores = len(captions), np.zeros(len(captions))
    for length in range(1, LONGEST + 1):
        having: Grams = Counter()
        for each in references:
            having.update({gram for reference in each for gram in _grams(reference, length)})
        for number, (caption, others) in enumerate(zip(captions, references, strict=True)):
            near = [_similar(caption, other, length, having, pictures) for other in others]
            scores[number] += 10 * sum(near) / len(near) / LONGEST
    return scores.tolist()


def _similar(caption: Words, reference: Words, length: int, having: Grams, pictures: int) -> float:
    """Cosine of the n-grams, weighted by their rarity among the references, as CIDEr-D clips and damps it."""
    mine, theirs = (
        {gram: count * math.log(pictures / max(1, having[gram])) for gram, count in _grams(words, length).items()}
        for words in (caption, reference)
    )
    norms = [math.sqrt(sum(value * value for value in each.values())) for each in (mine, theirs)]
    if not all(norms):
        return 0.0
    product = sum(min(value, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, value in mine.items())
    return product / math.prod(norms) * math.exp(-((len(caption) - len(reference)) ** 2) / (2 * LENGTH_SPREAD**2))
