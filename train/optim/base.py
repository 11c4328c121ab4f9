"""The base of all optimizers here: flat fp32 tensors that contain fragments of many parameters, on many ranks.

DeepSpeed replaces the parameters by flat slices, so an optimizer learns only afterwards, through `bind`, which
elements belong to which parameter. Learning-rate factors and weight decay apply per fragment, so that there is still
one flat tensor per rank; norms of whole parameters are sums over the ranks. Padding belongs to no fragment and never
moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from murmuration.train.distributed.shards import Fragment, whole_parameters

Layout = Mapping[int, tuple[Tensor, Sequence[Fragment]]]
Add = Callable[[Tensor], Tensor]

AVERAGE, BEFORE = "weights_ema", "weights_before"
# Elements processed at a time: bounds the memory of intermediate results and keeps them in a CPU's cache.
CHUNK = {"cpu": 1 << 15}
CHUNK_ON_DEVICES = 1 << 24


@dataclass(frozen=True)
class Policy:
    """Factor on the learning rate, weight decay, and whether a trust ratio applies."""

    learning_rate: float
    weight_decay: float
    trust_ratio: bool


class OptimizerError(RuntimeError):
    """The optimizer was given unknown tensors, or no gradient; the message says what to do."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring elements of one flat tensor under one policy."""

    number: int
    """Index of the parameter among the trainable ones; that of the first, where the stretch spans several."""
    position: int
    length: int
    policy: Policy


