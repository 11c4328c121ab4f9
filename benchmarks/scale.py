"""What a private logical step would take on up to 1,024 GPUs: simulated from counted and measured parts, not measured.

    python benchmarks/scale.py [--records 2200000000 --batch 1048576 --link 50] [--out benchmarks/results/scale.json]

Counted: a micro-batch's time on one GPU (`tests/gpu/counted.json`, priced at the rates in `tests/gpu/rates.json`),
without and with privacy. Computed as by the planner: exchange over rings of `--link` GB/s, gathers at ZeRO-3, the noise
of a rank's share. Drawn: the number of records of a step, and so the micro-batches that all ranks take. Measured here:
how fast this processor draws noise and records. Assumed: micro-batches take unequally long (`--jitter`), and now and
then a rank is late (`--late`, `--delay`). Below ZeRO-3 ranks meet once per step, at ZeRO-3 in every micro-batch, where
gathers are counted as if none overlapped with computing. With HSDP (FSDP2 with `run.shard_over`), weights are sharded
within nodes of `--node` GPUs and copied to all nodes: ranks of a node meet in every micro-batch, over links of
`--node-link` GB/s, and nodes once per step. Left out: reading records, and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from murmuration.data.draw.micro_batch import row_count  # noqa: E402
from murmuration.data.draw.poisson import LANES, PoissonSampler  # noqa: E402
from murmuration.train.commands.forecast import measured_noise_rate  # noqa: E402
from murmuration.train.config.load import load  # noqa: E402
from murmuration.train.planner.cluster import Cluster, step_time  # noqa: E402
from murmuration.train.planner.cost import RecordCost  # noqa: E402
from murmuration.train.planner.forecast import counted  # noqa: E402
from murmuration.train.planner.memory import GIB, WeightCounts, fsdp2_memory, memory  # noqa: E402
from murmuration.train.planner.rows import Batch  # noqa: E402

RECIPES = {
    "mae/base": "ds_configs/vip/vip_base.json", "mae/large": "ds_configs/vip/vip_large.json",
    "captioner/base": "ds_configs/dpcap/dpcap_base.json", "captioner/large": "ds_configs/dpcap_large.json",
}  # fmt: skip
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# ZeRO-2 exchanges as much as ZeRO-1.
HSDP = "HSDP"
STAGES: dict[int | str, str] = {1: "ZeRO-1 and 2", 3: "ZeRO-3", HSDP: "HSDP"}
# Bytes of a rank's shard that an update reads or writes, per weight: sum, noise, gradient, weight and two moments.
UPDATE_BYTES = 60.0


@dataclass(frozen=True)
class Setting:
    records: int
    batch: float
    link: float
    noise_per_second: float
    ids_per_second: float
    """Records among which one processor draws, while the step before trains."""
    jitter: float = 0.02
    late: float = 1e-3
    delay: float = 0.5
    steps: int = 100
    parts: float = 2.0
    """How many of N parts of the records each rank draws: its own, and its neighbour's to compare."""
    node: int = 8
    node_link: float = 400.0


@dataclass(frozen=True)
class Work:
    """A recipe's private phase: its weights, and a micro-batch on one GPU."""

    weights: WeightCounts
    micro_batch: int
    seconds: float
    plain_seconds: float
    memory_bytes_per_second: float


def simulated(work: Work, gpus: int, stage: int | str, setting: Setting, seed: int = 0) -> dict[str, Any]:
    """Mean seconds of a step's parts; what is hidden behind computing counts only as far as it takes longer."""
    draw = np.random.default_rng(seed)
    link = setting.node_link if stage == HSDP and gpus <= setting.node else setting.link
    cluster = Cluster(gpus, 1.0, 1.0, link, setting.noise_per_second, node_link_gb_per_s=setting.node_link)
    copy = sharded_over(gpus, stage, setting)
    held = fsdp2_memory(work.weights, copy) if stage == HSDP else memory(work.weights, int(stage), gpus, False)
    rate = work.micro_batch / work.seconds
    parts: dict[str, list[float]] = {}
    for _ in range(setting.steps):
        total = int(draw.binomial(setting.records, setting.batch / setting.records))
        rows = row_count(total, gpus, work.micro_batch)
        each = work.seconds * np.maximum(0.5, draw.normal(1.0, setting.jitter, (rows, gpus)))
        each[draw.integers(rows, size=gpus), np.arange(gpus)] += setting.delay * (draw.random(gpus) < setting.late)
        waited = waiting(each, stage, setting)
        planned = step_time(
            NO_COST, work.weights, cluster, Batch(float(total)), work.micro_batch, 3 if stage == HSDP else int(stage),
            rate, ranks_per_copy=copy if stage == HSDP else 0,
        )  # fmt: skip
        ideal = total / gpus / rate
        computed = rows * work.seconds
        step = {
            "ideal": ideal, "padding": computed - ideal, "unequal": waited - computed,
            "exchange": planned.exchange, "noise": max(0.0, planned.noise - waited),
            "draw": max(0.0, setting.records * min(1.0, setting.parts / gpus) / setting.ids_per_second - waited),
            "update": UPDATE_BYTES * work.weights.trainable / copy / work.memory_bytes_per_second,
        }  # fmt: skip
        for name, seconds in step.items():
            parts.setdefault(name, []).append(float(seconds))
    mean = {name: float(np.mean(values)) for name, values in parts.items()}
    whole = sum(mean.values())
    lost = {name: seconds for name, seconds in mean.items() if name != "ideal"}
    return {
        "gpus": gpus, "stage": stage, "seconds": whole, "efficiency": mean["ideal"] / whole, "parts": mean,
        "bottleneck": max(lost, key=lambda name: lost[name]), "gpu_hours_per_step": whole * gpus / 3600,
        "gib_without_activations": (held.stays + max(held.gathered, held.update)) / GIB,
        "private_over_plain": work.plain_seconds / work.seconds * mean["ideal"] / whole,
    }  # fmt: skip


