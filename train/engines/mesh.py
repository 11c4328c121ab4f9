"""Ranks in a grid (HSDP): neighbours hold one copy of the weights together, and the same places of all copies hold
equal shards. With a single copy, the grid is one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from murmuration.train.config.section import COLLECTIVE_SECONDS, RecipeError
from murmuration.train.distributed.ranks import Alone, Ranks, by_copy


@dataclass(frozen=True)
class Mesh:
    holders: Ranks
    """Those that hold this rank's copy: rank s of them has shard s."""
    replicas: Ranks
    """Those that hold equal shards, one of each copy."""
    device_mesh: DeviceMesh
    """As FSDP2 wants it: copies × shards, or shards alone."""

    @staticmethod
    def of(ranks: Ranks, shard_over: int | None) -> Mesh:
        """Collective. `shard_over`: the ranks of one copy; None: all."""
        require_whole_copies(ranks.world, shard_over)
        device = ranks.device.type
        if shard_over in (None, ranks.world):
            return Mesh(ranks, Alone(ranks.device), init_device_mesh(device, (ranks.world,)))
        grid = _grid(dist.group.WORLD, ranks.world, shard_over, device)
        copy, place = divmod(ranks.rank, shard_over)
        return Mesh(
            replace(ranks, rank=place, world=shard_over, group=grid.holders),
            replace(ranks, rank=copy, world=ranks.world // shard_over, group=grid.replicas), grid.device_mesh,
        )  # fmt: skip


def require_whole_copies(world: int, shard_over: int | None) -> None:
    if shard_over is not None and world % shard_over:
        raise RecipeError(
            f"run.shard_over = {shard_over}: {world} ranks cannot be divided into copies of {shard_over} ranks each; "
            "set it to a number that divides the ranks, or leave it out to shard over all of them"
        )


class _Grid(NamedTuple):
    holders: dist.ProcessGroup
    replicas: dist.ProcessGroup
    device_mesh: DeviceMesh


@cache
def _grid(everyone: object, world: int, shard_over: int, device: str) -> _Grid:
    """Made once for a process group, `everyone`: phases share it, and nothing is ended, which might hang."""
    del everyone
    rows = [list(row) for row in by_copy(range(world), shard_over)]
    holders, replicas = _own_of(rows), _own_of([list(column) for column in zip(*rows, strict=True)])
    device_mesh = DeviceMesh.from_group(
        [replicas, holders], device, mesh=torch.tensor(rows), mesh_dim_names=("copies", "shards")
    )
    return _Grid(holders, replicas, device_mesh)


def _own_of(groups: list[list[int]]) -> dist.ProcessGroup:
    """The group of these that this rank is in; all ranks make all groups together."""
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    assert isinstance(own, dist.ProcessGroup), "every rank is in one of the groups"
    return own
