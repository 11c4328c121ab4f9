"""Augmented pictures for fine-tuning: random crops, RandAug and erasing, mixed in pairs by mix-up and cut-mix, all by
timm.

timm draws from three global generators. They are seeded for each (seed, epoch, record) and for each mixed batch, so
that what a record looks like depends neither on the processes that read it nor on where an earlier start was stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.mixup import Mixup
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from murmuration.data.batch.reader import DataSpec
from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source
from murmuration.data.decode.augment import drop_key
from murmuration.data.decode.decode import BadRecord, decode, picture_in
from murmuration.data.decode.fields import numbers_of
from murmuration.data.store.place import RecordIndex
from murmuration.evaluation.measures.fine_tuning import FineTuneSettings
from murmuration.evaluation.protocols.shared_training import own_part
from murmuration.evaluation.session.sharing import Sharing

KEY = b"drops of a fine-tuned model"
"""Public, like the records."""


class AugmentedPictures(Dataset[Any]):
    """Item (epoch, record): its picture, its class and its key for dropped paths; None for a bad record."""

    def __init__(self, index: RecordIndex, spec: DataSpec, settings: FineTuneSettings) -> None:
        self.index, self.spec, self.seed = index, spec, settings.seed
        self._reader: ShardReader | None = None
        self._change: Any = create_transform(
            spec.image_size, is_training=True, color_jitter=0.0, auto_augment=settings.rand_augment or None,
            interpolation="bicubic", re_prob=settings.erase, re_mode="pixel", mean=spec.mean, std=spec.std,
        )  # fmt: skip

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int, int] | None:
        epoch, record = item
        if self.index.left_out(record):
            return None
        if self._reader is None:  # made in the process that reads
            self._reader = ShardReader(self.index, open_source(self.index, ReadOptions()))
        spec = self.spec
        try:
            members = self._reader.read(record)
            (label,), _ = numbers_of(members, spec.labels, spec.target, spec.classes, None, spec.class_list)
            pixels = Image.fromarray(decode(picture_in(members) or b""))
        except BadRecord:
            return None
        seed_all([self.seed, epoch, record])
        return self._change(pixels), label, drop_key(KEY, epoch, record)


def seed_all(told: Sequence[int]) -> None:
    """The generators that timm draws from."""
    words = np.random.SeedSequence(list(told)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def mixed_batches(
    pictures: AugmentedPictures, settings: FineTuneSettings, ids: np.ndarray, epoch: int, workers: int,
    sharing: Sharing,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Pictures, the shares of their classes, and drop keys: this rank's part of each whole batch of an epoch. Picture i
    is mixed with the i-th from the end, so ranks take pairs of these; a pair with a bad record is left out."""
    batch = settings.batch_of(len(ids))
    order = ids[settings.order(len(ids), epoch)]
    whole = range(0, len(order) - batch + 1, batch)
    own = own_part(list(range(batch // 2)), sharing)
    places = np.array([*own, *(batch - 1 - place for place in reversed(own))], dtype=np.int64)
    rows = [[(epoch, int(record)) for record in order[at : at + batch][places]] for at in whole]
    mixing = settings.mixup > 0 or settings.cutmix > 0
    mix = Mixup(
        settings.mixup, settings.cutmix, prob=1.0 if mixing else 0.0, label_smoothing=settings.smoothing,
        num_classes=pictures.spec.classes,
    )  # fmt: skip
    loader: Any = DataLoader(pictures, batch_sampler=rows, collate_fn=_readable, num_workers=workers)  # pyright: ignore[reportArgumentType]
    for number, (images, labels, keys) in enumerate(loader):
        seed_all([settings.seed, epoch, number, 1])
        mixed, shares = mix(images, labels) if len(images) else (images, labels)
        yield mixed, shares, keys


def _readable(items: list[tuple[Tensor, int, int] | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Without the pairs that have a bad record."""
    there = [item for item, mate in zip(items, reversed(items), strict=True) if item is not None and mate is not None]
    if not there:
        return torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    images, labels, keys = zip(*there, strict=True)
    return torch.stack(images), torch.tensor(labels), torch.tensor(keys, dtype=torch.int64)
