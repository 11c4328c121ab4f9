"""Captions from a captioner: greedy, the likeliest of a beam search, or drawn from the nucleus of each next token.

A caption ends with the end token or at the given length, which counts the start token. Start and padding are never
written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from murmuration.data.text.encoder import TextEncoder
from murmuration.model.captioner import Captioner

Next = Callable[[Tensor], Tensor]
"""Logits [rows, vocabulary] -> one token per row."""


@torch.no_grad()
def greedy_captions(model: Captioner, images: Tensor, text: TextEncoder, *, length: int, batch: int = 64) -> list[str]:
    """One caption per image, at most `length` tokens counting the start token."""
    captions: list[str] = []
    for chunk in images.split(batch):
        captions += [text.decode(ids) for ids in CaptionWriter(model, text, length).greedy(model.encode_images(chunk))]
    return captions


@dataclass(frozen=True)
class CaptionWriter:
    """Writes token ids of captions, given the memory of images; a caption has at most `length` of them, the start token
    among them."""

    model: Captioner
    text: TextEncoder
    length: int

    def greedy(self, memory: Tensor) -> list[list[int]]:
        """The most probable next token each time; argmax takes the lowest id on ties, so a run repeats."""
        return self._written(memory, lambda logits: logits.argmax(dim=1))

    def nucleus(self, memory: Tensor, p: float, seed: int, records: Sequence[int]) -> list[list[int]]:
        """Each token is drawn from the fewest most probable ones that together have probability `p`.

        The draws belong to (seed, record), so that a record's caption does not depend on the batch that it came in.
        """
        draws = [_generator(seed, record) for record in records]

        def choose(logits: Tensor) -> Tensor:
            likely, order = logits.cpu().double().softmax(dim=1).sort(dim=1, descending=True, stable=True)
            # A token belongs to the nucleus while those before it have not reached p, so the first one always does.
            kept = torch.where(likely.cumsum(dim=1) - likely < p, likely, 0.0)
            taken = [
                int(order[row, torch.multinomial(kept[row], 1, generator=draw)[0]]) for row, draw in enumerate(draws)
            ]
            return torch.tensor(taken, device=logits.device)

        return self._written(memory, choose)

    def _written(self, memory: Tensor, choose: Next) -> list[list[int]]:
        tokens = torch.full((len(memory), 1), self.text.start, dtype=torch.int64, device=memory.device)
        ended = torch.zeros(len(memory), dtype=torch.bool, device=memory.device)
        while tokens.shape[1] < self.length and not bool(ended.all()):
            chosen = choose(self._next_logits(memory, tokens))
            following = torch.where(ended, self.text.pad, chosen)
            tokens = torch.cat([tokens, following[:, None]], dim=1)
            ended = ended | (following == self.text.end)
        silent = {self.text.start, self.text.end, self.text.pad}
        return [[token for token in row if token not in silent] for row in tokens.tolist()]

    def _next_logits(self, memory: Tensor, tokens: Tensor) -> Tensor:
        """[rows, vocabulary]; -inf for what may not be written."""
        logits = self.model.decode(memory, tokens)[:, -1].float()
        # Some tokenizers have no padding, or begin with the token that ends.
        logits[:, [token for token in {self.text.start, self.text.pad} if 0 <= token != self.text.end]] = float("-inf")
        return logits

    def beam(self, memory: Tensor, width: int) -> list[list[int]]:
        """The likeliest caption that a beam of `width` meets; with width 1 the greedy one.

        A beam may drop the greedy caption although it would have ended as the likeliest, so that one is compared, too.
        """
        plain = self.greedy(memory)
        if width == 1:
            return plain
        found = []
        for row, words in enumerate(plain):
            one = memory[row : row + 1]
            searched, score = self._beam_of_one(one, width)
            found.append(searched if score >= self.log_likelihood(one, words) else words)
        return found

    def log_likelihood(self, memory: Tensor, words: Sequence[int]) -> float:
        """Scores a caption, with its end token unless the length cut it off; `memory` [1, …]."""
        whole = [self.text.start, *words, self.text.end][: self.length]
        scores = 0.0
        for place in range(1, len(whole)):
            tokens = torch.tensor([whole[:place]], device=memory.device)
            scores += float(self._next_logits(memory, tokens)[0].double().log_softmax(dim=0)[whole[place]])
        return scores

    def _beam_of_one(self, memory: Tensor, width: int) -> tuple[list[int], float]:
        open_rows: list[tuple[float, list[int]]] = [(0.0, [self.text.start])]
        ended: list[tuple[float, list[int]]] = []
        for _ in range(self.length - 1):
            tokens = torch.tensor([row for _, row in open_rows], device=memory.device)
            logits = self._next_logits(memory.expand(len(tokens), *memory.shape[1:]), tokens)
            scores = (
                logits.double().log_softmax(dim=1)
                + torch.tensor([[score] for score, _ in open_rows], device=logits.device).double()
            )
            best = scores.flatten().topk(min(width, scores.numel()))
            grown = [
                (value, [*open_rows[place // scores.shape[1]][1], place % scores.shape[1]])
                for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
            ended += [row for row in grown if row[1][-1] == self.text.end]
            open_rows = [row for row in grown if row[1][-1] != self.text.end and row[0] > float("-inf")]
            # Scores only fall, so nothing open can overtake a caption that has ended above all of them.
            if not open_rows or (ended and max(ended)[0] >= open_rows[0][0]):
                break
        score, row = max(ended + open_rows, key=lambda each: each[0])
        return [token for token in row[1:] if token != self.text.end], score


def _generator(seed: int, record: int) -> torch.Generator:
    digest = hashlib.sha256(f"murmuration caption {seed} {record}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
