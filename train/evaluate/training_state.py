"""The state of a training after each epoch, on the disk whole or not at all, from which a stopped command continues."""

from __future__ import annotations

from pathlib import Path

import torch

from murmuration.accounting.durable import atomic
from murmuration.model.weight_files import load_plain
from murmuration.train.evaluate.errors import EvaluationError

STATE = "fine_tune.pt"


def restored(path: Path, identity: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Epochs that are done."""
    if not path.is_file():
        return 0
    stored = load_plain(path)
    if stored["identity"] != identity:
        raise EvaluationError(f"{path} was begun by a command with other settings; repeat that, or name another --out")
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    return int(stored["epoch"])


def save_state(path: Path, identity: str, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with atomic(path) as file:
        torch.save(
            {"identity": identity, "epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
            file,
        )
