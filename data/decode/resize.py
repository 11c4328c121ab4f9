"""Part of a picture -> pixels of a given size: the part is cut out, then resized by an antialiased cubic filter, as in
torchvision's and timm's crops.

By the SIMD code of fast_image_resize; where there is no wheel of it (Linux on ARM), by Pillow. Each gives the same
pixels on every processor; they differ from each other by rounding, so which one it is belongs to what identifies a
phase.
"""

from __future__ import annotations

import math
from importlib.metadata import version

import numpy as np
from PIL import Image, features

try:
    import cykooz_resizer as simd
except ImportError:
    simd = None

DECODER = ", ".join(
    [
        f"Pillow {Image.__version__}", f"libjpeg-turbo {features.version_feature('libjpeg_turbo')}",
        f"simplejpeg {version('simplejpeg')}",
    ]
    + ([] if simd is None else [f"cykooz-resizer {version('cykooz-resizer')}"])
)  # fmt: skip
"""What makes pixels of bytes, with versions."""


def resized(pixels: np.ndarray, box: tuple[float, float, float, float], size: tuple[int, int]) -> np.ndarray:
    """uint8 [height, width, 3] of the box (left, top, right, bottom) of an image like it, whose sides need not be
    whole. `size` is (width, height)."""
    left, top = math.floor(box[0]), math.floor(box[1])
    part = pixels[top : math.ceil(box[3]), left : math.ceil(box[2])]
    box = (box[0] - left, box[1] - top, box[2] - left, box[3] - top)
    if simd is None:
        return np.asarray(Image.fromarray(part).resize(size, Image.Resampling.BICUBIC, box=box))
    source = simd.ImageData(part.shape[1], part.shape[0], simd.PixelType.U8x3, part.tobytes())
    target = simd.ImageData(*size, simd.PixelType.U8x3)
    cut = simd.CropBox(box[0], box[1], box[2] - box[0], box[3] - box[1])
    cubic = simd.ResizeAlg.convolution(simd.FilterType.catmull_rom)
    simd.Resizer().resize(source, target, simd.ResizeOptions(resize_alg=cubic, crop_box=cut, use_alpha=False))
    return np.frombuffer(target.get_buffer(), np.uint8).reshape(size[1], size[0], 3)
