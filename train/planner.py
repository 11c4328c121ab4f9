"""What a config will cost on a cluster: memory, micro-batch, time and ε of each phase, and what to change.

Needs neither the data (`expected_records` stands for them) nor memory for the model, and starts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from accounting.accountant import Event, epsilon
from accounting.plan import PrivacyPlan
from model.build import build
from model.trainable import select
from train.clip_rule import MOST_ALLOWANCE, rounding_allowance
from train.config import Config, Phase
from train.opening import known_records
from train.planner_advice import advice
from train.planner_cluster import Cluster, PlannerError
from train.planner_cost import RecordCost, count
from train.planner_memory import Memory, Weights, memory, weights_of
from train.planner_rows import Batch
from train.planner_time import StepTime, step_time
from train.probes import synthetic_batch
from train.recipe import make_plan, resolve_shape, with_steps

LAYOUTS = ((0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True))
MARKS = 5


@dataclass(frozen=True)
class Layout:
    """One way to lay the phase out over the ranks."""

    stage: int
    offload: bool
    memory: Memory
    micro_batch: int
    """The largest that fits; 0 if the phase does not."""
    peak_bytes: float
    """With the micro-batch of the config."""


@dataclass(frozen=True)
class PhaseForecast:
    name: str
    objective: str
    weights: Weights
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
    """ε after so many steps."""
    advice: list[str]

    @property
    def days(self) -> float | None:
        return None if self.time is None else self.time.seconds * self.steps / 86400

    def gpu_hours(self, cluster: Cluster) -> float | None:
        return None if self.days is None else self.days * 24 * cluster.gpus


def forecast(config: Config, cluster: Cluster, records_per_second: float | None = None) -> list[PhaseForecast]:
    if config.run.engine != "deepspeed":
        raise PlannerError(f"plans are made for run.engine = 'deepspeed', and not for {config.run.engine!r}")
    if config.run.noise == "philox":
        cluster = replace(cluster, noise_per_second=math.inf)  # drawn on the device, while it computes
    found = []
    for number, phase in enumerate(config.phases):
        if phase.trains:
            found.append(_of_phase(config, number, phase, cluster, records_per_second))
    return found


def _of_phase(
    config: Config, number: int, phase: Phase, cluster: Cluster, records_per_second: float | None
) -> PhaseForecast:  # fmt: skip
    where = f"phases.{number}"
    records = known_records(phase, where)[0]
    phase = with_steps(phase, records, where)
    plan = make_plan(phase, phase.privacy, records, where) if phase.privacy else None
    batch = Batch.drawn(plan) if plan else Batch(float(phase.batch or 1))
    mixed = phase.mixing.batch if phase.mixing else 0
    cost, weights = counted(config, phase)
    per_record = 4.0 * weights.trainable if plan and config.run.clip_engine != "book-keeping" else 0.0
    # A micro-batch as large as a rank's share of nearly every draw; at the mean, half of the draws would need two.
    wanted, most = config.train_micro_batch_size_per_gpu, math.ceil(batch.most / cluster.gpus)
    if plan:
        most = min(most, _most_exact())
    layouts = []
    for stage, offload in LAYOUTS:
        need = memory(weights, stage, cluster.gpus, offload)
        fits = min(most, need.micro_batch(cluster.usable_bytes, cost, per_record))
        layouts.append(Layout(stage, offload, need, fits, need.peak(wanted, cost, per_record)))
    own = (config.zero_optimization.stage, config.zero_optimization.offload_optimizer is not None)
    chosen = next(layout for layout in layouts if (layout.stage, layout.offload) == own)
    fits = chosen.peak_bytes <= cluster.usable_bytes
    micro_batch = wanted if fits else batch.even(cluster.gpus, chosen.micro_batch)
    time = None
    if micro_batch:
        time = step_time(cost, weights, cluster, batch, micro_batch, chosen.stage, records_per_second, mixed)
    found = PhaseForecast(
        phase.name, phase.objective, weights, cost, batch, mixed, phase.steps, layouts, chosen, micro_batch, time,
        plan, _epsilons(plan) if plan else [], [],
    )  # fmt: skip
    return replace(found, advice=advice(found, wanted, cluster))


def counted(config: Config, phase: Phase) -> tuple[RecordCost, Weights]:
    """From the shapes of the phase's model alone."""
    shape = resolve_shape(config)
    model = build(shape, phase.objective, device="meta")
    select(model, phase.trainable)
    example = synthetic_batch(shape, phase.objective, 1, 0).inputs
    inputs = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in example.items()}
    return count(model, inputs, config.run.precision), weights_of(model, phase)


def _most_exact() -> int:
    """Beyond it, the fp32 sum of a micro-batch may err by more than C is lowered by, and the run is refused."""
    size = 1
    while rounding_allowance(size + 1) <= MOST_ALLOWANCE:
        size += 1
    return size


def _epsilons(plan: PrivacyPlan) -> list[tuple[int, float]]:
    marks = sorted({max(1, round(plan.steps * part / MARKS)) for part in range(1, MARKS + 1)})
    sigma = plan.effective_noise_multiplier
    return [(t, epsilon([Event(plan.sampling_rate, sigma, t)], plan.delta)) for t in marks]
