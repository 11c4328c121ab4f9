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
    """`journal` exists on the main rank alone: one writer."""

    config: Config
    name: str
    ranks: Ranks
    key: RunKey
    journal: Journal | None
    board: Board
    stop: StopRequest
    checkpoints: Checkpoints
    new_segment: str | None

    @property
    def folder(self) -> RunDir:
        return RunDir(self.checkpoints.folder.parent)

    @property
    def writer(self) -> Journal:
        assert self.journal is not None, "the main rank holds the ledger"
        return self.journal
