"""Pictures made smaller while they are packed, so that no reading decodes pixels that no crop needs.

What was compressed with loss becomes JPEG, anything else PNG, which keeps the resized pixels as they are. Nothing but
the upright pixels is kept: no EXIF block, no colour profile.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import FORMATS, MAX_PIXELS, decode_scaled, parsing
from murmuration.data.decode.pool import DecodePool, Wanted
from murmuration.data.decode.record import DataSpec, RecordMaker
from murmuration.data.decode.resize import resized

QUALITY = 95  # as img2dataset writes
_WITH_LOSS = ("JPEG", "WEBP")


@dataclass(frozen=True)
class _Shrinker(RecordMaker):
    """Runs in a decoding process."""

    side: int = 0

    @property
    def row(self) -> np.dtype[np.void]:
        """A file of any size that a picture may have; memory is only taken up to the largest one that was written."""
        return np.dtype([("bytes", "i8"), ("file", "u1", (4 * MAX_PIXELS,))])

    def make(self, members: Mapping[str, bytes], record: int, step: int, key: bytes, into: np.void) -> bool:
        raw = members["jpg"]
        image = decode_scaled(raw, lambda _width, _height: None).image
        shorter = min(image.size)
        into["bytes"] = 0
        if shorter > self.side:
            with parsing("the image cannot be shrunk"):
                width, height = (round(self.side * side / shorter) for side in image.size)
                file = _file(resized(image, (0, 0, *image.size), (width, height)), raw)
                into["file"][: len(file)] = np.frombuffer(file, np.uint8)
                into["bytes"] = len(file)
        return True


def _file(pixels: np.ndarray, source: bytes) -> bytes:
    grey = bool((pixels == pixels[:, :, :1]).all())  # a third of the bytes, and the same pixels when decoded
    image, out = Image.fromarray(pixels[:, :, 0] if grey else pixels), io.BytesIO()
    with Image.open(io.BytesIO(source), formats=FORMATS) as before:
        form = "JPEG" if before.format in _WITH_LOSS else "PNG"
    image.save(out, form, **({"quality": QUALITY} if form == "JPEG" else {}))
    return out.getvalue()


class Shrinking:
    """Decoding processes that shrink pictures to `side` pixels of their shorter side."""

    def __init__(self, side: int, processes: int) -> None:
        self._pool = DecodePool(_Shrinker(DataSpec(1), side=side), processes, most=1)

    def picture(self, raw: bytes) -> bytes:
        """The bytes themselves where the picture is small enough; raises BadRecord as decoding does."""
        found: list[bytes] = []
        wanted = Wanted(0, None, lambda: {"jpg": raw})
        (made,) = self._pool.make([wanted], 0, lambda _, row: found.append(row["file"][: row["bytes"]].tobytes()))
        if not isinstance(made, bool):
            raise made
        return found[0] or raw

    def close(self) -> None:
        self._pool.close()
