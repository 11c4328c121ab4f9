"""What the host does for one micro-batch of each engine: the functions of Python and PyTorch that cProfile counts.
Where micro-batches are not replayed (ZeRO-3, FSDP2), a GPU waits for them if the model is small.

    OMP_NUM_THREADS=1 python benchmarks/host.py [--model captioner]

The model has as many layers as size Base, 16 wide, so that there is next to nothing to compute; one rank. On a GPU, a
norm or a weighted sum is one kernel; here it is a few functions. Seconds are of this machine, and of the processor.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from murmuration.model.build import build  # noqa: E402
from murmuration.model.settings import ModelSettings  # noqa: E402
from murmuration.train.clip.rule import ClipRule  # noqa: E402
from murmuration.train.config.optimizer import Optimizer, ZeroOptimization  # noqa: E402
from murmuration.train.core import Computation, clipping_engine  # noqa: E402
from murmuration.train.engines.choose import EngineSettings, make_engine, start_ranks  # noqa: E402
from murmuration.train.engines.forward import PlainForward  # noqa: E402
from murmuration.train.optim.optimizers import make_optimizer  # noqa: E402
from murmuration.train.self_test.probes import SyntheticRecords  # noqa: E402

OBJECTIVES = {"mae": "mae", "captioner": "caption"}
ENGINES = {"one process": ("local", 0), "FSDP2": ("fsdp2", 0), "ZeRO-3": ("deepspeed", 3)}
WAYS = ("plain", "private", "private, compiled blocks")
RECORDS, WARM, TIMED = 8, 4, 11


def measured(model: str, engine: str, way: str) -> str:
    name, stage = ENGINES[engine]
    settings = EngineSettings(name, RECORDS, ZeroOptimization(stage=stage))  # pyright: ignore[reportArgumentType]
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 16, "text_length": 8, "vocabulary": 64}
    base = ModelSettings(family=model, size="base", **sizes).resolved()  # pyright: ignore[reportArgumentType]
    narrow = {part: replace(getattr(base, part), width=16, heads=2) for part in ("encoder", "text", "pixels")}
    shape, objective = replace(base, **narrow), OBJECTIVES[model]
    ranks, module = start_ranks(name), build(shape, objective)  # pyright: ignore
    if way == "plain":
        optimizer = make_optimizer(Optimizer(), module.named_parameters())
        running = make_engine(settings, PlainForward(module), optimizer, ranks)
    else:
        computation = Computation(compile="blocks" if way != "private" else "off")
        running = clipping_engine(module, ClipRule("flat", 1.0, 0.0), Optimizer(), settings, ranks, computation).engine
    batch, seconds = SyntheticRecords.of(shape, objective).batch(RECORDS, seed=0), []
    for number in range(WARM + TIMED):
        began = time.process_time()
        running.accumulate(batch)
        seconds += [time.process_time() - began] if number >= WARM else []
    profile = cProfile.Profile()
    profile.enable()
    running.accumulate(batch)
    profile.disable()
    calls = sum(entry[1] for entry in pstats.Stats(profile).stats.values())  # pyright: ignore[reportAttributeAccessIssue]
    return f"| {engine}, {way} | {calls:,} | {1e3 * statistics.median(seconds):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=OBJECTIVES, default="mae")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        print(measured(given.model, *given.case), flush=True)
        return
    print("| engine | functions called | ms of CPU |\n|---|---|---|")
    for engine in ENGINES:
        for way in WAYS:  # each in a process of its own, since engines start process groups
            command = [sys.executable, __file__, "--model", given.model, "--case", engine, way]
            done = subprocess.run(command, capture_output=True, text=True)
            rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
            print(*rows or [done.stdout + done.stderr], sep="\n", flush=True)


if __name__ == "__main__":
    main()
