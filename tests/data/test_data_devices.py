"""Pictures by rule on other devices: the code of a GPU is run on the CPU, checked without a GPU, and run on one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from murmuration.data.synthetic.index import _shape, generator
from murmuration.data.synthetic.kinds import TEXTURES
from murmuration.data.synthetic.shapes import BACKGROUNDS, SHAPES, Scene, _Canvas, _render, render
from murmuration.data.synthetic.textures import _batch, textures

# Mean red, green and blue of the records 0 and 7 of seed 3 at 32 px, as they have been since the generators' VERSION 2.
KNOWN = {
    "dead_leaves": [[133.71, 95.92, 172.21], [110.56, 106.84, 105.89]],
    "spectrum": [[102.57, 158.81, 164.84], [133.95, 116.0, 133.03]],
    "fractals": [[145.18, 125.65, 62.49], [87.26, 57.04, 178.84]],
    "shaders": [[69.13, 134.94, 129.42], [121.99, 201.89, 125.3]],
    "mixed": [[69.13, 134.94, 129.42], [133.95, 116.0, 133.03]],
    "shapes": [[103.24, 94.46, 99.7], [146.51, 69.1, 76.08]],
}


@pytest.mark.parametrize("kind", KNOWN)
def test_the_pictures_are_what_they_were(kind) -> None:
    if kind == "shapes":
        found = np.stack([_shape(3, record, 32)[0] for record in (0, 7)])
    else:
        found = textures(kind, 3, [0, 7], 32).numpy()
    assert np.abs(found.mean(axis=(1, 2)) - np.array(KNOWN[kind])).max() < 0.1


@pytest.mark.parametrize("kind", TEXTURES)
def test_a_batch_as_a_gpu_makes_it_holds_the_same_records(kind) -> None:
    """The path of a GPU on the CPU: whole batches at a time, equal up to rounding."""
    batch = _batch(kind, 2, range(9, 21), 32, torch.device("cpu"))
    alone = textures(kind, 2, range(9, 21), 32)
    assert (batch.int() - alone.int()).abs().float().mean() < 0.01


def test_shapes_by_torch_are_those_by_numpy() -> None:
    for number in range(200):
        scene = Scene(number % 8, number % 4, number % 3, number % 5)
        by_numpy = render(scene, 24, generator(4, number))
        canvas = _Canvas(24, torch.device("cpu"))
        by_torch = _render(scene, canvas, generator(4, number)).to(torch.uint8).numpy()
        assert np.abs(by_torch.astype(int) - by_numpy.astype(int)).max() <= 1


@pytest.mark.parametrize("kind", [kind for kind in TEXTURES if kind != "mixed"])
def test_every_tensor_of_a_family_is_made_on_the_device_asked_for(kind) -> None:
    """Tensors without memory that know their device: whatever meets one of another device raises. `mixed` only puts
    families together, by numbers that such tensors have not."""
    textures(kind, 3, [0], 40)  # sizes that depend on the side alone are found once, on the CPU
    with FakeTensorMode(), torch.no_grad():
        made = _batch(kind, 3, range(4), 40, torch.device("cuda", 0))
    assert made.device == torch.device("cuda", 0) and made.shape == (4, 40, 40, 3) and made.dtype == torch.uint8


def test_every_tensor_of_a_shape_is_made_on_the_device_asked_for() -> None:
    for shape in range(len(SHAPES)):
        for back in range(len(BACKGROUNDS)):
            with FakeTensorMode():
                made = _render(Scene(0, shape, 1, back), _Canvas(16, torch.device("cuda", 0)), generator(1, 2))
            assert made.device == torch.device("cuda", 0) and made.shape == (16, 16, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", TEXTURES)
def test_a_gpu_makes_the_same_pictures_up_to_rounding(kind) -> None:
    here, there = textures(kind, 3, range(16), 64), textures(kind, 3, range(16), 64, "cuda").cpu()
    assert (here.int() - there.int()).abs().float().mean() < 2
    assert torch.equal(there, textures(kind, 3, range(16), 64, "cuda").cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_shapes_up_to_rounding() -> None:
    for number in range(60):
        scene = Scene(number % 8, number % 4, number % 3, number % 5)
        here, there = (render(scene, 32, generator(4, number), device) for device in ("cpu", "cuda"))
        assert np.abs(here.astype(int) - there.astype(int)).mean() < 0.5
