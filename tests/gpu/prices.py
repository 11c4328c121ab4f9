"""How long a GPU takes for a kernel, by the rate of its kind.

Kinds that an H200 ran have the rates in rates.json, which `python benchmarks/gpu_rates.py` fits to the times of their
kernels. The rates of other kinds are assumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RATES = Path(__file__).with_name("rates.json")


def in_lines(found: dict[str, Any]) -> str:
    """JSON in which whatever holds numbers alone has a line of its own."""
    return re.sub(r"([{\[])\s+([^{}\[\]]*?)\s+([}\]])", _one_line, json.dumps(found, indent=1)) + "\n"


def _one_line(block: re.Match[str]) -> str:
    return block[1] + re.sub(r"\s*\n\s*", " ", block[2]) + block[3]


# Bytes per second that a copy on the device reads and writes, and operations per second of products in fp32: measured
# (benchmarks/results/gpu/probe.json: 4.01e12, and 4.1e13 to 5.1e13).
MEMORY, PRODUCT_FP32 = 4.0e12, 45e12
# Assumed: the rates of kinds of which no kernel was measured by itself.
NOT_MEASURED = "not measured"
FUSED = "fused by the compiler"
ASSUMED = {
    FUSED: 3.3e12,
    "product fp32": PRODUCT_FP32, "product fp64": PRODUCT_FP32, "convolution fp64": PRODUCT_FP32, NOT_MEASURED: MEMORY,
}  # fmt: skip


class Kernel(NamedTuple):
    kind: str
    bytes: int
    operations: int = 0
    """As the device computes them, in whole tiles; 0 for kinds whose rate is in bytes per second."""


@dataclass(frozen=True)
class Rates:
    start: float
    """Seconds that a kernel takes beside its work: filling the device, and waiting for its last blocks."""
    fitted: Mapping[str, float]
    """Bytes or operations per second, by kind."""
    starts: Mapping[str, float] = field(default_factory=dict)
    """By kind, where it is another."""

    @staticmethod
    def committed() -> Rates:
        found = json.loads(RATES.read_text())
        return Rates(found["start_seconds"], found["rates"], found["starts"])

    def seconds(self, kernel: Kernel) -> float:
        rate = self.fitted[kernel.kind] if kernel.kind in self.fitted else ASSUMED[kernel.kind]
        start = self.starts.get(kernel.kind, self.start)
        if kernel.operations:
            return start + max(kernel.operations / rate, kernel.bytes / MEMORY)
        return start + kernel.bytes / rate
