"""Chooses the engine that holds the model: `run.engine`. An engine is imported only once it is chosen, so none needs
the libraries of the others."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.config.section import RecipeError

if TYPE_CHECKING:
    from murmuration.train.config.root import Config
    from murmuration.train.distributed.ranks import Ranks
    from murmuration.train.engines.base import Engine
    from murmuration.train.engines.forward import PlainForward, PrivateForward
    from murmuration.train.optim.base import FlatOptimizer


@dataclass(frozen=True)
class EngineSettings:
    name: Literal["deepspeed", "fsdp2", "local"] = "local"
    micro_batch: int = 1
    """Records per rank: DeepSpeed requires it, and sums of sharded models are laid out for it."""
    zero: ZeroOptimization = field(default_factory=ZeroOptimization)
    """Used only by DeepSpeed."""
    shard_over: int | None = None
    """Used only by FSDP2: the ranks of one copy of the weights; None: all."""

    def __post_init__(self) -> None:
        if self.shard_over is not None and (self.name != "fsdp2" or self.shard_over < 2):
            raise RecipeError(
                f'shard_over = {self.shard_over}: it is for engine "fsdp2", and 2 ranks at least hold a copy of the '
                "weights; leave it out"
            )

    @staticmethod
    def of(config: Config) -> EngineSettings:
        return EngineSettings(config.run.engine, config.micro_batch, config.zero_optimization, config.run.shard_over)

    @property
    def ranks_per_copy(self) -> int:
        """How many neighbours hold, noise and update one copy of the model together; 0: all ranks."""
        if self.name == "fsdp2":
            return self.shard_over or 0
        return 1 if self.name == "local" or self.zero.stage == 0 else 0

    def __str__(self) -> str:
        if self.name == "local":
            return "one process (PyTorch)"
        if self.name == "fsdp2":
            copies = "" if self.shard_over is None else f", a copy of the weights on every {self.shard_over} ranks"
            return f"FSDP2 (torch.distributed.fsdp.fully_shard){copies}"
        return f"DeepSpeed, ZeRO-{self.zero.stage}"


def start_ranks(engine: str, shard_over: int | None = None) -> Ranks:
    """Joins the process group that the launcher describes; without a launcher, makes a group of one. `shard_over`: of
    FSDP2, which ranks must be able to do."""
    if engine == "local":
        from murmuration.train.engines import local

        return local.start_ranks()
    if engine == "fsdp2":
        from murmuration.train.engines import fsdp2

        return fsdp2.start_ranks(shard_over)
    from murmuration.train.engines import deepspeed_zero

    return deepspeed_zero.start_ranks()


def make_engine(
    engine: EngineSettings, forward: PrivateForward | PlainForward, optimizer: FlatOptimizer, ranks: Ranks
) -> Engine:
    if engine.name == "local":
        from murmuration.train.engines.local import LocalEngine

        return LocalEngine(forward, optimizer, ranks)
    if engine.name == "fsdp2":
        from murmuration.train.engines.fsdp2 import FSDP2Engine

        return FSDP2Engine(forward, optimizer, engine.micro_batch, ranks, engine.shard_over)
    from murmuration.train.engines.deepspeed_zero import DeepSpeedEngine

    return DeepSpeedEngine(forward, optimizer, engine.zero, engine.micro_batch, ranks)


def require_compiler() -> None:
    """torch.compile writes C++ for a processor, and what launches its kernels for a GPU."""
    named = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    if shutil.which(named) is None:
        raise RecipeError(
            f'run.compile = "blocks" needs a C++ compiler, and {named} is not on the PATH; install it (Debian/Ubuntu: '
            'apt-get install g++), or set run.compile to "off"'
        )
