"""Procedural textures: pure in (seed, record), with the statistics that they are made for."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import murmuration.data.synthetic.fractals as module
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.dead_leaves import _radii, dead_leaves
from murmuration.data.synthetic.fractals import FILL, fractals
from murmuration.data.synthetic.index import SyntheticIndex
from murmuration.data.synthetic.kinds import KINDS, TEXTURES, PictureKind
from murmuration.data.synthetic.random import Draws
from murmuration.data.synthetic.spectrum import noise_field, spectrum
from murmuration.data.synthetic.textures import textures

ROOT = Path(__file__).resolve().parents[2]


def _mix64(state: int) -> int:
    """SplitMix64's finaliser as published, in Python's own integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_draws_are_splitmix64() -> None:
    draws = Draws(torch.tensor([0, 12345, -1]))
    found = draws.uniform(6)
    for row, key in enumerate((0, 12345, 2**64 - 1)):
        hashes = [_mix64((key + j * 0x9E3779B97F4A7C15) % 2**64) for j in (1, 2, 3)]
        expected = [h >> 40 for h in hashes] + [h & 0xFFFFFF for h in hashes]
        assert (found[row] * 2**24).to(torch.int64).tolist() == expected
    assert draws.uniform(2)[0, 0] * 2**24 == _mix64(4 * 0x9E3779B97F4A7C15 % 2**64) >> 40, "and it goes on"


def test_draws_have_the_right_distributions() -> None:
    draws = Draws.of(1, range(40))
    assert scipy.stats.kstest(draws.uniform(5000).flatten().numpy(), "uniform").pvalue > 1e-3
    normal = draws.normal(5001).flatten().numpy()
    assert scipy.stats.kstest(normal, "norm").pvalue > 1e-3
    assert scipy.stats.kstest(normal * 1.02, "norm").pvalue < 1e-3, "the test sees 2 %"
    counts = np.bincount(draws.choice(6, 6000).flatten().numpy(), minlength=6)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    # Neighbours in records, in place, and between branches.
    a, b = draws.uniform(4000), draws.branch(1).uniform(4000)
    for one, other in ((a[:-1], a[1:]), (a[:, :-1], a[:, 1:]), (a, b), (b, draws.branch(2).uniform(4000))):
        assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 0.01


@pytest.mark.parametrize("kind", TEXTURES)
def test_a_record_is_a_pure_function_of_seed_and_number(kind) -> None:
    """Whatever it is made with, whenever, on however many threads."""
    side = 40
    together = textures(kind, 3, range(12), side)
    assert together.shape == (12, side, side, 3) and together.dtype == torch.uint8
    backwards = textures(kind, 3, range(11, -1, -1), side)
    assert torch.equal(together, backwards.flip(0))
    assert torch.equal(textures(kind, 3, [7], side)[0], together[7])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(textures(kind, 3, range(12), side), together)
        large = textures(kind, 3, [5], 200)
        torch.set_num_threads(threads)
        assert torch.equal(textures(kind, 3, [5], 200), large)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(textures(kind, 4, [7], side)[0], together[7])


@pytest.mark.parametrize("kind", TEXTURES)
def test_no_two_records_are_equal_and_none_is_empty(kind) -> None:
    pictures = textures(kind, 8, range(120), 24).numpy()
    assert len({picture.tobytes() for picture in pictures}) == 120
    small = pictures.reshape(120, 6, 4, 6, 4, 3).mean(axis=(2, 4)).reshape(120, -1)
    distance = np.abs(small[:, None] - small[None]).mean(axis=2) + 255 * np.eye(120)
    assert distance.min() > 1.5, "not merely the same picture with other noise"
    deviation = pictures.reshape(120, -1).std(axis=1)
    assert np.median(deviation) > 20 and deviation.min() > 3
    assert pictures.mean(axis=(1, 2, 3)).std() > 8, "not all alike"


def test_mixed_takes_of_all_families_and_draws_them_as_they_are() -> None:
    mixed = textures("mixed", 2, range(60), 16)
    families = {kind: textures(kind, 2, range(60), 16) for kind in TEXTURES[:-1]}
    counts = {kind: int((mixed == pictures).flatten(1).all(dim=1).sum()) for kind, pictures in families.items()}
    assert sum(counts.values()) == 60 and min(counts.values()) >= 5, counts


def _slope(field: Tensor) -> float:
    """Exponent of the amplitude spectrum of [n, side, side], averaged around rings."""
    side = field.shape[-1]
    power = torch.fft.fft2(field.double()).abs().square().mean(dim=0)
    down = torch.fft.fftfreq(side).double()
    ring = (down[:, None].square() + down[None].square()).sqrt()
    edges = np.geomspace(2 / side, 0.4, 12)
    inside = [(ring >= low) & (ring < high) for low, high in itertools.pairwise(edges)]
    points = [(float(ring[part].log().mean()), float(power[part].mean().log()) / 2) for part in inside]
    return -float(np.polyfit(*zip(*points, strict=True), 1)[0])


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5, 2.0])
def test_spectra_fall_as_asked(exponent: float) -> None:
    count = 24
    asked, still = torch.full((count,), exponent), torch.ones(count)
    field = noise_field(Draws.of(1, range(count)), 96, asked, still)
    assert abs(float(field.mean())) < 1e-4 and field.std(dim=(2, 3)).sub(1).abs().max() < 1e-3
    assert abs(_slope(field.flatten(0, 1)) - exponent) < 0.06
    stretched = noise_field(Draws.of(1, range(count)), 96, asked, 2 * still).flatten(0, 1)
    along, across = (stretched.diff(dim=dim).square().mean() for dim in (-1, -2))
    assert along < across, "stretched along the rows: neighbours in a row are more alike"


