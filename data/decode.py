"""Image bytes -> RGB pixels, with one clear answer for bytes that are no image.

BadRecord means: these bytes will fail in the same way on every machine and at every try. Only such a record
may be left out of a step (its slot contributes zero); anything that could go better next time must stop the
run instead, which is why a MemoryError passes through here untouched.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # a short list: every further parser is attack surface
MAX_PIXELS = 89_478_485  # Pillow's own limit, spelt out because other libraries like to switch Pillow's off
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Set once, here: warnings.catch_warnings around each decode would not be thread-safe. Pillow's remarks about
# a file (corrupt EXIF and the like) would reach the console, a public sink, and speak of private records;
# but between its pixel limit and twice that it warns and then decodes, which has to be an error.
warnings.filterwarnings("ignore", module=r"PIL\.")
warnings.simplefilter("error", Image.DecompressionBombWarning)


class BadRecord(ValueError):
    """The content of one record is unusable, deterministically. The message is private: it describes data."""


def decode(data: bytes, at_least: int | None = None) -> np.ndarray:
    """RGB pixels, uint8 [height, width, 3]; transparent images are laid on white.

    `at_least` lets a large JPEG be decoded at 1/2, 1/4 or 1/8 as long as both sides keep that many pixels,
    which is several times faster than decoding in full and shrinking afterwards.
    """
    if not data:
        raise BadRecord("the image is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadRecord(
                    f"the image has {image.width} x {image.height} pixels, at most {MAX_PIXELS} are decoded"
                )
            turn = _turn(image)
            if at_least is not None:
                image.draft(None, (at_least, at_least))
            image.load()
            rgb = _rgb(image)
        return np.array(rgb.transpose(turn) if turn is not None else rgb)
    except (BadRecord, MemoryError):
        raise
    # Decoders raise nearly everything on hostile bytes (OSError, SyntaxError, struct.error, IndexError ...);
    # no I/O happens here, so each of them speaks about the content.
    except Exception as error:
        raise BadRecord(f"the image cannot be decoded ({type(error).__name__}: {error})") from error


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey to 255, that is to white; scale it instead.
        wide = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
