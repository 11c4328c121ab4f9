"""What ends a phase before its last step: a public loss that no longer falls, or a person.

Both look at public values alone, and both are choices: the ledger shows that planned steps were not made, and the
planned budget is claimed. The rule is a function of what was measured at which step, so a resumed run reads the
measurements from the public log and decides as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from murmuration.train.config.phase import Plateau
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.storage.run_dir import RunDir, measurements

METRIC = "public_loss"


@dataclass
class PlateauRule:
    settings: Plateau
    measured: dict[int, float] = field(default_factory=dict)

    def reason(self) -> str | None:
        """None before step `not_before`, and as long as one of the last `patience` checkpoints was better than all
        checkpoints before it by more than `min_delta`."""
        best, waited = float("inf"), 0
        for step in sorted(self.measured):
            if self.measured[step] < best - self.settings.min_delta:
                best, waited = self.measured[step], 0
            else:
                waited += 1
        last = max(self.measured, default=0)
        if waited < self.settings.patience or last < self.settings.not_before:
            return None
        return f"the public loss has not fallen below {best:.4g} at {waited} checkpoints in a row"


@dataclass
class Ending:
    """Why a phase should end now; equal on all ranks."""

    name: str
    file: Path
    ranks: Ranks
    plateau: PlateauRule | None

    @staticmethod
    def of(phase: ReadyPhase, folder: RunDir, ranks: Ranks, done: int) -> Ending:
        plateau = None
        if phase.settings.plateau is not None:
            known = ranks.on_main(lambda: measured_before(folder.public_log, phase.name, done))
            plateau = PlateauRule(phase.settings.plateau, known)
        return Ending(phase.name, folder.end_file, ranks, plateau)

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the measurements of a durable checkpoint."""
        if self.plateau is not None and METRIC in values:
            self.plateau.measured[step] = values[METRIC]

    def reason(self) -> str | None:
        """Called between steps, by all ranks."""
        if self.ranks.on_main(lambda: asked_for(self.file, self.name)):
            return f"{self.file.name} names it"
        return self.plateau.reason() if self.plateau is not None else None


def asked_for(file: Path, name: str) -> bool:
    """Whether the file names the phase (one name per line). The file stays, so that a resumed run does not begin the
    phase again."""
    try:
        return name in file.read_text(errors="replace").split()
    except OSError:
        return False


def measured_before(log: Path, name: str, done: int, metric: str = METRIC) -> dict[int, float]:
    """The phase's measurements up to step `done` in the public log; where a step was measured twice, the last one."""
    ours = (entry for entry in measurements(log) if entry.phase == name and metric in entry.values)
    return {entry.step: entry.values[metric] for entry in ours if entry.step <= done}
