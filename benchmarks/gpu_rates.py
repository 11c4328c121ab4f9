"""Rates by which tests/gpu/count.py prices kernels, fitted to kernels that were measured on a GPU.

    python benchmarks/gpu_rates.py                  prints the fit and how far it is off
    python benchmarks/gpu_rates.py --write          commits to it (tests/gpu/rates.json)

`gpu.py kernels` measured the 40 kernels that cost most, by name; count.py counts the same micro-batches by operation.
NAMES and tests/gpu/kinds.py say which belong together, and launches show whether they do. A kind has one start and one
rate over all models and sides. With them its kernels together take as long as measured, and the start is the one with
which each model and side comes closest, of those with which nothing is faster than the memory. Where more were counted
than listed, those with the least work are taken to be below the 40. "Other" is what is left of the total: softmax,
fills, and what is below the 40 and of no kind. "Left out" predicts a model by starts and rates that were fitted to the
others.

All of that is fitted to transformers, and a ResNet is priced by it, too. Kinds that only a ResNet has (OF_RESNETS) are
fitted to one model, from which no start follows: they have that of elementwise kernels. Its convolutions have dozens of
names, most of them below the 40, so that in its plain micro-batch, where little else is, what is left of the total is
theirs.

micro.json has times of whole micro-batches by the clock, kernel by kernel or replayed. They had no part in the fit.
Those are compared for which the host launched faster than the device computed: replayed ones, or else kernel by kernel
where the host needed at most HOST_SHARE of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.gpu import pretended  # noqa: E402
from tests.gpu.kinds import UNALIGNED  # noqa: E402
from tests.gpu.prices import ASSUMED, RATES, Kernel, Rates, in_lines  # noqa: E402

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
    "elementwise, two types": r"::unrolled_elementwise_kernel<(?!.*\(double\))",
    "elementwise": r"bfloat16_copy_kernel|CUDAFunctor_add|CatArrayBatchedCopy_vectorized|clamp_scalar|threshold_kernel",
    OTHER: r"Memset|SoftMax|^_finish$|\(double\)|Memcpy|FillFunctor|MulFunctor|batch_norm",
}
RESNET, CONVOLUTION = "classifier/r50x1", "convolution half"
# The same for what only a ResNet has, before NAMES. Plain convolutions are products to some names.
OF_RESNETS = {
    "our group norm backward": r"^_backward$",
    "group norm": r"GroupNormKernelImplInternal|RowwiseMoments",
    "group norm backward": r"GroupNormBackwardKernelImpl|ComputeInternalGradients|GammaBetaBackwardCUDAKernel1<",
    "standardised sums": r"^_sums$",
    "standardised back": r"^_back$",
    "patches": r"im2col_kernel",
    "max pool": r"max_pool",
    "convolution fp32": r"xmma_\w*f32f32_f32f32_f32",
    UNALIGNED: r"cutlass::Kernel2<.*gemm",
    CONVOLUTION: r"cudnn",
}
KINDS = [*NAMES, *OF_RESNETS]
# Kernels that an operation launches, where it is not one.
PER_OPERATION = {"attention backward": 3, "layer norm backward": 2, "group norm": 2, "group norm backward": 3}
# One for each record.
PER_RECORD = {"patches"}
# Seconds, up to 10 us. A kind that seems to start more slowly is slow for some shapes, whatever the number of records.
STARTS = [half / 2e6 for half in range(21)]
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
    left_over: str = OTHER
    """The kind that took what is left of the total."""

    @property
    def counted(self) -> Counter[Kernel]:
        return self.listed + self.rest

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())

    def own(self, kind: str) -> Counter[Kernel]:
        """The kernels that took a kind's milliseconds. What is left over is the rest, each at the rate of its own
        kind."""
        own = Counter({kernel: times for kernel, times in self.listed.items() if kernel.kind == kind})
        return own + self.rest if kind == self.left_over else own


def kind_of_name(kernel: str, model: str) -> str:
    names = OF_RESNETS | NAMES if model == RESNET else NAMES
    return next(kind for kind, pattern in names.items() if re.search(pattern, kernel))


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
            milliseconds, launches = dict.fromkeys(KINDS, 0.0), Counter[str]()
            left_over = CONVOLUTION if (model, side) == (RESNET, "plain") else OTHER
            for kernel, *row in case["kernels"]:
                kind = kind_of_name(kernel, model)
                if kind == CONVOLUTION or (kind == UNALIGNED and side == "plain"):
                    kind = left_over
                milliseconds[kind] += row[2 * column + 1]
                launches[kind] += row[2 * column]
            milliseconds[left_over] += case[f"{side}_ms"] - sum(milliseconds.values())
            found.append(Case(model, side, *split(kernels[side], launches), milliseconds, launches, left_over))
    return found


def split(kernels: Counter[Kernel], launches: Counter[str]) -> tuple[Counter[Kernel], Counter[Kernel]]:
    """As many kernels of each kind as launches were listed, those with most work; and the rest."""
    room = {kind: launches[kind] // PER_OPERATION.get(kind, 1) for kind in KINDS if kind not in (OTHER, CONVOLUTION)}
    listed: Counter[Kernel] = Counter()
    for kernel, times in sorted(kernels.items(), key=lambda each: -(each[0].operations or each[0].bytes)):
        if taken := min(times, room.get(kernel.kind, 0)):
            listed[kernel] = taken
            room[kernel.kind] -= taken
    return listed, kernels - listed


def priced(kernels: Mapping[Kernel, int], rates: Rates) -> float:
    """Milliseconds."""
    return 1e3 * sum(times * rates.seconds(kernel) for kernel, times in kernels.items())


def rate_of(kind: str, kernels: Counter[Kernel], milliseconds: float, start: float, known: Rates) -> Rates:
    """With the rate at which they take so long, found by halving: the faster, the less time."""

    def at(rate: float) -> Rates:
        return Rates(known.start, {**known.fitted, kind: rate}, {**known.starts, kind: start})

    slow, fast = 1e9, 1e17
    for _ in range(60):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if priced(kernels, at(middle)) > milliseconds else (slow, middle)
    return at(float(f"{fast:.3g}"))


def fit_kind(kind: str, of: list[Case], starts: Iterable[float], known: Rates) -> Rates:
    taken = [(case.own(kind), case.milliseconds[kind]) for case in of if case.milliseconds[kind]]
    kernels, milliseconds = sum((own for own, _ in taken), Counter[Kernel]()), sum(each for _, each in taken)
    in_bytes = not any(kernel.operations for kernel in kernels if kernel.kind == kind)

    def error(rates: Rates) -> float:
        if in_bytes and rates.fitted[kind] > PEAK:
            return math.inf
        return sum((priced(own, rates) - each) ** 2 / each for own, each in taken)

    return min((rate_of(kind, kernels, milliseconds, start, known) for start in starts), key=error)


def fit(of: list[Case]) -> Rates:
    """What is left over has kernels of all kinds, and comes last."""
    resnets, transformers = ([case for case in of if (case.model == RESNET) is which] for which in (True, False))
    rates = Rates(0.0, {})
    for kind in NAMES:
        rates = fit_kind(kind, transformers, [PER_OPERATION.get(kind, 1) * start for start in STARTS], rates)
    rates = replace(rates, start=rates.starts["elementwise"])
    for kind in OF_RESNETS if resnets else ():
        rates = fit_kind(kind, resnets, [rates.start], rates)
    return rates


def compared(of: list[Case], rates: Rates) -> dict[str, Any]:
    """Totals and ratios of each model: measured, modelled, and predicted from the other transformers alone."""
    found: dict[str, Any] = {}
    for model in dict.fromkeys(case.model for case in of):
        own, others = ([c for c in of if (c.model == model) is here] for here in (True, False))
        totals = {"measured": [c.total for c in own], "modelled": [priced(c.counted, rates) for c in own]}
        if model != RESNET:
            totals["left out"] = [priced(c.counted, fit(others)) for c in own]
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
        replayed = case["graph"].get("how", "").startswith("micro-batches are replayed")
        for way in ("plain", "graph" if replayed else "private"):
            if case[way]["host_seconds"] > HOST_SHARE * case[way]["seconds"]:
                continue
            modelled = priced(kernels["plain" if way == "plain" else "private"], rates)
            found.append({
                "case": name, "way": "private, replayed" if way == "graph" else way,
                "measured_ms": round(1e3 * case[way]["seconds"], 1), "modelled_ms": round(modelled, 1),
            })  # fmt: skip
    return found


def kinds(of: list[Case], rates: Rates) -> dict[str, Any]:
    """Each kind over all models and sides, and the worst that its price is off for one of them, in milliseconds."""
    found: dict[str, Any] = {}
    for kind in KINDS:
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
    lines = ["| kind | start, us | rate, 1e12 per s | launches | listed | measured ms | worst error |"]
    lines.append("|---" * 7 + "|")
    for kind, each in found["kinds"].items():
        lines.append(
            f"| {kind} | {1e6 * found['starts'][kind]:.1f} | {found['rates'][kind] / 1e12:.3g} {each['unit']} | "
            f"{each['launches_counted']:,} | {each['launches_listed']:,} | {each['measured_ms']:.2f} | "
            f"{each['largest_error_ms']:+.2f} |"
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
    return {
        "start_seconds": rates.start, "starts": dict(rates.starts), "rates": dict(rates.fitted),
        "models": compared(of, rates),
    }  # fmt: skip


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
    rates = Rates(found["start_seconds"], found["rates"], found["starts"])
    found |= {"kinds": kinds(of, rates), "by_the_clock": by_the_clock(rates), "assumed": ASSUMED}
    print(report(found))
    if write:
        RATES.write_text(in_lines(found))


if __name__ == "__main__":
    main()
