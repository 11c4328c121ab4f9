"""Does a learning rate that was chosen on a narrow model serve a wide one, with `optimizer.width_transfer` and without?

    python benchmarks/width_transfer.py --out benchmarks/results/width_transfer.json \
        --plot benchmarks/results/width_transfer.png

Two measurements on synthetic pictures, of a vision transformer with two blocks whose heads grow in number. The
coordinate check (`width_coordinates.py`): how far a few private steps, with real clipping and real noise, move features
and logits at widths 64 to 512, signal and noise apart. And the best rate: models of widths 32 to 256 learn 32 classes
from random weights, each at every rate, with the same records, steps and noise, hence ε; they are made of the private
step's own parts, without ledger and self-test.

It does not show what holds at other depths, at other ratios of noise to signal, or where weights are pretrained.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from width_coordinates import BASE, Check, changes, model_of, pictures, summary  # noqa: E402

from murmuration.accounting.epsilon.accountant import epsilon, round_up  # noqa: E402
from murmuration.accounting.epsilon.calibrate import calibrate_sigma  # noqa: E402
from murmuration.accounting.plan import (  # noqa: E402
    RATE_DENOMINATOR,
    Event,
    PrivacyPlan,
    threshold_for,
)
from murmuration.data.draw.micro_batch import MicroBatch, slots  # noqa: E402
from murmuration.data.draw.poisson import PoissonSampler  # noqa: E402
from murmuration.train.clip.rule import ClipRule  # noqa: E402
from murmuration.train.config.optimizer import (  # noqa: E402
    LimitedBy,
    Optimizer,
    OptimizerParams,
    OptimizerType,
    Schedule,
    WidthTransfer,
)
from murmuration.train.engines.choose import EngineSettings  # noqa: E402
from murmuration.train.engines.local import start_ranks  # noqa: E402
from murmuration.train.noise.aes import AESNoise  # noqa: E402
from murmuration.train.noise.update import NoisyUpdate  # noqa: E402
from murmuration.train.optim.schedule import learning_rate  # noqa: E402
from murmuration.train.private import Computation, clipping_engine  # noqa: E402

EPSILON, NARROWEST = 8.0, 32
ARMS: dict[str, LimitedBy | None] = {"off": None, "noise": "noise", "signal": "signal"}
CHECKED: list[tuple[OptimizerType, str]] = [
    ("AdamW", "off"), ("AdamW", "noise"), ("AdamW", "signal"), ("SGD", "off"), ("SGD", "noise"), ("LAMB", "noise"),
]  # fmt: skip
CHECK_RATES = {"AdamW": 3e-3, "LAMB": 3e-2, "SGD": 1e-2}


@dataclass(frozen=True)
class Size:
    records: int = 4_000
    tested: int = 1_000
    batch: int = 200
    micro_batch: int = 100
    steps: int = 30
    widths: tuple[int, ...] = (32, 64, 128, 256)
    rates: tuple[float, ...] = (8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128)
    checked_widths: tuple[int, ...] = (64, 128, 256, 512)


SMOKE = Size(200, 32, 20, 20, 2, (32, 64), (1e-2,), (64, 128))


def optimizer_of(kind: OptimizerType, arm: str, base: int) -> Optimizer:
    params = OptimizerParams(momentum=0.9) if kind == "SGD" else OptimizerParams(betas=(0.9, 0.95))
    limited_by = ARMS[arm]
    transfer = None if limited_by is None else WidthTransfer(width=base, limited_by=limited_by)
    return Optimizer(type=kind, params=params, width_transfer=transfer)


@dataclass(frozen=True)
class Run:
    arm: str
    width: int
    rate: float
    seed: int


def runs(size: Size, seeds: int) -> list[Run]:
    """At the narrowest width, where the rate would be chosen, all arms are one."""
    return [
        Run(arm, width, rate, seed)
        for arm in ARMS for width in size.widths for rate in size.rates for seed in range(seeds)
        if width != NARROWEST or arm == "off"
    ]  # fmt: skip


def plan_of(size: Size) -> PrivacyPlan:
    """The same for all runs, and so is ε."""
    delta = 1 / (2 * size.records)
    threshold = threshold_for(size.records, size.batch)
    sigma = calibrate_sigma(threshold / RATE_DENOMINATOR, size.steps, EPSILON, delta)
    return PrivacyPlan(
        records=size.records, threshold=threshold, clip_norm=1.0, noise_multiplier=sigma, steps=size.steps, delta=delta,
        epsilon_budget=EPSILON,
    )  # fmt: skip


def trained(run: Run, size: Size, plan: PrivacyPlan) -> dict[str, Any]:
    """The private step's own parts, keys of the operating system, no ledger; scored by loss on other pictures."""
    torch.set_num_threads(1)
    (images, labels), model = pictures(101, size.records), model_of(run.width, run.seed)
    rule = ClipRule.of(plan, "automatic", 0.01, size.micro_batch)
    optimizer, settings = optimizer_of("AdamW", run.arm, NARROWEST), EngineSettings(micro_batch=size.micro_batch)
    gradient_noise = plan.noise_std / plan.divisor
    engine = clipping_engine(model, rule, optimizer, gradient_noise, settings, start_ranks(), Computation()).engine
    noise = AESNoise.of(secrets.token_bytes(32), plan)
    sampler = PoissonSampler(secrets.token_bytes(32), secrets.token_bytes(32), plan.records, plan.threshold)
    schedule = Schedule(peak=run.rate, warmup=max(1, size.steps // 6), shape="cosine")
    for step in range(1, size.steps + 1):
        for row in slots(sampler.draw(step).ids, 0, 1, size.micro_batch):
            ids = torch.from_numpy(row)
            inputs = {"images": images[ids.clamp(min=0)], "labels": labels[ids.clamp(min=0)]}
            engine.accumulate(MicroBatch(inputs, ids >= 0), rule)
        engine.update(NoisyUpdate(noise, step), learning_rate(schedule, size.steps, step))
    images, labels = pictures(102, size.tested)
    with torch.no_grad():
        logits = model.logits(images)
    loss, right = float(F.cross_entropy(logits, labels)), (logits.argmax(1) == labels).float()
    return {**asdict(run), "loss": loss, "top_1": float(right.mean())}


def rates(size: Size, seeds: int, jobs: int) -> dict[str, Any]:
    plan = plan_of(size)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(trained, run, size, plan) for run in runs(size, seeds)]
        rows = [each.result() for each in waiting]
    spent = round_up(epsilon([Event.of_plan(plan)], plan.delta))
    return {"epsilon": spent, "plan": plan.as_dict(), "size": asdict(size), "runs": rows}


def coordinates(size: Size, seeds: int, jobs: int) -> dict[str, Any]:
    """By optimizer and arm: what moved at each width, and its slope."""
    widths, found = size.checked_widths, dict[str, Any]()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for kind, arm in CHECKED:
            asked = optimizer_of(kind, arm, BASE), Check(rate=CHECK_RATES[kind])
            waiting = [[pool.submit(changes, width, *asked, seed) for seed in range(seeds)] for width in widths]
            found[f"{kind} {arm}"] = summary(widths, [[each.result() for each in row] for row in waiting])
    return {"check": asdict(Check()) | {"rate": CHECK_RATES, "widths": widths}, "slopes": found}


PARTS = {"coordinates": coordinates, "rates": rates}


def losses(rows: list[dict[str, Any]], arm: str, width: int) -> dict[float, float]:
    """The mean over seeds at each rate."""
    own = [row for row in rows if row["width"] == width and (row["arm"] == arm or width == NARROWEST)]
    return {
        rate: statistics.mean(row["loss"] for row in own if row["rate"] == rate)
        for rate in dict.fromkeys(row["rate"] for row in own)
    }


def slopes_told(found: dict[str, Any]) -> str:
    slopes = found["slopes"]
    lines = ["| slope with width of what moved | " + " | ".join(slopes) + " |", "|---|" + "---|" * len(slopes)]
    for name in next(iter(slopes.values())):
        lines.append(f"| {name} | {' | '.join(format(each[name]['slope'], '+.2f') for each in slopes.values())} |")
    return "\n".join(lines)


def rates_told(found: dict[str, Any]) -> str:
    size, rows = found["size"], found["runs"]
    lines = [f"| transfer | width | {' | '.join(f'{rate:g}' for rate in size['rates'])} | best |"]
    lines.append("|---|---|" + "---|" * (len(size["rates"]) + 1))
    for arm in ARMS:
        for width in size["widths"]:
            own = losses(rows, arm, width)
            cells = [f"{own[rate]:.3f}" for rate in size["rates"]]
            lines.append(f"| {arm} | {width} | {' | '.join(cells)} | {min(own, key=own.__getitem__):g} |")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Above, the coordinate check of AdamW; below, the loss at every rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(ARMS), figsize=(4 * len(ARMS), 6.4))
    for axis, arm in zip(axes[0], ARMS, strict=True):
        for name, each in found["coordinates"]["slopes"][f"AdamW {arm}"].items():
            kind, part, what = name.split()
            if kind in ("hidden", "output") and what == "logits":
                style = "o-" if part == "noise" else "s--"
                axis.loglog(found["coordinates"]["check"]["widths"], each["changes"], style, label=f"{kind}, {part}")
        axis.set(title=f"AdamW, width_transfer: {arm}", xlabel="width", ylabel="change of logits")
        axis.legend(fontsize=7)
    for axis, arm in zip(axes[1], ARMS, strict=True):
        for width in found["rates"]["size"]["widths"]:
            own = losses(found["rates"]["runs"], arm, width)
            axis.semilogx(list(own), list(own.values()), "o-", label=f"width {width}")
        axis.set(title=f"width_transfer: {arm}", xlabel="learning rate", ylabel="loss on other pictures")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, default=None, help="one of the two; the other is read from --out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="at a time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: only shows that the program runs")
    parser.add_argument("--out", type=Path, default=None, help="write this JSON")
    parser.add_argument("--plot", type=Path, default=None, help="draw this picture")
    asked = parser.parse_args()
    size = SMOKE if asked.smoke else Size()
    made = {name: part(size, asked.seeds, asked.jobs) for name, part in PARTS.items() if asked.only in (None, name)}
    before = json.loads(asked.out.read_text()) if asked.out is not None and asked.out.is_file() else {}
    command = f"python benchmarks/width_transfer.py --seeds {asked.seeds}"
    found = before | {name: {"command": f"{command} --only {name}", **part} for name, part in made.items()}
    for name, say in (("coordinates", slopes_told), ("rates", rates_told)):
        if name in made:
            print(say(found[name]) + "\n")
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.plot is not None and found.keys() == PARTS.keys():
        plot(json.loads(json.dumps(found)), asked.plot)


if __name__ == "__main__":
    main()
