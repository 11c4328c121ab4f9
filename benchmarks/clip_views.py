"""Slots of K rows against a non-private step on the same rows: the cost of `privacy.views`, beside that of one view.

The number of rows stays the same, so that all are timed between the same non-private steps: of R rows, K views make
R / K records. Each is judged first, by plain autograd on the rows of one record after the other.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from clip_engines import BASELINE, ENGINES, OwnEngine
from clip_memory import peak_bytes
from clip_models import Inputs, Weights, Workload
from clip_timing import interleaved
from torch import nn

from murmuration.data.draw.micro_batch import ROW_SHARE
from murmuration.train.clip.engine import assert_exact_matmul
from tests.support import brute_force

# Of records that are judged, as each takes a whole gradient in fp64.
MOST_JUDGED = 4


def of_views(rows: Inputs, views: int) -> Inputs:
    if views == 1:
        return rows
    first = next(iter(rows.values()))
    return {**rows, ROW_SHARE: torch.full((len(first),), 1 / views, device=first.device)}


class ViewsEngine(OwnEngine):
    """The book-keeping engine on records of several rows."""

    def __init__(self, weights: Weights, bound: float, bf16: bool, views: int) -> None:
        super().__init__(weights, bound, bf16)
        self.views = views

    def step(self, inputs: Inputs) -> None:
        first = next(iter(inputs.values()))
        present = torch.ones(len(first) // self.views, dtype=torch.bool, device=first.device)
        self.clip.add_clipped(self.model, of_views(inputs, self.views), present, self.sums)


def by_autograd(model: nn.Module, rows: Inputs, views: int) -> list[brute_force.Record]:
    """The mean gradient of each record's rows."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for start in range(0, len(next(iter(rows.values()))), views):
        loss = model({name: tensor[start : start + views] for name, tensor in rows.items()}).mean()
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        named = zip(trained.items(), gradients, strict=True)
        gradient = {name: (torch.zeros_like(p) if g is None else g).double() for (name, p), g in named}
        found.append(brute_force.Record(float(loss.detach()), gradient))
    return found


def judged(workload: Workload, model: nn.Module, rows: int, views: int, device: torch.device) -> tuple[float, float]:
    """The clipping bound, at which half of the records are clipped, and the relative error of the sum in fp32."""
    inputs = workload.batch(views * min(rows // views, MOST_JUDGED), device, seed=2)
    records = by_autograd(model, inputs, views)
    bound = statistics.median(record.norm() for record in records)
    engine = ViewsEngine(Weights(model), bound, False, views)
    engine.step(inputs)
    everyone = torch.ones(len(records), dtype=torch.bool)
    factors = brute_force.factors_of(records, everyone, brute_force.flat(bound))
    return bound, brute_force.relative_error(engine.totals(), brute_force.clipped_sum(records, factors))


def measure_views(
    name: str, workload: Workload, views: Sequence[int], rows: int, rounds: int, device: torch.device, bf16: bool
) -> dict[str, Any]:
    assert_exact_matmul()
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = workload.model(device)
    every = [1, *views]
    found = {k: judged(workload, model, rows, k, device) for k in every}
    weights, inputs = Weights(model), workload.batch(rows, device)
    plain = ENGINES[BASELINE](weights, 1.0, bf16)
    engines = {k: ViewsEngine(weights, found[k][0], bf16, k) for k in every}
    steps = {str(k): (lambda engine=engine: engine.step(inputs)) for k, engine in engines.items()}
    timings = interleaved(lambda: plain.step(inputs), steps, rounds, device)
    least = _peak(lambda: plain.step(inputs), device)
    table = [
        {
            "model": name, "views": k, "records": rows // k, "rows": rows, "error": found[k][1],
            "memory_ratio": _peak(steps[str(k)], device) / least, **timings[str(k)].summary(),
        }
        for k in every
    ]  # fmt: skip
    return {"model": name, "about": workload.about, "rows": table}


def _peak(step: Any, device: torch.device) -> int:
    gc.collect()
    return peak_bytes(step, device)


def views_table(results: Sequence[dict[str, Any]]) -> str:
    columns = ("model", "views", "records", "time_ratio", "time_ratio_min", "time_ratio_max", "memory_ratio", "error")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in (row for result in results for row in result["rows"]):
        cells = [f"{row[c]:.1e}" if c == "error" else f"{row[c]:.2f}" if "ratio" in c else str(row[c]) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
