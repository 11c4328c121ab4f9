"""How long a GPU takes for a kernel, by the rate of its kind.

Kinds that an H200 ran have the rates in rates.json, which `python benchmarks/gpu_rates.py` fits to the times of their
kernels. Kinds that no GPU has run for us have assumed rates, and so do kernels that load more than they read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

RATES = Path(__file__).with_name("rates.json")

# Bytes per second that a copy on the device reads and writes, and operations per second of products in fp32: measured
# (benchmarks/results/gpu/probe.json: 4.01e12, and 4.1e13 to 5.1e13).
MEMORY, PRODUCT_FP32 = 4.0e12, 45e12
# Assumed: bytes per second that kernels load through the cache, and the rates of kinds that were not measured.
CACHE = 5.5e12
NOT_MEASURED = "not measured"
ASSUMED = {
    "product fp32": PRODUCT_FP32, "product fp64": 45e12, "convolution half": 620e12, "convolution fp32": PRODUCT_FP32,
    "convolution fp64": 45e12, NOT_MEASURED: MEMORY,
}  # fmt: skip


class Kernel(NamedTuple):
    kind: str
    bytes: int
    operations: int = 0
    """As the device computes them, in whole tiles; 0 for kinds whose rate is in bytes per second."""
    loaded: int = 0
    """Bytes that a kernel of ours loads, which may be more than it reads of memory."""


@dataclass(frozen=True)
class Rates:
    start: float
    """Seconds that every kernel takes beside its work: filling the device, and waiting for its last blocks."""
    fitted: Mapping[str, float]
    """Bytes or operations per second, by kind."""

    @staticmethod
    def committed() -> Rates:
        found = json.loads(RATES.read_text())
        return Rates(found["start_seconds"], found["rates"])

    def seconds(self, kernel: Kernel) -> float:
        rate = self.fitted[kernel.kind] if kernel.kind in self.fitted else ASSUMED[kernel.kind]
        if kernel.operations:
            return self.start + max(kernel.operations / rate, kernel.bytes / MEMORY)
        return self.start + max(kernel.bytes / rate, kernel.loaded / CACHE)
