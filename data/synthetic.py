"""Samples made by rule, and their writing as WebDataset shards: licence-clean data for demos and warm starts.

Sample i of a seed is a pure function of (seed, i), and shards carry a fixed time stamp: the same request
yields the same bytes, hence the same manifest digest, wherever it is run with the same libraries.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset.writer import TarWriter

from data.shapes import GRAMMAR_WORDS, caption, draw_scene, render
from data.textures import texture

__all__ = ["GRAMMAR_WORDS", "Sample", "shape_samples", "texture_samples", "write_shards"]

# Raise it whenever the same (seed, index) would give other bytes: prepared folders are then made anew.
VERSION = 1
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


def shape_sample(seed: int, index: int, side: int, *, labels: bool = False) -> Sample:
    rng = generator(seed, index)
    scene = draw_scene(rng)
    text = caption(scene, rng)
    return Sample(f"{index:08d}", _jpeg(render(scene, side, rng)), text, scene.labels() if labels else None)


def texture_sample(seed: int, index: int, side: int) -> Sample:
    return Sample(f"{index:08d}", _jpeg(texture(side, generator(seed, index))))


def shape_samples(seed: int, count: int, side: int, *, labels: bool = False) -> Iterator[Sample]:
    """Captioned shapes; with `labels`, a .json of colour, shape and class index as well."""
    return (shape_sample(seed, index, side, labels=labels) for index in range(count))


def texture_samples(seed: int, count: int, side: int) -> Iterator[Sample]:
    """Textures without a caption."""
    return (texture_sample(seed, index, side) for index in range(count))


def _jpeg(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    # Without chroma subsampling: at 32 px it would smear the colours that the captions name.
    Image.fromarray(pixels).save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


def write_shards(folder: Path, samples: Iterable[Sample], per_shard: int) -> list[Path]:
    """Write 000000.tar, 000001.tar, … into `folder` and return them; the caller makes the folder atomic."""
    if per_shard < 1:
        raise ValueError(f"{per_shard} records per shard: at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    writer: TarWriter | None = None
    try:
        for number, sample in enumerate(samples):
            if writer is None or number % per_shard == 0:
                if writer is not None:
                    writer.close()
                paths.append(folder / f"{len(paths):06d}.tar")
                writer = TarWriter(str(paths[-1]), encoder=False, mtime=_TIME_STAMP)
            writer.write(sample.members())
    finally:
        if writer is not None:
            writer.close()
    return paths
