"""What the evaluations need from a text encoder and from a captioner, as protocols.

Why protocols: `data.text.encoder` and `model.captioner` satisfy them, and a test (or a user's own tokenizer) needs only
these few names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Text(Protocol):
    """Words to ids and back."""

    pad: int
    start: int
    end: int
    unk: int

    def words(self, text: str) -> list[int]:
        """Ids of the words alone, without start, end and padding."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class CaptionModel(Protocol):
    """An image encoder whose memory is computed once, and a decoder that reads it."""

    def encode_images(self, images: Tensor) -> Tensor: ...

    def decode(self, memory: Tensor, tokens: Tensor) -> Tensor: ...
