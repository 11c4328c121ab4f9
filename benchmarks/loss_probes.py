"""Learning rates that follow noised probes of the loss, against rates that are not tuned, at toy size and equal ε.

    python benchmarks/loss_probes.py --seeds 3 --jobs 2 --out benchmarks/results/loss_probes.json

A small vision transformer learns to name shape and colour of synthetic pictures (32 classes), from random weights, by
AdamW. First guesses of the peak learning rate lie a factor of 10 apart. Three arms begin with each of them: a cosine, a
constant rate, and a constant rate with probes, which are charged with the gradient, so that its noise is larger at the
same ε. All keys come from the operating system; seeds set initial weights. What counts is loss and accuracy on public
pictures after the last step. Without probes, tuning would have to pay for the guesses that it tries on the same
records, which is not charged here. It does not show what probes do to a large model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mechanisms import EPSILON, FIRST_SEED, SMOKE, Arm, Size, prepare  # noqa: E402
from mechanisms import config as config_of  # noqa: E402
from runs import last_measured, mean_and_deviation, study_arguments, train, verified_epsilon  # noqa: E402

PEAKS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ARMS: dict[str, tuple[str, bool]] = {
    "cosine": ("cosine", False),
    "constant": ("constant", False),
    "probes": ("constant", True),
}
PROBES = {"every": 5}


@dataclass(frozen=True)
class Trial:
    arm: str
    peak: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.peak:g}-{self.seed}"


def config(data: Path, trial: Trial, size: Size, run_dir: Path) -> dict[str, Any]:
    raw = config_of(data, "private", Arm("classify", "AdamW", "independent"), trial.peak, trial.seed, size, run_dir)
    (phase,) = raw["phases"]
    shape, probed = ARMS[trial.arm]
    phase["schedule"] = {"peak": trial.peak, "warmup": size.steps // 6, "shape": shape}
    if probed:
        phase["privacy"]["loss_probes"] = PROBES
    return raw


def factors(run_dir: Path) -> list[tuple[int, float]]:
    """What the rate was multiplied by, at each probe."""
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    return [(line["step"], line["learning_rate_factor"]) for line in lines if "learning_rate_factor" in line]


def measured(folder: Path, trial: Trial, size: Size) -> dict[str, Any]:
    run_dir = train(folder / "runs", trial.name, config(folder / "data", trial, size, folder / "runs" / trial.name))
    found = last_measured(run_dir)
    return {
        **asdict(trial), "epsilon": verified_epsilon(run_dir, EPSILON), "loss": found["public_loss"],
        "top_1": found["top_1"], "factors": factors(run_dir),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| first guess | {' | '.join(f'{arm}: loss, top-1' for arm in ARMS)} |", "|---" * (1 + len(ARMS)) + "|"]
    for peak in PEAKS:
        cells = []
        for arm in ARMS:
            own = [row for row in rows if (row["arm"], row["peak"]) == (arm, peak)]
            cells.append(", ".join(mean_and_deviation([row[name] for row in own]) for name in ("loss", "top_1")))
        lines.append(f"| {peak:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for arm in ARMS:
        means = []
        for peak in PEAKS:
            own = [row["top_1"] for row in rows if (row["arm"], row["peak"]) == (arm, peak)]
            means.append(sum(own) / len(own))
        axes.plot(PEAKS, means, marker="o", label=arm)
    axes.set(xscale="log", xlabel="first guess of the peak learning rate", ylabel="top-1 on public pictures")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    asked = study_arguments(__doc__).parse_args()
    size = SMOKE if asked.smoke else Size()
    with tempfile.TemporaryDirectory() as place:
        folder = asked.work or Path(place)
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        prepare(folder / "data", size)
        todo = [Trial(arm, peak, FIRST_SEED + seed) for arm in ARMS for peak in PEAKS for seed in range(asked.seeds)]
        with ThreadPoolExecutor(asked.jobs) as pool:
            rows = list(pool.map(lambda trial: measured(folder, trial, size), todo))
    print(table(rows))
    if asked.out is not None:
        command = f"python benchmarks/loss_probes.py --seeds {asked.seeds} --jobs {asked.jobs}"
        setting = {"epsilon": EPSILON, "size": asdict(size), "probes": PROBES, "peaks": PEAKS}
        asked.out.write_text(json.dumps({"command": command, **setting, "runs": rows}, indent=1) + "\n")
        plot(rows, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