def test_spectra_stay_within_the_range_of_a_picture() -> None:
    pictures = spectrum(Draws.of(2, range(40)), 64)
    assert ((pictures < 0) | (pictures > 1)).float().mean() < 0.06, "little is clipped, or the slopes would be bent"


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_leaves_cover_as_much_at_every_scale(exponent: float) -> None:
    """With a density of r^-3 each octave of radii has the same area: zooming changes nothing. Others tilt it."""
    radius = _radii(Draws.of(3, range(1500)), 256, exponent)[:, :-6]
    octave = (radius / (1.5 / 256)).log2().floor()
    areas = torch.stack([radius[octave == number].square().sum() for number in range(5)])
    steps = (areas[1:] / areas[:-1]).log2()
    assert (steps - (3 - exponent)).abs().max() < 0.15, steps
    assert radius.min() >= 1.4 / 256 and radius.max() <= 0.401


def test_dead_leaves_have_the_spectrum_of_photographs() -> None:
    """Occlusion alone gives an amplitude of about 1 / frequency."""
    grey = dead_leaves(Draws.of(4, range(32)), 128).mean(dim=-1)
    assert 0.8 < _slope(grey - grey.mean(dim=(1, 2), keepdim=True)) < 1.5


def test_dead_leaves_cover_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ground is hardly seen, and each pixel shows the leaf that lies in front, by brute force over all leaves."""
    import murmuration.data.synthetic.dead_leaves as module

    seen: list[tuple[Tensor, Tensor, Tensor, int]] = []
    colour, paint = module._colour, module._paint
    painted: list[tuple[module.Leaves, int]] = []

    def note(draws, front, depth, centre, leaves, fine):
        seen.append((front, depth, centre, leaves))
        return colour(draws, front, depth, centre, leaves, fine)

    def watch(front, leaves, nothing, window):
        painted.append((leaves, nothing))
        paint(front, leaves, nothing, window)

    monkeypatch.setattr(module, "_colour", note)
    monkeypatch.setattr(module, "_paint", watch)
    side = 40
    dead_leaves(Draws.of(5, range(6)), side)
    front, _, _, leaves = seen[0]
    assert (front == leaves).float().mean() < 0.02, "ground"
    fine = 2 * side
    grid = (torch.arange(fine) + 0.5) / fine
    expected = torch.full((6, fine, fine), leaves)
    for part, _ in painted:
        for leaf in range(part.depth.shape[1]):
            x = grid[None, None, :] - part.centre[:, leaf, 0, None, None]
            y = grid[None, :, None] - part.centre[:, leaf, 1, None, None]
            reach = part.radius[:, leaf, None, None]
            cos, sin = (f(part.turn[:, leaf])[:, None, None] for f in (torch.cos, torch.sin))
            turned = torch.maximum((cos * x + sin * y).abs(), (cos * y - sin * x).abs())
            inside = turned < reach if part.boxes else x.square() + y.square() < reach.square()
            depth = part.depth[:, leaf, None, None].expand_as(expected)
            expected = torch.where(inside & (depth < expected), depth, expected)
    assert (front.view(6, fine, fine) != expected).float().mean() < 1e-4


def fill(draws: Draws) -> Tensor:
    """[batch]: the share of coarse cells that the chosen systems reach."""
    maps, odds = module._system(draws)
    return module._share(module._walk(draws.branch(0), maps, odds, module._SCOUTS, 4 * module._SCOUT_STEPS)[0])


def test_fractals_fill_what_is_promised() -> None:
    filled = fill(Draws.of(6, range(150)))
    assert filled.min() >= FILL and filled.median() < 0.9 and filled.std() > 0.05
    pictures = fractals(Draws.of(6, range(30)), 64)
    assert torch.isfinite(pictures).all()
    # Not only a background: fine structure everywhere, which clouds enlarged from 32 px do not have.
    rough = pictures.mean(dim=-1).diff(n=2, dim=-1).abs().mean(dim=(1, 2))
    assert rough.median() > 0.02


def test_a_system_that_fills_a_square_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILL", 1.1)
    assert fill(Draws.of(6, range(8))).min() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_reads_records_that_are_made(kind: PictureKind) -> None:
    index = SyntheticIndex(kind, 20, 3, 24)
    reader = BatchReader(index, DataSpec(24, mean=(0, 0, 0), std=(1, 1, 1)))
    batch = reader.read(np.array([0, 5, 19, -1]), 0)
    assert batch.present.tolist() == [True, True, True, False] and not reader.bad_records
    if kind != "shapes":
        pixels = (batch.inputs["images"][1] * 255).round().to(torch.uint8).permute(1, 2, 0)
        assert torch.equal(pixels, textures(kind, 3, [5], 24)[0]), "uncompressed, so pixel for pixel"
    assert index.read(5) == index.read(5) != index.read(6)
    for outside in (-1, 20):
        with pytest.raises(ShardError, match="outside"):
            index.read(outside)


def test_an_index_that_makes_its_records_is_pinned_by_its_rule() -> None:
    rules: tuple[tuple[PictureKind, int, int, int], ...] = (
        ("mixed", 9, 1, 32), ("mixed", 8, 1, 32), ("mixed", 9, 2, 32), ("mixed", 9, 1, 33), ("shapes", 9, 1, 32),
    )  # fmt: skip
    assert len({SyntheticIndex(*rule).manifest_digest for rule in rules}) == 5
