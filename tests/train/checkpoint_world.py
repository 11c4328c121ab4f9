"""Engines after a few steps and the checkpoints they leave: what tests of checkpoints stand on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from train_helpers import LocalEngine, private_engine, toy_batch

from train.checkpoint import Checkpoints, Keep, Position
from train.gradient import NoisyUpdate

HEADER = {"run": "toy", "ledger": {"length": 3, "head": "f" * 64}}


def trained(ranks: Any, replicated: bool = False, steps: int = 2) -> LocalEngine:
    engine, _, noise = private_engine(ranks, replicated=replicated)
    for step in range(1, steps + 1):
        engine.accumulate(toy_batch(6, seed=10 * step + ranks.rank))
        engine.update(NoisyUpdate(noise, step), 1e-2)
    return engine


def saved(folder: Path, ranks: Any, step: int = 2, replicated: bool = False, keep: int = 2) -> str:
    engine = trained(ranks, replicated, step)
    return Checkpoints(folder, ranks, Keep(keep)).save(Position(1, step), engine, replicated, HEADER)


def whole_state(engines: list[LocalEngine]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, put together from all ranks."""
    found: dict[str, torch.Tensor] = {}
    for engine in engines:
        for shard in engine.shards():
            for f in shard.fragments:
                for kind, tensor in {"weights": shard.weights.detach(), **shard.state}.items():
                    key = f"{kind} {f.name}"
                    size = engine.parameters[f.name].numel()
                    found.setdefault(key, torch.full((size,), torch.nan))
                    found[key][f.start : f.start + f.length] = f.of(tensor)
    return found
