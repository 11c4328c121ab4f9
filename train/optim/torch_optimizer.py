"""Any optimizer of torch.optim, or of that form, on flat shards.

It gets the gradient that has its noise already, so whatever it does is post-processing. Where ranks hold parts of
parameters, an optimizer must move each element by that element's own history, as most do; one that looks at whole
matrices needs an engine whose ranks hold whole parameters.

Its state is kept in flat tensors beside the weights, like that of our own optimizers, so that checkpoints can be cut
for another number of ranks. What it keeps as a number (NAdam's products, for example) is kept for every element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from murmuration.accounting.errors import RunError
from murmuration.train.optim.base import Add, Flat, FlatOptimizer, Layout, Policy, Stretch

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""A class of torch.optim, or a function that makes one from a list of parameters."""
ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.SGD,
)  # fmt: skip
"""Those of torch.optim that move each element by its own history."""


class UnfitOptimizerError(RunError, ValueError):
    """The optimizer cannot work here; the message says why and what to do."""


class TorchOptimizer(FlatOptimizer):
    by_parameter = True

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], make: MakeOptimizer) -> None:
        named = [(name, parameter) for name, parameter in parameters]
        self._make, self._shapes = make, [getattr(each, "ds_shape", each.shape) for _, each in named]
        tried = {len(shape): _tried(make, (2,) * (len(shape) or 1)) for shape in self._shapes}
        self._kind, self.moments, self._numbers_in = tried.get(2) or next(iter(tried.values()))
        if len(set(tried.values())) > 1:
            raise UnfitOptimizerError(
                f"{self._kind.__name__} keeps another state for parameters of other dimensions, which flat shards "
                "cannot hold; use another optimizer"
            )
        self._inner: dict[tuple[int, int], tuple[nn.Parameter, torch.optim.Optimizer]] = {}
        """Of each stretch, with the parameter that it was made with: making one costs more than a small step."""
        super().__init__(named, {name: Policy(1.0, 0.0, False) for name, _ in named}, None, None)

    def bind(self, layout: Layout, add: Add | None) -> None:
        if add is not None and self._kind not in ELEMENTWISE:
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise UnfitOptimizerError(
                f"{self._kind.__name__} may look at whole parameters, of which ranks hold parts; use an engine whose "
                f"ranks hold whole ones (local, or ZeRO-0), one of {known}, or murmuration.Optimizer(type='LAMB')"
            )
        super().bind(layout, add)

    @torch.no_grad()
    def update(self, flats: Sequence[Flat]) -> None:
        for flat in flats:
            for stretch in flat.stretches:
                self._move(flat, stretch)

    def _move(self, flat: Flat, stretch: Stretch) -> None:
        part = slice(stretch.position, stretch.position + stretch.length)
        shape = self._shapes[stretch.number] if self._add is None else torch.Size([stretch.length])
        key = stretch.number, stretch.position
        if (made := self._inner.get(key)) is None or flat.step == 1:  # it makes the state of its first step itself
            weights = nn.Parameter(torch.empty_like(flat.weights.view(-1)[part].view(shape)), requires_grad=False)
            made = self._inner[key] = weights, self._make([weights])
        weights, inner = made
        weights.data = flat.weights.view(-1)[part].view(shape)
        weights.grad = flat.gradient.view(-1)[part].view(shape)
        kept = {name: moment.view(-1)[part].view(shape) for name, moment in flat.moments.items()}
        for group in inner.param_groups:
            group["lr"] = flat.learning_rate
        if flat.step > 1:
            found: dict[str, Any] = {"step": torch.tensor(float(flat.step - 1))}
            for name, moment in kept.items():
                found[name] = moment.flatten()[0].cpu().clone() if name in self._numbers_in else moment
            inner.state[weights] = found
        inner.step()
        for name, moment in kept.items():
            after = inner.state[weights][name]
            if not isinstance(after, Tensor) or after.data_ptr() != moment.data_ptr():
                moment.copy_(torch.as_tensor(after, dtype=moment.dtype, device=moment.device).expand(shape))
        weights.grad = None


def learning_rate_of(make: MakeOptimizer) -> float:
    """The rate that the optimizer was made with."""
    return float(_made(make, nn.Parameter(torch.zeros(2, 2))).param_groups[0]["lr"])


def described(make: MakeOptimizer) -> str:
    """Its class and settings, in words."""
    inner = _made(make, nn.Parameter(torch.zeros(2, 2)))
    return f"{type(inner).__qualname__} {_settings(inner)}"


def _made(make: MakeOptimizer, weights: nn.Parameter, steps: int = 0) -> torch.optim.Optimizer:
    try:
        inner = make([weights])
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"it is a {type(inner).__name__}")
        for _ in range(steps):
            inner.step()
    except Exception as error:
        raise UnfitOptimizerError(
            "optimizer= is called with a list of parameters and must return a torch.optim optimizer whose step() needs "
            f"no closure, but failed for one of shape {list(weights.shape)} ({type(error).__name__}: {error}); give a "
            "class such as torch.optim.AdamW, or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)"
        ) from None
    return inner


def _settings(inner: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Of its group of parameters, and what else it holds as a number."""
    found = {name: value for name, value in inner.param_groups[0].items() if name != "params"}
    own = {name: value for name, value in vars(inner).items() if isinstance(value, int | float | Tensor)}
    counted = {name: value for name, value in own.items() if not name.startswith("_") or type(value) in (int, float)}
    return sorted((name, repr(value)) for name, value in (found | counted).items())


def _tried(make: MakeOptimizer, shape: tuple[int, ...]) -> tuple[type, tuple[str, ...], frozenset[str]]:
    """Makes two steps on a parameter of no account; returns the class, the names of its state, and which of these are
    numbers."""
    weights = nn.Parameter(torch.zeros(shape))
    weights.grad = torch.ones(shape)
    inner = _made(make, weights, steps=2)
    state = {key: value for key, value in inner.state[weights].items() if key != "step" and value is not None}
    odd = [key for key, value in state.items() if not isinstance(value, Tensor | float | int)]
    odd += [key for key, value in state.items() if isinstance(value, Tensor) and value.dim() and value.shape != shape]
    if len(inner.param_groups) != 1:
        odd.append("groups of parameters")
    once = nn.Parameter(torch.zeros(shape))
    once.grad = torch.ones(shape)
    odd += sorted(state.keys() - _made(make, once, steps=1).state[once].keys())
    # It is made anew when a run continues: what it counts or adapts outside of a parameter's state would be lost.
    before = dict(_settings(_made(make, nn.Parameter(torch.zeros(shape)))))
    odd += [name for name, value in _settings(inner) if before.get(name) != value]
    if odd:
        raise UnfitOptimizerError(
            f"{type(inner).__name__} keeps {', '.join(odd)}, which a checkpoint of shards cannot hold; use another "
            "optimizer, or murmuration.Optimizer with rules for some parameters"
        )
    numbers = frozenset(key for key, value in state.items() if not (isinstance(value, Tensor) and value.dim()))
    return type(inner), tuple(state), numbers
