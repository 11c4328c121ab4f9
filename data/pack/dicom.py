"""DICOM becomes 8-bit PNG while it is packed: training reads it as any other picture, and needs no further parser.

What becomes of grey values depends on the file and on `Window` alone, so a file gives the same pixels everywhere.
Stored values become those of the modality (slope and intercept, or its table); the window maps them to 0 … 255 as the
standard's LINEAR function does; MONOCHROME1, in which small values are light, is turned round. The window is the one
that is given, or the file's first one, or else from the smallest to the largest value. Colour keeps its values. Of
several frames the first one is taken, as of an animation.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import MAX_PIXELS
from murmuration.data.pack.row import UNDECODABLE, BadPicture, PackError

_PREAMBLE, _MAGIC = 128, b"DICM"
_GREYS, _COLOURS = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422")


@dataclass(frozen=True)
class Window:
    """The range of values that is shown: from centre - width/2 to centre + width/2."""

    centre: float
    width: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.centre) and 1 <= self.width < math.inf):
            raise PackError(f"--window {self.centre:g} {self.width:g}: both are finite, and the width is at least 1")

    def shown(self, values: np.ndarray) -> np.ndarray:
        """PS3.3 C.11.2.1.2.1, for 8 bits."""
        if self.width == 1:  # a step
            return np.where(values > self.centre - 0.5, 255.0, 0.0)
        return (((values - (self.centre - 0.5)) / (self.width - 1) + 0.5) * 255).clip(0, 255)


def is_dicom(raw: bytes) -> bool:
    return raw[_PREAMBLE : _PREAMBLE + len(_MAGIC)] == _MAGIC


def as_png(raw: bytes, window: Window | None) -> bytes:
    """BadPicture for what has no picture, or one that pydicom cannot decode."""
    pydicom = _pydicom()
    try:
        read = pydicom.dcmread(io.BytesIO(raw))
        if int(read.Rows) * int(read.Columns) > MAX_PIXELS:
            raise BadPicture(UNDECODABLE, f"the image has more than {MAX_PIXELS} pixels")
        pixels = _pixels(read, window)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()
    except (BadPicture, MemoryError):
        raise
    except Exception as error:  # parsers raise nearly everything on hostile bytes
        raise BadPicture(UNDECODABLE, f"DICOM: {type(error).__name__}: {error}"[:300]) from None


def _pydicom() -> Any:
    try:
        import pydicom
    except ImportError:
        raise PackError(
            "these are DICOM files, which need the package pydicom: pip install 'murmuration[dicom]'"
        ) from None
    return pydicom


def _pixels(read: Any, window: Window | None) -> np.ndarray:
    from pydicom.pixels.processing import apply_modality_lut
    from pydicom.pixels.utils import pixel_array

    kind = str(read.PhotometricInterpretation)
    if kind not in (*_GREYS, *_COLOURS) or (kind in _COLOURS and int(read.BitsAllocated) != 8):
        raise BadPicture(UNDECODABLE, f"DICOM: pixels of the kind {kind}, {read.BitsAllocated} bits each")
    stored = pixel_array(read, index=0)  # which turns YBR into RGB
    if kind in _COLOURS:
        return np.ascontiguousarray(stored)
    values = apply_modality_lut(stored, read).astype(np.float64)
    shown = (window or _own_window(read, values)).shown(values)
    return np.rint(255 - shown if kind == "MONOCHROME1" else shown).astype(np.uint8)


def _own_window(read: Any, values: np.ndarray) -> Window:
    centre, width = read.get("WindowCenter"), read.get("WindowWidth")
    if centre is not None and width is not None:
        first = [float(value if isinstance(value, int | float) else value[0]) for value in (centre, width)]
        if first[1] >= 1:
            return Window(*first)
    low, high = float(values.min()), float(values.max())
    return Window((low + high + 1) / 2, max(1.0, high - low + 1))
