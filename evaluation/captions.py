"""Greedy captions: the most probable next token, until the end token or the given length."""

from __future__ import annotations

import torch
from torch import Tensor

from murmuration.evaluation.text import CaptionModel, Text


@torch.no_grad()
def greedy_captions(model: CaptionModel, images: Tensor, text: Text, *, length: int, batch: int = 64) -> list[str]:
    """One caption per image, at most `length` tokens counting the start token."""
    captions: list[str] = []
    for chunk in images.split(batch):
        captions += [text.decode(ids) for ids in _greedy(model, chunk, text, length)]
    return captions


def _greedy(model: CaptionModel, images: Tensor, text: Text, length: int) -> list[list[int]]:
    memory = model.encode_images(images)
    tokens = torch.full((len(images), 1), text.start, dtype=torch.int64, device=images.device)
    ended = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    while tokens.shape[1] < length and not bool(ended.all()):
        logits = model.decode(memory, tokens)[:, -1].float()
        # Start and padding are never words; argmax takes the lowest id on ties, so a run repeats.
        logits[:, [text.start, text.pad]] = float("-inf")
        following = torch.where(ended, text.pad, logits.argmax(dim=1))
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        ended = ended | (following == text.end)
    silent = {text.start, text.end, text.pad}
    return [[token for token in row if token not in silent] for row in tokens.tolist()]
