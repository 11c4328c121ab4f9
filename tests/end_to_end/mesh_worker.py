"""Run under `deepspeed` with four ranks, two copies of two shards: what FSDP2 makes on such a grid, what becomes of its
checkpoints, and what it must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from murmuration.data.draw.micro_batch import slots
from murmuration.model.build import build
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.section import RecipeError
from murmuration.train.core import ClippingEngine, Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines import sharded_sums
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.engines.forward import PlainForward
from murmuration.train.engines.mesh import Mesh
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate, Update
from murmuration.train.optim.optimizers import make_optimizer
from murmuration.train.self_test.probes import Capture, SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestError, self_test
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Position
from tests.support.answering import answer
from tests.support.sharded_engines import (
    EMPTY_STEP,
    MICRO_BATCH,
    NOISE_KEY,
    OPTIMIZERS,
    PLAN,
    RANKS_PER_COPY,
    RATES,
    SHAPE,
    STEPS,
    C,
    Layout,
    distance,
    drawn,
    engine_of,
    noise,
    rows_of,
    settings_of,
)

LAYOUTS: tuple[Layout, ...] = ("hsdp", "fsdp2", 1)


def private(ranks: Ranks, layout: Layout, kind: str) -> ClippingEngine:
    return engine_of(ranks, settings_of(layout), build(SHAPE, "caption"), OPTIMIZERS[kind])


def train(engine: Any, ranks: Ranks, step: int, kind: str, update: Update | None = None) -> None:
    for row in slots(drawn(step), ranks.rank, ranks.world, MICRO_BATCH):
        batch = rows_of(row)
        if isinstance(update, PlainUpdate):  # what pads the batches of a public phase is a number
            batch.inputs["images"].nan_to_num_()
        engine.accumulate(batch)
    engine.update(update or NoisyUpdate(noise(), step), RATES[kind])


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: t.double() for name, t in engine.whole_weights().items() if name in engine.shapes}


def at_start() -> dict[str, Tensor]:
    return {name: p.detach().double() for name, p in build(SHAPE, "caption").named_parameters()}


# The same weights as those of other layouts.


def apart(ranks: Ranks, kind: str) -> float:
    """The distance of three steps' weights from those of a single copy, over the distance that they moved."""
    found = {}
    layouts: tuple[Layout, ...] = ("hsdp", "fsdp2")
    for layout in layouts:
        engine = private(ranks, layout, kind).engine
        for step in STEPS:
            train(engine, ranks, step, kind)
        found[layout] = weights_of(engine)
        engine.close()
    return distance(found["hsdp"], found["fsdp2"]) / distance(at_start(), found["hsdp"])


def apart_without_privacy(ranks: Ranks) -> float:
    found = []
    for layout in ("hsdp", "fsdp2"):
        model = build(SHAPE, "caption")
        optimizer = make_optimizer(OPTIMIZERS["SGD"], model.named_parameters())
        engine = make_engine(settings_of(layout), PlainForward(model), optimizer, ranks)
        for step in STEPS:
            train(engine, ranks, step, "SGD", PlainUpdate(17))
        found.append(weights_of(engine))
        engine.close()
    return distance(*found) / distance(at_start(), found[0])


def noise_alone(ranks: Ranks) -> bool:
    """Whether a step without records leaves the same bits at every layout: each element has its noise once."""
    found = []
    for layout in LAYOUTS:
        engine = private(ranks, layout, "SGD").engine
        train(engine, ranks, EMPTY_STEP, "SGD")
        found.append(weights_of(engine))
        engine.close()
    return all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


# Its checkpoints.


def resumed(ranks: Ranks, root: Path) -> dict[str, Any]:
    """To and from a layout without copies: distance of the third step from that of the engine that was saved. And how
    many ranks wrote."""
    layouts: tuple[Layout, ...] = ("hsdp", 1)
    settings: dict[Layout, EngineSettings] = {layout: settings_of(layout) for layout in layouts}
    far: dict[str, float] = {}
    pieces: dict[str, int] = {}
    for source in layouts:
        engine = private(ranks, source, "AdamW").engine
        for step in STEPS[:2]:
            train(engine, ranks, step, "AdamW")
        checkpoints = Checkpoints(root / str(source), ranks, Keep())
        checkpoints.save(Position(0, 2), engine, settings[source].ranks_per_copy, {})
        before = weights_of(engine)
        train(engine, ranks, STEPS[2], "AdamW")
        expected = weights_of(engine)
        engine.close()
        loaded = checkpoints.latest()
        assert loaded is not None
        pieces[str(source)] = len(loaded.manifest["pieces"])
        for target in layouts if source == "hsdp" else layouts[:1]:
            model = build(SHAPE, "caption")
            model.load_state_dict(loaded.state_dict(model.state_dict()))
            engine = engine_of(ranks, settings[target], model, OPTIMIZERS["AdamW"]).engine
            loaded.restore_optimizer(engine)
            train(engine, ranks, STEPS[2], "AdamW")
            far[f"{source} to {target}"] = distance(weights_of(engine), expected) / distance(expected, before)
            engine.close()
    return {"apart": far, "pieces": pieces}


# What would go wrong in silence.


def not_added(engine: Any, ranks: Ranks) -> None:
    """Each copy would train on the records of its own ranks."""
    engine._forward.sums._add_copies = lambda: True


def added_twice(engine: Any, ranks: Ranks) -> None:
    sums = engine._forward.sums
    real = sums._add_copies
    sums._add_copies = lambda: real() and real()


