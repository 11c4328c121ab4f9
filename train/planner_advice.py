"""What to change where a phase does not fit a cluster, or wastes its time there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.planner_cluster import Cluster
from train.planner_memory import GIB

if TYPE_CHECKING:
    from train.planner import PhaseForecast

# Shares of slots: padding worth a word, and what a change must save to be worth one.
PADDING, SAVED = 0.1, 0.05


def advice(found: PhaseForecast, wanted: int, cluster: Cluster) -> list[str]:
    """`wanted` is the micro-batch of the config."""
    if found.chosen.peak_bytes > cluster.usable_bytes:
        return _to_fit(found, wanted, cluster)
    assert found.time is not None
    lines = _to_fill(found, wanted, cluster.gpus)
    if found.time.exchange > 0.2 * found.time.seconds:
        share = found.time.exchange / found.time.seconds
        other = " or stage 1, which does not gather weights" if found.chosen.stage == 3 else ""
        lines.append(f"{share:.0%} of a step is exchange: fewer GPUs, a larger batch, a faster link{other}")
    if found.time.noise > found.time.compute:
        lines.append('drawing the noise takes longer than computing: run.noise = "philox" draws on the device')
    if found.plan is not None and found.epsilons[-1][1] > found.plan.epsilon_budget:
        lines.append("the budget ends the phase before its last step: lower steps, raise noise_multiplier or epsilon")
    larger = found.batch.even(cluster.gpus, found.chosen.micro_batch)
    if not lines and larger >= 2 * wanted and found.batch.padding(cluster.gpus, larger) <= PADDING:
        lines.append(f"a micro-batch of {larger} would fit, too")
    return lines


def _to_fill(found: PhaseForecast, wanted: int, gpus: int) -> list[str]:
    """Against padding: the config's rows filled evenly, or one row less, with room for a draw's scatter."""
    padding = found.batch.padding(gpus, wanted)
    if padding <= PADDING:
        return []
    smaller = found.batch.even(gpus, wanted)
    larger = found.batch.fewer(gpus, wanted)
    fitting = [size for size in (larger, smaller) if 0 < size <= found.chosen.micro_batch]
    # Of two that waste alike, the larger: fewer rows.
    better = min(fitting, key=lambda size: round(found.batch.padding(gpus, size), 2), default=wanted)
    left, ways = found.batch.padding(gpus, better), []
    if left < padding - SAVED:
        ways.append(f"train_micro_batch_size_per_gpu = {better} leaves {left:.0%}")
    if not ways or left > PADDING:
        ways.append("use fewer GPUs")
    return [f"{padding:.0%} of the slots are padding: {', or '.join(ways)}"]


def _to_fit(found: PhaseForecast, wanted: int, cluster: Cluster) -> list[str]:
    need = found.chosen.peak_bytes / GIB
    lines = [f"a micro-batch of {wanted} needs {need:.1f} GiB of {cluster.usable_bytes / GIB:.1f} GiB that may be used"]
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
        lines.append(f"zero_optimization.stage = {layout.stage}{offload}: a micro-batch of up to {layout.micro_batch}")
    if not found.chosen.micro_batch and not others:
        least = min(layout.memory.peak(1, found.cost) for layout in found.layouts) / (1 - cluster.free_share) / GIB
        lines.append(
            f"no stage fits, not even one record at a time: GPUs of at least {least:.1f} GiB, more of them, a smaller "
            'model, or run.precision = "bf16" for smaller activations'
        )
    return lines
