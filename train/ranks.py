"""The few collective acts that the trainer itself needs, so that every rank takes the same decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Disagreement(RuntimeError):
    """Ranks hold different values where they must hold the same."""


def spoken_for(error: Exception) -> Exception:
    """Marks an error that every rank has: one may speak for all."""
    error.everywhere = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: int) -> int:
        total = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return int(total)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def any(self, value: bool) -> bool:
        return self.sum(int(value)) > 0

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def require_same(self, what: str, value: Any) -> None:
        found = self.gather(value)
        if any(other != found[0] for other in found):
            raise spoken_for(
                Disagreement(f"the ranks disagree about {what}; check that all machines have the same files and code")
            )

    def on_main(self, act: Callable[[], T]) -> T:
        """Runs on rank 0 and gives every rank its result, or its error: nobody is left waiting."""
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise spoken_for(outcome[1])
        return outcome[0]
