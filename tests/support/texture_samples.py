"""Textures in a row, for tests that need pictures which depict nothing."""

from __future__ import annotations

from collections.abc import Iterator

from murmuration.data.synthetic.index import Sample, texture_sample


def texture_samples(seed: int, count: int, side: int) -> Iterator[Sample]:
    return (texture_sample(seed, index, side) for index in range(count))
