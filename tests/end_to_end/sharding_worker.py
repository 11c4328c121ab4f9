"""Run under `deepspeed`: every ZeRO stage and FSDP2, precision and optimizer against one textbook trajectory.

The draws are Poisson, so ranks get uneven numbers of records and padding, and one step draws nothing at all. The
textbook holds whole tensors in one process, loops over single records in fp32 and knows nothing of shards.

Each of its gradients is taken at the weights that the engine has at that step. The two keep weights in different
precision, so theirs differ in the last bit of fp32. bf16 passes that on as it is, or turns it into 2^-8 of an
activation, where the activation lies at the edge between two bf16 numbers. Which of them do depends on the kernel.
At equal weights equal operands meet in equal kernels, and bf16 sums are as exact as fp32 ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from accounting.plan import PrivacyPlan, threshold_for  # noqa: E402
from data.batches import MicroBatch, slots  # noqa: E402
from data.sampler import PoissonSampler  # noqa: E402
from model.build import build  # noqa: E402
from model.settings import ModelSettings  # noqa: E402
from tests.end_to_end.answering import answer  # noqa: E402
from train.clip_bookkeeping import BookKeepingClip  # noqa: E402
from train.clip_rule import ClipRule  # noqa: E402
from train.config import Offload, ZeroOptimization  # noqa: E402
from train.engine_deepspeed import DeepSpeedEngine, start_ranks  # noqa: E402
from train.engine_fsdp2 import FSDP2Engine  # noqa: E402
from train.forward import PlainForward, PrivateForward  # noqa: E402
from train.gradient import NoisyUpdate  # noqa: E402
from train.noise import NoiseMechanism  # noqa: E402
from train.optim import make_optimizer  # noqa: E402
from train.optim_settings import Optimizer  # noqa: E402
from train.sums import ExactSums  # noqa: E402

RECORDS, MICRO_BATCH, C, STEPS = 48, 4, 3.0, (1, 2, 3)
EMPTY_STEP = 2
LONG = 2004  # as many for each of 1, 2 or 3 ranks, which a stage needs that gathers weights
NOISE_KEY = b"n" * 32
Layout = Literal[0, 1, 2, 3, "fsdp2"]
LAYOUTS: tuple[Layout, ...] = (0, 1, 2, 3, "fsdp2")
# fp32 rounds to nearest: by at most so much of a number, on any processor.
UNIT_ROUNDOFF = 2.0**-24
# How often at most an optimizer rounds, in each step, the weights themselves (decayed, then moved) and what moves them
# (gradient, moments with their constants, root, quotients, trust ratio; some are carried from step to step).
ROUNDINGS_OF_WEIGHTS, ROUNDINGS_OF_MOVES = 4, 32
# Of a size at which three steps move the weights by far more than fp32 rounds them.
RATES = {"AdamW": 1e-2, "SGD": 0.3, "LAMB": 1e-2, "LARS": 1e-2}
SHAPE = ModelSettings(
    family="captioner", image_size=16, patch_size=8, width=24, depth=1, heads=2, decoder_width=16, decoder_depth=1,
    decoder_heads=2, mae_decoder_width=8, mae_decoder_depth=1, mae_decoder_heads=2, text_length=6, vocabulary=19,
    qkv_bias=True,
).resolved()  # fmt: skip
PLAN = PrivacyPlan(
    records=RECORDS, threshold=threshold_for(RECORDS, 17.0), clip_norm=C, noise_multiplier=0.4, steps=9, delta=1e-3,
    epsilon_budget=1e6,
)  # fmt: skip
OPTIMIZERS = {
    "AdamW": Optimizer.model_validate({"params": {"weight_decay": 0.1}}),
    "SGD": Optimizer.model_validate({"type": "SGD", "params": {"weight_decay": 0.1}}),
    "LAMB": Optimizer.model_validate({"type": "LAMB", "params": {"weight_decay": 0.1}}),
    "LARS": Optimizer.model_validate({"type": "LARS", "params": {"weight_decay": 0.1, "trust_coefficient": 1.0}}),
}


def drawn(step: int):
    ids = PoissonSampler(b"s" * 32, b"d" * 32, PLAN.records, PLAN.threshold).draw(step).ids
    return ids[:0] if step == EMPTY_STEP else ids


def rows_of(ids) -> MicroBatch:
    """Records by id, the same for whoever asks; -1 is padding, filled with what must not matter."""
    inputs: dict[str, list[Tensor]] = {"images": [], "tokens": []}
    for record in ids:
        draw = torch.Generator().manual_seed(int(record) + 77)
        inputs["images"].append(torch.randn(3, 16, 16, generator=draw) * (1 + record % 5))
        inputs["tokens"].append(torch.randint(1, 19, (6,), generator=draw))
        if record < 0:
            inputs["images"][-1].fill_(float("nan"))
    return MicroBatch({name: torch.stack(rows) for name, rows in inputs.items()}, torch.from_numpy(ids >= 0))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def noise(times: float = 1.0, more: float = 0.0) -> NoiseMechanism:
    """The plan's; faults are planted by another standard deviation or divisor."""
    planned = NoiseMechanism.of(NOISE_KEY, PLAN)
    return NoiseMechanism(NOISE_KEY, planned.std * times, planned.divisor + more)


