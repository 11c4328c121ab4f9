"""How a phase is saved, by recipes and by the library alike: the checkpoint is durable first, then the ledger names it,
then the keys of its steps are forgotten; only then may anything that was computed from its weights be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from murmuration.train.engines.base import Engine
from murmuration.train.storage.checkpoint import Position

if TYPE_CHECKING:
    from murmuration.train.storage.open_run import OpenRun


@dataclass
class Saving:
    run: OpenRun
    phase: int
    engine: Engine
    ranks_per_copy: int
    """Neighbours that hold a copy of the state together; 0: all."""
    header: Callable[[], dict[str, Any]]
    """What a manifest says of the run, on the main rank."""
    list_unusable: Callable[[], None] = lambda: None
    """Lists the unusable records that this rank has met so far, for the owner, who need not wait for the end."""
    require: Callable[[], None] = lambda: None
    """Refuses to save a state that is not whole, on every rank."""
    writing: int | None = None
    """The step whose weights are being written."""
    saved: int = 0
    """The step whose weights were saved last."""

    def begin(self, step: int) -> None:
        """Copies what is to be saved; weights may change as soon as this returns."""
        self.require()
        header = self.run.ranks.on_main(self.header)
        self.run.checkpoints.begin(Position(self.phase, step), self.engine, self.ranks_per_copy, header)
        self.writing = step

    def settle(self, measured: dict[str, float]) -> str:
        """The digest of what was begun, which is durable now. `measured`: with its weights, on public records."""
        step, self.writing = self.writing, None
        assert step is not None, "nothing was begun"
        digest = self.run.checkpoints.settle(
            lambda found: self.run.writer.checkpointed(self.phase, step, found), measured
        )
        self.saved = step
        self.run.forget(step)  # from here on these steps are never made again
        self.list_unusable()
        return digest

    def save(self, step: int) -> str:
        self.begin(step)
        return self.settle({})
