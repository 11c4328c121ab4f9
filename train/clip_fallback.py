"""Any function of weights and activations that has no rule: exact per-record gradients by torch.func, with a notice.

It writes out the gradients of some records at a time and runs the function again: right, and slower than a rule.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from train.clip_layers import Applied
from train.clip_rule import ClipError
from train.clip_watch import Watch, swapped, tensors_in

_noticed: set[str] = set()


def fallback(watch: Watch, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    named = {id(x): x for x in tensors_in(args, kwargs)}
    known = [x for x in named.values() if watch.source(x) is not None]
    varying = [x for x in named.values() if watch.varies(x)]
    _notice(getattr(func, "__name__", str(func)), " and ".join(watch.names_of(known)))
    for x in varying:
        watch.times(len(x), " and ".join(watch.names_of(known)))

    def run(weights: list[Tensor], inputs: Any) -> Tensor:
        new = dict(zip([*map(id, known), *map(id, varying)], [*weights, *inputs], strict=True))
        out = func(*swapped(args, lambda x: new.get(id(x), x)), **swapped(kwargs, lambda x: new.get(id(x), x)))
        if not isinstance(out, Tensor) or not out.dim():
            raise ClipError(f"{func} of weights returns no tensor of records; there is no rule to clip it")
        return out

    sources = [watch.source(x) for x in known]
    for source in sources:
        assert source is not None
        watch.use(source)
    fixed = [source.value.detach() for source in sources if source is not None]

    def report(inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
        parts = tuple(x.unflatten(0, (watch.records, -1)) for x in inputs)
        upstream = gradient.unflatten(0, (watch.records, -1))
        for number, source in enumerate(sources):
            assert source is not None

            def pull(inputs: Any, upstream: Tensor, number: int = number) -> Tensor:
                dtype = upstream.dtype
                others = [x.to(dtype) for x in fixed]
                one = lambda w: run([*others[:number], w, *others[number + 1 :]], inputs)  # noqa: E731
                return torch.func.vjp(one, others[number])[1](upstream)[0]

            watch.report(
                source.written(
                    parts,
                    upstream,
                    lambda inputs, upstream, pull=pull: torch.vmap(pull)(inputs, upstream),
                    lambda inputs, upstream, pull=pull: pull([x.flatten(0, 1) for x in inputs], upstream.flatten(0, 1)),
                )
            )

    return Applied.apply(watch.anchor, lambda *inputs: run(fixed, inputs), report, *varying)


def _notice(function: str, names: str) -> None:
    if function not in _noticed:
        _noticed.add(function)
        warnings.warn(
            f"{function} has no clipping rule of its own; gradients of {names} are written out record by record",
            stacklevel=2,
        )
