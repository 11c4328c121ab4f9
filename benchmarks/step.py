"""Where the time of a private logical step goes: share of compute, reading, draw, noise, reduction and optimizer.

    python benchmarks/step.py [--quick] [--json] [--out benchmarks/results/step.json]

Compute and reading are timed on a number of samples and scaled by count (the nano model shows that compute is
proportional to it); everything else happens once per logical step and is timed in full. The absolute figures are of
this machine; the shares matter. Reading counts as if it did not overlap with compute, and noise as if it were not drawn
ahead: both are upper bounds for a real run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCHES = (256, 1024, 4096, 8192)
PARTS = ("compute", "read", "draw", "noise", "reduction", "optimizer")
COLORS = dict(zip(PARTS, ("#4c72b0", "#8c8c8c", "#ccb974", "#c44e52", "#55a868", "#8172b3"), strict=True))


def launch(world: int, model: str, samples: list[int], stages: list[int]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "deepspeed"), "--master_port", str(port), "--num_gpus", str(world),
        str(ROOT / "benchmarks" / "step_worker.py"), "--model", model, "--samples", *map(str, samples),
        "--stages", *map(str, stages),
    ]  # fmt: skip
    # Threads other than the main one take their thread limit from the environment.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULTS ")), None)
    if line is None:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(line.removeprefix("RESULTS "))


def shares(row: dict[str, Any], draw: float, batch: int) -> dict[str, float]:
    """Seconds of each part of a logical step of `batch` records."""
    count, seconds = max((int(count), value) for count, value in row["compute_seconds"].items())
    return {
        "compute": seconds * batch / count, "read": row["read_seconds_per_sample"] * batch, "draw": draw,
        "noise": row["noise"], "reduction": row["reduction"], "optimizer": row["optimizer"],
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    lines = ["stage world batch   step s  noise+reduction+optimizer  " + "  ".join(f"{part:>9}" for part in PARTS)]
    for row in results["rows"]:
        parts, whole = row["seconds"], sum(row["seconds"].values())
        lines.append(
            f"{row['stage']:>5} {row['world']:>5} {row['batch']:>5} {whole:8.1f}  {row['overhead_share']:>25.2%}  "
            + "  ".join(f"{parts[part] / whole:>9.2%}" for part in PARTS)
        )
    for row in results["linearity"]:
        lines.append(f"nano, {row['samples']} samples: {row['seconds_per_sample'] * 1e3:.1f} ms a sample")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = results["rows"]
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(rows) + 1.2))
    left = [0.0] * len(rows)
    for part in PARTS:
        values = [100 * row["seconds"][part] / sum(row["seconds"].values()) for row in rows]
        axes.barh(range(len(rows)), values, left=left, color=COLORS[part], label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(
        range(len(rows)), [f"ZeRO-{r['stage']}, {r['world']} ranks, B = {r['batch']:,}" for r in rows], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xlabel("share of a logical step, %")
    axes.set_title(f"ViT captioner ({results['model']}, {results['parameters'] / 1e6:.0f}M) on {results['machine']}")
    axes.legend(ncols=len(PARTS), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples, stages 1 and 3")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="write this JSON and a PNG next to it")
    arguments = parser.parse_args()
    samples, stages = ([64], [1, 3]) if arguments.quick else ([256], [0, 1, 2, 3])
    rows, parameters = [], 0
    for world in (1, 2):
        found = launch(world, arguments.model, samples, stages)
        for row in found["rows"]:
            parameters = row["parameters"]
            for batch in BATCHES:
                seconds = shares(row, found["draw_seconds"], batch)
                overhead = seconds["noise"] + seconds["reduction"] + seconds["optimizer"]
                rows.append({"stage": row["stage"], "world": world, "batch": batch, "seconds": seconds,
                             "overhead_share": overhead / sum(seconds.values())})  # fmt: skip
    nano = launch(1, "nano", [64, 128, 256] if arguments.quick else [64, 256, 1024], [1])["rows"][0]["compute_seconds"]
    results = {
        "command": "python benchmarks/step.py" + (" --quick" if arguments.quick else ""),
        "machine": f"{platform.machine()} CPU, one thread a rank", "model": arguments.model, "parameters": parameters,
        "versions": {name: version(name) for name in ("torch", "deepspeed")}, "rows": rows,
        "linearity": [{"samples": int(n), "seconds_per_sample": s / int(n)} for n, s in nano.items()],
    }  # fmt: skip
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        plot(results, arguments.out.with_suffix(".png"))
    print(json.dumps(results) if arguments.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
