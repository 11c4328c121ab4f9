"""Rates by which tests/gpu/count.py prices kernels, fitted to kernels that were measured on a GPU.

    python benchmarks/gpu_rates.py                  prints the fit and how far it is off
    python benchmarks/gpu_rates.py --write          commits to it (tests/gpu/rates.json)

`gpu.py kernels` measured the 40 kernels that cost most, by name; count.py counts the same micro-batches by operation.
NAMES and tests/gpu/kinds.py say which belong together, and launches show whether they do. A kind has one rate over all
models and sides: with it, and one start for all kernels, the kind's kernels together take as long as measured. Where
more were counted than listed, those with the least work are taken to be below the 40. "Other" is what is left of the
total: softmax, fills, and what is below the 40 and of no kind. The start is the one with the least squared error over
kinds, models and sides, of those with which no kind is faster than the memory. "Left out" predicts a model by rates
that were fitted to the others.

micro.json has times of whole micro-batches by the clock, kernel by kernel or replayed. They had no part in the fit.
Those are compared for which the host launched faster than the device computed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.gpu import pretended  # noqa: E402
from tests.gpu.prices import ASSUMED, RATES, Kernel, Rates  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SIDES = ("plain", "private")
OTHER = "other"
# Kinds by the names of kernels; the first that matches.
NAMES = {
    "attention backward": r"sdpa\w*_bprop|compute_dot_do_o|convert_dq_to_16bits",
    "attention": r"sdpa\w*_fprop",
    "product half": r"^nvjet",
    "gram, few tokens": r"^_few_tokens$",
    "gram": r"^_many_tokens$",
    "our layer norm backward": r"^_backward$",
    "scale": r"^_scale$",
    "add parts": r"^_add_parts$",
    "layer norm": r"vectorized_layer_norm_kernel",
    "layer norm backward": r"GammaBetaBackward|layer_norm_grad_input",
    "bias sum": r"reduce_kernel.*BFloat16",
    "gelu": r"Gelu",
    "strided copy": r"CatArrayBatchedCopy<|::elementwise_kernel<.*direct_copy_kernel",
    "elementwise, two types": r"::unrolled_elementwise_kernel<",
    "elementwise": r"bfloat16_copy_kernel|CUDAFunctor_add|CatArrayBatchedCopy_vectorized",
    OTHER: r"Memset|SoftMax",
}
# Kernels that an operation launches, where it is not one.
PER_OPERATION = {"attention backward": 3, "layer norm backward": 2}
STARTS = [tenth / 1e7 for tenth in range(31)]
# Bytes per second of an H200's memory.
PEAK = 4.8e12
# Of what the clock measured, the share that the host may have needed to launch it.
HOST_SHARE = 0.8


@dataclass(frozen=True)
class Case:
    """One side of a model: kernels as counted, and the milliseconds and launches of each kind as listed."""

    model: str
    side: str
    listed: Counter[Kernel]
    rest: Counter[Kernel]
    """Below the 40, or of no kind."""
    milliseconds: dict[str, float]
    launches: Counter[str]

    @property
    def counted(self) -> Counter[Kernel]:
        return self.listed + self.rest

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())

    def own(self, kind: str) -> Counter[Kernel]:
        """The kernels that took a kind's milliseconds. "Other" is all of the rest, each at the rate of its own kind."""
        if kind == OTHER:
            return self.rest
        return Counter({kernel: times for kernel, times in self.listed.items() if kernel.kind == kind})


def kind_of_name(kernel: str) -> str:
    return next(kind for kind, pattern in NAMES.items() if re.search(pattern, kernel))


def counted(model: str, records: int) -> dict[str, Counter[Kernel]]:
    """By count.py, on a pretended GPU."""
    arguments = ("kernels", "--inside", "--model", model, "--records", str(records))
    done = pretended.run(ROOT / "tests" / "gpu" / "count.py", *arguments)
    line = next((line for line in done.stdout.splitlines() if line.startswith("KERNELS ")), None)
    if line is None:
        raise RuntimeError(done.stdout + done.stderr)
    found = json.loads(line.removeprefix("KERNELS "))[model]
    return {side: Counter({Kernel(*each): times for *each, times in rows}) for side, rows in found.items()}


