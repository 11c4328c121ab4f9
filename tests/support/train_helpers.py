"""An honest engine in plain PyTorch, ranks as threads, and a toy model: what the tests of train/ stand on.

`LocalEngine` does with flat slices what ZeRO does: a real backward through the private forward, one sum over the
ranks, the update on this rank's slice, AdamW, and the weights gathered again. Faults are planted by overriding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.model.settings import ModelSettings
from murmuration.train.clip.engine import ClipEngine, Observation
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer, OptimizerParams
from murmuration.train.config.root import Config
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Disagreement, Pulse
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.base import AppliedUpdate, OptimizerShard
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.engines.forward import PlainForward, PrivateForward
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import Update, UpdateError
from murmuration.train.optim.base import FlatOptimizer
from murmuration.train.optim.optimizers import make_optimizer

T = TypeVar("T")

NANO = ModelSettings(
    family="captioner", image_size=32, patch_size=8, width=16, depth=1, heads=2, decoder_depth=1, mae_decoder_width=16,
    mae_decoder_depth=1, mae_decoder_heads=2, text_length=8, vocabulary=32, qkv_bias=True,
)  # fmt: skip
SHAPE = NANO.resolved()
NOISE_KEY = b"s" * 32
ADAMW = Optimizer(params=OptimizerParams(weight_decay=0.01))


class ThreadRanks:
    """The interface of murmuration.train.distributed.ranks.Ranks between threads of this process."""

    def __init__(self, rank: int, world: int, shared: _Shared) -> None:
        self.pulse = Pulse()
        self.rank, self.world, self.device = rank, world, torch.device("cpu")
        self._shared = shared

    @property
    def main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        found = list(self._shared.values)
        self._shared.barrier.wait()
        return found

    def sum(self, value: int) -> int:
        return sum(self.gather(value))

    def add(self, tensor: Tensor) -> Tensor:
        parts = self.gather(tensor.clone())
        return tensor.copy_(torch.stack(parts).sum(0))

    def swap(self, received: Tensor, sent: Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        parts = [part.split(list(sizes))[self.rank] for part in self.gather(sent.clone())]
        return lambda: (received.copy_(torch.cat(parts)), None)[1]

    def any(self, value: bool) -> bool:
        return self.sum(int(value)) > 0

    def barrier(self) -> None:
        self._shared.barrier.wait()

    def require_same(self, what: str, value: Any) -> None:
        if len({repr(other) for other in self.gather(value)}) != 1:
            raise Disagreement(what)

    def on_main(self, act: Callable[[], T]) -> T:
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.main:
            try:
                outcome = (act(), None)
            except Exception as error:
                outcome = (None, error)
        result, error = self.gather(outcome)[0]
        if error is not None:
            raise error
        return result


class _Shared:
    def __init__(self, world: int) -> None:
        self.values: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=60)


def alone() -> Any:
    return ThreadRanks(0, 1, _Shared(1))


def on_ranks(world: int, act: Callable[[Any], T]) -> list[T]:
    """`act` on every rank at once; the error of the lowest rank that failed by itself is raised."""
    shared = _Shared(world)

    def one(rank: int) -> T:
        try:
            return act(ThreadRanks(rank, world, shared))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        running = [pool.submit(one, rank) for rank in range(world)]
    errors = [future.exception() for future in running if future.exception() is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        assert error is not None
        raise error
    return [future.result() for future in running]


class LocalEngine:
    """train.engines.base.Engine: `replicated` is ZeRO-0; otherwise each rank owns a flat slice of everything."""

    def __init__(
        self, forward: PrivateForward | PlainForward, ranks: Any, replicated: bool = False,
        optimizer: FlatOptimizer | None = None,
    ) -> None:  # fmt: skip
        self.forward, self.ranks, self.replicated = forward, ranks, replicated
        self.ranks_per_copy = 1 if replicated else 0  # as EngineSettings counts them
        self.device = torch.device("cpu")
        self.model: nn.Module = forward.model
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.shapes, self.partitioned = forward.shapes, False
        self.trainable_elements = sum(p.numel() for p in self.parameters.values())
        if replicated:
            self.flats = list(self.parameters.values())
            self.layout = [[Fragment(n, i, 0, p.numel(), 0)] for i, (n, p) in enumerate(self.parameters.items())]
        else:
            self.low, self.high = slice_of(ranks.rank, ranks.world, self.trainable_elements)
            self.flats = [nn.Parameter(self._flat([p.detach() for p in self.parameters.values()]))]
            self.layout = [fragments_of(self.parameters, self.low, self.high)]
        self.base = optimizer or make_optimizer(ADAMW, self.parameters.items())
        if not replicated:
            self.base.param_groups[0]["params"] = self.flats
            held = zip(self.flats, self.layout, strict=True)
            self.base.bind({id(flat): (flat, fragments) for flat, fragments in held}, ranks.add)

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors])[self.low : self.high].clone()

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        loss = self.forward(batch.inputs, batch.present, rule)
        if isinstance(self.forward, PlainForward):
            loss.backward()

    def hand_over(self) -> None:
        if isinstance(self.forward, PrivateForward):
            self.forward().backward()
            self.forward.sums.clear()

    def reduce(self) -> None:
        for p in self.parameters.values():
            assert p.grad is not None, "nothing was accumulated"
            self.ranks.add(p.grad)
        if not self.replicated:
            self.flats[0].grad = self._flat([p.grad for p in self.parameters.values() if p.grad is not None])

    def finish(self, update: Update) -> None:
        for flat, fragments in zip(self.flats, self.layout, strict=True):
            assert flat.grad is not None
            update.finish(flat.grad, fragments)

    def step(self) -> None:
        self.base.step()

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        for group in self.base.param_groups:
            group["lr"] = learning_rate
        self.hand_over()
        self.reduce()
        self.finish(update)
        self.step()
        if not self.replicated:
            whole = torch.cat(self.ranks.gather(self.flats[0].detach().clone()))
            start = 0
            for p in self.parameters.values():
                p.data.copy_(whole[start : start + p.numel()].view_as(p))
                start += p.numel()
        for p in self.parameters.values():
            p.grad = None
        elements = self.ranks.sum(update.elements)
        if elements != self.trainable_elements * (self.ranks.world if self.replicated else 1):
            raise UpdateError(f"{elements} elements were finished")
        return AppliedUpdate(self.trainable_elements)

    def discard(self) -> None:
        if isinstance(self.forward, PrivateForward):
            self.forward.clear()
        for p in self.parameters.values():
            p.grad = None

    def observe(self) -> Observation:
        observed = self.forward.observed
        assert observed is not None
        if isinstance(observed, Tensor):
            return Observation(observed)
        return Observation(observed.losses, observed.norms, observed.sensitivity)

    def shards(self) -> list[OptimizerShard]:
        return [
            OptimizerShard(flat, fragments, self.base.state_tensors(flat))
            for flat, fragments in zip(self.flats, self.layout, strict=True)
        ]

    def plain_model(self) -> nn.Module | None:
        return None

    def whole_weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def optimizer_step(self) -> int:
        return self.base.steps_done

    def set_optimizer_step(self, step: int) -> None:
        self.base.restart(step)

    def close(self) -> None:
        pass


def slice_of(rank: int, world: int, elements: int) -> tuple[int, int]:
    """Uneven on purpose: cuts fall inside parameters and at odd offsets."""
    cuts = [round(elements * i / world) | 1 if 0 < i < world else elements * (i // world) for i in range(world + 1)]
    return cuts[rank], cuts[rank + 1]


def fragments_of(parameters: dict[str, nn.Parameter], low: int, high: int) -> list[Fragment]:
    found, begin = [], 0
    for index, (name, p) in enumerate(parameters.items()):
        first, last = max(low, begin), min(high, begin + p.numel())
        if first < last:
            found.append(Fragment(name, index, first - begin, last - first, first - low))
        begin += p.numel()
    return found


class Toy(nn.Module):
    """A small differentiable model with a loss per record, a frozen weight and a buffer; images of 4×4."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.first = nn.Linear(48, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 3)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("table", torch.linspace(-1, 1, width))
        with torch.no_grad():
            for p in self.parameters():
                if p.requires_grad:
                    p.copy_(torch.randn(p.shape, generator=draw) * 0.3 + (p.dim() == 1))

    def forward(self, inputs: Any) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs["images"].flatten(1)))) * self.frozen + self.table
        return (self.second(hidden) - 1.5).square().sum(1)


