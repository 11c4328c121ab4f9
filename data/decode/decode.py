"""Image bytes -> RGB pixels, with one clear answer for bytes that are not an image.

BadRecord means that these bytes fail in the same way on every machine and at every try. Only such a record may be left
out of a step (its slot contributes zero); any failure that may not recur must stop the run instead, which is why a
MemoryError passes through here untouched.

Unusual images: EXIF orientation is applied; CMYK, grey, palette and 1-bit become RGB; alpha and transparent palettes
are composited on white; 16 bits per channel are scaled to 8 (Pillow alone turns 16-bit grey white); only the first
frame of an animation is used; a damaged EXIF block is ignored. Images over MAX_PIXELS (decompression bombs), truncated
images and formats not in FORMATS are refused as bad. Bit flips in the middle of a JPEG decode to noise without an
error: no decoder notices them all.

Ordinary JPEGs are decoded by simplejpeg, the rest by Pillow, which also judges every file that simplejpeg finds fault
with. Both are libjpeg-turbo and give the same pixels; simplejpeg gives them sooner (`benchmarks/data.py`).
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError, WebPImagePlugin

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # a short list: every further parser is attack surface
SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")  # of image members, in order of preference
MAX_PIXELS = 89_478_485  # Pillow's own limit, spelt out because other libraries tend to switch Pillow's off
# Pillow loads this parser late, and all its others with it: a quarter of a second of CPU time in the first record that
# is not a JPEG, PNG, GIF or BMP.
assert WebPImagePlugin.WebPImageFile.format in FORMATS
_ORIENTATION = 0x0112
_SCAN, _APP1 = 0xDA, 0xE1  # markers of a JPEG
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
# Orientations whose first column, and whose first row, is the last one stored.
_LEFT_WAS_LAST, _TOP_WAS_LAST = (2, 3, 6, 7), (3, 4, 7, 8)

# Set once, here: warnings.catch_warnings around each decode would not be thread-safe. Pillow's warnings about a file
# (such as corrupt EXIF) would reach the console, a public sink, and describe private records. Between its pixel limit
# and twice that, Pillow only warns and then decodes; that has to be an error.
warnings.filterwarnings("ignore", module=r"PIL\.")
warnings.simplefilter("error", Image.DecompressionBombWarning)


class BadRecord(ValueError):
    """The content of one record is unusable, deterministically. The message is private: it describes data."""


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Turn any error in the block into BadRecord: parsers do no I/O, so an error is about the content.

    They raise nearly everything on hostile bytes (OSError, SyntaxError, struct.error, IndexError ...), and one
    record must not end a run. Only MemoryError passes through, because memory may be available next time.
    """
    try:
        yield
    except (BadRecord, MemoryError):
        raise
    except BaseException as error:
        # A Rust library may panic, as tokenizers does when a regular expression gives up; that is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadRecord(f"{what} ({type(error).__name__}: {error})") from error


def picture_in(members: Mapping[str, bytes], suffixes: Sequence[str] = SUFFIXES) -> bytes | None:
    """The image member of a record, of several the preferred one; None where it has none."""
    return next((members[suffix] for suffix in suffixes if suffix in members), None)


@dataclass(frozen=True)
class Decoded:
    """An upright image, uint8 [height, width, 3], and the size of the full one.

    An image shrunk by 8 has a last column that stands for up to 8 pixels, some of them beyond the edge. If the image is
    turned around, that is the first column, and the image begins `margin` (left, top) full pixels inside it.
    """

    pixels: np.ndarray
    width: int
    height: int
    shrunk: int
    margin: tuple[int, int]


def decode(data: bytes, at_least: int | None = None) -> np.ndarray:
    """RGB pixels, uint8 [height, width, 3]; `at_least` as in `decode_scaled`."""
    return np.require(decode_scaled(data, lambda _width, _height: at_least).pixels, requirements="W")


def decode_scaled(data: bytes, at_least: Callable[[int, int], int | None]) -> Decoded:
    """`at_least(width, height)` gets the upright full size and returns the least length of the shorter side.

    A large JPEG is then decoded at 1/2, 1/4 or 1/8, which is several times faster than decoding in full and
    shrinking afterwards. None decodes in full.
    """
    if not data:
        raise BadRecord("the image is empty")
    with parsing("the image cannot be decoded"):
        return _decoded(data, at_least)


def _decoded(data: bytes, at_least: Callable[[int, int], int | None]) -> Decoded:
    found = _ordinary_jpeg(data, at_least)
    if found is not None:
        return found
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            try:
                turn = image.getexif().get(_ORIENTATION, 1)
            except Exception:
                turn = 1
            full = image.size
            side = at_least(*_upright(full, turn))
            if side is not None:
                image.draft(None, (side, side))
            image.load()
            rgb = _rgb(image)
        shrunk = 1 << round(math.log2(max(full) / max(rgb.size)))
        beyond = _upright((rgb.width * shrunk - full[0], rgb.height * shrunk - full[1]), turn)
        margin = beyond[0] * (turn in _LEFT_WAS_LAST), beyond[1] * (turn in _TOP_WAS_LAST)
        upright = rgb.transpose(_TURNS[turn]) if turn in _TURNS else rgb
        return Decoded(np.asarray(upright), *_upright(full, turn), shrunk, margin)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadRecord(f"the image has more than {MAX_PIXELS} pixels") from None
    except UnidentifiedImageError:
        raise BadRecord(f"the bytes are not an image in any of {', '.join(FORMATS)}") from None


def _ordinary_jpeg(data: bytes, at_least: Callable[[int, int], int | None]) -> Decoded | None:
    """None for what is left to Pillow: any other image, and any JPEG that is unusual or not perfect."""
    if not _surely_upright(data):
        return None
    try:
        tall, wide, colours, _ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, KeyError):
        return None
    height, width = int(tall), int(wide)
    if colours not in ("YCbCr", "Gray") or width * height > MAX_PIXELS:
        return None
    side = at_least(width, height)
    shrunk = 1 if side is None else next((by for by in (8, 4, 2) if min(width, height) // side >= by), 1)
    try:  # warnings are errors
        pixels = simplejpeg.decode_jpeg(
            data, min_height=-(-height // shrunk), min_width=-(-width // shrunk), min_factor=shrunk
        )
    except ValueError:
        return None
    return Decoded(pixels, width, height, shrunk, (0, 0))


def _surely_upright(data: bytes) -> bool:
    """Whether this is a JPEG without a segment in which EXIF or XMP could say that it is turned."""
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _SCAN:
            return True
        if marker == _APP1 or not (0xC0 <= marker <= 0xCF or 0xDB <= marker <= 0xFE):  # the others have no length
            return False
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _upright(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return (size[1], size[0]) if orientation in _SIDEWAYS else size


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey to 255, which is white; scale it instead.
        wide = np.asarray(image).clip(0, 65535).astype(np.uint32)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
