"""Large synthetic sets as tar shards: made by several processes or on a GPU, resumable after a kill.

Each shard appears complete or not at all, beside a note of the request; the folder gets its final name, with its
index, once all shards are there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from murmuration.accounting.durable import atomic, sync
from murmuration.accounting.errors import InputError
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.index_files import read_json
from murmuration.data.synthetic.index import VERSION, Sample, jpeg, shape_sample, shard_path, write_shard
from murmuration.data.synthetic.kinds import PictureKind
from murmuration.data.synthetic.textures import textures

RECEIPT = "prepared.json"
_BATCH = 64  # pictures at a time on a GPU
Part = TypeVar("Part")


@dataclass(frozen=True)
class Request:
    """The set to be made; these numbers decide every byte (on one kind of device)."""

    kind: PictureKind
    records: int
    size: int
    seed: int = 1
    per_shard: int = 1000
    device: str = "cpu"
    generator: int = VERSION

    def __post_init__(self) -> None:
        if self.records < 1 or self.per_shard < 1:
            raise InputError(f"{self.records} records, {self.per_shard} per shard: both must be at least 1")
        if not 8 <= self.size <= 1024:
            raise InputError(f"--size {self.size}: choose 8 to 1024 pixels")
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or not (number.isdigit() or self.device == kind):
            raise InputError(f"--device {self.device}: choose cpu or cuda")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"--device {self.device}: PyTorch finds no GPU here; omit --device")

    @property
    def shards(self) -> int:
        return -(-self.records // self.per_shard)

    def facts(self) -> dict[str, Any]:
        # A CPU and a GPU round slightly differently; models of GPU are not distinguished.
        return asdict(self) | {"device": torch.device(self.device).type}

    def samples(self, shard: int) -> Iterator[Sample]:
        first = shard * self.per_shard
        numbers = range(first, min(first + self.per_shard, self.records))
        if self.kind == "shapes":
            yield from (shape_sample(self.seed, number, self.size, device=self.device) for number in numbers)
            return
        for start in range(0, len(numbers), _BATCH):
            part = numbers[start : start + _BATCH]
            pictures = textures(self.kind, self.seed, part, self.size, self.device).cpu().numpy()
            yield from (Sample(f"{number:08d}", jpeg(pixels)) for number, pixels in zip(part, pictures, strict=True))


def make(request: Request, target: Path, workers: int, progress: Callable[[int, int], None]) -> ShardIndex:
    """Make the set at `target`, or resume making it, and open its index."""
    if target.exists():
        if _note(target) == request.facts():
            return ShardIndex.open(target)
        raise InputError(f"{target}: contains other data; remove it or use another --out")
    partial_folder = target.with_name(f".{target.name}.partial")
    if _note(partial_folder) != request.facts():
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        with atomic(partial_folder / RECEIPT) as file:
            file.write(json.dumps(request.facts(), indent=1).encode() + b"\n")
    missing = [shard for shard in range(request.shards) if not shard_path(partial_folder, shard).exists()]
    progress(request.shards - len(missing), request.shards)
    for done, _ in enumerate(spread(partial(_write, request, partial_folder), missing, workers), start=1):
        progress(request.shards - len(missing) + done, request.shards)
    build(partial_folder)
    partial_folder.rename(target)
    sync(target.parent)
    return ShardIndex.open(target)


def spread(work: Callable[[Part], None], parts: Sequence[Part], workers: int) -> Iterator[None]:
    """Runs `work`, which can be pickled, on all parts in this many processes, and yields as the parts are done."""
    if min(workers, len(parts)) <= 1:
        yield from map(work, parts)
        return
    # One thread each: the processes share the cores already.
    context = get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(parts)), context, torch.set_num_threads, (1,)) as pool:
        try:
            yield from pool.map(work, parts)
        finally:
            pool.shutdown(cancel_futures=True)


def _write(request: Request, folder: Path, shard: int) -> None:
    path = shard_path(folder, shard)
    with atomic(path) as file:
        write_shard(file, request.samples(shard))


def _note(folder: Path) -> dict[str, Any] | None:
    try:
        return read_json(folder / RECEIPT)
    except (OSError, ValueError):
        return None
