"""Bu et al.'s four-way study on PUBLIC data: is it clipping or noise that makes private training slow?

One phase is trained four times from the same weights on the same Poisson draws: with neither, with clipping alone, with
noise alone, and with both. The parts are those of a private step; without clipping, the bound is one that no gradient
reaches (which is checked), and without noise, the deviation is zero. Nothing in the study is private or could be: it
takes public data alone, has no plan and no ledger, and every output says NOT PRIVATE.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from torch import nn

from murmuration.accounting.errors import DONE, RunError
from murmuration.accounting.sampling import RATE_DENOMINATOR, threshold_for
from murmuration.data.batch.loader import iterate
from murmuration.data.batch.reader import BatchReader
from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.model.build import build
from murmuration.model.trainable import select
from murmuration.train.clip.rule import ClipRule
from murmuration.train.commands.arguments import add_config
from murmuration.train.commands.exit_codes import FROM_THE_START, complain, guarded, joined, leave
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import Engine, evaluating
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.forward import PlainForward, PrivateForward
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.optim.base import FlatOptimizer
from murmuration.train.optim.rates import learning_rate
from murmuration.train.planner.micro_batch import on_this_machine
from murmuration.train.public.evaluation import public_loss
from murmuration.train.recipe.ready_phase import ReadyPhase, RecipeError, prepare
from murmuration.train.storage.run_dir import run_dir_of

MARKED = "NOT PRIVATE: a study on public data"
# No gradient of a model that trains is longer; sums of gradients this long still have room in fp32.
UNREACHED = 1e12
POINTS = 10
MakeEngine = Callable[[EngineSettings, PrivateForward | PlainForward, FlatOptimizer, Ranks], Engine]


@dataclass(frozen=True)
class Variant:
    name: str
    clipping: bool
    noise: bool


VARIANTS = (
    Variant("neither", False, False), Variant("clipping only", True, False), Variant("noise only", False, True),
    Variant("both", True, True),
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What the four trainings have in common."""

    clip: Literal["flat", "automatic"]
    norm: float
    gamma: float
    noise_multiplier: float
    rates: Sequence[float]
    """Peak learning rates that each of the four tries; its best one is shown."""
    steps: int
    records: int
    """Public records on which the loss is measured."""


@dataclass(frozen=True)
class Curve:
    variant: str
    rate: float
    losses: list[tuple[int, float]]
    """(steps done, public loss)"""
    clip_factor: float
    """Mean over all records of all steps."""

    @property
    def final(self) -> float:
        last = self.losses[-1][1]
        return last if math.isfinite(last) else math.inf


@dataclass
class Outcome:
    phase: str
    study: Study
    batch: float
    curves: list[Curve] = field(default_factory=list)
    marked: str = MARKED

    def best(self, variant: Variant) -> Curve:
        """The variant's curve at its best learning rate."""
        return min((curve for curve in self.curves if curve.variant == variant.name), key=lambda curve: curve.final)

    def as_dict(self) -> dict[str, Any]:
        best = {variant.name: asdict(self.best(variant)) for variant in VARIANTS}
        return asdict(self) | {"best": best}


def run_study(
    config: Config, phase: ReadyPhase, study: Study, ranks: Ranks, say: Callable[[str], None],
    make: MakeEngine = make_engine,
) -> Outcome:  # fmt: skip
    """Runs the four variants at every rate; `say` reports each when it is done."""
    require_public(phase)
    require_start(config, phase)
    outcome = Outcome(phase.name, study, float(phase.settings.batch or 1))
    # Held-out records if the phase has some, otherwise the first ones it trains on; never augmented.
    index = phase.held_out or phase.index
    reader = BatchReader(index, phase.data_spec(augment=False), phase.text, mask_key=b"m" * 32)
    rows = slots(np.arange(min(study.records, index.records)), ranks.rank, ranks.world, config.micro_batch)
    public = list(iterate(reader, rows, 0))
    for variant in VARIANTS:
        for rate in study.rates:
            curve = _one(config, phase, study, variant, rate, public, ranks, make)
            outcome.curves.append(curve)
            say(f"{MARKED}  {variant.name:13}  lr {rate:g}  public loss {curve.losses[0][1]:.4f} -> {curve.final:.4f}")
    return outcome


