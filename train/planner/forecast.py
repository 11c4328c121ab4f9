"""What a config will cost on a cluster: memory, micro-batch, time and ε of each phase, and what to change.

Needs neither the data (`expected_records` stands in for them) nor memory for the model, and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.plan import PrivacyPlan
from murmuration.model.build import build
from murmuration.train.config.root import Config, Phase
from murmuration.train.engines.mesh import require_whole_copies
from murmuration.train.planner.cluster import Cluster, PlannerError, StepTime, step_time
from murmuration.train.planner.cost import RecordCost, count
from murmuration.train.planner.memory import GIB, Memory, WeightCounts, fsdp2_memory, memory, weights_of
from murmuration.train.planner.rows import Batch
from murmuration.train.recipe.open_data import known_records
from murmuration.train.recipe.ready_phase import plan_of_phase, resolve_shape, select_trained, with_steps
from murmuration.train.self_test.probes import synthetic_batch

LAYOUTS = ((0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True))
MARKS = 5


# Share of the rate at which a processor draws other noise; measured for 100 million weights (benchmarks/noise.py).
EXACT_RATE = 0.5


@dataclass(frozen=True)
class Layout:
    """One way to lay the phase out over the ranks."""

    stage: int
    offload: bool
    memory: Memory
    micro_batch: int
    """The largest that fits; 0 if the phase does not."""
    peak_bytes: float
    """Peak memory with the micro-batch of the config."""
    ranks_per_copy: int = 0
    """With FSDP2: over how many ranks a copy of the weights is sharded. 0: DeepSpeed."""
    recorded: int | None = None
    """The largest micro-batch that can be recorded as a CUDA graph; None: none is recorded."""


@dataclass(frozen=True)
class PhaseForecast:
    name: str
    objective: str
    weights: WeightCounts
    cost: RecordCost
    batch: Batch
    mixed: int
    """Public records per step that `phase.mixing` adds."""
    steps: int
    layouts: list[Layout]
    chosen: Layout
    micro_batch: int
    """The config's if it fits, or one that does and fills its rows evenly; 0 if nothing fits."""
    time: StepTime | None
    plan: PrivacyPlan | None
    epsilons: list[tuple[int, float]]
    """(steps, ε after them)"""
    advice: list[str]
    calibrated: bool = False
    """Whether σ follows from ε."""
    rows_per_unit: int = 1
    """Records of a unit that a step reads at most."""
    checkpoints: int = 1
    """Stored at once: those that are kept, and one that is being written."""

    @property
    def checkpoint_bytes(self) -> int:
        """Weights, frozen ones among them, and the optimizer's state, in fp32."""
        return (4 + self.weights.moments) * self.weights.trainable + 4 * self.weights.frozen

    @property
    def reads_per_second(self) -> float | None:
        """Records that all ranks read."""
        records = self.batch.mean * self.rows_per_unit + self.mixed
        return None if self.time is None else records / self.time.seconds

    @property
    def days(self) -> float | None:
        return None if self.time is None else self.time.seconds * self.steps / 86400

    def gpu_hours(self, cluster: Cluster) -> float | None:
        return None if self.days is None else self.days * 24 * cluster.gpus


def forecast(
    config: Config, cluster: Cluster, records_per_second: float | None = None, *,
    counting: Callable[[Config, Phase], tuple[RecordCost, WeightCounts]] | None = None, priced: bool = True,
) -> list[PhaseForecast]:  # fmt: skip
    """`counting` stands in for `counted`. `priced`: whether ε is computed."""
    if config.run.engine == "local":
        raise PlannerError("the planner supports run.engine = 'deepspeed' and 'fsdp2', not 'local'")
    if config.run.engine == "fsdp2":
        require_whole_copies(cluster.gpus, config.run.shard_over)
    if config.run.noise == "chacha20":
        cluster = replace(cluster, noise_per_second=math.inf)  # on the device, where its time is not known yet
    if config.run.noise == "exact":
        cluster = replace(cluster, noise_per_second=EXACT_RATE * cluster.noise_per_second)
    found = []
    for number, phase in enumerate(config.phases):
        if phase.trains:
            found.append(_of_phase(config, number, phase, cluster, records_per_second, counting or counted, priced))
    return found


