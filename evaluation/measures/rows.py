"""Features as the probes read them: a part at a time, because those of a large set do not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_VALUES = 1 << 25
"""Numbers read at once: 128 MiB in single precision."""


@dataclass(frozen=True)
class Rows:
    """Rows `ids` of an array, which may be a mapped file, each with its label."""

    features: np.ndarray
    labels: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def take(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Features and labels of some of the rows. They are read in the order of the file, which is much faster."""
        ids = np.sort(self.ids[places])
        # A list of rows is a copy already; a second one would double what a batch takes.
        return torch.from_numpy(np.asarray(self.features[ids])), torch.from_numpy(np.asarray(self.labels[ids]))

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows in order, a bounded number at a time."""
        size = max(1, CHUNK_VALUES // self.width)
        for start in range(0, len(self), size):
            yield self.take(np.arange(start, min(start + size, len(self))))
