"""Records in tar shards, as tarfile writes them, and the smallest pictures."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from PIL import Image

from murmuration.data.index.shard_index import ShardIndex, build


def png(red: int = 0, side: int = 16, green: int = 0) -> bytes:
    """A picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (red, green, 0)).save(file, "PNG")
    return file.getvalue()


def tar(records: Iterable[tuple[str, Mapping[str, bytes]]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Of records (key, content by suffix)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for key, members in records:
            for suffix, content in members.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def numbered(records: Iterable[Mapping[str, bytes]], first: int = 0) -> bytes:
    return tar((f"{number:06d}", members) for number, members in enumerate(records, first))


def indexed(folder: Path, *shards: Iterable[Mapping[str, bytes]]) -> ShardIndex:
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, shard in enumerate(list(each) for each in shards):
        (folder / f"{number:06d}.tar").write_bytes(numbered(shard, first))
        first += len(shard)
    return build(folder)