def require_public(phase: ReadyPhase) -> None:
    if phase.private or not phase.settings.data.public:
        raise RecipeError(
            f"{phase.where}: the study trains without noise and without a ledger, so it takes public data "
            "alone; name a phase without `privacy` whose data are declared public"
        )
    if phase.settings.features is not None or not phase.settings.trains:
        raise RecipeError(f"{phase.where} does not train a whole model on records; name a phase that does")


def require_start(config: Config, phase: ReadyPhase) -> None:
    trained = next((other.name for other in config.phases[: phase.number] if other.trains), None)
    if trained is not None:
        raise RecipeError(
            f"{phase.where} continues from what phase {trained!r} trains, which the study does not do; replace "
            'the phases before it by one with "data": {"source": "checkpoint", "path": …}'
        )


def first_weights(phase: ReadyPhase) -> nn.Module:
    """The weights that the phase begins with in a run: fresh ones, or those that a phase before it loads."""
    model = build(phase.shape, phase.settings.objective)
    if phase.start is not None:
        phase.start.fill(model)
    return model


def _one(
    config: Config, phase: ReadyPhase, study: Study, variant: Variant, rate: float, public: list[MicroBatch],
    ranks: Ranks, make: MakeEngine,
) -> Curve:  # fmt: skip
    settings, micro_batch = phase.settings, config.micro_batch
    model = first_weights(phase)
    select(model, settings.trainable)
    rule = ClipRule(study.clip, study.norm, 0.0, study.gamma) if variant.clipping else ClipRule("flat", UNREACHED, 0.0)
    built = clipping_engine(
        model, rule, settings.optimizer, EngineSettings.of(config), ranks, Computation.of(config.run), make=make
    )
    forward, engine = built.forward, built.engine
    # Public data need no secrets: all variants get the same records in the same order, and the same noise.
    threshold = threshold_for(phase.index.records, settings.batch or 1)
    divisor = threshold / RATE_DENOMINATOR * phase.index.records
    sampler = PoissonSampler(
        b"four-way sampling".ljust(32), b"four-way digest".ljust(32), phase.index.records, threshold
    )
    std = study.noise_multiplier * study.norm if variant.noise else 0.0
    noise = AESNoise(b"four-way noise".ljust(32), std, divisor)
    reader = BatchReader(
        phase.index, phase.data_spec(augment=True), phase.text,
        augment_key=b"a" * 32, mask_key=b"m" * 32, dropout_key=b"d" * 32,
    )  # fmt: skip
    schedule = settings.schedule.model_copy(update={"peak": rate})
    losses, factors, seen = [(0, _loss(public, engine, ranks))], 0.0, 0
    try:
        for step in range(1, study.steps + 1):
            rows = slots(sampler.draw(step).ids, ranks.rank, ranks.world, micro_batch)
            for batch in (read.to(engine.device) for read in iterate(reader, rows, step)):
                engine.accumulate(batch)
                clipped = forward.observed
                assert clipped is not None
                there = batch.present.to(clipped.factors.device)
                factors += float(clipped.factors[there].double().sum())
                seen += int(there.sum())
                if not variant.clipping and bool((clipped.factors[there] < 1).any()):
                    raise RecipeError(
                        f"a gradient of variant {variant.name!r} is longer than {UNREACHED:g}; lower --rates"
                    )
            engine.update(NoisyUpdate(noise, step), learning_rate(schedule, study.steps, step))
            if step % max(1, study.steps // POINTS) == 0 or step == study.steps:
                losses.append((step, _loss(public, engine, ranks)))
    finally:
        engine.close()
    return Curve(variant.name, rate, losses, sum(ranks.gather(factors)) / max(1, ranks.sum(seen)))


def _loss(batches: list[MicroBatch], engine: Engine, ranks: Ranks) -> float:
    with evaluating(engine.model):
        there = (batch.to(engine.device) for batch in batches)
        return public_loss(there, lambda batch: engine.model(batch.inputs), ranks)


# The command line: a plot and a JSON file, each marked NOT PRIVATE.


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m murmuration.contrib.four_way",
        description="Train a public phase four times: with clipping, noise, both and neither. NOT PRIVATE: deepspeed "
        "--module murmuration.contrib.four_way --config ds_configs/demo.json --phase warm-start "
        "--noise-multiplier 0.5 --out four_way",
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
    try:
        config = load(arguments.config, arguments.set)
    except RunError as error:
        return complain(error)
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
    from matplotlib.figure import Figure  # takes a second, and only the main rank draws

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


if __name__ == "__main__":
    sys.exit(main())
