"""Miniatures to evaluate: pictures in class folders and in tar shards, and models of several origins in files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from murmuration.data.text.encoder import word_tokenizer
from murmuration.launch.evaluate import main
from tests.support.tars import indexed

COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "grey": (128, 128, 128), "red": (220, 40, 40),
           "white": (240, 240, 240)}  # fmt: skip
SIZE = (26, 20)


def picture(colour: str, seed: int) -> bytes:
    """A noisy picture of one colour, as PNG."""
    noise = np.random.default_rng(seed).normal(0, 40, (SIZE[1], SIZE[0], 3))
    pixels = (np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def class_folders(root: Path, each: int, seed: int = 0, colours: tuple[str, ...] = tuple(COLOURS)) -> Path:
    for number, colour in enumerate(colours):
        (root / colour).mkdir(parents=True)
        for place in range(each):
            (root / colour / f"{place:03}.png").write_bytes(picture(colour, seed + 1000 * number + place))
    return root


def shards(folder: Path, records: int, captions: bool = True) -> Path:
    """An indexed folder of one tar, with captions and a colour's number under "colour"."""
    found, names = list[dict[str, bytes]](), list(COLOURS)
    for record in range(records):
        colour = names[record % len(names)]
        found.append({"png": picture(colour, record), "json": json.dumps({"colour": record % len(names)}).encode()})
        if captions:
            found[-1]["txt"] = f"a photo of a {colour} square".encode()
    indexed(folder, found)
    return folder


def tokenizer(folder: Path) -> Path:
    return word_tokenizer(["a", "photo", "of", "square", *COLOURS], folder / "tokenizer.json")


def class_list(folder: Path) -> Path:
    path = folder / "classes.txt"
    path.write_text("\n".join(COLOURS) + "\n")
    return path


def saved(path: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save({"model": state}, path)
    return path


def evaluate(*arguments: Any) -> int:
    """The command, in this process and without decoding processes."""
    return main([*map(str, arguments), *([] if arguments[0] == "compare" else ["--workers", "0"])])


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
