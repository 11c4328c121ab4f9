"""Which released metrics take a pass of their own over a step's micro-batches, and which pass that is."""

from __future__ import annotations

from collections.abc import Callable

from murmuration.accounting.metrics import ACCURACY, SLOPE
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine
from murmuration.train.engines.held_out import HeldOutCount
from murmuration.train.engines.loss_probes import LossProbes
from murmuration.train.noise.metrics import MetricRelease

Probes = Callable[[int], bool]
PASSES: dict[str, Callable[[Engine, MetricRelease, Ranks, Probes | None], HeldOutCount | LossProbes | None]] = {
    ACCURACY: lambda engine, release, ranks, probes: HeldOutCount(engine, release),
    # Slope and curvature are measured together.
    SLOPE: lambda engine, release, ranks, probes: LossProbes(engine, release, ranks, probes) if probes else None,
}
