"""Draws steps on ranks that share them, in the loader's thread, while the main thread has collectives of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from murmuration.data.batch.loader import BackgroundSampler
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.draw.samplers import SharedSampler
from murmuration.train.engines.fsdp2 import start_ranks

RECORDS, STEPS = 100_003, 30


def main() -> None:
    ranks = start_ranks()
    sampler = PoissonSampler(b"k" * 32, b"d" * 32, RECORDS, LANES // 50)
    shared = SharedSampler(sampler, ranks.rank, ranks.world, ranks.gather_apart())
    ahead = BackgroundSampler(shared, STEPS)
    same, sums = [], []
    for step in range(1, STEPS + 1):
        draw = ahead.draw(step)
        sums.append(float(ranks.add(torch.full((1000,), float(ranks.rank + 1)))[0]))
        ranks.require_same(f"the records of step {step}", draw.digest)
        same.append(draw.digest == sampler.draw(step).digest)
    ahead.close()
    if ranks.main:
        print("RESULTS " + json.dumps({"world": ranks.world, "same": same, "sums": sums}))
    ranks.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
