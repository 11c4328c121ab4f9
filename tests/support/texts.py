"""Texts in indexed tar shards, without pictures."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from murmuration.data.index.shard_index import build


def write_texts(folder: Path, texts: Sequence[str], suffix: str = "txt") -> Path:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "000000.tar", "w") as tar:
        for number, text in enumerate(texts):
            content = text.encode()
            info = tarfile.TarInfo(f"{number:06}.{suffix}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    build(folder)
    return folder
