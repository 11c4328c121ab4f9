"""Records made by rule: written as WebDataset shards, or made inside the loader; licence-clean, nobody's.

Record i of a seed is a pure function of (seed, i), and shards carry a fixed time stamp: the same request yields the
same bytes, hence the same manifest digest, wherever it is run with the same libraries.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
import torch
from PIL import Image
from webdataset.writer import TarWriter

from murmuration.data.store.place import Place, Shard, ShardError
from murmuration.data.synthetic.kinds import KINDS, Kind, Texture
from murmuration.data.synthetic.shapes import FAINT, GRAMMAR_WORDS, caption, draw_scene, render
from murmuration.data.synthetic.textures import textures

__all__ = ["GRAMMAR_WORDS", "Sample", "SyntheticIndex", "shape_samples", "texture_samples"]

# Raise it whenever the same (seed, index) would give other bytes: prepared folders are then made anew.
VERSION = 2
_TIME_STAMP = 1_600_000_000.0


@dataclass(frozen=True)
class Sample:
    """One record; `labels` only where they may be published."""

    key: str
    jpg: bytes
    caption: str | None = None
    labels: dict[str, int] | None = None

    def members(self) -> dict[str, str | bytes]:
        found: dict[str, str | bytes] = {"__key__": self.key, "jpg": self.jpg}
        if self.caption is not None:
            found["txt"] = self.caption.encode()
        if self.labels is not None:
            found["json"] = json.dumps(self.labels).encode()
        return found


def generator(seed: int, index: int) -> np.random.Generator:
    """Counter-based, so that sample 1,000,000 needs no other sample first."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))


def shape_sample(
    seed: int, index: int, side: int, *, labels: bool = False, device: torch.device | str = "cpu", tint: float = FAINT
) -> Sample:
    pixels, text, numbers = _shape(seed, index, side, device, tint)
    return Sample(f"{index:08d}", jpeg(pixels), text, numbers if labels else None)


def _shape(
    seed: int, index: int, side: int, device: torch.device | str = "cpu", tint: float = FAINT
) -> tuple[np.ndarray, str, dict[str, int]]:
    rng = generator(seed, index)
    scene = draw_scene(rng)
    text = caption(scene, rng)
    return render(scene, side, rng, device, tint), text, scene.labels()


def texture_sample(seed: int, index: int, side: int, kind: Texture = "mixed") -> Sample:
    return Sample(f"{index:08d}", jpeg(textures(kind, seed, [index], side)[0].numpy()))


def shape_samples(seed: int, count: int, side: int, *, labels: bool = False, tint: float = FAINT) -> Iterator[Sample]:
    """Captioned shapes; with `labels`, a .json of colour, shape and class index as well."""
    return (shape_sample(seed, index, side, labels=labels, tint=tint) for index in range(count))


def texture_samples(seed: int, count: int, side: int) -> Iterator[Sample]:
    """Textures of all families, without a caption."""
    return (texture_sample(seed, index, side) for index in range(count))


def jpeg(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    # Without chroma subsampling: at 32 px it would smear the colours that the captions name.
    Image.fromarray(pixels).save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


class SyntheticIndex:
    """Records that are made when they are read. To sampler and loader it is an index like any other."""

    folder = Path()  # nothing lies anywhere
    shards: tuple[Shard, ...] = ()
    excluded_digest = ""

    def __init__(self, kind: Kind, records: int, seed: int, side: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind '{kind}' is unknown; choose one of {', '.join(KINDS)}")
        if records < 1 or side < 8:
            raise ValueError(f"{records} pictures of {side} px: at least 1 of at least 8 px")
        self.kind: Kind = kind
        self.records, self.seed, self.side = records, seed, side

    @property
    def manifest_digest(self) -> str:
        """What pins every byte: the rule and its numbers."""
        rule = ["murmuration synthetic", VERSION, self.kind, self.records, self.seed, self.side]
        return hashlib.sha256(json.dumps(rule).encode()).hexdigest()

    def read(self, record: int) -> dict[str, bytes]:
        """The members of one record; the picture is a bitmap, because packing what is unpacked at once is waste."""
        if not 0 <= record < self.records:
            raise ShardError(f"record {record} is outside 0..{self.records - 1}")
        if self.kind == "shapes":
            pixels, text, numbers = _shape(self.seed, record, self.side)
            return {"bmp": _bitmap(pixels), "txt": text.encode(), "json": json.dumps(numbers).encode()}
        return {"bmp": _bitmap(textures(self.kind, self.seed, [record], self.side)[0].numpy())}

    def left_out(self, record: int) -> bool:
        return False

    def locate(self, record: int) -> tuple[Place, int, int]:
        """Nowhere: made on this machine, so as near as a local file."""
        return Path(self.owner(record)), record, record + 1

    def owner(self, record: int) -> str:
        return f"synthetic {self.kind}"

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        raise ShardError("synthetic records lie nowhere; read them from their index")

    def check_unchanged(self, *, contents: bool = False) -> None:
        """A rule does not change."""


def _bitmap(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "BMP")
    return out.getvalue()


def write_shards(folder: Path, samples: Iterable[Sample], per_shard: int) -> list[Path]:
    """Write 000000.tar, 000001.tar, … into `folder` and return them; the caller makes the folder atomic."""
    if per_shard < 1:
        raise ValueError(f"{per_shard} records per shard: at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == per_shard:
            paths.append(_whole_shard(folder, len(paths), batch))
            batch = []
    return [*paths, _whole_shard(folder, len(paths), batch)] if batch else paths


def _whole_shard(folder: Path, number: int, samples: list[Sample]) -> Path:
    path = shard_path(folder, number)
    with path.open("wb") as file:
        write_shard(file, samples)
    return path


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.tar"


def write_shard(file: IO[bytes], samples: Iterable[Sample]) -> None:
    with TarWriter(cast(BinaryIO, file), encoder=False, mtime=_TIME_STAMP) as writer:
        for sample in samples:
            writer.write(sample.members())
