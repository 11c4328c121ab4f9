"""How a phase is saved, by recipes and by the library alike: the checkpoint is durable first, then the ledger names it,
then the keys of its steps are forgotten; only then may anything that was computed from its weights be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine
from murmuration.train.storage.checkpoint import Checkpoints, Position

if TYPE_CHECKING:
    from murmuration.train.storage.open_run import OpenRun


@dataclass
class Saving:
    checkpoints: Checkpoints
    ranks: Ranks
    phase: int
    engine: Engine
    ranks_per_copy: int
    """Neighbours that hold a copy of the state together; 0: all."""
    header: Callable[[], dict[str, Any]]
    """What a manifest says of the run, on the main rank."""
    checkpointed: Callable[[int, str], None]
    """Enters a durable checkpoint into the ledger, on the main rank."""
    forget: Callable[[int], None] = lambda done: None
    """Forgets the keys of durable steps, on all ranks together."""
    list_unusable: Callable[[], None] = lambda: None
    """Lists the unusable records that this rank has met so far, for the owner, who need not wait for the end."""
    require: Callable[[], None] = lambda: None
    """Refuses to save a state that is not whole, on every rank."""
    writing: int | None = None
    """The step whose weights are being written."""
    saved: int = 0
    """The step whose weights were saved last."""

    @staticmethod
    def of(
        run: OpenRun, phase: int, engine: Engine, ranks_per_copy: int, header: Callable[[], dict[str, Any]],
        list_unusable: Callable[[], None], require: Callable[[], None] = lambda: None,
    ) -> Saving:  # fmt: skip
        def checkpointed(step: int, digest: str) -> None:
            run.writer.checkpointed(phase, step, digest)

        return Saving(
            run.checkpoints, run.ranks, phase, engine, ranks_per_copy, header, checkpointed, run.forget, list_unusable,
            require,
        )  # fmt: skip

    def begin(self, step: int) -> None:
        """Copies what is to be saved; weights may change as soon as this returns."""
        self.require()
        header = self.ranks.on_main(self.header)
        self.checkpoints.begin(Position(self.phase, step), self.engine, self.ranks_per_copy, header)
        self.writing = step

    def settle(self, measured: dict[str, float]) -> str:
        """The digest of what was begun, which is durable now. `measured`: with its weights, on public records."""
        step, self.writing = self.writing, None
        assert step is not None, "nothing was begun"
        digest = self.checkpoints.settle(lambda found: self.checkpointed(step, found), measured)
        self.saved = step
        self.forget(step)  # from here on these steps are never made again
        self.list_unusable()
        return digest

    def save(self, step: int) -> str:
        self.begin(step)
        return self.settle({})
