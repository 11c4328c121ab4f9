"""Shards made for the tests, written by webdataset as users' are: a PAX header before every member."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from webdataset.writer import TarWriter

from murmuration.data.index.shard_index import ShardIndex, build
from tests.support.range_server import RangeServer, serving

ShardMaker = Callable[[Path, Iterable[dict[str, str | bytes]]], Path]


@pytest.fixture
def write_tar() -> ShardMaker:
    def write(path: Path, samples: Iterable[dict[str, str | bytes]]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TarWriter(str(path), encoder=False) as writer:
            for sample in samples:
                writer.write(sample)
        return path

    return write


@pytest.fixture
def write_members() -> Callable[..., Path]:
    """A tar by tarfile: members (name, content) as they come; names that end in / are folders."""

    def write(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT, **options) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=form, **options) as archive:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.type, info.size = (tarfile.DIRTYPE, 0) if name.endswith("/") else (tarfile.REGTYPE, len(content))
                archive.addfile(info, io.BytesIO(content))
        return path

    return write


@pytest.fixture
def picture() -> Callable[..., bytes]:
    """An image file with content of its own per number."""

    def make(number: int, side: int = 40, form: str = "JPEG") -> bytes:
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).resize((side, side + 9), Image.Resampling.BICUBIC).save(out, form)
        return out.getvalue()

    return make


@pytest.fixture
def small_set(tmp_path: Path, write_tar: ShardMaker, picture: Callable[..., bytes]) -> ShardIndex:
    """25 captioned records in 3 shards, of different sizes."""
    number = 0
    for shard, count in enumerate((10, 1, 14)):
        samples = []
        for _ in range(count):
            samples.append(
                {"__key__": f"{number:06d}", "jpg": picture(number, 30 + number), "txt": f"a red {number}".encode()}
            )
            number += 1
        write_tar(tmp_path / f"{shard:06d}.tar", samples)
    return build(tmp_path)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmuration.data.store.retry.random.uniform", lambda _low, _high: 0.0)


@pytest.fixture
def server(small_set: ShardIndex, tmp_path: Path) -> Iterator[RangeServer]:
    """Serves the 25 records of `small_set`."""
    with serving(RangeServer(tmp_path)) as running:
        yield running


@pytest.fixture
def remote(server: RangeServer, tmp_path: Path) -> ShardIndex:
    return build([f"{server.url}/{name:06d}.tar" for name in range(3)], tmp_path / "remote-index")