def _of_phase(
    config: Config, number: int, phase: Phase, cluster: Cluster, records_per_second: float | None,
    counting: Callable[[Config, Phase], tuple[RecordCost, WeightCounts]], priced: bool,
) -> PhaseForecast:  # fmt: skip
    where = f"phases.{number}"
    records = known_records(phase, where)[0]
    phase = with_steps(phase, records, where)
    plan = plan_of_phase(phase, records, where, config.run.noise) if phase.privacy else None
    batch = Batch.drawn(plan) if plan else Batch(float(phase.batch or 1))
    mixed = phase.mixing.batch if phase.mixing else 0
    if plan is not None:
        cluster = replace(cluster, noise_per_second=cluster.noise_per_second / plan.noise.draws)
    cost, weights = counting(config, phase)
    per_record = 4.0 * weights.trainable if plan and config.run.clip_engine != "book-keeping" else 0.0
    given = config.train_micro_batch_size_per_gpu
    run, privacy, gpus = config.run, phase.privacy, cluster.gpus
    if run.engine == "fsdp2":  # every number of ranks that leaves whole copies
        sharded = (ranks for ranks in range(1, gpus + 1) if gpus % ranks == 0 and (ranks > 1 or gpus == 1))
        ways, own = [Way(3, False, ranks) for ranks in sharded], Way(3, False, run.shard_over or gpus)
    else:
        zero = config.zero_optimization
        ways, own = [Way(*layout, 0) for layout in LAYOUTS], Way(zero.stage, zero.offload_optimizer is not None, 0)
    # Micro-batches are recorded as a CUDA graph, where there is room for it.
    fixed = privacy is not None and privacy.clip.adaptive is None
    as_graphs = fixed and run.cuda_graph == "auto" and run.clip_engine == "book-keeping"
    layouts = [_layout(way, cluster, cost, weights, batch, given, per_record, as_graphs) for way in ways]
    chosen = next(layout for layout in layouts if (layout.stage, layout.offload, layout.ranks_per_copy) == own)
    wanted = max(1, batch.even(cluster.gpus, chosen.micro_batch)) if given == "auto" else given
    fits = chosen.peak_bytes <= cluster.usable_bytes
    micro_batch = wanted if fits else batch.even(cluster.gpus, chosen.micro_batch)
    time = None
    if micro_batch:
        time = step_time(
            cost, weights, cluster, batch, micro_batch, chosen.stage, records_per_second, mixed, chosen.ranks_per_copy
        )
    epsilons: list[tuple[int, float]] = []
    if plan is not None and priced:
        marks = sorted({max(1, round(plan.steps * part / MARKS)) for part in range(1, MARKS + 1)})
        epsilons = [(t, epsilon([plan.event(plan.sampling.turns(t))], plan.delta)) for t in marks]
    found = PhaseForecast(
        phase.name, phase.objective, weights, cost, batch, mixed, phase.steps, layouts, chosen, micro_batch, time,
        plan, epsilons, [],
    )  # fmt: skip
    calibrated = phase.privacy is not None and phase.privacy.noise_multiplier is None
    rows_per_unit = plan.units.rows if plan is not None and plan.units is not None else 1
    return replace(
        found, advice=advice(found, wanted, cluster), calibrated=calibrated, rows_per_unit=rows_per_unit,
        checkpoints=run.keep_checkpoints + 1,
    )  # fmt: skip


def _layout(
    way: Way, cluster: Cluster, cost: RecordCost, weights: WeightCounts, batch: Batch, given: int | Literal["auto"],
    per_record: float, as_graphs: bool,
) -> Layout:  # fmt: skip
    stage, offload, ranks_per_copy = way
    need = fsdp2_memory(weights, ranks_per_copy) if ranks_per_copy else memory(weights, stage, cluster.gpus, offload)
    # At most a rank's share of nearly every draw; a micro-batch of its mean share would need two rows in half of them.
    most = math.ceil(batch.most / cluster.gpus)
    fits = min(most, need.micro_batch(cluster.usable_bytes, cost, per_record))
    wanted = max(1, batch.even(cluster.gpus, fits)) if given == "auto" else given
    peak, recorded = need.peak(wanted, cost, per_record), None
    if stage < 3 and as_graphs:
        recorded = min(fits, need.recorded_micro_batch(cluster.usable_bytes, cost))
    return Layout(stage, offload, need, fits, peak, ranks_per_copy, recorded)


class Way(NamedTuple):
    """How weights are laid out over the ranks, as in `Layout`."""

    stage: int
    offload: bool
    ranks_per_copy: int


def counted(config: Config, phase: Phase) -> tuple[RecordCost, WeightCounts]:
    """The cost of a record and the weight counts, from the shapes of the phase's model alone."""
    shape = resolve_shape(config)
    model = build(shape, phase.objective, device="meta")
    select_trained(model, phase)
    example = synthetic_batch(shape, phase.objective, 1, 0).inputs
    inputs = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in example.items()}
    again, private = config.run.gradient_checkpointing, phase.privacy is not None
    return count(model, inputs, config.run.precision, phase.rows_of_a_slot, again, private), weights_of(model, phase)


