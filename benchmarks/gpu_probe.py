"""What the device can do, measured: the limits against which everything else is held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from clip_timing import seconds_of
from gpu_cases import Case, Found, Setting, asked_of_driver, synchronise

# Records, tokens, columns and rows of the products that dominate the shipped recipes.
PRODUCTS = {
    "mae/base mlp": (64 * 50, 768, 3072), "mae decoder mlp": (64 * 197, 512, 2048),
    "captioner mlp": (128 * 197, 768, 3072), "caption head": (128 * 40, 768, 32768),
    "captioner/large mlp": (128 * 197, 1024, 4096),
}  # fmt: skip
LAUNCHES = 2000


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("clocks", partial(clocks, setting))
    for name, (rows, inner, columns) in PRODUCTS.items():
        for dtype in (torch.bfloat16, torch.float32):
            size = (8, 8, 8) if setting.smoke else (rows, inner, columns)
            yield Case(f"product {name} {str(dtype)[6:]}", partial(product, size, dtype, setting))
    yield Case("copy on the device", partial(copied, "device", setting))
    if setting.device.type == "cuda":
        yield Case("copy from pinned memory", partial(copied, "pinned", setting))
        yield Case("copy from ordinary memory", partial(copied, "host", setting))
    yield Case("launch", partial(launch, setting))


def clocks(setting: Setting) -> Found:
    if setting.device.type != "cuda":
        return {}
    fields = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "mig.mode.current")
    return {name: asked_of_driver(name) for name in fields}


def median_seconds(act: Callable[[], object], setting: Setting, repeats: int = 20) -> float:
    """Times one call, after two that warm up."""

    def once() -> None:
        act()

    repeats = 2 if setting.smoke else repeats
    for _ in range(2):
        once()
    synchronise(setting.device)
    return statistics.median(seconds_of(once, setting.device) for _ in range(repeats))


def product(size: tuple[int, int, int], dtype: torch.dtype, setting: Setting) -> Found:
    rows, inner, columns = size
    left = torch.randn(rows, inner, device=setting.device, dtype=dtype)
    right = torch.randn(inner, columns, device=setting.device, dtype=dtype)
    seconds = median_seconds(lambda: left @ right, setting)
    return {"shape": size, "microseconds": 1e6 * seconds, "tflops": 2 * rows * inner * columns / seconds / 1e12}


def copied(origin: str, setting: Setting) -> Found:
    count = 1 << (10 if setting.smoke else 28)
    there = torch.empty(count, dtype=torch.uint8, device=setting.device)
    here = torch.zeros(count, dtype=torch.uint8, device=setting.device if origin == "device" else "cpu")
    here = here.pin_memory() if origin == "pinned" else here
    seconds = median_seconds(lambda: there.copy_(here, non_blocking=True), setting)
    moved = (2 if origin == "device" else 1) * count
    return {"gigabytes_per_second": moved / seconds / 1e9}


def launch(setting: Setting) -> Found:
    """Host time for one small kernel, as PyTorch sends it: what a micro-batch costs that is all small kernels."""
    small = torch.zeros(64, device=setting.device)
    synchronise(setting.device)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        small.add_(1.0)
    host = time.perf_counter() - began
    synchronise(setting.device)
    whole = time.perf_counter() - began
    return {"host_microseconds": 1e6 * host / LAUNCHES, "microseconds": 1e6 * whole / LAUNCHES}
