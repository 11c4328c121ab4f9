"""Image augmentation keyed by (key, step, record id, view), so that pixels never depend on who computes them.

The random numbers of a record come straight from a keyed hash of (step, record, view): the crop is the same at any
world size, worker count, batch composition or restart, which makes a replayed step identical. Integers become uniforms
by one exact division, so nothing depends on the promises of a random-number library.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from murmuration.data.decode.resize import resized

AugmentKind = Literal["none", "center", "random_resized_crop", "inception_crop"]
KINDS: tuple[AugmentKind, ...] = ("none", "center", "random_resized_crop", "inception_crop")
# The smallest and largest share of the area that a random crop keeps.
AREAS: dict[AugmentKind, tuple[float, float]] = {"random_resized_crop": (0.2, 1.0), "inception_crop": (0.05, 1.0)}
RATIO = (3 / 4, 4 / 3)
# A picture of an extreme shape is not resized as a whole beyond this number of pixels, only the part that is shown.
MOST_RESIZED = 1 << 24


class ResizeCrop(NamedTuple):
    """The view of published evaluations: the shorter side is resized to `resize`, and the middle `crop` are cut out.

    For a model of another side, both are scaled alike, so that it sees the same part of the picture.
    """

    resize: int = 256
    crop: int = 224


PUBLISHED = ResizeCrop()
Augment = AugmentKind | ResizeCrop
SteadyView = Literal["center"] | ResizeCrop
"""A view that is the same each time: all of the middle square, or a closer part."""


def view_in_words(view: Augment) -> dict[str, Any]:
    return {"view": "resize-crop", **view._asdict()} if isinstance(view, ResizeCrop) else {"view": view}


def view_from(told: Mapping[str, Any]) -> SteadyView:
    """What `view_in_words` wrote."""
    if told == view_in_words("center"):
        return "center"
    view = ResizeCrop(told["resize"], told["crop"])
    if told != view_in_words(view) or not all(type(side) is int for side in view):
        raise ValueError(f"view {told!r:.80} is unknown")
    require_known(view)
    return view


def require_known(augment: Augment) -> None:
    if isinstance(augment, ResizeCrop):
        if not 1 <= augment.crop <= augment.resize:
            raise ValueError(f"crop {augment.crop} cuts nothing out of resize {augment.resize}; give 1 ≤ crop ≤ resize")
    elif augment not in KINDS:
        raise ValueError(f"augment '{augment}' is unknown; choose one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class View:
    """Which part of the upright, full-size image is shown, and whether it is mirrored.

    `resized`: width and height to which the whole image is resized first, and the left and top of the part in that.
    Resizing the part alone differs at its edges, where a resized whole also sees the pixels beyond.
    """

    box: tuple[float, float, float, float]  # left, top, right, bottom
    flip: bool = False
    resized: tuple[int, int, int, int] | None = None

    def shorter_side(self, width: int, height: int, size: int) -> int:
        """The number of pixels the image's shorter side needs for this part to be shown with `size` pixels."""
        if self.resized is not None:
            return min(width, height)  # a JPEG that is decoded smaller has other pixels than its resized whole
        left, top, right, bottom = self.box
        return math.ceil(min(width, height) * size / min(right - left, bottom - top))

    def render(self, pixels: np.ndarray, size: int, shrunk: int = 1, margin: tuple[int, int] = (0, 0)) -> np.ndarray:
        """uint8 [size, size, 3]. `pixels` may be the whole image at 1/`shrunk`, with `margin` full pixels before it on
        the left and at the top."""
        if self.resized is not None and self.resized[0] * self.resized[1] <= MOST_RESIZED:
            wide, high, left, top = self.resized
            whole = Image.fromarray(pixels).resize((wide, high), Image.Resampling.BICUBIC)
            return np.asarray(whole.crop((left, top, left + size, top + size)))
        height, width = pixels.shape[:2]
        left, top, right, bottom = ((side + margin[at % 2]) / shrunk for at, side in enumerate(self.box))
        box = (left, top, min(right, width), min(bottom, height))
        whole = box == (0, 0, size, size) == (0, 0, width, height)
        out = pixels if whole else resized(pixels, box, (size, size))
        if not self.flip:
            return out
        mirrored = np.empty_like(out)
        for channel in range(3):  # NumPy turns rows of three bytes five times more slowly than planes
            mirrored[..., channel] = out[:, ::-1, channel]
        return mirrored