def brute_force(model: nn.Module, ids) -> dict[str, Tensor]:
    named = trainable(model)
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    for record in ids:
        loss = model(rows_of(ids[ids == record]).inputs).sum()
        gradients = torch.autograd.grad(loss, list(named.values()))
        norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)))
        for name, gradient in zip(named, gradients, strict=True):
            total[name] += min(1.0, C / norm) * gradient.double()
    return total


def in_one_process(model: nn.Module, clip: BookKeepingClip, ids, world: int) -> dict[str, Tensor]:
    """For bf16, whose rounding belongs to the clip engine: its own sums of the same micro-batches, all in here."""
    sums = ExactSums({name: p.shape for name, p in trainable(model).items()}, torch.device("cpu"))
    for row in (row for rank in range(world) for row in slots(ids, rank, world, MICRO_BATCH)):
        batch = rows_of(row)
        clip.add_clipped(model, batch.inputs, batch.present, sums)
    return sums.totals


class Textbook:
    """Whole tensors, fp64 weights and moments, formulas as printed in the papers."""

    def __init__(self, kind: str, parameters: dict[str, nn.Parameter]) -> None:
        self.kind, self.count = kind, 0
        self.initial = {name: p.detach().double() for name, p in parameters.items()}
        self.weights = {name: w.clone() for name, w in self.initial.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.rounding = 0.0
        """How far fp32 may have led an optimizer away by now."""

    def step(self, gradients: dict[str, Tensor]) -> None:
        self.count += 1
        before = {name: weight.clone() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.sub_(RATES[self.kind] * self._direction(name, weight, gradients[name]))
        moves = ROUNDINGS_OF_MOVES * distance(self.weights, before)
        self.rounding += UNIT_ROUNDOFF * (ROUNDINGS_OF_WEIGHTS * length(before) + moves)

    def _direction(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        decay = 0.1 * weight
        if self.kind in ("SGD", "LARS"):
            rise = gradient + decay
            if self.kind == "LARS":
                rise = rise * _ratio(weight.norm(), gradient.norm() + 0.1 * weight.norm())
            self.first[name] = 0.9 * self.first[name] + rise
            return self.first[name]
        self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
        self.second[name] = 0.999 * self.second[name] + 0.001 * gradient**2
        first, second = self.first[name] / (1 - 0.9**self.count), self.second[name] / (1 - 0.999**self.count)
        adam = first / (second.sqrt() + 1e-8) + decay
        return adam * _ratio(weight.norm(), adam.norm()) if self.kind == "LAMB" else adam


def _ratio(weight: Tensor, update: Tensor) -> Tensor:
    return weight / update if float(weight) > 0 and float(update) > 0 else torch.ones_like(weight)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).square().sum()) for name in other) ** 0.5


