"""Bytes that one rank holds, by ZeRO stage or with FSDP2: what stays, what a micro-batch and what the update need.

The terms are those of this trainer on DeepSpeed 0.19 and FSDP2, each confirmed by what real runs allocate
(tests/end_to_end/test_e2e_planner.py): fp32 weights; in a private phase fp64 totals of all trainable weights on every
rank, or where the model is sharded an fp32 window of them all and the fp64 totals of a shard; the optimizer's fp32 copy
and moments, split over N ranks from stage 1 on. FSDP2 needs no such copy, and with `run.shard_over` N are the ranks of
one copy of the weights. A micro-batch that is recorded as a CUDA graph (`run.cuda_graph`) keeps its memory; before it
is used, it is compared with one that is computed as usual, in sums that were copied twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from murmuration.train.config.optimizer import Optimizer
from murmuration.train.config.root import Config, Phase
from murmuration.train.engines.exchange import RUNS, SHORTEST_RUN, WEIGHED_AT_ONCE
from murmuration.train.engines.sharded_sums import MOST_SLOTS

if TYPE_CHECKING:  # it brings PyTorch's compiler along, which a dry run does without
    from murmuration.train.planner.cost import RecordCost

GIB = 2**30
EXCHANGED_AT_ONCE = 4.0 * 500_000_000
"""Bytes that DeepSpeed sums over the ranks at once at stage 0."""


@dataclass(frozen=True)
class WeightCounts:
    """A phase's weights: their number, the size of the largest, and what the optimizer and privacy keep for each."""

    trainable: int
    frozen: int
    largest: int
    moments: int
    """Bytes of optimizer state per trainable weight, without its copy of the weight."""
    private: bool
    optimizer_copy: int = 4
    mixed: bool = False
    """Whether public gradients are mixed in (phase.mixing)."""
    probed: int = 0
    """Every so many steps the loss is probed at other weights (privacy.loss_probes); 0: never."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; `host` is main memory."""

    weights: float
    sums: float
    gradients: float
    optimizer: float
    gathered: float
    """What ZeRO-3 gathers while a micro-batch runs."""
    update: float
    """What only the update needs, when no micro-batch is in memory."""
    beside: float = 0.0
    """What is held beside the private micro-batches: public gradients that are mixed in (the sum so far, and those of
    one), and the weights at which the loss is probed."""
    host: float = 0.0
    host_update: float = 0.0
    """What only the update needs in main memory."""
    wide: float = 0.0
    """What windows in fp64 need more, for micro-batches of more than MOST_SLOTS."""

    @property
    def stays(self) -> float:
        return self.weights + self.sums + self.gradients + self.optimizer

    @property
    def while_computing(self) -> float:
        """What is held during a micro-batch, in addition to what stays."""
        return self.gathered + self.beside

    def peak(self, micro_batch: int, cost: RecordCost, per_record: float = 0.0) -> float:
        """The larger of the two peaks, while computing and while updating; `per_record` is for the per-record gradients
        that the engines for checking keep."""
        computing = self.while_computing + micro_batch * (cost.bytes + per_record)
        return self.stays + self._wide(micro_batch) + max(computing, self.update)

    def micro_batch(self, room: float, cost: RecordCost, per_record: float = 0.0) -> int:
        """The largest micro-batch that fits; 0 if none does."""
        if self.stays + self.update > room:
            return 0
        each = cost.bytes + per_record
        found = max(0, int((room - self.stays - self.while_computing) // each))
        if not self._wide(found):
            return found
        left = room - self.stays - self.wide
        return max(MOST_SLOTS, int((left - self.while_computing) // each) if left >= self.update else 0)

    def recorded_micro_batch(self, room: float, cost: RecordCost) -> int:
        """The largest micro-batch that can be recorded as a CUDA graph below stage 3; 0 if none can."""
        return max(0, int((room - self.stays - self.while_computing - 2 * self.sums) // (2 * cost.bytes)))

    def _wide(self, micro_batch: int) -> float:
        return self.wide if micro_batch > MOST_SLOTS else 0.0


def weights_of(model: nn.Module, phase: Phase) -> WeightCounts:
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() for p in model.parameters()) - sum(trained)
    private, mixed = phase.privacy is not None, phase.mixing is not None
    probes = phase.privacy.loss_probes if phase.privacy is not None else None
    probed = probes.every if probes is not None else 0
    moments = moment_bytes(phase.optimizer, probed > 0)
    return WeightCounts(sum(trained), frozen, max(trained), moments, private, mixed=mixed, probed=probed)


def moment_bytes(optimizer: Optimizer, probed: bool = False) -> int:
    """Bytes per trainable weight: moments, the running average if one is kept, and the weights from before the last
    step if the loss is probed there."""
    params = optimizer.params
    moments = 8 if optimizer.type in ("AdamW", "LAMB") else 4 if params.momentum else 0
    return moments + (4 if params.ema_decay is not None else 0) + (4 if probed else 0)


def memory_of(config: Config, weights: WeightCounts, ranks: int) -> Memory:
    """As the engine of a config holds it."""
    if config.run.engine == "fsdp2":
        return fsdp2_memory(weights, config.run.shard_over or ranks)
    stage = 0 if config.run.engine == "local" else config.zero_optimization.stage
    return memory(weights, stage, ranks, config.zero_optimization.offload_optimizer is not None)


def fsdp2_memory(weights: WeightCounts, ranks_per_copy: int) -> Memory:
    """The update needs four runs of the last window (`_under_way`); later, of the finished fp64 totals, a copy
    in fp32. All weights are counted as gathered at once, which is more than FSDP2 gathers: block by block."""
    n, private, ranks = weights.trainable, weights.private, ranks_per_copy
    own, whole = 4.0 * (n + weights.frozen), 4.0 * n
    shard = whole / ranks
    return Memory(
        weights=own / ranks, sums=whole + 2 * shard if private else 0.0, gradients=0.0 if private else shard,
        optimizer=weights.moments * n / ranks, gathered=own, update=max(shard, _under_way(n, 4)) if private else 0.0,
        wide=whole if private else 0.0,
    )  # fmt: skip


def _under_way(elements: int, size: int) -> float:
    """Two runs of sums that were received, in numbers of so many bytes, one that is sent, and one that was and that
    the backend may still hold."""
    return 2.0 * size * min(elements, 2 * max(SHORTEST_RUN, elements // RUNS))


def memory(weights: WeightCounts, stage: int, ranks: int, offload: bool) -> Memory:
    """With DeepSpeed."""
    n, private = weights.trainable, weights.private
    own, whole = 4.0 * (n + weights.frozen), 4.0 * n
    shard = whole / ranks
    state = (weights.optimizer_copy + weights.moments) * n / ranks
    sums = whole + 2 * shard if stage == 3 else 2 * whole
    device = Memory(
        weights=own / ranks if stage == 3 else own,
        sums=sums if private else 0.0,
        gradients=_gradients(stage, private, whole, shard, offload),
        optimizer=weights.moments * n if stage == 0 else 0.0 if offload else state,
        gathered=own if stage == 3 else 0.0,
        update=_update(stage, weights, ranks, offload) + (whole if weights.mixed else 0.0),
        # On every rank, at every stage.
        beside=(2 * whole if weights.mixed else 0.0) + (2 * whole if weights.probed else 0.0),
        wide=whole if private and stage == 3 else 0.0,
    )
    if not offload:
        return device
    copies = 8.0 * weights.largest if stage < 3 else 0.0
    return replace(device, host=state + 2 * shard + copies, host_update=3 * shard if private else 0.0)


def _gradients(stage: int, private: bool, whole: float, shard: float, offload: bool) -> float:
    """A private phase hands its gradient over only in the update; otherwise it accumulates over the micro-batches."""
    if stage == 3:
        return 0.0 if offload else shard
    if private:
        return 0.0
    return whole if stage < 2 else shard


def _update(stage: int, weights: WeightCounts, ranks: int, offload: bool) -> float:
    """In a private phase, the gradient is handed over whole, in the self-test at least; then each shard's exact fp64
    total replaces the reduced gradient."""
    whole = 4.0 * weights.trainable
    shard = whole / ranks
    if stage == 0:
        weighed = min(weights.trainable, WEIGHED_AT_ONCE)
        return whole + 8.0 * max(weights.largest, weighed) if weights.private else min(whole, EXCHANGED_AT_ONCE)
    if not weights.private:
        return 0.0 if offload else shard
    if stage == 3:
        handed = 2 * whole  # ZeRO-3 gathers the weights to hand their gradient over
    else:  # ZeRO-2 has reduced the gradient to its shards before the sums are sent
        under_way = _under_way(weights.trainable, 8) if ranks > 1 else 0.0
        handed = max(whole + shard, (whole if stage == 1 else shard) + under_way)
    return handed if offload else max(handed, 5 * shard)
