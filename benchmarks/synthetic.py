"""Pictures per second and core of the procedural generators: python benchmarks/synthetic.py [--size 224] [--json FILE]

CPU time, one thread, families interleaved, medians over rounds; JPEG encoding is timed separately, because the loader
needs none. With a GPU, also pictures per second of wall time there, in batches of 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from murmuration.data.synthetic.index import jpeg, shape_sample
from murmuration.data.synthetic.kinds import TEXTURES
from murmuration.data.synthetic.textures import textures

_RECORDS, _BATCH = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {"command": " ".join(["python", "benchmarks/synthetic.py", *sys.argv[1:]]), "size": arguments.size}
    found["per_core"] = measure(arguments.size, arguments.rounds)
    if torch.cuda.is_available():
        found["gpu"] = {"name": torch.cuda.get_device_name(), **measure_gpu(arguments.size, arguments.rounds)}
    for name, rate in found["per_core"].items():
        print(f"{name:12s} {rate:8.1f} pictures/s/core at {arguments.size} px")
    for name, rate in found.get("gpu", {}).items():
        print(f"GPU {name:12s} {rate}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(side: int, rounds: int) -> dict[str, float]:
    picture = textures("mixed", 1, [0], side)[0].numpy()
    work: dict[str, Callable[[int], object]] = {
        kind: lambda number, kind=kind: textures(kind, 1, [number], side) for kind in TEXTURES
    }
    work["shapes"] = lambda number: shape_sample(1, number, side)
    work["jpeg"] = lambda number: jpeg(picture)
    rates: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(-1, rounds):  # the first round warms up
        for name, job in work.items():
            started = time.process_time()
            for number in range(_RECORDS):
                job(turn * _RECORDS + number + _RECORDS)
            if turn >= 0:
                rates[name].append(_RECORDS / (time.process_time() - started))
    return {name: round(statistics.median(each), 1) for name, each in rates.items()}


def measure_gpu(side: int, rounds: int) -> dict[str, float]:
    rates: dict[str, float] = {}
    for kind in TEXTURES:
        seconds: list[float] = []
        for turn in range(rounds + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            textures(kind, 1, range(turn * _BATCH, (turn + 1) * _BATCH), side, "cuda")
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rates[kind] = round(_BATCH / statistics.median(seconds[1:]), 1)
    return rates


if __name__ == "__main__":
    main()