def length(tensors: dict[str, Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5


class Teacher:
    """The textbook beside one engine: its gradients are taken at the engine's weights, its steps are its own."""

    def __init__(self, kind: str, precision: str, world: int) -> None:
        self.model, self.precision, self.world = build(SHAPE, "caption"), precision, world
        self.clip = BookKeepingClip(ClipRule("flat", C, 0.0), precision)  # pyright: ignore[reportArgumentType]
        self.clip.prepare(self.model)
        self.textbook = Textbook(kind, trainable(self.model))

    def step(self, step: int, weights: dict[str, Tensor]) -> None:
        named, ids = trainable(self.model), drawn(step)
        for name, p in named.items():
            p.data.copy_(weights[name])
        if self.precision == "fp32":
            total = brute_force(self.model, ids)
        else:
            total = in_one_process(self.model, self.clip, ids, self.world)
        gradients = {}
        for number, (name, p) in enumerate(named.items()):
            random = torch.from_numpy(noise().draw(step, number, 0, p.numel())).double().view(p.shape)
            gradients[name] = (total[name].double() + random) / PLAN.divisor
        self.textbook.step(gradients)

    def compare(self, weights: dict[str, Tensor]) -> dict[str, float]:
        """The distance from the textbook's weights, and how far fp32 may lead, over the distance that they moved."""
        book = self.textbook
        moved = distance(book.weights, book.initial)
        return {"drift": distance(weights, book.weights) / moved, "bound": book.rounding / moved}


def engine_of(ranks, layout: Layout, forward: PrivateForward | PlainForward, optimizer, offload: str | None = None):
    if layout == "fsdp2":
        return FSDP2Engine(forward, optimizer, ranks)
    stage = layout
    zero = ZeroOptimization(stage=stage, stage3_param_persistence_threshold=0 if stage == 3 else None)  # pyright: ignore[reportArgumentType]
    if offload is not None:
        zero = zero.model_copy(update={"offload_optimizer": Offload(adam=offload)})  # pyright: ignore[reportArgumentType]
    return DeepSpeedEngine(forward, optimizer, zero, MICRO_BATCH, ranks)


def spoil_padding(engine) -> None:
    """As memory may be that nobody ever wrote: the engine must not take it for weights."""
    for shard in engine.shards():
        behind = torch.ones(shard.weights.numel(), dtype=torch.bool)
        for fragment in shard.fragments:
            fragment.of(behind)[...] = False
        with torch.no_grad():
            shard.weights.view(-1)[behind] = float("nan")


def sharded(
    ranks, layout: Layout, kind: str, precision: str, offload: str | None = None, *,
    mechanism: NoiseMechanism | None = None, norm: float = C, lost: int = 0,
) -> dict[str, float]:  # fmt: skip
    """The engine against its teacher, who knows nothing of another mechanism, another norm or lost records."""
    teacher = Teacher(kind, precision, ranks.world) if ranks.main else None
    model = build(SHAPE, "caption")
    optimizer = make_optimizer(OPTIMIZERS[kind], model.named_parameters(), 0.0)
    clip = BookKeepingClip(ClipRule("flat", norm, 0.0), precision)  # pyright: ignore[reportArgumentType]
    engine = engine_of(ranks, layout, PrivateForward(model, clip), optimizer, offload)
    if ranks.world == 3:  # where sizes do not divide evenly
        spoil_padding(engine)
    for step in STEPS:
        weights = engine.whole_weights()
        if teacher is not None:
            teacher.step(step, weights)
        for row in slots(drawn(step)[lost:], ranks.rank, ranks.world, MICRO_BATCH):
            engine.accumulate(rows_of(row))
        engine.update(NoisyUpdate(mechanism or noise(), step), RATES[kind])
    weights = {name: tensor.double() for name, tensor in engine.whole_weights().items() if name in engine.shapes}
    engine.close()
    return {} if teacher is None else teacher.compare(weights)


class Straight(nn.Module):
    """Whose gradient of a record is the record."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(37))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return (inputs["x"] * self.weight).sum(1)


def straight(number: int) -> MicroBatch:
    """Two records: one that nearly all share, and one that is its opposite every other time."""
    draw = torch.Generator().manual_seed(number)
    x = torch.cat([torch.ones(1, 37), torch.full((1, 37), (-1.0) ** number)]) + torch.randn(2, 37, generator=draw)
    return MicroBatch({"x": x * 10}, torch.ones(2, dtype=torch.bool))


def error_of_a_long_sum(ranks, layout: Layout) -> float:
    """In units of C: from the clipped sum of many micro-batches to what moved the weights, at rate and divisor 1."""
    model = Straight()
    optimizer = make_optimizer(Optimizer.model_validate({"type": "SGD"}), model.named_parameters(), 0.0)
    forward = PrivateForward(model, BookKeepingClip(ClipRule("flat", C, 0.0)))
    engine = engine_of(ranks, layout, forward, optimizer)
    for number in range(ranks.rank, LONG, ranks.world):
        engine.accumulate(straight(number))
    engine.update(NoisyUpdate(NoiseMechanism(NOISE_KEY, 1e-9, 1.0), 1), 1.0)
    found = engine.whole_weights()["weight"].double()
    engine.close()
    every = torch.cat([straight(number).inputs["x"] for number in range(LONG)]).double()
    exact = (every * (C / every.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    return float((found + exact).norm()) / C


def main() -> None:
    ranks = start_ranks()
    results = []
    for precision in ("fp32", "bf16"):
        for kind in OPTIMIZERS:
            layouts: list[tuple[Layout, str | None]] = [(layout, None) for layout in LAYOUTS]
            if "--offload" in sys.argv and kind in ("AdamW", "LAMB") and precision == "fp32":
                layouts += [(stage, "torch") for stage in (1, 2, 3)]
                layouts += [(stage, "deepspeed") for stage in (1, 2, 3) if kind == "AdamW"]
            for layout, offload in layouts:
                found = sharded(ranks, layout, kind, precision, offload)
                results.append({"layout": layout, "optimizer": kind, "precision": precision, "world": ranks.world,
                                "offload": offload} | found)  # fmt: skip
    faults = {
        "noise": {"mechanism": noise(times=1.001)}, "divisor": {"mechanism": noise(more=1.0)},
        "clipping": {"norm": 1e9}, "clip norm": {"norm": 1.001 * C}, "lost record": {"lost": 1},
    }  # fmt: skip
    planted = {fault: sharded(ranks, 0, "SGD", "bf16", **given) for fault, given in faults.items()}
    counts = [
        [int((slots(drawn(s), r, ranks.world, MICRO_BATCH) >= 0).sum()) for r in range(ranks.world)] for s in STEPS
    ]
    errors = {str(layout): error_of_a_long_sum(ranks, layout) for layout in LAYOUTS}
    answer(ranks, {"results": results, "records_per_rank": counts, "errors_of_long_sums": errors,
                   "planted": planted})  # fmt: skip


if __name__ == "__main__":
    main()
