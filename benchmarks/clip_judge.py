"""Checks each timed engine's correctness: totals against brute force, and the largest addition of a single record."""

from __future__ import annotations

import statistics

import torch
from clip_engines import Contender
from clip_models import Inputs, Workload
from torch import nn

from tests.support import brute_force


class Judge:
    """Brute force over a few records; the clipping bound is their median norm, so that some are clipped."""

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self.inputs = workload.batch(workload.judged, device, seed=2)
        # Makes some records larger: norms of random inputs are too similar.
        for tensor in self.inputs.values():
            if tensor.is_floating_point():
                tensor[::3] *= 2
        self.records = brute_force.records_of(model, self.inputs)
        self.bound = statistics.median(record.norm() for record in self.records)

    def error(self, contender: Contender) -> float:
        """Relative error of the totals over the parameters that the contender trains."""
        contender.clear()
        contender.step(self.inputs)
        found = contender.totals()
        trained = [name for name, p in contender.model.named_parameters() if p.requires_grad]
        records = [brute_force.Record(r.loss, {name: r.gradient[name] for name in trained}) for r in self.records]
        everyone = torch.ones(len(records), dtype=torch.bool)
        factors = brute_force.factors_of(records, everyone, brute_force.flat(self.bound))
        return brute_force.relative_error(found, brute_force.clipped_sum(records, factors))

    def max_contribution(self, contender: Contender, most: int = 8) -> float:
        """Largest addition of one record, in units of C."""
        sizes = []
        for row in range(min(most, len(self.records))):
            one: Inputs = {name: tensor[row : row + 1] for name, tensor in self.inputs.items()}
            contender.clear()
            contender.step(one)
            sizes.append(brute_force.size(contender.totals().values()))
        contender.clear()
        return max(sizes) / self.bound
