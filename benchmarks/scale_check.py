"""Checks the simulation of many GPUs (scale.py) against steps of 1, 2 and 4 processes on this machine.

    python benchmarks/scale_check.py [--steps 12] [--out benchmarks/results/scale_check.json]

Each process clips its share of the same Poisson draws (a toy masked autoencoder, one thread); ranks meet once per step
to add up their sums, as below ZeRO-3, or in every micro-batch as well, as at ZeRO-3. From a micro-batch's measured mean
and deviation and from an exchange by itself, scale.py computes what a step takes. Its ratio to the measured step should
be near 1 in every row: then padding and waiting are what the simulation says they are. Times of this machine, and of
what runs beside it, cancel.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place or ".").resolve() != ROOT / "benchmarks")]

import numpy as np  # noqa: E402

RECORDS, BATCH, MICRO_BATCH = 100_000, 96.0, 8
WORLDS = (1, 2, 4)
MEETINGS = {1: "once per step", 3: "in every micro-batch"}


def totals(steps: int) -> list[int]:
    """How many records each step draws; the same on all ranks."""
    draw = np.random.default_rng(7)
    return [int(draw.binomial(RECORDS, BATCH / RECORDS)) for _ in range(steps)]


def work(steps: int) -> None:
    """One rank. Prints what all ranks measured."""
    import torch
    import torch.distributed as dist

    from murmuration.data.draw.micro_batch import row_count
    from murmuration.model.build import build
    from murmuration.model.settings import ModelSettings
    from murmuration.train.clip.rule import ClipRule
    from murmuration.train.config.optimizer import Optimizer
    from murmuration.train.core import Computation, clipping_engine
    from murmuration.train.distributed.ranks import Alone
    from murmuration.train.engines.choose import EngineSettings
    from murmuration.train.self_test.probes import synthetic_batch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    shape = ModelSettings(
        family="mae", image_size=64, patch_size=8, width=192, depth=4, heads=3, mae_decoder_width=96,
        mae_decoder_depth=2, mae_decoder_heads=3,
    ).resolved()  # fmt: skip
    # Each rank alone: what it does together with the others is timed by itself.
    ranks, settings = Alone(torch.device("cpu")), EngineSettings("local", MICRO_BATCH)
    rule, optimizer = ClipRule("flat", 1.0, 0.0), Optimizer()
    forward = clipping_engine(build(shape, "mae"), rule, optimizer, settings, ranks, Computation()).forward
    batch = synthetic_batch(shape, "mae", MICRO_BATCH, dist.get_rank())
    for _ in range(3):
        forward(batch.inputs, batch.present)

    def exchange() -> float:
        dist.barrier()
        began = time.perf_counter()
        for total in forward.exact_sums.totals.values():
            dist.all_reduce(total)
        return time.perf_counter() - began

    found: dict[str, Any] = {"exchange": statistics.median(exchange() for _ in range(5)), "weights": sum(
        total.numel() for total in forward.exact_sums.totals.values()
    )}  # fmt: skip
    for stage in MEETINGS:
        walls, seconds = [], []
        for total in totals(steps):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(row_count(total, world, MICRO_BATCH)):
                here = time.perf_counter()
                forward(batch.inputs, batch.present)
                seconds.append(time.perf_counter() - here)
                if stage == 3:
                    dist.barrier()
            exchange()
            walls.append(time.perf_counter() - began)
            forward.clear()
        own: list[Any] = [None] * world
        dist.all_gather_object(own, (walls, seconds))
        every = np.array([each for _, seconds in own for each in seconds])
        found[str(stage)] = {
            "step": float(np.mean([max(each) for each in zip(*(walls for walls, _ in own), strict=True)])),
            "micro_batch": float(every.mean()), "jitter": float(every.std() / every.mean()),
        }  # fmt: skip
    if dist.get_rank() == 0:
        print("RESULTS " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def launched(world: int, steps: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", "--steps", str(steps)]
    started = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    answers = [process.communicate()[0] for process in started]
    return json.loads(answers[0].split("RESULTS ", 1)[1])


def compared(world: int, steps: int) -> list[dict[str, Any]]:
    import scale  # pyright: ignore[reportMissingImports]

    from murmuration.train.planner.memory import WeightCounts

    measured = launched(world, steps)
    rows = []
    for stage, meeting in MEETINGS.items():
        seen = measured[str(stage)]
        work = scale.Work(WeightCounts(0, 0, 0, 8, True), MICRO_BATCH, seen["micro_batch"], seen["micro_batch"], 1e18)
        free = scale.Setting(RECORDS, BATCH, 1e12, 1e18, 1e18, jitter=seen["jitter"], late=0.0, steps=400)
        predicted = scale.simulated(work, world, stage, free)
        seconds = predicted["seconds"] + measured["exchange"]
        rows.append({
            "processes": world, "meeting": meeting, **seen, "exchange": measured["exchange"], "simulated": seconds,
            "ratio": seconds / seen["step"], "parts": predicted["parts"],
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| processes | ranks meet | jitter | simulated / measured |", "|---|---|---|---|"]
    lines += [f"| {r['processes']} | {r['meeting']} | {r['jitter']:.0%} | {r['ratio']:.2f} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each case (12)")
    parser.add_argument("--out", type=Path, help="write this JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.steps)
        return
    sys.path.append(str(ROOT / "benchmarks"))
    rows = [row for world in WORLDS for row in compared(world, given.steps)]
    print(table(rows))
    if given.out is not None:
        found = {"command": f"python benchmarks/scale_check.py --steps {given.steps}", "cores": os.cpu_count()}
        given.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
