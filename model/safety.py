"""Refuses models in which one sample's loss depends on another sample.

Flat per-sample clipping bounds a record's influence only if the record affects its own loss and nothing else. There are
two checks. `refuse_coupling` knows the usual layers by type and names the place and the fix; `coupling_probe` knows
nothing about layers and measures derivatives and differences on the given module, so it also finds a batch mean written
by hand (pitfall A26).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from murmuration.model.record_weight import Inputs

_NOT_KEYED = "and its draw is not keyed by sample; set it to 0, or use the layers of model.drop"


class CouplingError(ValueError):
    """A module lets samples influence one another, or draws randomness without a key."""


def refuse_coupling(module: nn.Module) -> None:
    """Raise CouplingError for the first layer that mixes samples, keeps running statistics or drops without keys."""
    for path, part in module.named_modules():
        if reason := _reason(part):
            raise CouplingError(f"{path or '(the model itself)'} ({type(part).__name__}) {reason}.")


def _reason(part: nn.Module) -> str | None:
    if isinstance(part, _InstanceNorm):
        if part.track_running_stats:
            return "keeps running statistics over samples; set track_running_stats=False"
        return None
    # SyncBatchNorm, the lazy ones and timm's BatchNormAct all derive from _BatchNorm; foreign copies
    # are recognised by their name or by their buffers.
    if isinstance(part, _BatchNorm) or "BatchNorm" in type(part).__name__:
        return "normalises with statistics of the whole batch; use LayerNorm or GroupNorm"
    if any(name.startswith("running_") for name, _ in part.named_buffers(recurse=False)):
        return "keeps running statistics over samples; use LayerNorm or GroupNorm"
    if isinstance(part, _DropoutNd) and part.p > 0:
        return f"drops units with p={part.p}, {_NOT_KEYED}"
    if isinstance(part, nn.MultiheadAttention) and part.dropout > 0:
        return f"drops attention with p={part.dropout}, {_NOT_KEYED}"
    if isinstance(part, nn.RNNBase) and part.dropout > 0:
        return f"drops units with p={part.dropout}, {_NOT_KEYED}"
    rate = getattr(part, "drop_prob", 0.0)
    if isinstance(rate, float) and rate > 0:
        return f"drops whole paths with p={rate}, {_NOT_KEYED}"
    return None


def coupling_probe(
    module: nn.Module,
    inputs: Inputs,
    *,
    loss: Callable[[Inputs], Tensor] | None = None,
    tolerance: float = 0.0,
) -> None:
    """Measure whether each sample's loss depends only on that sample; raise CouplingError otherwise.

    `inputs` are synthetic (never private records) with at least two samples. `loss` replaces the module's own
    forward when the path to be tested is longer, from collated inputs to per-sample losses. `tolerance` is
    absolute, for devices whose kernels are not bitwise row-independent; on a CPU it stays 0. The module's
    parameters and buffers and the CPU random state are restored afterwards.
    """
    batch = len(next(iter(inputs.values())))
    if batch < 2:
        raise ValueError("the coupling probe needs at least two samples to compare; pass a larger batch.")
    forward = loss or module
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]), zeros_filled(module):
            _probe(forward, inputs, batch, tolerance)
        for name, buffer in module.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise CouplingError(
                    f"the forward pass changed the buffer {name}, carrying one sample's data to the next; "
                    "remove the state or freeze it."
                )
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])


@contextmanager
def zeros_filled(module: nn.Module) -> Iterator[None]:
    """Fill all-zero matrices with fixed numbers for the duration, and restore their own bits afterwards.

    A classifier's head and a LoRA's second matrix start at zero, which would hide all layers before them. Sharded
    parameters, of which only a part is present, are left as they are.
    """
    kept = {p: p.detach().clone() for p in module.parameters() if p.dim() > 1 and _is_whole(p) and not bool(p.any())}
    with torch.no_grad():
        for parameter in kept:
            values = torch.arange(1.0, parameter.numel() + 1, device=parameter.device).sin() * 0.5
            parameter.copy_(values.view(parameter.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether the whole parameter is present. Engines shard by emptying it, changing its type or freeing its memory."""
    plain = parameter.detach()
    return type(plain) is Tensor and 0 < plain.nbytes <= plain.untyped_storage().nbytes()


def _probe(forward: Callable[[Inputs], Tensor], inputs: Inputs, batch: int, tolerance: float) -> None:
    floats = {k: v.detach().clone().requires_grad_() for k, v in inputs.items() if v.is_floating_point()}
    with torch.enable_grad():
        losses = forward({**inputs, **floats})
    if tuple(losses.shape) != (batch,):
        raise CouplingError(
            f"the forward pass returned shape {list(losses.shape)} for {batch} samples; "
            "it must return one loss per sample, not their mean."
        )
    base = losses.detach()
    with torch.no_grad():
        if not torch.equal(forward(inputs), base):
            raise CouplingError(
                "two passes over the same inputs gave different losses; "
                "make every random choice an input drawn under a key."
            )
    if losses.requires_grad and floats:
        _check_gradients(losses, floats, batch, tolerance)
    for other in range(batch):
        for what, changed in _replacements(inputs, other):
            with torch.no_grad():
                moved = (forward(changed) - base).abs()
            # A NaN difference must count as a change, hence "not within" instead of "above".
            touched = [own for own in torch.nonzero(~(moved <= tolerance)).flatten().tolist() if own != other]
            if touched:
                raise CouplingError(
                    f"the loss of sample {touched[0]} changed by {float(moved[touched[0]]):.3g} when {what} "
                    f"of sample {other} was replaced; a sample's loss may depend only on that sample."
                )


def _check_gradients(losses: Tensor, floats: Inputs, batch: int, tolerance: float) -> None:
    for own in range(batch):
        gradients = torch.autograd.grad(losses[own], list(floats.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(floats, gradients, strict=True):
            if gradient is None:
                continue
            for other in range(batch):
                size = float(gradient[other].abs().max())
                if other != own and not size <= tolerance:
                    raise CouplingError(
                        f"the loss of sample {own} has derivative {size:.3g} with respect to {name} of "
                        f"sample {other}; a sample's loss may depend only on that sample."
                    )


def _replacements(inputs: Inputs, row: int) -> Iterator[tuple[str, Inputs]]:
    """The inputs with one sample replaced, one input at a time, by mild and by hostile values."""
    for name, value in inputs.items():
        if value.is_floating_point():
            new = {
                "another value": value[row].flip(0) * -2.0 + 0.5,
                "NaN": torch.full_like(value[row], float("nan")),
            }
            new["1e19"] = torch.full_like(value[row], 1e19)
        else:
            # These stay within the ids that the model accepts; a single number changes only with the last two.
            new = {"the reverse": value[row].flip(0) if value.dim() > 1 else value[row]}
            new |= {"zeros": torch.zeros_like(value[row]), "its neighbour's": value[row - 1]}
        for kind, replacement in new.items():
            changed = value.detach().clone()
            changed[row] = replacement
            yield f"{name} ({kind})", {**inputs, name: changed}
