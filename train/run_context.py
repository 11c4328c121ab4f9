"""What all phases of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from accounting.journal import Journal
from accounting.keys import RunKey
from train.board import Board
from train.checkpoint import Checkpoints
from train.config import Config
from train.ranks import Ranks
from train.run_dir import RunDir
from train.stop import StopRequest


@dataclass
class RunContext:
    """`journal` exists on the main rank alone: one writer. `secret` is None of a finished run."""

    config: Config
    name: str
    ranks: Ranks
    secret: RunKey | None
    journal: Journal | None
    board: Board
    stop: StopRequest
    folder: RunDir
    checkpoints: Checkpoints
    new_segment: str | None

    @property
    def key(self) -> RunKey:
        assert self.secret is not None, "nothing is drawn for a finished run"
        return self.secret

    @property
    def writer(self) -> Journal:
        assert self.journal is not None, "the main rank holds the ledger"
        return self.journal
