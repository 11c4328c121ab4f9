"""Which elements of which parameter every flat tensor of this rank's optimizer holds; proved, not assumed.

DeepSpeed ZeRO-1/2 keep one flat fp32 slice per parameter group and leave the addresses on the parameters; ZeRO-3 cuts
every parameter into equal parts, one per rank, and lays a rank's parts into one flat tensor. The attributes are
semi-private, so they are read here alone and checked against the weights before anything uses them. (Two parameters
with equal sizes and weights could still be confounded; the engine compares gradients at every step, which they do not
share.) Supported and tested: DeepSpeed 0.19.8 (the range is in pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.fragment import Fragment


class ShardMapError(RuntimeError):
    """The layout of the shards is not the one that noise and checkpoints rely on."""


def whole_parameters(trainable: Mapping[str, nn.Parameter]) -> dict[int, tuple[Tensor, list[Fragment]]]:
    """Without sharding the optimizer holds the parameters themselves."""
    return {id(p): (p, [Fragment(name, index, 0, p.numel(), 0)]) for index, (name, p) in enumerate(trainable.items())}


def zero_slices(
    trainable: Mapping[str, nn.Parameter], flats: Sequence[Tensor]
) -> dict[int, tuple[Tensor, list[Fragment]]]:
    """ZeRO-1/2: flat slice per parameter group -> fragments, in order of position."""
    layout: dict[int, tuple[Tensor, list[Fragment]]] = {id(flat): (flat, []) for flat in flats}
    for index, (name, parameter) in enumerate(trainable.items()):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            continue  # wholly on another rank
        inside, outside = mapping.lp_fragment_address, mapping.hp_fragment_address
        if inside.numel != outside.numel:
            raise ShardMapError(f"{name}: its slice and its shard have different sizes")
        flat = flats[mapping.param_group_index]
        layout[id(flat)][1].append(Fragment(name, index, inside.start, inside.numel, outside.start))
    for flat, fragments in layout.values():
        fragments.sort(key=lambda fragment: fragment.position)
        prove_slice(flat, fragments, trainable)
    return layout


def partitioned_parameters(
    trainable: Mapping[str, nn.Parameter], zero: Any, rank: int
) -> dict[int, tuple[Tensor, list[Fragment]]]:
    """ZeRO-3: this rank's part of each parameter, in the flat tensor of its group. Not proved yet: see the caller."""
    flats: list[Tensor] = zero.fp32_partitioned_groups_flat
    layout: dict[int, tuple[Tensor, list[Fragment]]] = {id(flat): (flat, []) for flat in flats}
    for index, (name, parameter) in enumerate(trainable.items()):
        group, position, size = zero.grad_position[zero.get_param_id(parameter)]
        start = rank * size
        length = max(0, min(size, int(parameter.ds_numel) - start))  # pyright: ignore[reportAttributeAccessIssue]
        if length:
            layout[id(flats[group])][1].append(Fragment(name, index, start, length, position))
    for _, fragments in layout.values():
        fragments.sort(key=lambda fragment: fragment.position)
    return layout


def prove_slice(flat: Tensor, fragments: list[Fragment], trainable: Mapping[str, nn.Parameter]) -> None:
    end = 0
    for fragment in fragments:
        if fragment.position < end:
            raise ShardMapError(f"{fragment.name} overlaps another parameter in its shard")
        end = fragment.position + fragment.length
        weights = trainable[fragment.name].detach().reshape(-1)[fragment.start : fragment.start + fragment.length]
        if end > flat.numel() or not torch.equal(fragment.of(flat.detach()), weights.to(flat.dtype)):
            raise ShardMapError(
                f"{fragment.name}: its shard does not hold its weights; the layout is not the known one"
            )
