"""Captions -> fixed-length token rows, from a tokenizer on the local disk; nothing is ever downloaded or learnt.

`"clip"` is CLIP's BPE at 32,768 tokens, `"clip:16384"` a smaller cut of it and `"clip:full"` all of it (see
clip_bpe.py); anything else is a file: BERT's WordPiece if its name ends in .txt, a tokenizer.json otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from murmuration.data.text.built_in import BUILT_IN
from murmuration.data.text.clip_bpe import DEFAULT_SIZE, FULL_SIZE, open_clip_vocabulary
from murmuration.data.text.vocabulary import (
    PAD,
    TokenizerError,
    Vocabulary,
    open_bert,
    open_json,
    open_of_language_model,
    word_tokenizer,
)

__all__ = ["PAD", "TextEncoder", "word_tokenizer"]

# Characters read per token of the row; this bounds the cost of a caption of many megabytes.
_CHARACTERS_PER_TOKEN = 64


def open_vocabulary(source: str | os.PathLike[str]) -> Vocabulary:
    name = os.fspath(source)
    if match := BUILT_IN.fullmatch(name):
        size = match.group(1)
        if size is None:
            return open_clip_vocabulary(DEFAULT_SIZE)
        if size != "full" and not size.isdecimal():
            raise TokenizerError(f'"{name}" names no vocabulary; write "clip", "clip:16384" or "clip:full"')
        return open_clip_vocabulary(FULL_SIZE if size == "full" else int(size))
    return open_bert(name) if name.endswith(".txt") else open_json(name)


class TextEncoder:
    """Rows of exactly `length` tokens: START, words, END, then PAD (id 0); END survives truncation."""

    def __init__(self, source: str | os.PathLike[str], length: int, of_language_model: bool = False) -> None:
        """`of_language_model`: one of transformers; what follows END in its rows is NO_PADDING."""
        if length < 3:
            raise TokenizerError(f"text length {length} leaves no room for a word between <start> and <end>")
        known = open_of_language_model(source) if of_language_model else open_vocabulary(source)
        self.pad, self.start, self.end, self.unk = known.pad, known.start, known.end, known.unk
        self.length, self.vocabulary, self.digest = length, known.size, known.digest
        self._tokenizer, self._clean, self._decode = known.tokenizer, known.clean, known.decode

    def encode(self, caption: str) -> list[int]:
        words = self.words(caption[: _CHARACTERS_PER_TOKEN * self.length])[: self.length - 2]
        # A caption that spells out "<end>" must not be able to end itself.
        words = [self.unk if word in (self.pad, self.start, self.end) else word for word in words]
        row = [self.start, *words, self.end]
        return row + [self.pad] * (self.length - len(row))

    def decode(self, ids: Sequence[int]) -> str:
        """The words up to the first END; PAD and START are left out."""
        words = [int(token) for token in ids]
        if self.end in words:
            words = words[: words.index(self.end)]
        return self._decode([token for token in words if token not in (self.pad, self.start)])

    def words(self, text: str) -> list[int]:
        """The bare token ids of a text, without START, END or padding (prompts, class names)."""
        return self._tokenizer.encode(self._clean(text), add_special_tokens=False).ids