# What to change where a phase does not fit a cluster, or wastes its time there.

# Shares of slots: the padding worth mentioning, and what a change must save to be worth mentioning.
PADDING, SAVED = 0.1, 0.05


def advice(found: PhaseForecast, wanted: int, cluster: Cluster) -> list[str]:
    """`wanted` is the micro-batch of the config."""
    if found.chosen.peak_bytes > cluster.usable_bytes:
        return _to_fit(found, wanted, cluster)
    assert found.time is not None
    lines = _to_fill(found, wanted, cluster.gpus)
    if found.time.exchange > 0.2 * found.time.seconds:
        share = found.time.exchange / found.time.seconds
        other = _with_less_exchange(found)
        lines.append(f"{share:.0%} of a step is exchange: fewer GPUs, a larger batch, a faster link{other}")
    if found.time.noise > found.time.compute:
        lines.append('drawing the noise takes longer than computing: run.noise = "chacha20" draws on the device')
    if found.plan is not None and found.epsilons and found.epsilons[-1][1] > found.plan.epsilon_budget:
        lines.append("the budget ends the phase before its last step: lower steps, raise noise_multiplier or epsilon")
    larger = found.batch.even(cluster.gpus, found.chosen.micro_batch)
    if not lines and larger >= 2 * wanted and found.batch.padding(cluster.gpus, larger) <= PADDING:
        lines.append(f"a micro-batch of {larger} would fit, too")
    recorded = found.chosen.recorded
    if recorded is not None and recorded < found.micro_batch:
        lines.append(
            f"there is room to record a micro-batch of up to {recorded} as a CUDA graph; larger ones are launched "
            "kernel by kernel"
        )
    return lines


def _with_less_exchange(found: PhaseForecast) -> str:
    if not found.chosen.ranks_per_copy:
        return " or stage 1, which does not gather weights" if found.chosen.stage == 3 else ""
    smaller = [layout for layout in found.layouts if layout.ranks_per_copy < found.chosen.ranks_per_copy]
    fitting = [layout.ranks_per_copy for layout in smaller if layout.micro_batch >= found.micro_batch]
    return f", or run.shard_over = {fitting[0]}, which gathers weights among fewer" if fitting else ""


def _to_fill(found: PhaseForecast, wanted: int, gpus: int) -> list[str]:
    """Advice against padding: fill the config's rows evenly, or use one row less, with room for the spread of draws."""
    padding = found.batch.padding(gpus, wanted)
    if padding <= PADDING:
        return []
    smaller = found.batch.even(gpus, wanted)
    larger = found.batch.fewer(gpus, wanted)
    fitting = [size for size in (larger, smaller) if 0 < size <= found.chosen.micro_batch]
    # Of two with equal waste, the larger one: it needs fewer rows.
    better = min(fitting, key=lambda size: round(found.batch.padding(gpus, size), 2), default=wanted)
    left, ways = found.batch.padding(gpus, better), []
    if left < padding - SAVED:
        ways.append(f"train_micro_batch_size_per_gpu = {better} leaves {left:.0%}")
    if not ways or left > PADDING:
        ways.append("use fewer GPUs")
    return [f"{padding:.0%} of the slots are padding: {', or '.join(ways)}"]


def _to_fit(found: PhaseForecast, wanted: int, cluster: Cluster) -> list[str]:
    need = found.chosen.peak_bytes / GIB
    lines = [f"a micro-batch of {wanted} needs {need:.1f} GiB of {cluster.usable_bytes / GIB:.1f} GiB usable"]
    if found.micro_batch:
        lines.append(f"set train_micro_batch_size_per_gpu to {found.micro_batch}")
    others = [
        layout
        for layout in found.layouts
        # Public gradients are mixed into whole weights: the run is refused at stage 3.
        if layout.micro_batch > found.chosen.micro_batch and not (found.mixed and layout.stage == 3)
    ]
    for layout in sorted(others, key=lambda layout: (layout.offload, layout.stage)):
        offload = ' with zero_optimization.offload_optimizer = {"device": "cpu"}' if layout.offload else ""
        way = f"zero_optimization.stage = {layout.stage}{offload}"
        if layout.ranks_per_copy:
            way = f"run.shard_over = {layout.ranks_per_copy}"
        lines.append(f"{way}: a micro-batch of up to {layout.micro_batch}")
    if not found.chosen.micro_batch and not others:
        least = min(layout.memory.peak(1, found.cost) for layout in found.layouts) / (1 - cluster.free_share) / GIB
        lines.append(
            f"no stage fits even one record at a time: use GPUs of at least {least:.1f} GiB, more of them, a smaller "
            'model, or run.precision = "bf16" for smaller activations'
        )
    return lines
