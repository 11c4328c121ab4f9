"""The planner's step times against those of real private runs: `launch/train.py`, two ranks over gloo on this machine.

    python benchmarks/plan.py --out benchmarks/results/plan.json

First the ranks measure the planner's inputs, all at the same time and with the threads with which they train: plain
fp32 products of the layers' sizes (--tflops), an all-reduce (--link) and the noise (--noise-rate). Then a masked
autoencoder and a captioner are trained for some steps, and the median time between two steps, as recorded on the run's
own private board, is compared with the forecast's step: once with the measured products, and once with the rate that
the run itself measured on synthetic records before its first step (--rate). Nothing is fitted, and the ratios are
reported as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from murmuration.accounting.strict_json import whole_lines  # noqa: E402
from murmuration.train.commands.forecast import measured_noise_rate  # noqa: E402
from murmuration.train.config.root import Config  # noqa: E402
from murmuration.train.distributed.process import quiet_libraries  # noqa: E402
from murmuration.train.planner.cluster import Cluster  # noqa: E402
from murmuration.train.planner.forecast import PhaseForecast, forecast  # noqa: E402
from murmuration.train.storage.run_dir import RunDir  # noqa: E402

if TYPE_CHECKING:
    from murmuration.train.distributed.ranks import Ranks

RECORDS, DROPPED, ROUNDS, EXCHANGED = 4000, 3, 5, 2_000_000
"""Records on disk; steps that warm up; rounds of each measurement; fp64 numbers in an all-reduce."""
BATCHES, STEPS, MICRO_BATCH = {"mae": 240.0, "captioner": 80.0}, 12, 16
"""Expected batches halfway between two numbers of rows, where nearly all draws need the same number, so that the median
equals the mean; steps; micro-batch."""
MODEL = {
    "image_size": 32, "patch_size": 4, "width": 384, "depth": 4, "heads": 6, "qkv_bias": True,
    "mae_decoder_width": 192, "mae_decoder_depth": 1, "mae_decoder_heads": 3,
}  # fmt: skip
TEXT = {"decoder_width": 384, "decoder_depth": 2, "decoder_heads": 6, "text_length": 16, "vocabulary": 64}
"""As wide as two cores can train in minutes: in narrow models, operations other than products take most of the time."""


def config(name: str, data: Path, run_dir: Path, batch: float | None = None, steps: int = STEPS) -> dict[str, Any]:
    text = {"tokenizer": str(data / "tokenizer.json")} if name == "captioner" else {}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH, "zero_optimization": {"stage": 1},
        "model": {"family": name, "size": "custom", **MODEL, **(TEXT if text else {})},
        "phases": [{
            "name": "private", "objective": "caption" if text else "mae",
            "data": {"source": "shards", "path": str(data / "private"), "reading": {"workers": 0}, **text},
            "privacy": {
                "epsilon": 1000.0, "expected_batch": batch or BATCHES[name], "noise_multiplier": 1.0,
                "clip": {"kind": "flat", "norm": 1.0},
            },
            "schedule": {"peak": 1e-3, "shape": "constant"}, "steps": steps,
        }],
        "run": {"dir": str(run_dir), "checkpoint_every": 1000, "log_every": 1, "private_curves": True},
    }  # fmt: skip


def launched(ranks: int, *script: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    beside = Path(sys.executable).parent
    command = [str(beside / "deepspeed"), "--master_port", str(port), "--num_gpus", str(ranks), *script]
    paths = {"PATH": os.pathsep.join([str(beside), os.environ.get("PATH", "")])}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return done.stdout


# The planner's inputs, measured by every rank.


def machine() -> None:
    quiet_libraries()
    from murmuration.accounting.errors import DONE
    from murmuration.train.commands.exit_codes import leave
    from murmuration.train.engines.deepspeed_zero import start_ranks

    ranks = start_ranks()
    own: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name in BATCHES:
        sizes = layers(name)
        ranks.barrier()
        own[f"{name}_tflops"] = sustained_tflops(sizes, ranks.device)
    ranks.barrier()
    own["noise_per_second"] = statistics.median(measured_noise_rate() for _ in range(ROUNDS))
    own["link_gb_per_s"] = link(ranks)
    found = ranks.gather(own)
    if ranks.main:
        # A step waits for the slowest rank.
        print("RESULTS " + json.dumps({name: min(each[name] for each in found) for name in own}), flush=True)
    ranks.barrier()
    leave(DONE)


def layers(name: str) -> list[tuple[int, int, int]]:
    """Rows, inputs and outputs of every linear layer, for one micro-batch."""
    from murmuration.model.build import build
    from murmuration.train.self_test.probes import synthetic_batch

    whole = Config.model_validate(config(name, Path("."), Path(".")))
    shape, objective = whole.model.resolved(), whole.phases[0].objective
    model, found = build(shape, objective), []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda layer, _, out: found.append(
                    (out.numel() // layer.out_features, layer.in_features, layer.out_features)
                )
            )
    with torch.no_grad():
        model(synthetic_batch(shape, objective, MICRO_BATCH, 0).inputs)
    return found


def sustained_tflops(sizes: list[tuple[int, int, int]], device: torch.device) -> float:
    """Sustained rate of the three products that a linear layer needs, forward and backward."""
    operands = [[torch.randn(*size, device=device) for size in ((r, i), (o, i), (r, o))] for r, i, o in sizes]
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for inputs, weight, gradient in operands:
            torch.mm(inputs, weight.T)
            torch.mm(gradient, weight)
            torch.mm(gradient.T, inputs)
        wait(device)
        times.append(time.perf_counter() - began)
    return sum(6 * r * i * o for r, i, o in sizes) / statistics.median(times[1:]) / 1e12


def wait(device: torch.device) -> None:
    """A GPU only queues what it is asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def link(ranks: Ranks) -> float:
    """GB/s that one rank sends, by the planner's own model of a ring."""
    if ranks.world == 1:
        return 1.0
    numbers, times = torch.ones(EXCHANGED, dtype=torch.float64, device=ranks.device), []
    for _ in range(ROUNDS + 1):
        ranks.barrier()
        began = time.perf_counter()
        ranks.add(numbers)
        wait(ranks.device)
        times.append(time.perf_counter() - began)
    sent = 2 * 8 * EXCHANGED * (ranks.world - 1) / ranks.world
    return sent / statistics.median(times[1:]) / 1e9


