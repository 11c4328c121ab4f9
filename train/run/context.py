"""What all phases of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from murmuration.train.config.root import Config
from murmuration.train.distributed.stop import StopRequest
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.board import Board
from murmuration.train.run.early_end import measured_before
from murmuration.train.storage.checkpoint import KeptCheckpoint
from murmuration.train.storage.open_run import OpenRun


@dataclass
class RunContext(OpenRun):
    config: Config
    board: Board
    stop: StopRequest

    def contents(self, phase: ReadyPhase) -> dict[str, str]:
        """On the main rank: digests of the phase's contents."""
        return phase.contents()

    def say(self, text: str) -> None:
        self.board.say(text)

    def measured(self, entry: KeptCheckpoint, phase: str) -> dict[str, float]:
        best = self.config.run.keep_best
        found = measured_before(self.folder.public_log, phase, entry.step, best) if best is not None else {}
        return {best: found[entry.step]} if best is not None and entry.step in found else {}