def _further(view: int) -> bytes:
    """What a keyed name ends with. The first view's ends with nothing: it is what a record has that is seen once, and
    has its random numbers. Names of other views are longer, so that none is another's."""
    return struct.pack("<Q", view) if view else b""


class Uniforms:
    """An endless stream of uniform numbers in [0, 1) that belongs to one (key, step, record, view)."""

    def __init__(self, key: bytes, step: int, record: int, view: int = 0) -> None:
        self._key, self._step, self._record, self._view = key, step, record, view
        self._block = 0
        self._left: list[int] = []

    def next(self) -> float:
        if not self._left:
            name = struct.pack("<QQQ", self._step, self._record, self._block) + _further(self._view)
            digest = hashlib.blake2b(name, key=self._key[:64], person=b"mur-augment").digest()
            self._left = list(struct.unpack("<8Q", digest))
            self._block += 1
        return (self._left.pop() >> 11) * 2.0**-53


def choose_view(
    kind: Augment, width: int, height: int, size: int, key: bytes, step: int, record: int, view: int = 0
) -> View:  # fmt: skip
    if isinstance(kind, ResizeCrop):
        # With torchvision's rounding to whole pixels.
        shorter = size * kind.resize // kind.crop
        wide, high = (int(shorter * side / min(width, height)) for side in (width, height))
        left, top = round((wide - size) / 2), round((high - size) / 2)
        across, down = width / wide, height / high
        box = (left * across, top * down, (left + size) * across, (top + size) * down)
        return View(box, resized=(wide, high, left, top))
    if kind == "none":
        return View((0, 0, width, height))
    if kind == "center":
        side = min(height, width)
        left, top = (width - side) / 2, (height - side) / 2
        return View((left, top, left + side, top + side))
    if kind in AREAS:
        uniforms = Uniforms(key, step, record, view)
        flip = uniforms.next() < 0.5
        return View(_crop_box(width, height, AREAS[kind], uniforms), flip)
    raise ValueError(f"augment '{kind}' is unknown; choose one of {', '.join(KINDS)}")


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


def caption_choice(key: bytes, step: int, record: int, count: int, view: int = 0) -> int:
    """Which of a record's captions a view uses in this step: one of 0..count-1."""
    name = struct.pack("<QQ", step, record) + _further(view)
    raw = hashlib.blake2b(name, key=key[:64], person=b"mur-caption", digest_size=16).digest()
    return int.from_bytes(raw, "little") * count >> 128


def drop_key(key: bytes, step: int, record: int, view: int = 0) -> int:
    """An int64 from which a model that drops units derives the masks of this record's view for this step."""
    name = struct.pack("<QQQ", len(key), step, record) + key + _further(view)
    raw = hashlib.shake_128(b"mur-drop-key" + name).digest(8)
    return int.from_bytes(raw, "little", signed=True)


def mask_noise(key: bytes, step: int, record: int, patches: int, view: int = 0) -> np.ndarray:
    """float32 uniforms in [0, 1), one per patch; an MAE keeps the patches with the smallest values."""
    name = struct.pack("<QQ", step, record) + _further(view)
    raw = hashlib.shake_128(b"mur-mask-noise" + struct.pack("<Q", len(key)) + key + name).digest(4 * patches)
    # 24 bits, the most that float32 holds exactly: a value rounded up to 1.0 would leave the interval.
    return (np.frombuffer(raw, dtype="<u4") >> 8).astype(np.float32) * np.float32(2.0**-24)
