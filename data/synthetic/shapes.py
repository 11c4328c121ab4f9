"""Captioned shapes: a coloured shape on a grey background, and a small grammar that describes it.

Made for testing a trainer at toy size: colours and shapes are far apart, backgrounds are close to grey so
that colour is never in doubt, and most captions begin like the prompt that zero-shot evaluation uses. All of
it, including the words, is public by construction: nothing here was derived from data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 28, 36),
    "orange": (250, 138, 14),
    "yellow": (246, 226, 36),
    "green": (34, 160, 52),
    "cyan": (40, 210, 220),
    "blue": (36, 70, 225),
    "purple": (128, 34, 176),
    "pink": (250, 122, 192),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES = ("small", "medium", "big")
BACKGROUNDS = ("plain", "striped", "dotted", "checkered", "noisy")
# Radius as a share of the image side. The gaps keep the size words true.
_RADII = ((0.19, 0.23), (0.28, 0.32), (0.38, 0.43))
# Equal radii would make triangles and stars look small, so radii are scaled towards equal area.
_FILL = (0.92, 0.80, 1.12, 1.18)

# Tint of backgrounds, per channel: faint, so that colour is never in doubt. Only --tint raises it.
FAINT = 6.0

# "a orange" is intentional: with one article, the prompt "a photo of a" is followed by every colour.
_PROMPTED = (
    "a photo of a {colour} {shape}",
    "a photo of a {colour} {shape} on a {background} background",
    "a photo of a {colour} {shape} with a {background} background behind it",
    "a photo of a {colour} {shape} that is {size}",
)
_FREE = (
    "a photo of a {size} {colour} {shape}",
    "a photo of a {size} {colour} {shape} on a {background} background",
    "a {colour} {shape}",
    "a {size} {colour} {shape}",
    "there is a {size} {colour} {shape}",
    "there is a {colour} {shape} on a {background} background",
    "a {background} background with a {colour} {shape}",
    "a picture of one {colour} {shape}",
)
_PROMPTED_SHARE = 0.75

GRAMMAR_WORDS: tuple[str, ...] = tuple(
    sorted(
        {word for text in _PROMPTED + _FREE for word in text.split() if not word.startswith("{")}
        | {*COLOURS, *SHAPES, *SIZES, *BACKGROUNDS}
    )
)


@dataclass(frozen=True)
class Scene:
    """The contents of one picture, as indices into the tables above."""

    colour: int
    shape: int
    size: int
    background: int

    def labels(self) -> dict[str, int]:
        """`label` is colour and shape together: 32 classes, in the order of `class_names()`."""
        return {"colour": self.colour, "shape": self.shape, "label": self.colour * len(SHAPES) + self.shape}


def class_names() -> list[str]:
    """The 32 classes as the captions name them."""
    return [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


def draw_scene(rng: np.random.Generator) -> Scene:
    colour, shape, size, background = (int(rng.integers(len(table))) for table in (COLOURS, SHAPES, SIZES, BACKGROUNDS))
    return Scene(colour, shape, size, background)


def caption(scene: Scene, rng: np.random.Generator) -> str:
    templates = _PROMPTED if rng.random() < _PROMPTED_SHARE else _FREE
    return templates[int(rng.integers(len(templates)))].format(
        colour=list(COLOURS)[scene.colour],
        shape=SHAPES[scene.shape],
        size=SIZES[scene.size],
        background=BACKGROUNDS[scene.background],
    )


@dataclass(frozen=True)
class _Canvas:
    """Where pixels are computed: by numpy on the CPU, by torch on another device. Random numbers always come from
    numpy, and scalars are rounded to float32 before they meet an array, so both compute with the same values."""

    side: int
    device: torch.device | None = None

    @property
    def math(self) -> Any:
        return np if self.device is None else torch

    def array(self, values: np.ndarray) -> Any:
        values = np.asarray(values, np.float32)
        return values if self.device is None else torch.from_numpy(values).to(self.device)

    def grid(self) -> Any:
        return self.array((np.arange(self.side, dtype=np.float32) + 0.5) / self.side)


def render(
    scene: Scene, side: int, rng: np.random.Generator, device: torch.device | str = "cpu", tint: float = FAINT
) -> np.ndarray:
    """uint8 [side, side, 3]. Devices other than the CPU round slightly differently."""
    where = torch.device(device)
    canvas = _Canvas(side, None if where.type == "cpu" else where)
    found = _render(scene, canvas, rng, tint)
    return found.astype(np.uint8) if canvas.device is None else found.to(torch.uint8).cpu().numpy()


def _render(scene: Scene, canvas: _Canvas, rng: np.random.Generator, tint: float = FAINT) -> Any:
    grid = canvas.grid()
    low, high = _RADII[scene.size]
    radius = rng.uniform(low, high)
    room = max(0.0, 0.5 - radius)
    x = grid[None, :] - _float(0.5 + rng.uniform(-room, room))
    y = grid[:, None] - _float(0.5 + rng.uniform(-room, room))
    turn = rng.uniform(-0.5, 0.5)
    cos, sin = _float(np.cos(turn)), _float(np.sin(turn))
    size = np.float32(radius * _FILL[scene.shape])
    distance = _distance(canvas.math, scene.shape, cos * x + sin * y, cos * y - sin * x, size)
    # The signed distance in pixels, clipped to one pixel around the edge, is the covered share of a pixel.
    cover = canvas.math.clip(0.5 - distance * canvas.side, 0, 1)[..., None]
    shade = rng.uniform(0.86, 1.04) + (rng.uniform(-0.12, 0.12) * (x + y))[..., None]
    colour = np.array(COLOURS[list(COLOURS)[scene.colour]], np.float32) + rng.uniform(-8, 8, 3).astype(np.float32)
    paint = canvas.array(colour) * shade
    back = _background(canvas, scene.background, rng, tint)
    return canvas.math.clip(back + cover * (paint - back), 0, 255)


def _float(number: float) -> float:
    return float(np.float32(number))


def _distance(math: Any, shape: int, x: Any, y: Any, radius: np.float32) -> Any:
    """Signed distance to the outline, negative inside, for a shape around the origin."""
    if shape == 0:
        return math.sqrt(x * x + y * y) - float(radius)
    if shape == 1:
        return math.maximum(math.abs(x), math.abs(y)) - float(radius)
    if shape == 2:
        slant = _float(0.8660254) * math.abs(x) - 0.5 * y
        return math.maximum(slant, y) - float(radius / 2 * np.float32(1.1))
    return _star(math, x, y, radius)


def _star(math: Any, x: Any, y: Any, radius: np.float32) -> Any:
    """A five-pointed star: folded by its mirror lines onto half an arm, whose edge is one straight line."""
    fifth = np.float32(2 * np.pi / 5)
    half = float(fifth / 2)
    angle = math.arctan2(x, -y)
    angle = math.abs(math.remainder(angle + half, float(fifth)) - half)
    length = math.sqrt(x * x + y * y)
    along, across = length * math.cos(angle), length * math.sin(angle)
    inner = np.float32(0.45) * radius
    dent_along, dent_across = inner * np.cos(fifth / 2), inner * np.sin(fifth / 2)
    edge = np.hypot(radius - dent_along, dent_across)
    return ((along - float(radius)) * float(dent_across) + across * float(radius - dent_along)) / float(edge)


def _background(canvas: _Canvas, kind: int, rng: np.random.Generator, tint: float) -> Any:
    """A tinted grey texture, float32 [side, side, 3]."""
    math, side = canvas.math, canvas.side
    grey, contrast = rng.uniform(95, 165), rng.uniform(30, 48) * (1 if rng.random() < 0.5 else -1)
    pattern = canvas.array(np.zeros((side, side), np.float32))
    if kind:
        period = rng.uniform(0.16, 0.26)
        grid = (canvas.grid() + _float(rng.uniform())) / _float(period)
        if kind == 1:
            turn = rng.uniform(0, np.pi)
            pattern = _steps(math, grid[None, :] * _float(np.cos(turn)) + grid[:, None] * _float(np.sin(turn)))
        elif kind == 2:
            cell = math.remainder(grid, 1) - 0.5
            spot = math.sqrt(cell[None, :] ** 2 + cell[:, None] ** 2)
            pattern = math.clip((_float(0.3) - spot) * _float(period * side) + 0.5, 0, 1) * 2 - 1
        elif kind == 3:
            wave = _steps(math, grid)
            pattern = wave[None, :] * wave[:, None]
        else:
            pattern = canvas.array(rng.standard_normal((side, side), dtype=np.float32) * np.float32(0.6))
    hue = rng.uniform(-tint, tint, 3).astype(np.float32)
    return canvas.array(np.float32(grey) + hue) + _float(contrast) * pattern[..., None]


def _steps(math: Any, phase: Any) -> Any:
    """A soft square wave between -1 and 1."""
    return math.clip(3 * math.sin(_float(2 * np.pi) * phase), -1, 1)
