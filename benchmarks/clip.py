"""Cost of clipped per-record sums against ordinary training: python benchmarks/clip.py --quick [--json] [--plot FILE]

Each model runs in a process of its own, in which all engines share weights and are timed between non-private steps. A
step is forward, backward and the addition to fp32 totals; noise and optimizer are not part of it. Without --quick: the
published shapes, meant for a GPU (--device cuda --precision bf16). With --views 4,16: the cost of several views of a
record that are clipped as one, on the same number of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# This folder for the benchmark's own parts, the one above it for the measured code.
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the package `data` before data.py beside this file

# Listed here, so that this process need not import the code that its children measure.
QUICK = ("mae_s", "captioner_s", "vit_s", "last_layer", "llama_lora")
FULL = (
    "vip_mae_base", "vip_mae_large", "vip_mae_huge", "dpcap_base_40", "dpcap_base_77", "dpcap_large_40",
    "dpcap_large_77", "vit_base_224", "vit_base_384", "vit_large_224", "vit_large_384", "vit_huge_224", "vit_huge_392",
    "last_layer",
)  # fmt: skip
QUICK_ENGINES = ("nonprivate", "ours", "ours_exact", "reference_vmap", "opacus", "opacus_ghost", "fastdp")
ENGINES = (*QUICK_ENGINES, "ours_faster", "ours_compiled", "nonprivate_compiled")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="real widths and tokens, reduced depth; some 8 minutes")
    size.add_argument("--smoke", action="store_true", help="toy shapes: only shows that the program runs")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout instead of a table")
    parser.add_argument("--plot", type=Path, help="also draw a picture")
    parser.add_argument("--save", type=Path, help="also write the JSON to this file")
    parser.add_argument("--models", type=_names, help="comma-separated; default: all")
    parser.add_argument("--engines", type=_names, help=f"comma-separated; default: {','.join(QUICK_ENGINES)}")
    parser.add_argument("--rounds", type=int, help="timed steps of ours, half as many of peers; default 7, 20 on GPU")
    parser.add_argument("--micro-batches", type=_names, default=[], help="default: the model's own; on GPU 8,32,128")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--views", type=_names, default=[], help="instead: views of a record that are clipped as one")
    parser.add_argument("--rows", type=int, default=16, help="with --views: rows of a step; default 16")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(given: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if given is None else given)
    asked = arguments(given)
    known_models = QUICK if asked.quick or asked.smoke else FULL
    names = asked.models or list(known_models)
    engines = asked.engines or [*QUICK_ENGINES, *(["nonprivate_compiled"] if asked.device == "cuda" else [])]
    for kind, wanted, known in (("model", names, known_models), ("engine", engines, ENGINES)):
        if unknown := sorted(set(wanted) - set(known)):
            print(f"there is no {kind} {unknown[0]!r}; choose among {', '.join(known)}", file=sys.stderr)
            return 2
    if asked.worker:
        return _work(asked, names[0], engines)
    results = [result for name in names if (result := _in_own_process(given, name)) is not None]
    _publish(results, asked)
    return 0 if len(results) == len(names) else 1


def _work(asked: argparse.Namespace, name: str, engines: list[str]) -> int:
    import clip_models
    import torch
    from clip_worker import Request, environment, measure

    workloads = clip_models.QUICK if asked.quick else clip_models.SMOKE if asked.smoke else clip_models.FULL
    sizes = [int(size) for size in asked.micro_batches] or ([8, 32, 128] if asked.device == "cuda" else [])
    rounds = asked.rounds or (20 if asked.device == "cuda" else 7)
    workload = workloads[name]
    engines = asked.engines or [*engines, *workload.also]
    request = Request(name, engines, rounds, asked.device, asked.precision == "bf16", sizes)
    if asked.views:
        from clip_views import measure_views

        views, device = [int(each) for each in asked.views], torch.device(asked.device)
        found = measure_views(name, workload, views, asked.rows, rounds, device, request.bf16)
        asked.worker.write_text(json.dumps(found | {"environment": environment(request)}))
        return 0
    asked.worker.write_text(json.dumps(measure(name, workload, request)))
    return 0


def _in_own_process(given: list[str], name: str) -> dict[str, Any] | None:
    """The process's own output (peers print) goes to stderr, so that stdout contains only the result."""
    print(f"{name} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "clip.py"), *given, "--models", name, "--worker", str(answer)]
        quiet = {"KINETO_LOG_LEVEL": "99", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(command, stdout=sys.stderr, env=os.environ | quiet)
        if done.returncode or not answer.exists():
            print(f"{name}: the process ended with code {done.returncode}; its rows are missing", file=sys.stderr)
            return None
        return json.loads(answer.read_text())


def _publish(results: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    from clip_report import plot, table
    from clip_views import views_table

    if asked.views:
        table = views_table
    everything = {"rows": [row for result in results for row in result["rows"]], "models": results}
    if asked.save:
        asked.save.write_text(json.dumps(everything, indent=1) + "\n")
    if asked.plot and results and not asked.views:
        plot(results, asked.plot)
    print(json.dumps(everything, indent=1) if asked.json else table(results))


if __name__ == "__main__":
    sys.exit(main())
