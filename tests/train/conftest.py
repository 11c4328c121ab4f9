"""One thread, as the models are tiny and ranks are threads of their own; and the base config, read after changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from murmuration.data.index.folders import build_folder
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from tests.support.config_base import BASE, Change


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Config]:
    """Reads the base config after changes to it, and with overrides as --set gives them."""

    def read(*changes: Change, overrides: list[str] | None = None) -> Config:
        raw = copy.deepcopy(BASE)
        for change in changes:
            change(raw)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return load(path, overrides or [])

    return read


@pytest.fixture
def single_images(tmp_path: Path) -> Path:
    """Three pictures of one class in a folder, without shards."""
    folder = tmp_path / "images"
    (folder / "class").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(folder / "class" / f"{number}.png")
    build_folder(folder)
    return folder
