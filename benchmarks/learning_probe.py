"""Linear probes of the learning benchmark: with all labels, and with a few of each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from linear_probe import fit, pooled_tokens
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.synthetic.shapes import COLOURS, SHAPES
from murmuration.model.encoder import Encoder

CLASSES = {"label": len(COLOURS) * len(SHAPES), "colour": len(COLOURS), "shape": len(SHAPES)}
CHANCE = {f"{name}{labels}": 1 / count for labels in ("", "_few") for name, count in CLASSES.items()}
"""Chance accuracy by reported name, for a probe fitted to all records for fitting and for one fitted to a few."""
SHOTS, DRAWS, FEW_PENALTY = 5, 10, 1e-2
"""For the probe with few labels: labels per class, number of draws, penalty."""


class Judge:
    """Probes on public labelled pictures. Learning rates are chosen by other pictures than those that are tested."""

    def __init__(self, held_out: Path, side: int, counts: tuple[int, int, int]) -> None:
        """`counts`: numbers of records for fitting probes, for choosing learning rates, and for testing."""
        fitted, chosen_on, tested = counts
        spec = DataSpec(image_size=side, augment="center", labels=tuple(CLASSES))
        batch = BatchReader(ShardIndex.open(held_out), spec).read(np.arange(sum(counts)), 0)
        assert bool(batch.present.all())
        self.images, self.labels = batch.inputs["images"], {name: batch.inputs[name] for name in CLASSES}
        self.fitted = fitted
        self.chosen_on, self.tested = (
            slice(fitted, fitted + chosen_on),
            slice(fitted + chosen_on, fitted + chosen_on + tested),
        )

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        features = pooled_tokens(encoder, self.images)
        return self._judged(features, self.tested)

    def tuning(self, encoder: Encoder) -> dict[str, float]:
        return self._judged(pooled_tokens(encoder, self.images), self.chosen_on)

    def _judged(self, features: Tensor, judged: slice) -> dict[str, float]:
        found = {f"{name}_few": self._few(features, name, judged) for name in CLASSES}
        for name, classes in CLASSES.items():
            labels = self.labels[name]
            probe = fit(features[: self.fitted], labels[: self.fitted], classes)
            found[name] = probe.accuracy(features[judged], labels[judged])
        return found

    def _few(self, features: Tensor, name: str, judged: slice) -> float:
        """Mean accuracy over draws that are the same for every encoder."""
        labels, found = self.labels[name], []
        for draw in range(DRAWS):
            order = torch.randperm(self.fitted, generator=torch.Generator().manual_seed(draw))
            shown = torch.cat([order[labels[order] == each][:SHOTS] for each in range(CLASSES[name])])
            probe = fit(features[shown], labels[shown], CLASSES[name], FEW_PENALTY)
            found.append(probe.accuracy(features[judged], labels[judged]))
        return sum(found) / DRAWS
