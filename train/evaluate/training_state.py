"""The state of a training after each epoch, on the disk whole or not at all, from which a stopped command continues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from murmuration.accounting.durable import atomic
from murmuration.model.weight_files import load_plain
from murmuration.train.evaluate.errors import EvaluationError

STATE = "fine_tune.pt"


@dataclass(frozen=True)
class TrainingState:
    """`identity` covers everything that decides what is trained; the state of another training is refused."""

    path: Path
    identity: str

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """The number of epochs that are done."""
        if not self.path.is_file():
            return 0
        stored = load_plain(self.path)
        if stored["identity"] != self.identity:
            raise EvaluationError(
                f"{self.path} was begun by a command with other settings; repeat that, or name another --out"
            )
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        return int(stored["epoch"])

    def save(self, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with atomic(self.path) as file:
            torch.save({"identity": self.identity, "epoch": epoch, **state}, file)
