"""Which engine shards the model: `run.engine`. An engine is imported once it is chosen, so none needs the others'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.config import Config

if TYPE_CHECKING:
    from train.engine import ShardedEngine
    from train.forward import PlainForward, PrivateForward
    from train.optim_flat import FlatOptimizer
    from train.ranks import Ranks


def start_ranks(config: Config) -> Ranks:
    """Joins the process group that the launcher describes; alone, without one, a group of one is made."""
    if config.run.engine == "fsdp2":
        from train import engine_fsdp2

        return engine_fsdp2.start_ranks()
    from train import engine_deepspeed

    return engine_deepspeed.start_ranks()


def make_engine(
    config: Config, forward: PrivateForward | PlainForward, optimizer: FlatOptimizer, ranks: Ranks
) -> ShardedEngine:
    if config.run.engine == "fsdp2":
        from train.engine_fsdp2 import FSDP2Engine

        return FSDP2Engine(forward, optimizer, ranks)
    from train.engine_deepspeed import DeepSpeedEngine

    micro_batch = config.train_micro_batch_size_per_gpu
    return DeepSpeedEngine(forward, optimizer, config.zero_optimization, micro_batch, ranks)


def replicated(config: Config) -> bool:
    """Whether every rank holds, noises and updates the whole model."""
    return config.run.engine == "deepspeed" and config.zero_optimization.stage == 0


def describe_engine(config: Config) -> str:
    """For people."""
    if config.run.engine == "fsdp2":
        return "FSDP2 (torch.distributed.fsdp.fully_shard)"
    return f"DeepSpeed, ZeRO-{config.zero_optimization.stage}"
