"""Image augmentation keyed by (key, step, record id), so that pixels never depend on who computes them.

The random numbers of a record come straight from a keyed hash of (step, record): the crop is the same at any world
size, worker count, batch composition or restart, which makes a replayed step identical. Integers become uniforms by
one exact division, so nothing depends on the promises of a random-number library.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

Kind = Literal["none", "center", "resize_crop", "random_resized_crop", "inception_crop"]
KINDS: tuple[Kind, ...] = ("none", "center", "resize_crop", "random_resized_crop", "inception_crop")
# The smallest and largest share of the area that a random crop keeps.
AREAS: dict[Kind, tuple[float, float]] = {"random_resized_crop": (0.2, 1.0), "inception_crop": (0.05, 1.0)}
RATIO = (3 / 4, 4 / 3)
CROP_OF = 224 / 256
"""The part of the resized image that `resize_crop` keeps: published evaluations resize to 256 and crop 224."""


@dataclass(frozen=True)
class View:
    """Which part of the upright, full-size image is shown, and whether it is mirrored."""

    box: tuple[float, float, float, float]  # left, top, right, bottom
    flip: bool = False

    def shorter_side(self, width: int, height: int, size: int) -> int:
        """The number of pixels the image's shorter side needs for this part to be shown with `size` pixels."""
        left, top, right, bottom = self.box
        return math.ceil(min(width, height) * size / min(right - left, bottom - top))

    def render(self, pixels: np.ndarray, size: int, shrunk: int = 1, margin: tuple[int, int] = (0, 0)) -> np.ndarray:
        """uint8 [size, size, 3]. `pixels` may be the image at 1/`shrunk`, with `margin` full pixels before it on the
        left and at the top."""
        left, top, right, bottom = ((side + margin[at % 2]) / shrunk for at, side in enumerate(self.box))
        box = (left, top, min(right, pixels.shape[1]), min(bottom, pixels.shape[0]))
        if box == (0, 0, size, size) == (0, 0, *pixels.shape[1::-1]):
            out = pixels
        else:
            out = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC, box=box))
        return np.ascontiguousarray(out[:, ::-1]) if self.flip else out


class Uniforms:
    """An endless stream of uniform numbers in [0, 1) that belongs to one (key, step, record)."""

    def __init__(self, key: bytes, step: int, record: int) -> None:
        self._key, self._step, self._record = key, step, record
        self._block = 0
        self._left: list[int] = []

    def next(self) -> float:
        if not self._left:
            name = struct.pack("<QQQ", self._step, self._record, self._block)
            digest = hashlib.blake2b(name, key=self._key[:64], person=b"mur-augment").digest()
            self._left = list(struct.unpack("<8Q", digest))
            self._block += 1
        return (self._left.pop() >> 11) * 2.0**-53


def choose_view(kind: Kind, width: int, height: int, size: int, key: bytes, step: int, record: int) -> View:
    if kind == "none":
        return View((0, 0, width, height))
    if kind == "center":
        side = min(height, width)
        left, top = (width - side) / 2, (height - side) / 2
        return View((left, top, left + side, top + side))
    if kind == "resize_crop":
        return View(_resized_crop(width, height, size))
    if kind in AREAS:
        uniforms = Uniforms(key, step, record)
        flip = uniforms.next() < 0.5
        return View(_crop_box(width, height, AREAS[kind], uniforms), flip)
    raise ValueError(f"augment '{kind}' is unknown; choose one of {', '.join(KINDS)}")


def augment(pixels: np.ndarray, kind: Kind, size: int, key: bytes, step: int, record: int) -> np.ndarray:
    """uint8 [size, size, 3] from uint8 [height, width, 3]."""
    height, width = pixels.shape[:2]
    return choose_view(kind, width, height, size, key, step, record).render(pixels, size)


def _resized_crop(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """The part of the image that is left once its shorter side is resized to size / CROP_OF pixels and the middle is
    cut out, with torchvision's rounding to whole pixels."""
    shorter = int(size / CROP_OF)
    wide, high = (int(shorter * side / min(width, height)) for side in (width, height))
    left, top = round((wide - size) / 2), round((high - size) / 2)
    across, down = width / wide, height / high
    return left * across, top * down, (left + size) * across, (top + size) * down


def _crop_box(
    width: int, height: int, areas: tuple[float, float], uniforms: Uniforms
) -> tuple[float, float, float, float]:
    """Inception-style crop: area and aspect ratio drawn until they fit, else the largest fitting centre."""
    for _ in range(10):
        area = width * height * (areas[0] + (areas[1] - areas[0]) * uniforms.next())
        ratio = math.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * uniforms.next())
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = math.floor(uniforms.next() * (width - wide + 1))
            top = math.floor(uniforms.next() * (height - high + 1))
            return left, top, left + wide, top + high
    wide, high = min(width, height * RATIO[1]), min(height, width / RATIO[0])
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def caption_choice(key: bytes, step: int, record: int, count: int) -> int:
    """Which of a record's captions this step uses: one of 0..count-1."""
    name = struct.pack("<QQ", step, record)
    raw = hashlib.blake2b(name, key=key[:64], person=b"mur-caption", digest_size=16).digest()
    return int.from_bytes(raw, "little") * count >> 128


def drop_key(key: bytes, step: int, record: int) -> int:
    """An int64 from which a model that drops units derives this record's masks for this step."""
    raw = hashlib.shake_128(b"mur-drop-key" + struct.pack("<QQQ", len(key), step, record) + key).digest(8)
    return int.from_bytes(raw, "little", signed=True)


def mask_noise(key: bytes, step: int, record: int, patches: int) -> np.ndarray:
    """float32 uniforms in [0, 1), one per patch; an MAE keeps the patches with the smallest values."""
    name = struct.pack("<QQ", step, record)
    raw = hashlib.shake_128(b"mur-mask-noise" + struct.pack("<Q", len(key)) + key + name).digest(4 * patches)
    # 24 bits, the most that float32 holds exactly: a value rounded up to 1.0 would leave the interval.
    return (np.frombuffer(raw, dtype="<u4") >> 8).astype(np.float32) * np.float32(2.0**-24)