def machine_of(ranks: int) -> dict[str, float]:
    output = launched(ranks, str(Path(__file__).resolve()), "--machine")
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULTS "))[8:])


# The time that a run took.


def prepare(folder: Path, records: int = RECORDS) -> Path:
    script = [sys.executable, str(ROOT / "launch" / "prepare.py"), "demo", "--out", str(folder)]
    counts = ["--private", str(records), "--held-out", "1", "--textures", "1"]
    subprocess.run([*script, *counts], check=True, capture_output=True)
    return folder


def train(raw: dict[str, Any], folder: Path, ranks: int) -> RunDir:
    path = folder / f"{raw['model']['family']}.json"
    path.write_text(json.dumps(raw))
    launched(ranks, str(ROOT / "launch" / "train.py"), "--config", str(path))
    return RunDir(Path(raw["run"]["dir"]))


def step_seconds(run: RunDir) -> list[float]:
    """Times between the values of consecutive steps on the private board; the first steps are dropped."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.private_board))
    events.Reload()
    times = [event.wall_time for event in events.Scalars("private/records")]
    return [after - before for before, after in pairwise(times)][DROPPED:]


def rate_of(run: RunDir, ranks: int) -> float:
    """Records per second of one rank, measured on synthetic records by the run's self-test."""
    return (
        next(line["samples_per_second"] for line in whole_lines(run.public_log) if "samples_per_second" in line) / ranks
    )


def planned(raw: dict[str, Any], told: dict[str, float], ranks: int, rate: float | None = None) -> PhaseForecast:
    cluster = Cluster(
        ranks, 64, told[f"{raw['model']['family']}_tflops"], told["link_gb_per_s"], told["noise_per_second"]
    )
    return forecast(Config.model_validate(raw), cluster, rate)[0]


def compared(raw: dict[str, Any], told: dict[str, float], run: RunDir, ranks: int) -> dict[str, Any]:
    rate, seconds = rate_of(run, ranks), step_seconds(run)
    median, found = statistics.median(seconds), planned(raw, told, ranks)
    by_rate = planned(raw, told, ranks, rate).time
    assert found.time is not None and by_rate is not None
    return {
        "model": raw["model"]["family"], "weights": found.weights.trainable, "expected_batch": found.batch.mean,
        "rows": found.time.rows, "gflop_per_record": found.cost.private_flops / 1e9,
        "measured_step_seconds": median, "fastest_and_slowest": [min(seconds), max(seconds)], "steps": len(seconds),
        "predicted": {"compute": found.time.compute, "exchange": found.time.exchange, "noise": found.time.noise,
                      "seconds": found.time.seconds},
        "predicted_over_measured": found.time.seconds / median,
        "rate_of_self_test": rate, "predicted_by_rate_over_measured": by_rate.seconds / median,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.machine:
        return machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, told = prepare(folder / "data"), {}
        for name in BATCHES:
            # Repeated before each run: the speed of a shared machine changes within minutes.
            told[name] = machine_of(arguments.ranks)
            raw = config(name, data, folder / f"{name}-run", steps=arguments.steps)
            run = train(raw, folder, arguments.ranks)
            rows.append(compared(raw, told[name], run, arguments.ranks))
            print(json.dumps(rows[-1], indent=1), flush=True)
    found = {
        "command": f"python benchmarks/plan.py --ranks {arguments.ranks} --steps {arguments.steps}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU", "micro_batch": MICRO_BATCH,
        "versions": {name: version(name) for name in ("torch", "deepspeed")}, "told": told, "rows": rows,
    }  # fmt: skip
    for row in rows:
        print(f"{row['model']:10} predicted / measured: {row['predicted_over_measured']:.2f} by products, "
              f"{row['predicted_by_rate_over_measured']:.2f} by the run's own rate")  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
