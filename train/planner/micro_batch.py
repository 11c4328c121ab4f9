"""Answers `"train_micro_batch_size_per_gpu": "auto"`: the most rows that fit, by the planner's count of memory.

It is found once, by all ranks together, and kept (`storage/micro_batch_file.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from murmuration.train.config.root import Config, Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.cores import groups_of
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.planner.memory import GIB, memory_of
from murmuration.train.planner.rows import Batch
from murmuration.train.recipe.open_data import known_records
from murmuration.train.storage.micro_batch_file import KEY, found_once, kept

SHARE_OF_MAIN_MEMORY = 0.5
"""The rest is for the processes that decode, and for the system's cache of the shards."""


def settled(config: Config, run_dir: Path, ranks: Ranks) -> Config:
    """The config with a number, the same on all ranks: the run's own, or else what fits on the rank with least room."""
    if config.train_micro_batch_size_per_gpu != "auto":
        return config
    room = min(ranks.gather(_room()))
    gpus = all(ranks.gather(ranks.device.type == "cuda"))

    found, known = found_once(run_dir, ranks, lambda: ranks.on_main(lambda: largest(config, ranks.world, room, gpus)))
    if ranks.main:
        why = "as the run began" if known else f"as {room / GIB:.1f} GiB a rank allow"
        print(f"{KEY}: {found} rows ({why})", flush=True)
    return _with(config, found)


def on_this_machine(config: Config, run_dir: Path) -> Config:
    """The same for commands that begin no run, by what a launcher says of the ranks and by this machine's memory."""
    if config.train_micro_batch_size_per_gpu != "auto":
        return config
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return _with(config, kept(run_dir) or largest(config, world, _room(), torch.cuda.is_available()))


def largest(config: Config, world: int, room: float, gpus: bool) -> int:
    """On GPUs, the smallest micro-batch that needs no more rows than the largest that fits into `room` bytes in every
    phase; on processors, the one that takes the least time."""
    phases = [phase for phase in config.phases if phase.trains]
    if not phases:
        return 1
    found = [_fitting(config, phase, world, room) for phase in phases]
    fits = [fitting for fitting, _, _ in found]
    if not all(fits):
        least = phases[fits.index(0)].name
        raise RecipeError(
            f'{KEY} = "auto": phase {least!r} has no room for one record in the {room / GIB:.1f} GiB of a rank; use a '
            "higher zero_optimization.stage, more ranks or a smaller model"
        )
    # Of several phases, the last is the private one of every recipe.
    batch, (_, _, trained) = _drawn(phases[-1], f"phases.{config.phases.index(phases[-1])}"), found[-1]
    if gpus:
        return batch.even(world, min(fits))
    return batch.on_processors(world, max(record for _, record, _ in found), trained, min(fits))


def _fitting(config: Config, phase: Phase, world: int, room: float) -> tuple[int, float, int]:
    """How many records fit, the bytes of one, and the number of trained weights."""
    from murmuration.train.planner.forecast import counted  # its counter imports Triton; most configs give a number

    cost, weights = counted(config, phase)
    need = memory_of(config, weights, world)
    checking = phase.privacy is not None and config.run.clip_engine != "book-keeping"
    each = 4.0 * weights.trainable if checking else 0.0
    return need.micro_batch(room, cost, each), cost.kept_bytes + each, weights.trainable


def _drawn(phase: Phase, where: str) -> Batch:
    if phase.privacy is None:
        return Batch(float(phase.batch or 1))
    mean = phase.privacy.expected_batch
    if math.isinf(mean):  # the whole data set each time, or more than fits into any micro-batch
        with contextlib.suppress(RecipeError):  # the data are not at hand
            return Batch(float(known_records(phase, where)[0]), public=False)
        mean = float(2**32)
    return Batch(mean, math.sqrt(mean), public=False)  # the spread at a small q, and more than that at a large one


def _room() -> float:
    """Bytes that this rank may plan with. Only what stays the same from start to start is asked."""
    from murmuration.train.planner.cluster import FREE_SHARE

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory * (1 - FREE_SHARE)
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
    return min(main_memory()) * SHARE_OF_MAIN_MEMORY / here


def main_memory(root: Path = Path("/")) -> Sequence[float]:
    """Bytes of the machine's memory, and the limits of this process's control group and of those around it."""
    found = [float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")]
    for folder in groups_of("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
            with contextlib.suppress(OSError):  # another's hierarchy may have only one of them, or be closed to us
                if (text := (folder / name).read_text().strip()).isdecimal():
                    found.append(float(text))
    return found


def _with(config: Config, rows: int) -> Config:
    return config.model_copy(update={KEY: rows})