def sharded_over(gpus: int, stage: int | str, setting: Setting) -> int:
    return min(gpus, setting.node) if stage == HSDP else gpus


def waiting(seconds: np.ndarray, stage: int | str, setting: Setting) -> float:
    """Until the last rank is through [micro-batches, ranks]: those that meet in every micro-batch wait in each for the
    slowest of them."""
    if stage == 3:
        return float(seconds.max(1).sum())
    together = setting.node if stage == HSDP else 1
    starts = np.arange(0, seconds.shape[1], together)
    return float(np.maximum.reduceat(seconds, starts, axis=1).sum(0).max())


NO_COST = RecordCost(0.0, 1.0, 0.0, 0.0, 0.0)
"""Arithmetic is not asked for: the rate is given."""


def work_of(model: str, counts: dict[str, Any]) -> Work:
    from tests.gpu.count import CASES
    from tests.gpu.prices import MEMORY

    config = load(ROOT / RECIPES[model], [])
    phase = next(phase for phase in config.phases if phase.privacy is not None)
    plain, private = (sum(counts[model][kind]["priced_ms"].values()) / 1e3 for kind in ("plain", "private"))
    return Work(counted(config, phase)[1], CASES[model], private, plain, MEMORY)


def measured_ids_per_second() -> float:
    """How many records a second are drawn from, on one core of this processor."""
    sampler = PoissonSampler(b"k" * 32, b"d" * 32, 1 << 25, LANES // 1000)
    sampler.draw(0)
    began = time.perf_counter()
    sampler.draw(1)
    return sampler.records / (time.perf_counter() - began)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | ZeRO | GPUs | seconds | efficiency | bottleneck | GPU-hours | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['stage']} | {row['gpus']:,} | {row['seconds']:.1f} | {row['efficiency']:.2f} | "
        f"{row['bottleneck']} | {row['gpu_hours_per_step']:.2f} | {row['gib_without_activations']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw_plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3.2), sharey=True, layout="constrained")
    for axis, model in zip(np.atleast_1d(axes), models, strict=True):
        for stage, color in zip(STAGES, ("#4c72b0", "#c44e52", "#55a868"), strict=True):
            own = [row for row in rows if (row["model"], row["stage"]) == (model, stage)]
            points = [row["gpus"] for row in own], [row["efficiency"] for row in own]
            axis.plot(*points, marker="o", markersize=3, color=color, label=STAGES[stage])
        axis.set_xscale("log", base=2)
        axis.set(title=model, xlabel="GPUs", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("share of the time spent on records")
    np.atleast_1d(axes)[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=2_200_000_000)
    parser.add_argument("--batch", type=float, default=2.0**20)
    parser.add_argument("--link", type=float, default=50.0, help="GB/s from one GPU to the next (default 50)")
    parser.add_argument("--node", type=int, default=8, help="GPUs of a node, for HSDP (8)")
    parser.add_argument("--node-link", type=float, default=400.0, help="GB/s within a node, for HSDP (400)")
    parser.add_argument("--jitter", type=float, default=0.02, help="standard deviation of a micro-batch's time (0.02)")
    parser.add_argument("--late", type=float, default=1e-3, help="share of ranks that are late in a step (0.001)")
    parser.add_argument("--delay", type=float, default=0.5, help="seconds by which they are late (0.5)")
    parser.add_argument("--noise-rate", type=float, help="normal numbers per second of a rank (default: measured here)")
    parser.add_argument(
        "--ids-rate", type=float, help="records per second among which a rank draws (default: likewise)"
    )
    parser.add_argument("--steps", type=int, default=100, help="simulated steps of each case (100)")
    parser.add_argument("--draw-whole", action="store_true", help="as if every rank drew all records of a step itself")
    parser.add_argument("--out", type=Path, help="JSON, and a plot beside it")
    given = parser.parse_args(argv)
    counts = json.loads((ROOT / "tests" / "gpu" / "counted.json").read_text())
    setting = Setting(
        given.records, given.batch, given.link, given.noise_rate or measured_noise_rate(),
        given.ids_rate or measured_ids_per_second(), given.jitter,
        given.late, given.delay, given.steps, math.inf if given.draw_whole else Setting.parts,
        given.node, given.node_link,
    )  # fmt: skip
    rows = []
    for model in RECIPES:
        work = work_of(model, counts)
        for stage in STAGES:
            rows += [{"model": model, **simulated(work, gpus, stage, setting)} for gpus in GPUS]
    print(table([row for row in rows if row["gpus"] in (8, 128, 1024)]))
    if given.out is not None:
        found = {"setting": vars(setting), "processor": platform.machine(), "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        draw_plot(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