def another_sum(engine: Any, ranks: Ranks) -> None:
    """One rank receives a number that is off in its last bit."""
    sums = engine._forward.sums
    real = sums._replicas.add

    def add(tensor: Tensor) -> Tensor:
        real(tensor)
        if tensor.data_ptr() == sums._totals.data_ptr() and ranks.rank == 0:
            tensor[:1] = torch.nextafter(tensor[:1], torch.ones(1, dtype=tensor.dtype))
        return tensor

    object.__setattr__(sums._replicas, "add", add)


def own_noise(engine: Any, ranks: Ranks) -> None:
    """The copies draw noise under different keys."""
    own = AESNoise(bytes([ranks.rank // RANKS_PER_COPY]) * 32, noise().std, noise().divisor)
    real = engine.update

    def update(given: Update, learning_rate: float) -> Any:
        return real(with_another(given, lambda planned: NoisyUpdate(own, planned.step)), learning_rate)

    engine.update = update


def noise_before_the_sum(engine: Any, ranks: Ranks) -> None:
    """Each copy adds the noise to its own sum, so that the sum over the copies has it as often as there are copies."""
    sums, real = engine._forward.sums, engine.update
    add = sums._add_copies

    def update(given: Update, learning_rate: float) -> Any:
        def divided_only(planned: NoisyUpdate) -> Update:
            def noisy_first() -> bool:
                for fragment in sums._fragments.values():
                    own = sums._own[fragment.name]
                    planned.finish(own, [replace(fragment, position=0)])
                    own.mul_(planned.mechanism.divisor)
                return add()

            sums._add_copies = noisy_first
            return PlainUpdate(planned.mechanism.divisor, planned.step)  # pyright: ignore[reportArgumentType]

        try:
            return real(with_another(given, divided_only), learning_rate)
        finally:
            sums._add_copies = add

    engine.update = update


def with_another(given: Update, make: Callable[[NoisyUpdate], Update]) -> Update:
    """The update with another one in the place of what adds its noise."""
    inner = given.inner if isinstance(given, Capture) else given
    if not isinstance(inner, NoisyUpdate):
        return given
    other = make(inner)
    if not isinstance(given, Capture):
        return other
    given.inner = other
    return given


def other_moments(engine: Any, ranks: Ranks) -> None:
    """One rank's optimizer keeps something else than its replica's."""
    real = engine._optimizer.step

    def step() -> None:
        real()
        if ranks.rank == ranks.world - 1:
            shard = next(shard for shard in engine.shards() if shard.weights.numel())
            next(iter(shard.state.values())).view(-1)[0] += 1.0

    engine._optimizer.step = step


FAULTS: dict[str, Callable[[Any, Ranks], None] | None] = {
    "honest": None, "copies not added": not_added, "copies added twice": added_twice,
    "another sum on one rank": another_sum, "own noise on each copy": own_noise,
    "noise before the sum of the copies": noise_before_the_sum, "another moment on one rank": other_moments,
}  # fmt: skip


def outcome(ranks: Ranks, change: Callable[[Any, Ranks], None] | None) -> str:
    """One step of an engine that something was done to."""
    try:
        engine = private(ranks, "hsdp", "AdamW").engine
        if change is not None:
            change(engine, ranks)
        train(engine, ranks, STEPS[0], "AdamW")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


@contextmanager
def without_the_proof_of_sums(engine: Any) -> Iterator[None]:
    """Nor that of equal copies."""
    kept, sharded_sums.require_sums = sharded_sums.require_sums, lambda *_: None
    engine._copies_are_equal = lambda: True
    try:
        yield
    finally:
        sharded_sums.require_sums = kept


def self_tested(ranks: Ranks, change: Callable[[Any, Ranks], None] | None, ranks_per_copy: int) -> str:
    """A fault is seen by the self-test alone, as if the step proved nothing."""
    built = clipping_engine(
        build(SHAPE, "caption"), ClipRule("flat", C, 1e-4), OPTIMIZERS["SGD"], settings_of("hsdp"), ranks,
        Computation(),
    )  # fmt: skip
    engine: Any = built.engine
    planned = AESNoise(NOISE_KEY, PLAN.noise_std, PLAN.divisor)
    records = SyntheticRecords.of(SHAPE, "caption")
    if change is not None:
        change(engine, ranks)
    try:
        with nullcontext() if change is None else without_the_proof_of_sums(engine):
            self_test(engine, built.clip, planned, ranks_per_copy, records, MICRO_BATCH, ranks)
    except SelfTestError as error:
        return f"{error}"
    return "passed"


def refused(ranks: Ranks) -> str:
    try:
        Mesh.of(ranks, 3)
    except RecipeError as error:
        return f"{error}"
    return "went through"


def main() -> None:
    ranks = start_ranks()
    found: dict[str, Any] = {
        "world": ranks.world,
        "apart": apart(ranks, "LAMB"),
        "apart without privacy": apart_without_privacy(ranks),
        "noise alone": noise_alone(ranks),
        "resumed": resumed(ranks, Path(sys.argv[-1])),
        "faults": {name: ranks.gather(outcome(ranks, change)) for name, change in FAULTS.items()},
        "self-tests": {
            "honest": self_tested(ranks, None, RANKS_PER_COPY),
            "as if there were one copy": self_tested(ranks, None, 0),
            "as if each rank had a copy": self_tested(ranks, None, 1),
            **{
                name: self_tested(ranks, FAULTS[name], RANKS_PER_COPY)
                for name in ("copies not added", "own noise on each copy", "noise before the sum of the copies")
            },
        },
        "three ranks a copy": refused(ranks),
    }
    answer(ranks, found)


if __name__ == "__main__":
    main()