def cases() -> list[Case]:
    measured, found = json.loads((RESULTS / "kernels.json").read_text())["cases"], []
    for name, case in measured.items():
        model, records = name.split()
        kernels = counted(model, int(records))
        for column, side in enumerate(SIDES):
            milliseconds, launches = dict.fromkeys(NAMES, 0.0), Counter[str]()
            for kernel, *row in case["kernels"]:
                milliseconds[kind_of_name(kernel)] += row[2 * column + 1]
                launches[kind_of_name(kernel)] += row[2 * column]
            milliseconds[OTHER] += case[f"{side}_ms"] - sum(milliseconds.values())
            found.append(Case(model, side, *split(kernels[side], launches), milliseconds, launches))
    return found


def split(kernels: Counter[Kernel], launches: Counter[str]) -> tuple[Counter[Kernel], Counter[Kernel]]:
    """As many kernels of each kind as launches were listed, those with most work; and the rest."""
    room = {kind: launches[kind] // PER_OPERATION.get(kind, 1) for kind in NAMES if kind != OTHER}
    listed: Counter[Kernel] = Counter()
    for kernel, times in sorted(kernels.items(), key=lambda each: -(each[0].operations or each[0].bytes)):
        if taken := min(times, room.get(kernel.kind, 0)):
            listed[kernel] = taken
            room[kernel.kind] -= taken
    return listed, kernels - listed


def priced(kernels: Mapping[Kernel, int], rates: Rates) -> float:
    """Milliseconds."""
    return 1e3 * sum(times * rates.seconds(kernel) for kernel, times in kernels.items())


def rate_of(kind: str, of: list[Case], start: float, known: Mapping[str, float]) -> float:
    """Found by halving: the faster, the less time."""
    kernels = sum((case.own(kind) for case in of), Counter[Kernel]())
    wanted = sum(case.milliseconds[kind] for case in of)
    slow, fast = 1e9, 1e17
    for _ in range(60):
        middle = (slow * fast) ** 0.5
        rates = Rates(start, {**known, kind: middle})
        slow, fast = (middle, fast) if priced(kernels, rates) > wanted else (slow, middle)
    return float(f"{fast:.3g}")


def fit_with(start: float, of: list[Case]) -> Rates:
    """The last is "other", whose kernels are of all kinds."""
    found: dict[str, float] = {}
    for kind in NAMES:
        found[kind] = rate_of(kind, of, start, found)
    return Rates(start, found)


def fit(of: list[Case]) -> Rates:
    in_bytes = {kernel.kind for case in of for kernel in case.counted if not kernel.operations} & NAMES.keys()

    def error(rates: Rates) -> float:
        if any(rates.fitted[kind] > PEAK for kind in in_bytes):
            return math.inf
        return sum((priced(case.own(kind), rates) - case.milliseconds[kind]) ** 2 for case in of for kind in NAMES)

    return min((fit_with(start, of) for start in STARTS), key=error)


def compared(of: list[Case], rates: Rates) -> dict[str, Any]:
    """Totals and ratios of each model: measured, modelled, and predicted from the other models alone."""
    found: dict[str, Any] = {}
    for model in dict.fromkeys(case.model for case in of):
        own, others = ([c for c in of if (c.model == model) is here] for here in (True, False))
        totals = {
            "measured": [c.total for c in own], "modelled": [priced(c.counted, rates) for c in own],
            "left out": [priced(c.counted, fit(others)) for c in own],
        }  # fmt: skip
        found[model] = {
            name: {**{f"{side}_ms": round(ms, 2) for side, ms in zip(SIDES, pair, strict=True)},
                   "ratio": round(pair[0] / pair[1], 3)}
            for name, pair in totals.items()
        }  # fmt: skip
    return found


def by_the_clock(rates: Rates) -> list[dict[str, Any]]:
    """Micro-batches whose time is the device's."""
    found = []
    for name, case in json.loads((RESULTS / "micro.json").read_text())["cases"].items():
        model, records = name.split()
        kernels = counted(model, int(records))
        for way in ("plain", "private", "graph"):
            replayed = case[way].get("how", "").startswith("micro-batches are replayed")
            if case[way]["host_seconds"] > HOST_SHARE * case[way]["seconds"] or (way == "graph" and not replayed):
                continue
            modelled = priced(kernels["plain" if way == "plain" else "private"], rates)
            found.append({
                "case": name, "way": "private, replayed" if replayed else way,
                "measured_ms": round(1e3 * case[way]["seconds"], 1), "modelled_ms": round(modelled, 1),
            })  # fmt: skip
    return found


def kinds(of: list[Case], rates: Rates) -> dict[str, Any]:
    """Each kind over all models and sides, and the worst that its price is off for one of them, in milliseconds."""
    found: dict[str, Any] = {}
    for kind in NAMES:
        own = [(kernel, times) for case in of for kernel, times in case.counted.items() if kernel.kind == kind]
        errors = [priced(case.own(kind), rates) - case.milliseconds[kind] for case in of]
        found[kind] = {
            "unit": "operations" if any(kernel.operations for kernel, _ in own) else "bytes",
            "launches_counted": PER_OPERATION.get(kind, 1) * sum(times for _, times in own),
            "launches_listed": sum(case.launches[kind] for case in of),
            "measured_ms": round(sum(case.milliseconds[kind] for case in of), 2),
            "largest_error_ms": round(max(errors, key=abs), 2),
        }  # fmt: skip
    return found


def report(found: dict[str, Any]) -> str:
    lines = [f"Each kernel starts in {1e6 * found['start_seconds']:.1f} us.", ""]
    lines += ["| kind | rate, 1e12 per s | launches | listed | measured ms | worst error |", "|---" * 6 + "|"]
    for kind, each in found["kinds"].items():
        lines.append(
            f"| {kind} | {found['rates'][kind] / 1e12:.3g} {each['unit']} | {each['launches_counted']:,} | "
            f"{each['launches_listed']:,} | {each['measured_ms']:.2f} | {each['largest_error_ms']:+.2f} |"
        )
    lines += ["", "| model | measured | modelled | left out |", "|---" * 4 + "|"]
    for model, each in found["models"].items():
        shown = (f"{x['plain_ms']:.1f} → {x['private_ms']:.1f} ({x['ratio']:.2f})" for x in each.values())
        lines.append(f"| {model} | {' | '.join(shown)} |")
    lines += ["", "| by the clock | | measured | modelled |", "|---" * 4 + "|"]
    lines += [f"| {x['case']} | {x['way']} | {x['measured_ms']} | {x['modelled_ms']} |" for x in found["by_the_clock"]]
    return "\n".join(lines)


def fitted(of: list[Case]) -> dict[str, Any]:
    rates = fit(of)
    return {"start_seconds": rates.start, "rates": dict(rates.fitted), "models": compared(of, rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="tests/gpu/rates.json")
    write = parser.parse_args().write
    if why_not := pretended.why_not():
        parser.error(f"nothing can be counted here: {why_not}")
    measured = json.loads((RESULTS / "kernels.json").read_text())
    of = cases()
    found = {
        "command": "python benchmarks/gpu_rates.py --write", "measured": "benchmarks/results/gpu/kernels.json",
        "device": measured["environment"]["device"], **fitted(of),
    }  # fmt: skip
    rates = Rates(found["start_seconds"], found["rates"])
    found |= {"kinds": kinds(of, rates), "by_the_clock": by_the_clock(rates), "assumed": ASSUMED}
    print(report(found))
    if write:
        RATES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
