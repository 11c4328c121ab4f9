"""Parts of pictures in their size: the field's own resize, on every processor, whichever library does it."""

from __future__ import annotations

import cykooz_resizer
import numpy as np
import pytest
import torch
from PIL import Image

from murmuration.data.decode import resize
from murmuration.data.decode.augment import View

BOXES = [
    (0, 0, 200, 150), (10, 20, 61, 149), (150, 3, 199, 40), (0, 0, 1, 1), (7, 140, 9, 150), (0.5, 2.25, 100.75, 90.0),
    (12.125, 30.5, 187.375, 149.875), (199, 0, 200, 150),
]  # fmt: skip


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    coarse = np.random.default_rng(3).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((200, 150), Image.Resampling.BICUBIC))


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """But for rounding: each of the two passes ends in whole numbers."""
    apart = np.abs(one.astype(int) - other.astype(int))
    return apart.max() <= 2 and np.mean(apart > 1) <= 1e-3


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("size", [16, 64, 224])
def test_it_is_the_antialiased_cubic_of_torch_and_of_pillow(
    image: np.ndarray, box: tuple[float, float, float, float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resize.resized(image, box, (size, size))
    if all(float(side).is_integer() for side in box):
        left, top, right, bottom = map(int, box)
        part = torch.from_numpy(image[top:bottom, left:right].copy()).permute(2, 0, 1)[None]
        theirs = torch.nn.functional.interpolate(part, (size, size), mode="bicubic", antialias=True)
        assert _alike(found, theirs[0].permute(1, 2, 0).numpy())
    monkeypatch.setattr(resize, "simd", None)
    assert _alike(found, resize.resized(image, box, (size, size)))
    assert (
        View(box, flip=True).render(image, size).tobytes()
        == resize.resized(image, box, (size, size))[:, ::-1].tobytes()
    )


@pytest.mark.parametrize("name", ["none", "sse4_1", "avx2"])
def test_every_processor_gives_the_same_bits(image: np.ndarray, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [resize.resized(image, box, (64, 64)).tobytes() for box in BOXES]

    whole = cykooz_resizer.Resizer

    def limited() -> cykooz_resizer.Resizer:
        made = whole()
        made.cpu_extensions = getattr(cykooz_resizer.CpuExtensions, name)
        return made

    monkeypatch.setattr(cykooz_resizer, "Resizer", limited)
    assert [resize.resized(image, box, (64, 64)).tobytes() for box in BOXES] == expected
