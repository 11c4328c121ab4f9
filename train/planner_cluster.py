"""The machines that a plan is made for, in numbers that somebody knows of them. Nothing is guessed here."""

from __future__ import annotations

from dataclasses import dataclass

from train.planner_memory import GIB


class PlannerError(ValueError):
    """The plan cannot be made; the message says what is missing."""


@dataclass(frozen=True)
class Cluster:
    gpus: int
    memory_gib: float
    """Of one GPU."""
    tflops: float
    """What one GPU sustains in the products of this precision, in 10¹² operations per second."""
    link_gb_per_s: float
    """What one GPU can send to another, in 10⁹ bytes per second: the slowest link that a ring of all of them uses."""
    noise_per_second: float
    """Normal numbers that one rank's processor draws."""
    free_share: float = 0.1
    """Of the memory, left to the allocator, the libraries and the communication."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise PlannerError(f"--gpus {self.gpus}: a plan needs at least one")
        for name in ("memory_gib", "tflops", "link_gb_per_s", "noise_per_second"):
            value = getattr(self, name)
            if not value > 0:
                raise PlannerError(f"{name.replace('_', ' ')} must be a positive number, but is {value}")
        if not 0 <= self.free_share < 1:
            raise PlannerError(f"the share of memory to leave free must lie in [0, 1), but is {self.free_share}")

    @property
    def usable_bytes(self) -> float:
        return self.memory_gib * GIB * (1 - self.free_share)

    def all_reduce_seconds(self, size: float) -> float:
        """A ring sends every byte nearly twice."""
        return 2 * self._passed(size)

    def gather_seconds(self, size: float) -> float:
        """All-gather or reduce-scatter of `size` bytes in all."""
        return self._passed(size)

    def _passed(self, size: float) -> float:
        return size * (self.gpus - 1) / self.gpus / (self.link_gb_per_s * 1e9)
