"""How the processes that a launcher started share an evaluation: each computes micro-batches of its own, and when all
records are done, rank 0 alone continues with the result, while the others leave.

Ranks meet in exchanges of one kind only. So whatever a rank is about when it fails, the others learn of it when they
come to their next one, and all end with its sentence; and nobody waits for a rank that has left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from murmuration.accounting.errors import RunError
from murmuration.data.progress import Progress
from murmuration.train.distributed.cores import own_cores
from murmuration.train.distributed.process import describe_process, quiet_libraries
from murmuration.train.distributed.ranks import APART, Alone, Ranks, results_of_all
from murmuration.train.distributed.rendezvous import init_method

T = TypeVar("T")
CPU = torch.device("cpu")
BETWEEN = 8
"""Micro-batches that a rank computes between two exchanges."""
ENDING = (RunError, OSError)
"""Errors that end all ranks with one sentence; others are mistakes and end one with a traceback, and so the job."""


class PartDone(Exception):
    """This process did its part, and rank 0 continues alone."""


@dataclass
class Sharing:
    ranks: Ranks = field(default_factory=lambda: Alone(CPU))
    left: bool = False
    """The others have: nothing may be exchanged any more."""
    gradients: Any = None
    """The group in which gradients are added up."""

    @property
    def main(self) -> bool:
        return self.ranks.main

    def workers(self) -> int:
        """Decoding processes for this rank: one per core that it may use, but one. Called on all ranks together."""
        return max(0, own_cores(self.ranks) - 1)

    def mine(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[self.ranks.rank :: self.ranks.world]

    def together(self, act: Callable[[], T]) -> T:
        """Each rank's own result, once all have theirs; an error on one of them is raised on all."""
        kept: list[T] = []
        results_of_all(self.ranks, lambda: kept.append(act()), *ENDING)
        return kept[0]

    def open_gradients(self, device: torch.device) -> None:
        """By NCCL on GPUs, whose gradients need not pass the hosts."""
        if self.gradients is None:
            self.gradients = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")

    def of_all(self, act: Callable[[], T]) -> list[T]:
        """The results of all ranks, in their order."""
        return results_of_all(self.ranks, act, *ENDING)

    def on_main(self, act: Callable[[], T]) -> T:
        """Rank 0's result, on all ranks."""
        found: list[Any] = results_of_all(self.ranks, lambda: act() if self.main else None, *ENDING)
        return found[0]

    def main_first(self, act: Callable[[], T]) -> T:
        """Each rank's own result; the others begin when rank 0 is done, and find what it left on the disk."""
        kept: list[T] = []
        for turn in (True, False):
            self.together(lambda turn=turn: kept.append(act()) if self.main is turn else None)
        return kept[0]

    def share(self, all_parts: int, own: Iterator[T], act: Callable[[T], object]) -> None:
        """`act` on each of this rank's parts. `all_parts`: of all ranks, which have taken theirs by `mine`."""
        at_once = BETWEEN * self.ranks.world
        for _ in range(0, all_parts, at_once):
            self.together(lambda: [act(part) for part in islice(own, BETWEEN)])
        next(own, None)  # nothing is left; a reader that is asked ends its progress

    def progress(self, what: str, unit: str, before: int, total: int) -> Callable[[int, int], None]:
        """Told of rank 0's own share, shows that of all, which are equally far. Other ranks show nothing."""
        shown = Progress(what, unit)

        def tell(done: int, _: int) -> None:
            if self.main:
                shown(min(total, before + done * self.ranks.world), total)

        return tell

    def steps(self, what: str, total: int) -> Callable[[int], None]:
        """Told of steps that all ranks make together, shows them on rank 0."""
        shown = Progress(what, "steps")

        def tell(done: int) -> None:
            if self.main:
                shown(done, total)

        return tell

    def rest_on_main(self) -> None:
        """Call this where nothing is left to share: only rank 0 returns."""
        self.together(lambda: None)
        self.left = True
        if not self.main:
            raise PartDone

    def fail(self, error: Exception) -> NoReturn:
        """Lets all ranks end with an error that this one met."""
        if not self.left and not getattr(error, "everywhere", False):

            def act() -> None:
                raise error

            self.together(act)
        raise error


def started() -> tuple[Sharing, torch.device]:
    """Joins the ranks that a launcher started, and gives this one its device."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Sharing(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    quiet_libraries()
    device = describe_process()
    # A rank may wait for one that reads a slow disk; one that dies closes its connections at once.
    dist.init_process_group("gloo", init_method(), APART)
    return Sharing(Ranks(dist.get_rank(), dist.get_world_size(), CPU)), device
