"""Bytes that one rank holds, by ZeRO stage: what stays, what one micro-batch needs and what the update needs.

The terms are those of this trainer on DeepSpeed 0.19, each found again in the record of allocations of real runs
(tests/end_to_end/test_e2e_planner.py): fp32 weights; in a private phase fp64 totals of all trainable weights on every
rank, whatever the stage; the optimizer's fp32 copy and moments, split over N ranks from stage 1 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from train.config import Phase
from train.optim_settings import Optimizer
from train.planner_cost import RecordCost

GIB = 2**30


@dataclass(frozen=True)
class Weights:
    """Of a phase: how many, how large the largest is, and what its optimizer and its privacy keep for each."""

    trainable: int
    frozen: int
    largest: int
    moments: int
    """Bytes of optimizer state per trainable weight, its copy of the weight apart."""
    private: bool
    optimizer_copy: int = 4
    mixed: bool = False
    """Whether public gradients are mixed in (phase.mixing)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; `host` is main memory."""

    weights: float
    sums: float
    gradients: float
    optimizer: float
    gathered: float
    """What ZeRO-3 brings together while a micro-batch runs."""
    update: float
    """What only the update needs, when no micro-batch is there."""
    host: float
    public: float = 0.0
    """Public gradients that are mixed in, while their micro-batches run: the sum so far, and those of one."""

    @property
    def stays(self) -> float:
        return self.weights + self.sums + self.gradients + self.optimizer

    @property
    def while_computing(self) -> float:
        """What a micro-batch finds beside what stays."""
        return self.gathered + self.public

    def peak(self, micro_batch: int, cost: RecordCost, per_record: float = 0.0) -> float:
        """The larger of the two moments; `per_record` are gradients that an engine for checking keeps."""
        return self.stays + max(self.while_computing + micro_batch * (cost.bytes + per_record), self.update)

    def micro_batch(self, room: float, cost: RecordCost, per_record: float = 0.0) -> int:
        """The largest that fits; 0 if none does."""
        if self.stays + self.update > room:
            return 0
        return max(0, int((room - self.stays - self.while_computing) // (cost.bytes + per_record)))


def weights_of(model: nn.Module, phase: Phase) -> Weights:
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() for p in model.parameters()) - sum(trained)
    private, mixed = phase.privacy is not None, phase.mixing is not None
    return Weights(sum(trained), frozen, max(trained), moment_bytes(phase.optimizer), private, mixed=mixed)


def moment_bytes(optimizer: Optimizer) -> int:
    """Per trainable weight: moments, and the running average if one is kept."""
    params = optimizer.params
    moments = 8 if optimizer.type in ("AdamW", "LAMB") else 4 if params.momentum else 0
    return moments + (4 if params.ema_decay is not None else 0)


def memory(weights: Weights, stage: int, ranks: int, offload: bool) -> Memory:
    n, private = weights.trainable, weights.private
    mixed = 4.0 * n if weights.mixed else 0.0  # on every rank, at every stage
    own = 4 * (n + weights.frozen)
    sums = 8.0 * n if private else 0.0
    state = (weights.optimizer_copy + weights.moments) * n / ranks
    exact = 8 if private else 0  # the exact total in place of the reduced gradient
    if stage == 0:
        update = 8 * n + exact * weights.largest + (4 * n if private else 0) + mixed
        return Memory(own, sums, 4.0 * n, weights.moments * n, 0.0, update, 0.0, 2 * mixed)
    # A private phase hands its gradient over in the update alone; otherwise it adds up over the micro-batches.
    kept = 0.0 if private else 4.0 * n / (1 if stage == 1 else ranks)
    handed = 4.0 * n + (0 if offload else (4 + exact) * n / ranks) + mixed
    host = state + 4.0 * n / ranks + 4.0 * n + 8.0 * weights.largest if offload else 0.0
    if stage < 3:
        return Memory(own, sums, kept, 0.0 if offload else state, 0.0, handed, host, 2 * mixed)
    partition = 8.0 * n / ranks
    optimizer = (0.0 if offload else state) + partition
    return Memory(own / ranks, sums, kept, optimizer, own, handed, host, 2 * mixed)
