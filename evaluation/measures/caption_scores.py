"""How likely a captioner finds given captions of given pictures, and what follows: retrieval, and choices of captions.

The score of a caption is the mean cross-entropy of its own tokens with the end token, the loss that captioners are
trained with: lower is better. Each picture is encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from murmuration.model.captioner import Captioner, caption_loss

ROWS = 256
"""Pairs of picture and caption that are decoded at once."""


@torch.no_grad()
def pair_scores(model: Captioner, memory: Tensor, pictures: Tensor, tokens: Tensor, rows: int = ROWS) -> Tensor:
    """[pairs]: row i of `tokens` [pairs, T] after the picture number `pictures[i]` of `memory`."""
    found = []
    for chosen, part in zip(pictures.split(rows), tokens.split(rows), strict=True):
        logits = model.decode(memory[chosen.to(memory.device)], part[:, :-1].to(memory.device))
        found.append(caption_loss(logits, part[:, 1:].to(memory.device)))
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
