"""Image bytes -> the pixels that a model sees: decoding and augmentation in one step, pure in (key, step, record).

They belong together because the crop is chosen first, from the size in the header: a large JPEG is then decoded
no larger than the crop needs. Decoding processes run this module, so it imports neither torch nor the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from murmuration.data.decode.augment import AREAS, Augment, View, choose_view, require_known
from murmuration.data.decode.decode import decode_scaled, parsing


@dataclass(frozen=True)
class PictureMaker:
    """`key` is secret: it decides the random crops. It is one key for all steps, or a function of the step."""

    size: int
    augment: Augment = "none"
    key: bytes | Callable[[int], bytes] = b""

    def __post_init__(self) -> None:
        require_known(self.augment)
        if self.size < 1:
            raise ValueError(f"image size {self.size} is not positive")
        if self.augment in AREAS and not self.key:
            raise ValueError(f"{self.augment} needs an augmentation key; derive one from the run key")

    def key_of(self, step: int) -> bytes:
        """The key of a step; empty where nothing is random, because some views are needed outside any step."""
        if self.augment not in AREAS:
            return b""
        return self.key(step) if callable(self.key) else self.key

    def make(self, data: bytes, step: int, record: int) -> np.ndarray:
        """uint8 [size, size, 3]; raises BadRecord for bytes that are not a usable image."""

        key = self.key_of(step)

        def view(width: int, height: int) -> View:
            return choose_view(self.augment, width, height, self.size, key, step, record)

        found = decode_scaled(data, lambda width, height: view(width, height).shorter_side(width, height, self.size))
        with parsing("the image cannot be cut to its view"):
            return view(found.width, found.height).render(found.pixels, self.size, found.shrunk, found.margin)
