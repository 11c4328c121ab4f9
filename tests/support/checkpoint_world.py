"""Engines after a few steps and the checkpoints they leave: what tests of checkpoints stand on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Position
from tests.support.train_helpers import LocalEngine, alone, private_engine, toy_batch

HEADER = {"run": "toy", "ledger": {"length": 3, "head": "f" * 64}}


def trained(ranks: Any, replicated: bool = False, steps: int = 2) -> LocalEngine:
    engine, _, noise = private_engine(ranks, replicated=replicated)
    for step in range(1, steps + 1):
        engine.accumulate(toy_batch(6, seed=10 * step + ranks.rank))
        engine.update(NoisyUpdate(noise, step), 1e-2)
    return engine


def saved(folder: Path, ranks: Any, step: int = 2, replicated: bool = False, keep: int = 2) -> str:
    engine = trained(ranks, replicated, step)
    return Checkpoints(folder, ranks, Keep(keep)).save(Position(1, step), engine, engine.ranks_per_copy, HEADER)


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


def stored(checkpoints: Checkpoints, engine: LocalEngine) -> tuple[int, torch.Tensor]:
    """Step and weights of what the pointer names."""
    loaded = checkpoints.latest()
    assert loaded is not None
    parts = [loaded.read("weights", name, 0, p.numel()) for name, p in engine.parameters.items()]
    return loaded.position.step, torch.cat(parts)


def save(folder: Path, engine: LocalEngine, step: int, keep: Keep | None = None, **public: float) -> None:
    checkpoints = Checkpoints(folder, alone(), keep or Keep(9))
    checkpoints.begin(Position(0, step), engine, 0, HEADER)
    checkpoints.settle(lambda digest: None, public)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    else:
        path.unlink()
