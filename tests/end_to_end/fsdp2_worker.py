"""Run under `torchrun`, and without DeepSpeed: what the FSDP2 engine must do, and what it must notice.

The models have parameters with fewer rows than there are ranks, rows that do not divide evenly, one parameter used in
two places, and frozen ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.model.build import Objective, build
from murmuration.model.settings import ModelSettings, Shape
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.tracker import ParameterTracker
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import evaluating
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.forward import PlainForward
from murmuration.train.engines.fsdp2 import FSDP2Engine, start_ranks
from murmuration.train.engines.shard_map import row_slices
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate
from murmuration.train.optim.optimizers import make_optimizer
from murmuration.train.self_test.probes import SyntheticRecords, synthetic_batch
from murmuration.train.self_test.self_test import SelfTestError, self_test
from tests.support.answering import answer

SHAPE = ModelSettings(
    family="captioner", image_size=16, patch_size=8, width=24, depth=2, heads=2, decoder_width=16, decoder_depth=2,
    decoder_heads=2, mae_decoder_width=8, mae_decoder_depth=1, mae_decoder_heads=2, text_length=6, vocabulary=19,
    qkv_bias=True,
).resolved()  # fmt: skip
DROPPING = replace(SHAPE, dropout=0.3, drop_path=0.5)
C, ALLOWANCE, DIVISOR, RATE, MICRO_BATCH = 1.0, 1e-3, 8.0, 1e-2, 4
# Without noise, Adam would divide gradients that are zero but for rounding by their own size.
SETTINGS = {True: Optimizer.model_validate({"params": {"weight_decay": 0.1}}),
            False: Optimizer.model_validate({"type": "SGD", "params": {"weight_decay": 0.1}})}  # fmt: skip


class Tied(nn.Module):
    """Blocks of a list of which two share a weight, and one weight that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1, bias=False)
        self.blocks[2].weight = self.blocks[0].weight
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        for block in self.blocks:
            x = block(x).tanh_()  # in place, behind the hooks that FSDP2 has on a block's output
        return F.relu(self.last(torch.tanh(self.frozen(x)))).squeeze(1)


def tied_batch(rank: int) -> MicroBatch:
    x = torch.randn(MICRO_BATCH, 7, generator=torch.Generator().manual_seed(rank))
    return MicroBatch({"x": x}, torch.ones(MICRO_BATCH, dtype=torch.bool))


def batch_of(objective: str, rank: int) -> MicroBatch:
    if objective == "tied":
        return tied_batch(rank)
    return synthetic_batch(*shape_of(objective), MICRO_BATCH, seed=rank)


def shape_of(objective: str) -> tuple[Shape, Objective]:
    return (DROPPING, "mae") if objective == "dropping" else (SHAPE, objective)  # pyright: ignore[reportReturnType]


def model_of(objective: str) -> nn.Module:
    return Tied() if objective == "tied" else build(*shape_of(objective))


def noise() -> AESNoise:
    return AESNoise(b"n" * 32, 0.3, DIVISOR)


def engine_of(model: nn.Module, ranks: Ranks, private: bool = True) -> Any:
    sharding, optimizer = EngineSettings("fsdp2", MICRO_BATCH), SETTINGS[private]
    if private:
        rule = ClipRule("flat", C, ALLOWANCE)
        return clipping_engine(model, rule, optimizer, sharding, ranks, Computation()).engine
    return make_engine(sharding, PlainForward(model), make_optimizer(optimizer, model.named_parameters()), ranks)


def two_steps(engine: FSDP2Engine, objective: str, private: bool) -> dict[str, Tensor]:
    for step in (1, 2):
        for _ in range(2):
            engine.accumulate(batch_of(objective, engine.ranks.rank))
            with torch.no_grad(), evaluating(engine.model):  # a measurement in between leaves no trace
                engine.model(batch_of(objective, 7).inputs)
        engine.update(NoisyUpdate(noise(), step) if private else PlainUpdate(int(DIVISOR)), RATE)
    return engine.whole_weights()


