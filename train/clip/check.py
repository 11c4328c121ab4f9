"""A clip engine against the definition, on the live model: single records by plain autograd.

Engines are fast because they reason about layers. A model may do something that no rule foresaw; then norms are wrong,
and with them the promise. A few records at the start of a run show it, whatever the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from murmuration.model.safety import zeros_filled
from murmuration.train.clip.engine import ClipEngine, clipped_totals
from murmuration.train.clip.precision import autocast
from murmuration.train.clip.rule import ClipError

# In half precision a record alone takes other kernels than among others; deep models differ the most.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}


def check_gradients(
    clip: ClipEngine, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, records: int = 3
) -> None:
    """Norms and unclipped contributions of the first records that are present; ClipError if one is not its gradient.

    Where parameters are sharded, plain autograd does not see them whole, and there is nothing to compare with.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not all(p.numel() for p in trainable.values()):
        return
    rule, tolerance = clip.rule, TOLERANCE[clip.precision]
    try:
        # One group and a bound that never acts: the contribution is the gradient itself.
        clip.rule = replace(rule, kind="flat", bound=1e30, grouping="all")
        with zeros_filled(model):
            for row in present.nonzero().flatten().tolist()[:records]:
                alone = torch.zeros_like(present)
                alone[row] = True
                totals, seen = clipped_totals(clip, model, inputs, alone)
                expected = _gradient(clip, model, {name: x[row : row + 1] for name, x in inputs.items()}, trainable)
                size = _size(expected)
                norm_off = abs(float(seen.norms[row]) - size)
                sum_off = _size({name: totals[name].double() - expected[name] for name in expected})
                if not max(norm_off, sum_off) <= tolerance * size:
                    raise ClipError(
                        f"the clip engine's gradient of a test record is off by {sum_off / size:.2g} of its size, "
                        f'and its norm by {norm_off / size:.2g}; use run.clip_engine = "reference", or plainer layers'
                    )
    finally:
        clip.rule = rule


def _gradient(
    clip: ClipEngine, model: nn.Module, inputs: dict[str, Tensor], trainable: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    with torch.enable_grad(), autocast(clip.precision, next(iter(trainable.values())).device):
        loss = model(inputs).sum()
    found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if g is None else g.double()
        for (name, p), g in zip(trainable.items(), found, strict=True)
    }


def _size(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradient.values()]).norm())
