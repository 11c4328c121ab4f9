"""Features of a frozen body for 23 pictures, made as a phase makes them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from murmuration.data.batch.reader import DataSpec
from murmuration.data.draw.micro_batch import EMPTY, Fetched, MicroBatch
from murmuration.data.store.place import UnreadableError
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select
from murmuration.train.config.phase import Features
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.run.cached_features import FeatureReader, feature_reader, identity_of
from murmuration.train.storage.feature_store import FeatureFolder

SETTINGS = ModelSettings(
    family="classifier", image_size=16, patch_size=8, width=16, depth=1, heads=2, classes=5, classify_loss="sigmoid",
)  # fmt: skip
RESNET = ModelSettings(family="classifier", image_size=16, width=8, stages=(1,), classes=5)
RECORDS, DAMAGED = 23, 7
OF: tuple[Any, ...] = ("records", DataSpec(16, labels=("cls",), target="cls"), "fp32")
IMAGES = torch.randn(RECORDS, 3, 16, 16, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(RECORDS) % 5


class Pictures:
    """A reader of pictures, one of which is bad; counts what it was asked for and could give."""

    def __init__(self, unreadable_after: float = math.inf) -> None:
        self.asked: list[int] = []
        self.readable, self.closed = unreadable_after, False
        self.bad_reasons = {DAMAGED: "damaged"}

    def close(self) -> None:
        self.closed = True

    def report(self, fetched: Fetched) -> None:
        """Its bad record is known already."""

    def fetch(self, ids: np.ndarray, step: int) -> Fetched:
        del step
        if len(self.asked) >= self.readable:
            raise UnreadableError("shard-3.tar: cannot be read; restore access")
        self.asked += [int(number) for number in ids]
        there = torch.from_numpy((ids != EMPTY) & (ids != DAMAGED))
        rows = torch.from_numpy(np.maximum(ids, 0))
        images = torch.where(there.view(-1, 1, 1, 1), IMAGES[rows], 0.0)
        return Fetched(MicroBatch({"images": images, "labels": torch.where(there, LABELS[rows], 0)}, there), {})


def head_only(**settings: Any) -> Any:
    model = build(SETTINGS.model_copy(update=settings), "classify")
    select(model, "head")
    return model


class Stop:
    """What is used of a StopRequest, which takes over the signals of its process."""

    ask, check = StopRequest.ask, StopRequest.check

    def __init__(self) -> None:
        self.reason: str | None = None
        self.asked = 0

    def raised(self) -> str | None:
        self.asked += 1
        return self.reason


def made(
    shared: Path,
    ranks: Any,
    pictures: Pictures,
    model: Any = None,
    stop: Stop | None = None,
    said: Any = None,
    bad: Any = None,
    micro_batch: int = 4,
) -> tuple[FeatureReader, Pictures, Any]:
    """Features as a phase makes them."""
    model = model or head_only()
    digest, spec, precision = OF
    board = SimpleNamespace(say=said or (lambda text: None), bad_records=bad or (lambda *told: None))
    settings = SimpleNamespace(features=Features(folder=str(shared)), data=SimpleNamespace(public=False))
    run: Any = SimpleNamespace(
        ranks=ranks, stop=stop or Stop(), board=board, contents=lambda phase: {"data": digest},
        config=SimpleNamespace(
            run=SimpleNamespace(precision=precision), micro_batch=micro_batch, phases=[settings],
        ),
    )  # fmt: skip
    phase: Any = SimpleNamespace(
        name="head", number=0, data_spec=lambda augment: spec, index=SimpleNamespace(records=RECORDS),
        settings=settings,
    )  # fmt: skip
    reader = feature_reader(run, phase, model, pictures)  # pyright: ignore[reportArgumentType]
    return reader, pictures, model


def folder_of(shared: Path, model: Any = None) -> FeatureFolder:
    return FeatureFolder.within(shared, identity_of(model or head_only(), *OF), RECORDS, 16)