def by_hand(objective: str, world: int, private: bool) -> dict[str, Tensor]:
    """The same two steps on whole tensors in one process, record by record, with torch's own optimizers."""
    model = model_of(objective)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = list(named.values())
    optimizer = (
        torch.optim.AdamW(weights, lr=RATE, weight_decay=0.1) if private
        else torch.optim.SGD(weights, lr=RATE, weight_decay=0.1, momentum=0.9)
    )  # fmt: skip
    for step in (1, 2):
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
        for batch in (batch_of(objective, rank) for rank in range(world)):
            for row in range(MICRO_BATCH):
                loss = model({name: x[row : row + 1] for name, x in batch.inputs.items()}).sum()
                gradients = [g.double() for g in torch.autograd.grad(loss, list(named.values()))]
                norm = float(torch.stack([g.norm() for g in gradients]).norm())
                factor = min(1.0, C / norm) if private and norm else 1.0
                for name, gradient in zip(named, gradients, strict=True):
                    total[name] += 2 * factor * gradient  # each batch comes twice
        for number, (name, p) in enumerate(named.items()):
            if private:
                total[name] += torch.from_numpy(noise().draw(step, number, 0, p.numel())).double().view(p.shape)
            p.grad = (total[name] / DIVISOR).float()
        optimizer.step()
    return dict(model.state_dict())


