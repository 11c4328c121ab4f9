"""Rate of noise, in elements per second on one core, and what drawing it ahead costs concurrent training.

    OMP_NUM_THREADS=1 python benchmarks/noise.py [--elements N] [--rounds N] [--json FILE]

Options are timed in turn, round after round, by the processor time of the drawing thread; medians are reported.
`libm` draws the same numbers with numpy's log, sin and cos, as a plain program would. `ahead` runs matrix products with
and without a concurrent drawing thread, in turn, and is meaningful only with a second free core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from murmuration.accounting.noise import GRID_GROWTH
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise
from murmuration.train.noise.exact import ExactNoise
from murmuration.train.noise.prefetch import NoiseAhead

KEY = bytes(range(32))


def draw_with_libm(elements: int) -> np.ndarray:
    stream = Cipher(algorithms.AES256(KEY), modes.CTR(bytes(16))).encryptor()
    out = np.empty(elements, np.float32)
    for begin in range(0, elements, 1 << 19):
        count = min(1 << 18, (elements - begin) // 2)
        words = np.frombuffer(stream.update(bytes(16 * count)), "<u8").reshape(count, 2)
        radius = np.sqrt(-2.0 * np.log((words[:, 0].astype(np.float64) + 1.0) * 2.0**-64))
        angle = words[:, 1].astype(np.float64) * (2.0 * np.pi * 2.0**-64)
        piece = out[begin : begin + 2 * count]
        piece[::2], piece[1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return out


def options(elements: int) -> dict[str, Callable[[], object]]:
    aes, chacha = AESNoise(KEY, 1.0, 1.0), ChaChaNoise(KEY, 1.0, 1.0)
    exact = {d: ExactNoise(KEY, 1.0, 1.0, GRID_GROWTH / math.sqrt(d)) for d in (10**6, 10**8)}
    normal = torch.empty(elements)
    zeros, words = bytes(1 << 18), bytearray((1 << 18) + 16)
    cipher = Cipher(algorithms.AES256(KEY), modes.CTR(bytes(16))).encryptor()
    small = [Fragment(str(i), i, 0, 192, 192 * i) for i in range(elements // 192)]
    return {
        "aes_float32": lambda: aes.draw(1, 0, 0, elements),
        "aes_float64": lambda: aes.draw(1, 0, 0, elements, np.float64),
        "aes_float32_tensors_of_192": lambda: [aes.draw(1, f.parameter, 0, f.length) for f in small],
        "exact_of_a_million_weights": lambda: exact[10**6].draw(1, 0, 0, elements),
        "exact_of_a_hundred_million_weights": lambda: exact[10**8].draw(1, 0, 0, elements),
        "aes_libm": lambda: draw_with_libm(elements),
        "keystream_alone": lambda: [cipher.update_into(zeros, words) for _ in range(elements // (1 << 15))],
        "chacha20_on_cpu": lambda: chacha.draw(1, 0, 0, elements),
        "torch_normal_seeded": lambda: normal.normal_(),
    }


def rates(elements: int, rounds: int) -> dict[str, float]:
    acts = options(elements)
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            began = time.thread_time()
            act()
            seconds[name].append(time.thread_time() - began)
    return {name: elements / statistics.median(found) for name, found in seconds.items()}


def relative(found: dict[str, float]) -> dict[str, float]:
    """Rates relative to the noise that a run draws by default."""
    return {name: rate / found["aes_float64"] for name, rate in found.items() if name.startswith("exact")}


def beside_training(elements: int, rounds: int) -> dict[str, float]:
    """Times a stand-in for a logical step: matrix products for about twice as long as the noise takes."""
    fragments = [Fragment("w", 0, 0, elements, 0)]
    noise, ahead = AESNoise(KEY, 1.0, 1.0), NoiseAhead(AESNoise(KEY, 1.0, 1.0), fragments)
    left, right = torch.randn(384, 384), torch.randn(384, 384)
    began = time.monotonic()
    noise.draw(1, 0, 0, elements, np.float64)
    patience = 2 * (time.monotonic() - began)
    products = 0
    while time.monotonic() - began < 2 * patience:
        left @ right
        products += 1

    def logical_step(step: int, source: AESNoise | NoiseAhead | None) -> float:
        begun = time.monotonic()
        if isinstance(source, NoiseAhead):
            source.prepare(step)
        for _ in range(products):
            left @ right
        if source is not None:
            for _ in source.chunks(step, fragments, torch.device("cpu")):
                pass
        return time.monotonic() - begun

    found: dict[str, list[float]] = {"without": [], "drawn_when_asked": [], "drawn_ahead": []}
    for step in range(1, rounds + 1):
        for name, source in zip(found, (None, noise, ahead), strict=True):
            found[name].append(logical_step(step, source))
    ahead.close()
    without = statistics.median(found.pop("without"))
    return {f"{name}_over_without": statistics.median(times) / without for name, times in found.items()}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)
    found = rates(chosen.elements, chosen.rounds)
    report = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/noise.py " + " ".join(given or sys.argv[1:]),
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0], "elements": chosen.elements, "rounds": chosen.rounds,
        "elements_per_second_per_core": found, "over_aes_float64": relative(found),
        "step_time": beside_training(chosen.elements, chosen.rounds),
    }  # fmt: skip
    text = json.dumps(report, indent=2)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
