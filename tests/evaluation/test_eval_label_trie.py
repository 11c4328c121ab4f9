"""Names written along a trie, and scores over synonyms and templates, on models whose every logit is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.evaluation.protocols.zero_shot import stops_of, trie_of, written_names
from murmuration.train.measures.captions import CaptionWriter
from murmuration.train.measures.zero_shot import class_scores

WORDS = ["<pad>", "<start>", "<end>", "<unk>", ".", "a", "great", "white", "shark", "heron", "photo", "of"]
ID = {word: number for number, word in enumerate(WORDS)}


class Words:
    pad, start, end, unk = 0, 1, 2, 3

    def words(self, text: str) -> list[int]:
        return [ID.get(word, self.unk) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[number] for number in ids)


class Fixed:
    """The logits after each word, whatever came before it; `favours` [image] adds 10 to one word everywhere."""

    def __init__(self, after: dict[str, dict[str, float]], favours: Sequence[str] = ()) -> None:
        self.table = torch.zeros(len(WORDS), len(WORDS))
        for word, scores in after.items():
            for following, score in scores.items():
                self.table[ID[word], ID[following]] = score
        self.favours = [ID[word] for word in favours]

    def encode_images(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :1]

    def decode(self, memory: Tensor, tokens: Tensor) -> Tensor:
        logits = self.table[tokens].clone()
        if self.favours:
            rows = torch.arange(len(tokens))
            logits[rows, :, torch.tensor([self.favours[int(each)] for each in memory[:, 0]])] += 10
        return logits


def images(count: int) -> Tensor:
    return torch.arange(count).float().view(count, 1, 1, 1)


def names(*texts: str) -> list[tuple[int, ...]]:
    return [tuple(Words().words(text)) for text in texts]


def written(model: Fixed, *labels: str, count: int = 1) -> list[str]:
    found = written_names(
        model, images(count), [Words.start, *Words().words("a photo of a")], trie_of(names(*labels)), stops_of(Words())
    )
    return [Words().decode(each) for each in found]


def test_only_words_that_continue_a_name_are_taken() -> None:
    """The likeliest word of all, "photo", continues no name."""
    model = Fixed({"a": {"photo": 9, "great": 2, "heron": 1}, "great": {"photo": 9, "shark": -2, "white": -1}})
    assert written(model, "great white shark", "great shark", "heron") == ["great white shark"]


def test_a_name_inside_a_longer_one_ends_by_end_full_stop_or_padding() -> None:
    labels = ("great", "great white")
    for stop in ("<end>", ".", "<pad>"):
        assert written(Fixed({"a": {}, "great": {stop: 1, "white": 0.5}}), *labels) == ["great"], stop
        assert written(Fixed({"a": {}, "great": {stop: 0.4, "white": 0.5}}), *labels) == ["great white"], stop
    # A stop may not end what is no name.
    assert written(Fixed({"great": {"<end>": 9}}), "great white", "heron") == ["great white"]


def test_each_image_writes_its_own_name() -> None:
    model = Fixed({}, favours=["heron", "great", "white"])
    assert written(model, "great white shark", "heron", "white", count=3) == ["heron", "great white shark", "white"]


def test_a_class_has_the_score_of_its_best_name_and_the_mean_over_templates() -> None:
    model = Fixed({"a": {"heron": 3, "great": 1}, "of": {"heron": 0.5, "shark": 2}, "great": {"white": 1, ".": 2}})
    classes = (("heron",), ("shark", "great white"))
    found = class_scores(model, images(1), classes, ("a photo of a {}", "of {}"), Words())

    def by_hand(text: str) -> float:
        ids = [Words.start, *Words().words(text)]
        steps = [F.cross_entropy(model.table[before], torch.tensor(after)) for before, after in pairwise(ids)]
        return float(torch.stack(steps).mean())

    def of(name: str) -> float:
        return (by_hand(f"a photo of a {name}") + by_hand(f"of {name}")) / 2

    torch.testing.assert_close(found, torch.tensor([[of("heron"), min(of("shark"), of("great white"))]]))


def test_what_follows_the_name_counts() -> None:
    model = Fixed({"a": {"heron": 3}, "heron": {".": 5}})
    plain = class_scores(model, images(1), (("heron",),), ("a {}",), Words())
    ended = class_scores(model, images(1), (("heron",),), ("a {} .",), Words())
    last = F.cross_entropy(model.table[ID["heron"]], torch.tensor(ID["."]))
    torch.testing.assert_close(ended[0, 0] * 3, plain[0, 0] * 2 + last)


# Beam search and nucleus sampling: where they must agree with greedy captions, and what they may never do.


LENGTH = 6
TEXT = Words()


def random_model(seed: int) -> Fixed:
    model = Fixed({})
    model.table = 2 * torch.randn(len(ID), len(ID), generator=torch.Generator().manual_seed(seed))
    return model


def memory_of(model: Fixed, count: int = 1) -> Tensor:
    return model.encode_images(images(count))


def likelihood(model: Fixed, words: list[int]) -> float:
    return CaptionWriter(model, TEXT, LENGTH).log_likelihood(memory_of(model), words)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy_and_a_wider_one_is_never_less_likely(seed: int) -> None:
    model = random_model(seed)
    plain = CaptionWriter(model, TEXT, LENGTH).greedy(memory_of(model))
    assert CaptionWriter(model, TEXT, LENGTH).beam(memory_of(model), 1) == plain
    for width in (2, 3, 8):
        assert likelihood(model, CaptionWriter(model, TEXT, LENGTH).beam(memory_of(model), width)[0]) >= likelihood(
            model, plain[0]
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_all_captions_finds_the_likeliest(seed: int) -> None:
    model, length = random_model(seed), 4
    letters = [number for number in range(len(ID)) if number not in (TEXT.pad, TEXT.start, TEXT.end)]
    every = [list(words) for count in range(length) for words in product(letters, repeat=count)]
    best = max(CaptionWriter(model, TEXT, length).log_likelihood(memory_of(model), words) for words in every)
    found = CaptionWriter(model, TEXT, length).beam(memory_of(model), 2000)[0]
    assert CaptionWriter(model, TEXT, length).log_likelihood(memory_of(model), found) == pytest.approx(best)


def test_a_trap_for_greedy_is_seen_by_a_beam() -> None:
    """The likelier first word leads to many equally unlikely ones."""
    model = Fixed({"<start>": {"great": 6.0, "heron": 5.5}, "heron": {"<end>": 20.0}})
    assert CaptionWriter(model, TEXT, LENGTH).greedy(memory_of(model))[0][0] == ID["great"]
    assert CaptionWriter(model, TEXT, LENGTH).beam(memory_of(model), 2)[0] == [ID["heron"]]


def test_likelihood_sums_the_words_and_the_end() -> None:
    model = random_model(0)
    table = model.table.clone()
    table[:, [TEXT.start, TEXT.pad]] = float("-inf")
    scores = table.double().log_softmax(1)
    expected = scores[TEXT.start, 5] + scores[5, 6] + scores[6, TEXT.end]
    assert likelihood(model, [5, 6]) == pytest.approx(float(expected))
    # Cut off by the length, a caption has no end.
    assert CaptionWriter(model, TEXT, 3).log_likelihood(memory_of(model), [5, 6]) == pytest.approx(
        float(scores[TEXT.start, 5] + scores[5, 6])
    )


def test_the_nucleus_holds_the_fewest_likely_words_that_reach_p() -> None:
    logits = {"great": 0.5, "white": 0.3, "shark": 0.15}
    model = Fixed({"<start>": {word: float(torch.tensor(share).log()) + 30 for word, share in logits.items()}})
    drawn = Counter(
        CaptionWriter(model, TEXT, 2).nucleus(memory_of(model), p=0.7, seed=0, records=[record])[0][0]
        for record in range(600)
    )
    assert set(drawn) == {ID["great"], ID["white"]}
    # 0.5 / 0.8 of 600 draws; five standard deviations are 60.
    assert abs(drawn[ID["great"]] - 375) < 60
    certain = CaptionWriter(model, TEXT, 2).nucleus(memory_of(model), p=1e-9, seed=0, records=[3])
    assert certain == [[ID["great"]]], "the likeliest word is always in it"


def test_a_records_draws_depend_on_the_seed_and_not_on_its_batch() -> None:
    model = random_model(1)
    together = CaptionWriter(model, TEXT, LENGTH).nucleus(memory_of(model, 8), p=0.95, seed=4, records=list(range(8)))
    apart = [
        CaptionWriter(model, TEXT, LENGTH).nucleus(memory_of(model, 8)[row : row + 1], p=0.95, seed=4, records=[row])[0]
        for row in range(8)
    ]
    assert together == apart and len({tuple(each) for each in together}) > 3
    assert together != CaptionWriter(model, TEXT, LENGTH).nucleus(
        memory_of(model, 8), p=0.95, seed=5, records=list(range(8))
    )
