"""Captioned shapes: a coloured shape on a grey background, and a small grammar that describes it.

Made for proving a trainer at toy size: colours and shapes are far apart, backgrounds are close to grey so
that colour is never in doubt, and most captions begin like the prompt that zero-shot evaluation uses. All of
it, words included, is public by construction: nothing here has seen data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
# Equal radii would make triangles and stars look small: scaled towards equal area.
_FILL = (0.92, 0.80, 1.12, 1.18)

# "a orange" is on purpose: one article, so that the prompt "a photo of a" is followed by every colour.
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
    """What one picture shows, as indices into the tables above."""

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


def render(scene: Scene, side: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [side, side, 3]."""
    grid = (np.arange(side, dtype=np.float32) + 0.5) / side
    low, high = _RADII[scene.size]
    radius = rng.uniform(low, high)
    room = max(0.0, 0.5 - radius)
    x = grid[None, :] - np.float32(0.5 + rng.uniform(-room, room))
    y = grid[:, None] - np.float32(0.5 + rng.uniform(-room, room))
    turn = rng.uniform(-0.5, 0.5)
    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
    distance = _distance(scene.shape, cos * x + sin * y, cos * y - sin * x, np.float32(radius * _FILL[scene.shape]))
    # The signed distance in pixels, clipped to one pixel around the edge, is the covered share of a pixel.
    cover = np.clip(0.5 - distance * side, 0, 1)[..., None]
    shade = rng.uniform(0.86, 1.04) + (rng.uniform(-0.12, 0.12) * (x + y))[..., None]
    paint = (
        np.array(COLOURS[list(COLOURS)[scene.colour]], np.float32) + rng.uniform(-8, 8, 3).astype(np.float32)
    ) * shade
    back = _background(scene.background, side, rng)
    return np.clip(back + cover * (paint - back), 0, 255).astype(np.uint8)


def _distance(shape: int, x: np.ndarray, y: np.ndarray, radius: np.float32) -> np.ndarray:
    """Signed distance to the outline, negative inside, for a shape around the origin."""
    if shape == 0:
        return np.sqrt(x * x + y * y) - radius
    if shape == 1:
        return np.maximum(np.abs(x), np.abs(y)) - radius
    if shape == 2:
        slant = np.float32(0.8660254) * np.abs(x) - np.float32(0.5) * y
        return np.maximum(slant, y) - radius / 2 * np.float32(1.1)
    return _star(x, y, radius)


def _star(x: np.ndarray, y: np.ndarray, radius: np.float32) -> np.ndarray:
    """A five-pointed star: folded by its mirror lines onto half an arm, whose edge is one straight line."""
    fifth = np.float32(2 * np.pi / 5)
    angle = np.arctan2(x, -y)
    angle = np.abs(np.mod(angle + fifth / 2, fifth) - fifth / 2)
    length = np.sqrt(x * x + y * y)
    along, across = length * np.cos(angle), length * np.sin(angle)
    inner = np.float32(0.45) * radius
    dent_along, dent_across = inner * np.cos(fifth / 2), inner * np.sin(fifth / 2)
    edge = np.hypot(radius - dent_along, dent_across)
    return ((along - radius) * dent_across + across * (radius - dent_along)) / edge


def _background(kind: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """A texture in greys with a faint tint, float32 [side, side, 3]."""
    grey, contrast = rng.uniform(95, 165), rng.uniform(30, 48) * (1 if rng.random() < 0.5 else -1)
    pattern = np.zeros((side, side), np.float32)
    if kind:
        period = rng.uniform(0.16, 0.26)
        grid = ((np.arange(side, dtype=np.float32) + 0.5) / side + np.float32(rng.uniform())) / np.float32(period)
        if kind == 1:
            turn = rng.uniform(0, np.pi)
            pattern = _steps(grid[None, :] * np.float32(np.cos(turn)) + grid[:, None] * np.float32(np.sin(turn)))
        elif kind == 2:
            cell = np.mod(grid, 1) - np.float32(0.5)
            spot = np.sqrt(cell[None, :] ** 2 + cell[:, None] ** 2)
            pattern = np.clip((np.float32(0.3) - spot) * np.float32(period * side) + 0.5, 0, 1) * 2 - 1
        elif kind == 3:
            wave = _steps(grid)
            pattern = wave[None, :] * wave[:, None]
        else:
            pattern = rng.standard_normal((side, side), dtype=np.float32) * np.float32(0.6)
    tint = rng.uniform(-6, 6, 3).astype(np.float32)
    return np.float32(grey) + tint + np.float32(contrast) * pattern[..., None]


def _steps(phase: np.ndarray) -> np.ndarray:
    """A soft square wave between -1 and 1."""
    return np.clip(3 * np.sin(np.float32(2 * np.pi) * phase), -1, 1)
