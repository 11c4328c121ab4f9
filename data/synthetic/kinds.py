"""The names of the kinds of synthetic pictures, in a separate file so that naming them loads no library."""

from __future__ import annotations

from typing import Literal, get_args

Texture = Literal["dead_leaves", "spectrum", "fractals", "shaders", "mixed"]
PictureKind = Literal[Texture, "shapes"]
TEXTURES: tuple[Texture, ...] = get_args(Texture)
KINDS: tuple[PictureKind, ...] = get_args(PictureKind)
