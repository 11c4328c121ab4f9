"""The machines that a plan is made for, in numbers that the user gives or measures. Nothing is guessed here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from murmuration.accounting.errors import RunError
from murmuration.train.engines.sharded_sums import micro_batches_per_window
from murmuration.train.planner.cost import RecordCost
from murmuration.train.planner.memory import GIB, WeightCounts
from murmuration.train.planner.rows import Batch


class PlannerError(RunError, ValueError):
    """The plan cannot be made; the message says what is missing."""


FREE_SHARE = 0.1


@dataclass(frozen=True)
class Cluster:
    gpus: int
    memory_gib: float
    """Memory of one GPU."""
    tflops: float
    """What one GPU sustains in matrix products at the config's precision, in 10¹² operations per second."""
    link_gb_per_s: float
    """What one GPU can send to another, in 10⁹ bytes per second: the slowest link that a ring of all of them uses."""
    noise_per_second: float
    """Normal numbers that one rank's processor draws per second."""
    free_share: float = FREE_SHARE
    """Share of the memory that is left to the allocator, the libraries and the communication."""
    node_link_gb_per_s: float | None = None
    """The same as `link_gb_per_s` among the ranks that hold one copy of the weights (HSDP); None: no faster."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise PlannerError(f"--gpus {self.gpus}: a plan needs at least one")
        for name in ("memory_gib", "tflops", "link_gb_per_s", "noise_per_second", "node_link_gb_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
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


# Seconds of one logical step: arithmetic of the expected rows, exchange over the links, noise of a rank's share.

# ZeRO-3 gathers all weights for the forward pass and again for the backward pass of every micro-batch. Twice that is
# counted, since the clip engine's taps may gather them as well (tests/end_to_end/test_e2e_planner.py).
GATHERS_PER_MICRO_BATCH = 4
PASSES_OF_A_PROBE = 3
"""Forward passes over a step's records where the loss is probed."""


@dataclass(frozen=True)
class StepTime:
    compute: float
    exchange: float
    noise: float
    """Drawn on the processor while the micro-batches compute: only the time beyond that is waited for."""
    rows: float
    """Micro-batches of each rank, on average over the steps; public records that are mixed in have their own."""
    public: float = 0.0
    """The part of `compute` spent on public records that are mixed in."""

    @property
    def seconds(self) -> float:
        return self.compute + self.exchange + max(0.0, self.noise - self.compute)


def step_time(
    cost: RecordCost, weights: WeightCounts, cluster: Cluster, batch: Batch, micro_batch: int, stage: int,
    records_per_second: float | None = None, mixed: int = 0, ranks_per_copy: int = 0,
) -> StepTime:  # fmt: skip
    """`ranks_per_copy`: FSDP2, and over how many ranks it shards a copy of the weights; 0: DeepSpeed at this stage.

    `records_per_second` of one GPU, where it was measured, replaces the counted arithmetic.

    `mixed` is the fixed number of public records beside the batch; they cost no clipping, and have a mean gradient of
    their own that is summed over the ranks in fp32.
    """
    rows = batch.rows(cluster.gpus, micro_batch)
    flops = cost.private_flops if weights.private else cost.step_flops
    probes = PASSES_OF_A_PROBE * cost.forward_flops / weights.probed / flops if weights.probed else 0.0
    rate = records_per_second or cluster.tflops * 1e12 / flops
    public = 0.0
    if mixed:
        public = Batch(mixed).slots(cluster.gpus, micro_batch) / rate * cost.step_flops / flops
    compute = batch.slots(cluster.gpus, micro_batch) / rate * (1 + probes) + public
    if ranks_per_copy:
        exchange = _fsdp2_exchange(weights, cluster, rows, micro_batch, ranks_per_copy)
    else:
        n, whole = weights.trainable, 4.0 * (weights.trainable + weights.frozen)
        exchange = _summing(weights, cluster, rows, micro_batch, stage) if weights.private else 0.0
        exchange += cluster.all_reduce_seconds(4.0 * n) if mixed else 0.0
        if stage < 3:
            exchange += 0.0 if weights.private else cluster.all_reduce_seconds(4.0 * n)
            exchange += cluster.gather_seconds(4.0 * n) if stage else 0.0
        else:
            exchange += cluster.gather_seconds(4.0 * n)
            exchange += rows * GATHERS_PER_MICRO_BATCH * cluster.gather_seconds(whole)
    shards = ranks_per_copy or (cluster.gpus if stage else 1)
    noise = math.ceil(weights.trainable / shards) / cluster.noise_per_second if weights.private else 0.0
    return StepTime(compute, exchange, noise, rows, public)


def _fsdp2_exchange(
    weights: WeightCounts, cluster: Cluster, rows: float, micro_batch: int, ranks_per_copy: int
) -> float:
    """Weights are gathered and windows sent among the ranks of a copy; equal shards are added up over the copies: in a
    private phase once per step, in fp64, otherwise in every micro-batch, in fp32."""
    n, whole = weights.trainable, 4.0 * (weights.trainable + weights.frozen)
    # The ranks that hold one copy of the weights, and those that hold the same part of each.
    link = cluster.link_gb_per_s
    if ranks_per_copy != cluster.gpus:
        link = cluster.node_link_gb_per_s or link
    inside = replace(cluster, gpus=ranks_per_copy, link_gb_per_s=link)
    across = replace(cluster, gpus=cluster.gpus // ranks_per_copy)
    exchange = rows * GATHERS_PER_MICRO_BATCH * inside.gather_seconds(whole)
    if weights.private:
        exchange += _windows(weights, inside, rows, micro_batch)
        return exchange + across.all_reduce_seconds(8.0 * n / ranks_per_copy)
    return exchange + rows * (inside.gather_seconds(4.0 * n) + across.all_reduce_seconds(4.0 * n / ranks_per_copy))


def _summing(weights: WeightCounts, cluster: Cluster, rows: float, micro_batch: int, stage: int) -> float:
    """The fp64 totals go to the shards once, at stage 0 to all ranks; at stage 3, every window goes to the shards. Not
    counted: the gradient that DeepSpeed reduces as evidence, whole in the self-test and then a module in turn."""
    if stage == 0:
        return cluster.all_reduce_seconds(8.0 * weights.trainable)
    if stage < 3:
        return cluster.gather_seconds(8.0 * weights.trainable)
    return _windows(weights, cluster, rows, micro_batch)


def _windows(weights: WeightCounts, cluster: Cluster, rows: float, micro_batch: int) -> float:
    most = micro_batches_per_window(micro_batch)
    if most is None:  # one window, in fp64
        return cluster.gather_seconds(8.0 * weights.trainable)
    return math.ceil(rows / most) * cluster.gather_seconds(4.0 * weights.trainable)