@dataclass(frozen=True)
class Flat:
    """One flat tensor in a step: weights, gradient, moments, and the learning rate of its group."""

    weights: Tensor
    gradient: Tensor
    moments: Mapping[str, Tensor]
    step: int
    learning_rate: float
    stretches: Sequence[Stretch]

    def chunks(self, stretch: Stretch) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Views of weights, gradient and moments, a piece at a time."""
        size = CHUNK.get(self.weights.device.type, CHUNK_ON_DEVICES)
        flats = [self.weights.view(-1), self.gradient.view(-1), *(moment.view(-1) for moment in self.moments.values())]
        for begin in range(stretch.position, stretch.position + stretch.length, size):
            end = min(begin + size, stretch.position + stretch.length)
            weights, gradient, *moments = (flat[begin:end] for flat in flats)
            yield weights, gradient, moments


class FlatOptimizer(torch.optim.Optimizer, ABC):
    """Subclasses name their moments and update all flat tensors of this rank in one call."""

    moments: tuple[str, ...] = ()
    by_parameter = False
    """Whether fragments are processed separately; if not, neighbours under one policy are joined."""
    keeps_before = False
    """Whether the weights from before the last step are part of the state; set it before the first step."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], policies: Mapping[str, Policy],
        ema_decay: float | None, most: float | None,
    ) -> None:  # fmt: skip
        """`most` bounds the norm of the gradient of all parameters together. The gradient already has its noise, so
        this promises no privacy."""
        named = dict(parameters)
        super().__init__(list(named.values()), {"lr": 0.0})
        self._policies = dict(policies)
        self._numbers = {name: number for number, name in enumerate(named)}
        self._ema_decay, self._most = ema_decay, most
        self.bind(whole_parameters(named), None)

    def bind(self, layout: Layout, add: Add | None) -> None:
        """Call this once an engine has made its shards. `layout` has the fragments in each flat tensor, by id; `add`
        sums over the ranks, in place.

        `add` is None where every rank has whole parameters: their norms need no communication.
        """
        self._add = add
        self._stretches: dict[int, list[Stretch]] = {}
        self._bound = [flat for flat, _ in layout.values()]  # an id is valid only while its tensor is alive
        for identity, (_, fragments) in layout.items():
            unknown = next((f.name for f in fragments if f.name not in self._numbers), None)
            if unknown is not None:
                raise OptimizerError(f"the shard map contains {unknown}, which the optimizer was not made for")
            self._stretches[identity] = self._joined(fragments)

    def _joined(self, fragments: Sequence[Fragment]) -> list[Stretch]:
        stretches: list[Stretch] = []
        for f in sorted(fragments, key=lambda fragment: fragment.position):
            policy, last = self._policies[f.name], stretches[-1] if stretches else None
            adjoins = last is not None and last.position + last.length == f.position and last.policy == policy
            if last is not None and adjoins and not self.by_parameter:
                stretches[-1] = replace(last, length=last.length + f.length)
            else:
                stretches.append(Stretch(self._numbers[f.name], f.position, f.length, policy))
        return stretches

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None:
            raise OptimizerError("a closure would compute a gradient that got no noise; call step() without one")
        flats = [self._flat(tensor, group["lr"]) for group in self.param_groups for tensor in group["params"]]
        if self._most is not None:
            # Like torch.nn.utils.clip_grad_norm_, over the shards of all ranks, without padding.
            pieces = [g for flat in flats for stretch in flat.stretches for _, g, _ in flat.chunks(stretch)]
            square = torch.zeros(1, dtype=torch.float64, device=flats[0].weights.device)
            for gradient in pieces:
                square += gradient.double().square().sum()
            norm = (square if self._add is None else self._add(square)).sqrt()
            factor = (self._most / (norm + 1e-6)).clamp(max=1.0).float()
            for gradient in pieces:
                gradient.mul_(factor)
        if self.keeps_before:
            for flat in flats:
                self.state[flat.weights][BEFORE].copy_(flat.weights)
        self.update(flats)
        for flat in flats:
            if self._ema_decay is not None:
                self.state[flat.weights][AVERAGE].lerp_(flat.weights, 1.0 - self._ema_decay)

    def _flat(self, tensor: Tensor, learning_rate: float) -> Flat:
        if id(tensor) not in self._stretches:
            raise OptimizerError("the optimizer holds a tensor outside its layout; bind() it after sharding the model")
        if tensor.grad is None:
            raise OptimizerError("a tensor has no gradient; every one gets its noise at every step")
        state = self.state[tensor]
        if not state:
            state.update(self._fresh(tensor, step=0))
            if self._ema_decay is not None:
                state[AVERAGE].copy_(tensor)
        state["step"] += 1
        moments = {name: state[name] for name in self.moments}
        step, stretches = int(state["step"]), self._stretches[id(tensor)]
        return Flat(tensor, tensor.grad, moments, step, float(learning_rate), stretches)

    @abstractmethod
    def update(self, flats: Sequence[Flat]) -> None:
        """Moves the weights of all flat tensors of this rank by one step."""

    def norms(self, flats: Sequence[Flat], of: Callable[[Flat, Stretch], Iterator[tuple[Tensor, Tensor]]]) -> Tensor:
        """Norms over whole parameters of the pairs that `of` yields in pieces: [2, parameters], in fp64.

        There is one reduction for all of them; a rank that has only padding takes part too.
        """
        sums = torch.zeros(2, len(self._numbers), dtype=torch.float64, device=flats[0].weights.device)
        for flat in flats:
            for stretch in flat.stretches:
                for pair in of(flat, stretch):
                    for kind, piece in enumerate(pair):
                        sums[kind, stretch.number] += piece.double().square().sum()
        return (sums if self._add is None else self._add(sums)).sqrt()

    def _fresh(self, flat: Tensor, step: int) -> dict[str, Tensor]:
        names = (*self.moments, *([AVERAGE] if self._ema_decay is not None else []))
        names += (BEFORE,) if self.keeps_before else ()
        fresh = {name: torch.zeros_like(flat, memory_format=torch.contiguous_format).detach() for name in names}
        return {"step": torch.tensor(float(step)), **fresh}

    def state_tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """State by name, each shaped like the flat tensor; empty before the first step. The step is not included."""
        return {name: tensor for name, tensor in self.state.get(flat, {}).items() if name != "step"}

    @property
    def steps_done(self) -> int:
        steps = {int(state["step"]) for state in self.state.values() if "step" in state}
        if len(steps) > 1:
            raise OptimizerError("the flat tensors disagree about the number of steps")
        return steps.pop() if steps else 0

    def restart(self, step: int) -> None:
        """Sets zeroed state at this step count, to be filled from a checkpoint; at step 0, clears all state."""
        self.state.clear()
        if step:
            for flat in self._bound:  # not those of the groups, which ZeRO-3 empties between steps
                self.state[flat] = self._fresh(flat, step)
