"""Everything that only a GPU can show, in parts that can be interrupted: for anyone who has one.

    python benchmarks/gpu.py                          all parts, then the report; the same command continues
    python benchmarks/gpu.py truth micro --minutes 8  only these parts, each for at most so long
    python benchmarks/gpu.py micro --only captioner   the cases with this word in their names
    python benchmarks/gpu.py report --out DIR         the report of what was measured so far
    python benchmarks/gpu.py --smoke                  toy shapes on this machine's processor: shows that it runs

Parts:
    probe   what the device is, and how fast: products at the recipes' shapes, copies, launches
    truth   kernels against fp64, records against brute force, order of rows, doubtful records, repeatability;
            a claim that does not hold ends the command with 1
    micro   one micro-batch of the shipped recipes: plain, compiled and private, through the engine's own `accumulate`
    kernels which kernels the device's time goes to, plain and private
    step    what happens once per logical step: noise from each generator, division, optimizer
    feed    reading and decoding against what the device needs, and the copy to it
    report  report.md, report.json and plots of all that

Without a GPU it prints what was counted without one (tests/gpu/counted.json).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0:1] = [str(ROOT), str(Path(__file__).resolve().parent)]

import gpu_probe  # noqa: E402
import gpu_report  # noqa: E402
import gpu_speed  # noqa: E402
import gpu_truth  # noqa: E402
import torch  # noqa: E402
from gpu_cases import Results, Setting, environment  # noqa: E402

PARTS = {
    "probe": gpu_probe.cases, "truth": gpu_truth.cases, "micro": gpu_speed.micro_batches,
    "kernels": gpu_speed.kernels, "step": gpu_speed.once_per_step, "feed": gpu_speed.feeding,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, report; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most so long for each part; default 8")
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="cases whose names hold one of these")
    parser.add_argument("--again", action="store_true", help="measure again what was measured before")
    parser.add_argument("--eager", action="store_true", help="micro: without torch.compile, a minute for each model")
    parser.add_argument("--smoke", action="store_true", help="toy shapes on the processor")
    arguments = parser.parse_args()
    wanted = arguments.parts or [*PARTS, "report"]
    if unknown := [part for part in wanted if part not in (*PARTS, "report")]:
        parser.error(f"there is no part {unknown[0]!r}; choose among {', '.join(PARTS)}, report")
    if not torch.cuda.is_available() and not arguments.smoke and wanted != ["report"]:
        print("There is no GPU here, or PyTorch cannot use it. This was counted without one:\n")
        print(gpu_report.counted_table(json.loads((ROOT / "tests" / "gpu" / "counted.json").read_text())))
        return 0
    device = torch.device("cpu" if arguments.smoke else "cuda")
    setting = Setting(device, arguments.smoke, compile=not (arguments.smoke or arguments.eager))
    broken: list[str] = []
    for part in wanted:
        if part == "report":
            print(gpu_report.write(arguments.out))
            continue
        results = Results.at(arguments.out / f"{part}.json", part, environment(setting))
        chosen = (case for case in PARTS[part](setting) if any(text in case.name for text in arguments.only))
        left = results.run(chosen, arguments.minutes, arguments.again)
        broken += results.broken
        if left:
            print(f"{part}: {left} cases are left; the same command continues", flush=True)
    for claim in broken:
        print(f"DOES NOT HOLD: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
