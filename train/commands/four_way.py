"""The command line of the four-way study: its plot and its JSON, each marked NOT PRIVATE."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from murmuration.accounting.errors import DONE, RunError
from murmuration.train.commands.arguments import add_config
from murmuration.train.commands.exits import FROM_THE_START, complain, guarded, joined, leave

if TYPE_CHECKING:
    from murmuration.train.config.root import Config
    from murmuration.train.public.four_way import Outcome, Study
    from murmuration.train.recipe.ready_phase import ReadyPhase


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="four_way.py",
        description="Train a public phase four times: with clipping, noise, both and neither. NOT PRIVATE: deepspeed "
        "launch/four_way.py --config ds_configs/demo.json --phase warm-start --noise-multiplier 0.5 --out four_way",
    )
    add_config(parser)
    parser.add_argument("--phase", required=True, help="name of a non-private phase over public data")
    parser.add_argument("--noise-multiplier", type=float, required=True, metavar="S", help="σ of the two with noise")
    parser.add_argument(
        "--clip-norm", type=float, default=1.0, metavar="C", help="default 1; the noise is σ·C for both"
    )
    parser.add_argument("--clip-kind", choices=("flat", "automatic"), default="automatic")
    parser.add_argument("--gamma", type=float, default=0.01, help="γ of automatic clipping (default 0.01)")
    parser.add_argument("--rates", type=float, nargs="+", metavar="LR", help="peak learning rates to try; default: the "
                        "config's, a third of it and three times it")  # fmt: skip
    parser.add_argument("--steps", type=int, default=None, help="default: the phase's")
    parser.add_argument("--records", type=int, default=512, help="public records to measure the loss on (default 512)")
    parser.add_argument("--out", type=Path, required=True, help="folder for four_way.json and four_way.png")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    from murmuration.train.config.load import load

    try:
        config = load(arguments.config, arguments.set)
    except RunError as error:
        return complain(error)
    # Heavy imports only now: bad input is refused within a second.
    from murmuration.train.config.root import run_dir_of
    from murmuration.train.planner.micro_batch import on_this_machine
    from murmuration.train.public.four_way import Study, require_public, require_start
    from murmuration.train.recipe.ready_phase import RecipeError, prepare

    try:
        config = on_this_machine(config, run_dir_of(config, arguments.config))
        phase = next((phase for phase in prepare(config) if phase.name == arguments.phase), None)
        if phase is None:
            names = ", ".join(phase.name for phase in config.phases)
            raise RecipeError(f"--phase {arguments.phase}: the config has no such phase; choose one of {names}")
        require_public(phase)
        require_start(config, phase)
        if min(arguments.noise_multiplier, arguments.clip_norm, arguments.records, *(arguments.rates or [1])) <= 0:
            raise RecipeError("noise multiplier, clipping norm, rates and records must be positive numbers")
        peak = phase.settings.schedule.peak
        study = Study(
            arguments.clip_kind, arguments.clip_norm, arguments.gamma, arguments.noise_multiplier,
            arguments.rates or [peak / 3, peak, 3 * peak], arguments.steps or phase.settings.steps, arguments.records,
        )  # fmt: skip
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (RunError, OSError) as error:
        return complain(error)
    _run(arguments, config, phase, study)


def _run(arguments: argparse.Namespace, config: Config, phase: ReadyPhase, study: Study) -> NoReturn:
    ranks = joined(config)
    from murmuration.train.public.four_way import run_study

    def say(text: str) -> None:
        if ranks.main:
            print(text, flush=True)

    def act() -> int:
        outcome = run_study(config, phase, study, ranks, say)
        if ranks.main:
            write(outcome, arguments.out)
            say(f"{outcome.marked}  {arguments.out / 'four_way.json'}, {arguments.out / 'four_way.png'}")
        ranks.barrier()
        return DONE

    leave(guarded(act, ranks.main, FROM_THE_START))


def write(outcome: Outcome, folder: Path) -> None:
    from matplotlib.figure import Figure

    from murmuration.train.public.four_way import VARIANTS

    (folder / "four_way.json").write_text(json.dumps(outcome.as_dict(), indent=2) + "\n")
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    for variant in VARIANTS:
        curve = outcome.best(variant)
        steps, losses = zip(*curve.losses, strict=True)
        axis.plot(steps, losses, marker="o", markersize=3, label=f"{variant.name} (lr {curve.rate:g})")
    axis.set(xlabel="step", ylabel="loss on public records", title=f"{outcome.marked}, phase {outcome.phase}")
    axis.legend(frameon=False)
    figure.savefig(folder / "four_way.png", dpi=120, metadata={"Description": outcome.marked})
