"""Texts in indexed tar shards, without pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.tars import indexed


def write_texts(folder: Path, texts: Sequence[str], suffix: str = "txt") -> Path:
    indexed(folder, ({suffix: text.encode()} for text in texts))
    return folder
