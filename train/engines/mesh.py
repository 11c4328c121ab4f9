"""Ranks in a grid (HSDP): neighbours hold one copy of the weights together, and the same places of all copies hold
equal shards. With a single copy, the grid is one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

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
        rows = by_copy(range(ranks.world), shard_over)
        columns = [list(column) for column in zip(*rows, strict=True)]
        holders, replicas = _own_of([list(row) for row in rows]), _own_of(columns)
        copy, place = divmod(ranks.rank, shard_over)
        return Mesh(
            replace(ranks, rank=place, world=shard_over, group=holders),
            replace(ranks, rank=copy, world=len(rows), group=replicas),
            DeviceMesh.from_group(
                [replicas, holders], device, mesh=torch.tensor([list(row) for row in rows]),
                mesh_dim_names=("copies", "shards"),
            ),
        )  # fmt: skip

    def close(self) -> None:
        """Ends the connections that were made for the grid."""
        for ranks in (self.holders, self.replicas):
            if ranks.group is not None:
                dist.destroy_process_group(ranks.group)


def require_whole_copies(world: int, shard_over: int | None) -> None:
    if shard_over is not None and world % shard_over:
        raise RecipeError(
            f"run.shard_over = {shard_over}: {world} ranks cannot be divided into copies of {shard_over} ranks each; "
            "set it to a number that divides the ranks, or leave it out to shard over all of them"
        )


def _own_of(groups: list[list[int]]) -> dist.ProcessGroup:
    """The group of these that this rank is in; all ranks make all groups together."""
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    assert isinstance(own, dist.ProcessGroup), "every rank is in one of the groups"
    return own