def toy_batch(size: int, seed: int = 0, absent: tuple[int, ...] = ()) -> MicroBatch:
    images = torch.randn(size, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    present = torch.ones(size, dtype=torch.bool)
    present[list(absent)] = False
    images[~present] = 0.0
    return MicroBatch({"images": images}, present)


def nano_inputs(objective: str, size: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = {"images": torch.randn(size, 3, 32, 32, generator=draw)}
    if objective == "mae":
        inputs["mask_noise"] = torch.rand(size, SHAPE.patches, generator=draw)
    else:
        inputs["tokens"] = torch.randint(1, 32, (size, 8), generator=draw)
    return inputs


def plan_for(records: int = 400, batch: float = 20, steps: int = 6, **changes: Any) -> PrivacyPlan:
    fields: dict[str, Any] = dict(
        records=records, sampling=Poisson(round(batch / records * 2**32)), clip_norm=1.0, noise_multiplier=1.5,
        steps=steps, delta=1 / (2 * records), epsilon_budget=8.0,
    )  # fmt: skip
    return PrivacyPlan(**(fields | changes))


def private_engine(
    ranks: Any, plan: PrivacyPlan | None = None, replicated: bool = False, model: nn.Module | None = None,
    micro_batch: int = 8, engine: Callable[..., LocalEngine] = LocalEngine, optimizer: Optimizer = ADAMW,
    around_clip: Callable[[ClipEngine], ClipEngine] | None = None,
) -> tuple[Any, Any, AESNoise]:  # fmt: skip
    plan = plan or plan_for()
    built = clipping_engine(
        model or Toy(), ClipRule.of(plan, "flat", 0.01, micro_batch), optimizer, EngineSettings(), ranks,
        Computation("reference"), around_clip, lambda _, forward, flat, ranks: engine(forward, ranks, replicated, flat),
    )  # fmt: skip
    return built.engine, built.clip, AESNoise.of(NOISE_KEY, plan)


def local(config: Config, forward: Any, optimizer: Any, ranks: Any) -> Any:
    del config, optimizer
    return LocalEngine(forward, ranks)
