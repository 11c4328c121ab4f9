"""How many crops `murmuration.contrib.overlap` finds, and how many strangers it takes for one, on made pictures.

    python benchmarks/overlap.py --pictures 300

Every picture is cropped at a random place, saved as JPEG and compared with the original, as the command does it. A
stranger is a picture of another seed. The rate of false findings per pair of pictures is given with its upper bound at
95 %. Made pictures stand in for photographs: measure your own with --folder.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from murmuration.contrib.overlap.exclude import Hashes, overlapping
from murmuration.contrib.overlap.phash import DECODED, WINDOWS, hamming, window_hashes
from murmuration.data.decode.record import PictureMaker
from murmuration.data.synthetic.textures import textures

SIDE = 160
SHAPES = ((0.95, 0.95), (0.9, 0.9), (0.9, 1.0), (0.85, 0.85), (0.8, 0.8))


def jpeg(picture: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()


def hashed(files: list[bytes]) -> Hashes:
    maker = PictureMaker(DECODED)
    windows = window_hashes(np.stack([maker.make(file, 0, 0) for file in files]))
    return Hashes(windows, np.ones(len(files), dtype=bool))


def cropped(picture: Image.Image, wide: float, high: float, rng: np.random.Generator) -> Image.Image:
    width, height = round(picture.width * wide), round(picture.height * high)
    left, top = rng.integers(0, picture.width - width + 1), rng.integers(0, picture.height - height + 1)
    return picture.crop((int(left), int(top), int(left) + width, int(top) + height))


def nearest(one: Hashes, other: Hashes) -> np.ndarray:
    """Bits between each picture of one and each of the other, as the command counts them."""
    ways = (one.values[:, None, None], other.windows[None]), (one.windows[:, None], other.values[None, :, None])
    return np.minimum(*(hamming(*way).min(axis=2) for way in ways))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--distance", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="pictures to use instead of made ones; half of them are strangers")
    arguments = parser.parse_args()
    count, rng = arguments.pictures, np.random.default_rng(arguments.seed)
    if arguments.folder is not None:
        paths = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        pictures = [Image.open(path).convert("RGB") for path in paths[: 2 * count]]
        count = len(pictures) // 2
    else:
        made = [textures("mixed", arguments.seed + more, range(count), SIDE).numpy() for more in (0, 1)]
        pictures = [Image.fromarray(each) for part in made for each in part]
    files = [jpeg(picture, 95) for picture in pictures]
    begun = time.perf_counter()
    originals, strangers = hashed(files[:count]), hashed(files[count : 2 * count])
    each = (time.perf_counter() - begun) / (2 * count)
    print(f"{count} pictures, distance {arguments.distance}, {WINDOWS} hashes of 8 bytes per picture")
    print(f"decoding and hashing: {1e3 * each:.2f} ms per picture and core")
    for wide, high in SHAPES:
        crops = hashed([jpeg(cropped(picture, wide, high, rng), 80) for picture in pictures[:count]])
        found = np.diagonal(nearest(crops, originals)) <= arguments.distance
        alone = hamming(crops.values, originals.values) <= arguments.distance
        print(f"{wide:.0%} x {high:.0%} of the sides: {found.mean():.1%} found, {alone.mean():.1%} without windows")
    false, pairs = int((nearest(originals, strangers) <= arguments.distance).sum()), count * count
    most = beta.ppf(0.95, false + 1, pairs - false)
    print(f"strangers: {false} of {pairs} pairs taken for a crop; at most {most:.1e} per pair at 95 %")
    overlapping(originals, [strangers], arguments.distance)  # loads what it needs
    begun = time.perf_counter()
    overlapping(originals, [strangers], arguments.distance)
    print(f"search, among {count} records: {1e6 * (time.perf_counter() - begun) / count:.0f} µs per record")


if __name__ == "__main__":
    main()
