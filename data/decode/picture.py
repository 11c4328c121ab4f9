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
    """`key` is secret: it decides the random crops. It is one key for all steps, or a function of the step. `views`:
    how many pictures are made of a record, each with a crop of its own, from bytes that are decoded once."""

    size: int
    augment: Augment = "none"
    key: bytes | Callable[[int], bytes] = b""
    views: int = 1

    def __post_init__(self) -> None:
        require_known(self.augment)
        if self.size < 1:
            raise ValueError(f"image size {self.size} is not positive")
        if self.views < 1:
            raise ValueError(f"{self.views} views of a record: at least 1 is needed")
        if self.augment in AREAS and not self.key:
            raise ValueError(f"{self.augment} needs an augmentation key; derive one from the run key")

    def key_of(self, step: int) -> bytes:
        """The key of a step; empty where nothing is random, because some views are needed outside any step."""
        if self.augment not in AREAS:
            return b""
        return self.key(step) if callable(self.key) else self.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is made of a record: [size, size, 3], or [views, size, size, 3] of several."""
        one = (self.size, self.size, 3)
        return one if self.views == 1 else (self.views, *one)

    def make(self, data: bytes, step: int, record: int) -> np.ndarray:
        """uint8 of `shape`; raises BadRecord for bytes that are not a usable image."""
        key = self.key_of(step)

        def views(width: int, height: int) -> list[View]:
            chosen = (self.augment, width, height, self.size, key, step, record)
            return [choose_view(*chosen, view) for view in range(self.views)]

        def at_least(width: int, height: int) -> int:
            return max(view.shorter_side(width, height, self.size) for view in views(width, height))

        found = decode_scaled(data, at_least)
        with parsing("the image cannot be cut to its view"):
            wanted = views(found.width, found.height)
            rendered = {  # without random crops, all views are one
                view: view.render(found.image, self.size, found.shrunk, found.margin) for view in set(wanted)
            }
            return rendered[wanted[0]] if self.views == 1 else np.stack([rendered[view] for view in wanted])
