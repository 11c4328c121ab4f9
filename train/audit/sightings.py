"""What the auditor sees: the gradient as it goes to the optimizer, after noise and division, and nothing earlier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from murmuration.train.audit.canaries import Coordinates
from murmuration.train.distributed.ranks import Ranks, by_copy
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.base import AppliedUpdate, Engine, EngineAround
from murmuration.train.noise.update import Update


class Sightings:
    """Per step, the released value at each canary's coordinate, and the sum of squares of all released values."""

    def __init__(self, coordinates: Coordinates) -> None:
        self.coordinates = coordinates
        self.at_canaries: list[np.ndarray] = []
        self.squares: list[float] = []
        self.elements: list[int] = []

    def begin_step(self) -> None:
        self.at_canaries.append(np.zeros(len(self.coordinates.flat)))
        self.squares.append(0.0)
        self.elements.append(0)

    def see(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            released = fragment.of(flat).detach()
            here, offsets = self.coordinates.within(fragment.parameter, fragment.elements)
            self.at_canaries[-1][here] += released[torch.from_numpy(offsets).to(released.device)].double().cpu().numpy()
            self.squares[-1] += float(released.double().square().sum())
            self.elements[-1] += fragment.length

    def values(self, known: Sequence[np.ndarray], divisor: float, ranks: Ranks, ranks_per_copy: int) -> np.ndarray:
        """The released values per step and canary, minus what the real records are `known` to have added on each rank
        in each step."""
        released = sum(by_copy(ranks.gather(np.array(self.at_canaries)), ranks_per_copy)[0])
        return np.asarray(released - sum(ranks.gather(np.array(known))) / divisor)

    def sizes_of_noise(self, ranks: Ranks, ranks_per_copy: int) -> tuple[np.ndarray, np.ndarray]:
        """Per step, the sum of squares of the released values and their number, over the whole model."""
        parts = by_copy(ranks.gather((np.array(self.squares), np.array(self.elements))), ranks_per_copy)[0]
        return np.sum([part[0] for part in parts], axis=0), np.sum([part[1] for part in parts], axis=0)


class WatchedEngine(EngineAround):
    """Shows each finished update to a watcher."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.watcher: Sightings | None = None

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        if self.watcher is None:
            return self.inner.update(update, learning_rate)
        self.watcher.begin_step()
        return self.inner.update(_Watched(update, self.watcher), learning_rate)


class _Watched:
    def __init__(self, inner: Update, sightings: Sightings) -> None:
        self.inner, self.sightings = inner, sightings

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self.inner.finish(flat, fragments)
        self.sightings.see(flat, fragments)
