"""Whether the micro-batch fits into the memory of the device: found before anything is drawn, and by all ranks."""

from __future__ import annotations

import gc

import torch

from murmuration.accounting.errors import RunError
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine
from murmuration.train.self_test.probes import SyntheticRecords


class RoomError(RunError, RuntimeError):
    """The device has too little memory for what it was asked to hold."""


def require_room(engine: Engine, records: SyntheticRecords, micro_batch: int, ranks: Ranks) -> None:
    """Tries a synthetic micro-batch. If one rank has no room for it, every rank names the largest that fits all."""
    if _fits(engine, records, micro_batch, ranks):
        return
    fitting = micro_batch // 2
    while fitting and not _fits(engine, records, fitting, ranks):
        fitting //= 2
    raise too_large(micro_batch, engine.device, fitting)


def largest_that_fits(engine: Engine, records: SyntheticRecords, most: int, ranks: Ranks) -> int:
    """A power of two, or `most`; of a GPU, half of its memory is left to what a step needs besides."""
    size = most
    while size > 1 and not _fits_into_half(engine, records, size, ranks):
        size = 1 << (size - 1).bit_length() - 1
    return size


def _fits_into_half(engine: Engine, records: SyntheticRecords, size: int, ranks: Ranks) -> bool:
    device = engine.device
    if device.type != "cuda":
        return _fits(engine, records, size, ranks)
    torch.cuda.reset_peak_memory_stats(device)  # that of a larger size, which did not fit, is no concern
    if not _fits(engine, records, size, ranks):
        return False
    most = torch.cuda.max_memory_allocated(device)
    return all(ranks.gather(2 * most <= torch.cuda.get_device_properties(device).total_memory))


def too_large(micro_batch: int, device: torch.device, fitting: int = 0) -> RoomError:
    fix = (
        f"{fitting} fit: lower train_micro_batch_size_per_gpu (PrivateTraining: micro_batch)"
        if fitting
        else 'use a smaller micro-batch, a higher zero_optimization.stage, run.engine = "fsdp2" or a smaller model'
    )
    return RoomError(f"a micro-batch of {micro_batch} records does not fit into {_memory(device)}; {fix}")


def _fits(engine: Engine, records: SyntheticRecords, size: int, ranks: Ranks) -> bool:
    fits = True
    try:
        engine.accumulate(records.batch(size, seed=ranks.rank).to(engine.device))
    except torch.OutOfMemoryError:
        fits = False
    # Only here, where the error and the tensors that its frames hold are gone.
    engine.discard()
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    return all(ranks.gather(fits))


def _memory(device: torch.device) -> str:
    if device.type != "cuda":
        return "memory"
    properties = torch.cuda.get_device_properties(device)
    return f"the {properties.total_memory / 2**30:.0f} GiB of {properties.name}"
