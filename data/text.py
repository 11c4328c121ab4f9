"""Captions -> fixed-length token rows, from a tokenizer file on this disk; nothing is ever downloaded.

A vocabulary learnt from private captions is an unaccounted release of them, so this module can only read a
`tokenizer.json` or build one from a word list that is public by construction. It cannot train.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

PAD, START, END, UNK = "<pad>", "<start>", "<end>", "<unk>"
SPECIAL = (PAD, START, END, UNK)
# Characters looked at per token of the row: bounds the cost of a caption of many megabytes.
_CHARACTERS_PER_TOKEN = 64


class TextEncoder:
    """Rows of exactly `length` tokens: START, words, END, then PAD; END survives truncation."""

    def __init__(self, path: str | os.PathLike[str], length: int) -> None:
        if length < 3:
            raise ValueError(f"text length {length} leaves no room for a word between <start> and <end>")
        try:
            raw = Path(path).read_bytes()
            self._tokenizer = Tokenizer.from_buffer(raw)
        except OSError as error:
            raise ValueError(f"{path}: no tokenizer here ({error.strerror}); name a tokenizer.json") from error
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path}: not a tokenizer.json ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = [number for token in SPECIAL if (number := self._tokenizer.token_to_id(token)) is not None]
        if len(ids) != len(SPECIAL) or ids[0] != 0:
            raise ValueError(f"{path}: must hold the tokens {' '.join(SPECIAL)}, with <pad> as 0")
        self.pad, self.start, self.end, self.unk = ids
        self.length = length
        self.digest = hashlib.sha256(raw).hexdigest()

    @property
    def vocabulary(self) -> int:
        """Rows an embedding needs: the largest id plus one."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, caption: str) -> list[int]:
        text = caption[: _CHARACTERS_PER_TOKEN * self.length]
        words = self._tokenizer.encode(text, add_special_tokens=False).ids[: self.length - 2]
        # A caption that spells out "<end>" must not be able to end itself.
        words = [self.unk if word in (self.pad, self.start, self.end) else word for word in words]
        row = [self.start, *words, self.end]
        return row + [self.pad] * (self.length - len(row))

    def decode(self, ids: Sequence[int]) -> str:
        """The words up to the first END; PAD and START are left out."""
        words = [int(token) for token in ids]
        if self.end in words:
            words = words[: words.index(self.end)]
        words = [token for token in words if token not in (self.pad, self.start)]
        return self._tokenizer.decode(words, skip_special_tokens=False)

    def words(self, text: str) -> list[int]:
        """The bare token ids of a text, without START, END or padding (prompts, class names)."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def word_tokenizer(words: Iterable[str], path: str | os.PathLike[str]) -> Path:
    """Write a word-level, lower-casing `tokenizer.json` over a PUBLIC word list.

    The list must be public by construction, such as the words of a grammar: never collect it from private
    captions, since which words occur is itself information about them.
    """
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    for word in sorted({word.lower() for word in words}):
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(SPECIAL))
    target, temporary = Path(path), Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    tokenizer.save(str(temporary))
    temporary.replace(target)
    return target