def apart(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Distance of the weights over the distance that they moved; frozen ones and buffers must be equal."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    off = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in found)
    moved = sum(float((expected[name].double() - start[name].double()).square().sum()) for name in found)
    return (off / moved) ** 0.5


def passes_self_test(objective: str, ranks: Ranks) -> str:
    engine = engine_of(model_of(objective), ranks)
    try:
        clip = engine._forward.clip
        self_test(engine, clip, noise(), 0, SyntheticRecords.of(*shape_of(objective)), MICRO_BATCH, ranks)
    except SelfTestError as error:
        return f"{error}"
    return "passed"


def fault(ranks: Ranks, change: Callable[[FSDP2Engine], None] | None) -> str:
    """One step of an engine that something was done to in the middle of it."""
    try:
        engine = engine_of(model_of("mae"), ranks)
        engine.accumulate(batch_of("mae", ranks.rank))
        if change is not None:
            change(engine)
        engine.update(NoisyUpdate(noise(), 1), RATE)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def moved_away(engine: FSDP2Engine) -> None:
    """By loading a state dict, the model gets other memory than the optimizer's."""
    model = engine._units.model
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def left_whole(engine: FSDP2Engine) -> None:
    """Later micro-batches would compute with what was gathered before the update."""
    next(engine._units.gathered())
    engine._units.let_go = lambda: None


def poisoned(engine: FSDP2Engine) -> None:
    window = engine._forward.sums._window  # pyright: ignore[reportAttributeAccessIssue]
    next(iter(window.totals.values()))[..., 0] = float("nan")


def one_rank_lost(engine: FSDP2Engine) -> None:
    """A collective that gives every rank its own numbers back, as one over a wrong group does."""

    def swap(received: Tensor, sent: Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        first, own = sum(sizes[: engine.ranks.rank]), sizes[engine.ranks.rank]
        received.zero_()
        received[:own] = sent[first : first + own]
        return lambda: None

    exchange = engine._forward.sums._exchange  # pyright: ignore[reportAttributeAccessIssue]
    exchange._ranks = replace(engine.ranks)
    object.__setattr__(exchange._ranks, "swap", swap)


def twice_as_much(engine: FSDP2Engine) -> None:
    """What the last rank sent is added twice."""
    sums = engine._forward.sums  # pyright: ignore[reportAttributeAccessIssue]
    real = sums._take
    sums._take = lambda parts, start: (real(parts, start), real(parts[-1:], start))  # pyright: ignore[reportAttributeAccessIssue]


def shifted(engine: FSDP2Engine) -> None:
    """What was received lies by one element beside where it belongs."""
    sums = engine._forward.sums  # pyright: ignore[reportAttributeAccessIssue]
    real = sums._take
    sums._take = lambda parts, start: real(parts.roll(1, 1), start)  # pyright: ignore[reportAttributeAccessIssue]


def wrong_slices(engine: FSDP2Engine) -> None:
    """Every rank sends what lies one element beside the other's shard."""
    sums = engine._forward.sums  # pyright: ignore[reportAttributeAccessIssue]
    for parcel in sums._exchange._parcels:
        first, *_ = parcel.stretches
        parcel.stretches[0] = slice(first.start + 1, first.stop + 1)


def kept(engine: FSDP2Engine) -> None:
    """A window that is sent and not emptied comes again with the next one."""
    sums = engine._forward.sums  # pyright: ignore[reportAttributeAccessIssue]
    sums._window.clear = lambda: None  # pyright: ignore[reportAttributeAccessIssue]


def last_lost(engine: FSDP2Engine) -> None:
    """The last window is left where it is."""
    sums = engine._forward.sums  # pyright: ignore[reportAttributeAccessIssue]
    sums.send = lambda: None  # pyright: ignore[reportAttributeAccessIssue]


def no_step(engine: FSDP2Engine) -> None:
    engine._optimizer.step = lambda: None  # pyright: ignore[reportAttributeAccessIssue]


def a_shard_without_noise(engine: FSDP2Engine) -> None:
    flat, _ = next(entry for entry in engine._layout.values() if entry[1])
    engine._layout[id(flat)] = (flat, [])


FAULTS: dict[str, Callable[[FSDP2Engine], None] | None] = {
    "honest": None, "shards replaced": moved_away, "left whole": left_whole, "NaN in the sum": poisoned,
    "not reduced": one_rank_lost, "reduced twice": twice_as_much, "shifted": shifted, "wrong slices": wrong_slices,
    "window kept": kept, "last window lost": last_lost, "step skipped": no_step,
    "no noise on a shard": a_shard_without_noise,
}  # fmt: skip


def swapped_rows(ranks: Ranks) -> str:
    """A map that takes one parameter's rows for another's of the same shape and value."""
    engine = engine_of(model_of("mae"), ranks)
    biases = [name for name, shape in engine.shapes.items() if name.endswith("norm1.bias") and shape[0] == 24]
    wrong = dict(engine._trained)
    wrong[biases[0]], wrong[biases[1]] = wrong[biases[1]], wrong[biases[0]]
    engine._layout = row_slices(wrong, engine.shapes, ranks.rank, ranks.world)
    try:
        engine._prove()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def watched(sharding: EngineSettings, ranks: Ranks) -> int:
    """How many functions the clip engine looks at in a micro-batch, in which FSDP2 calls a multiple of its own."""
    engine = clipping_engine(
        model_of("caption"), ClipRule("flat", C, ALLOWANCE), SETTINGS[True], sharding, ranks, Computation()
    ).engine  # fmt: skip
    calls, real = [], ParameterTracker.call
    ParameterTracker.call = lambda *given: (calls.append(given[1]), real(*given))[1]
    engine.accumulate(batch_of("caption", ranks.rank))
    ParameterTracker.call = real
    return len(calls)


def main() -> None:
    ranks = start_ranks()
    found: dict[str, object] = {"world": ranks.world, "drifts": {}, "self-tests": {}, "faults": {}}
    for objective in ("tied", "dropping"):
        for private in (True, False):
            engine = engine_of(model_of(objective), ranks, private)
            weights = two_steps(engine, objective, private)
            start = dict(model_of(objective).state_dict())
            expected = by_hand(objective, ranks.world, private)
            found["drifts"][f"{objective}, private: {private}"] = apart(weights, expected, start)  # pyright: ignore
            held = ranks.sum(sum(f.length for shard in engine.shards() for f in shard.fragments))
            assert held == engine.trainable_elements
    for objective in ("caption", "dropping"):
        found["self-tests"][objective] = passes_self_test(objective, ranks)  # pyright: ignore[reportIndexIssue]
    for name, change in FAULTS.items():
        found["faults"][name] = ranks.gather(fault(ranks, change))  # pyright: ignore[reportIndexIssue]
    found["faults"]["rows swapped"] = ranks.gather(swapped_rows(ranks))  # pyright: ignore[reportIndexIssue]
    found["watched"] = [watched(EngineSettings(name, MICRO_BATCH), ranks) for name in ("local", "fsdp2")]
    found["deepspeed"] = any(name.partition(".")[0] == "deepspeed" for name in sys.modules)
    answer(ranks, found)


if __name__ == "__main__":
    main()
