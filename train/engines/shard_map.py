"""Which elements of which parameter each flat tensor of this rank's optimizer contains; verified, not assumed.

DeepSpeed ZeRO-1/2 keep one flat fp32 slice per parameter group and store the addresses on the parameters; ZeRO-3 splits
every parameter into equal parts, one per rank, and puts a rank's parts into one flat tensor. The attributes are
semi-private, so they are read only here and checked against the weights before anything uses them. (Two parameters
with equal sizes and weights could still be confused; but the engine compares gradients, and these differ.) Supported
and tested: DeepSpeed 0.19.8 (the range is in pyproject.toml).

FSDP2 splits every parameter along its first dimension and moves no gradient of a private phase, so its map is verified
once: each element gets a number, and the parameters that layers gather must contain these numbers in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from murmuration.accounting.errors import SELF_TEST_FAILED, RunError
from murmuration.train.distributed.shards import Fragment

# fp32 represents every integer below this exactly.
DIGIT = 1 << 24


class ShardMapError(RunError, RuntimeError):
    """The layout of the shards is not the one on which noise and checkpoints rely."""

    exit_code = SELF_TEST_FAILED


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
    """ZeRO-3: this rank's part of each parameter, in the flat tensor of its group. The caller must verify it."""
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
                f"{fragment.name}: its shard does not contain its weights; the layout is not the known one"
            )


def row_slices(
    locals_: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], rank: int, world: int
) -> dict[int, tuple[Tensor, list[Fragment]]]:
    """FSDP2: rank r holds up to ⌈rows / world⌉ rows, starting at row r·⌈rows / world⌉; maybe none."""
    layout: dict[int, tuple[Tensor, list[Fragment]]] = {}
    for index, (name, local) in enumerate(locals_.items()):
        rows, *row = shapes[name]
        most = -(-rows // world)
        first = min(rank * most, rows)
        if local.shape != (min(most, rows - first), *row) or not local.is_contiguous():
            raise ShardMapError(
                f"{name}: rank {rank} holds {list(local.shape)} of {list(shapes[name])}, which is not the known layout"
            )
        start = first * torch.Size(row).numel()
        fragments = [Fragment(name, index, start, local.numel(), 0)] if local.numel() else []
        layout[id(local)] = (local, fragments)
    return layout


@torch.no_grad()
def prove_numbering(
    layout: Mapping[int, tuple[Tensor, Sequence[Fragment]]],
    sizes: Mapping[str, int],
    gathered: Callable[[], Iterable[tuple[str, Tensor]]],
) -> None:
    """Numbers all elements of all shards consecutively, and inspects the whole parameters that layers receive.

    Takes two passes, for numbers of two digits. The weights are restored; every rank reaches the same verdict.
    """
    first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    kept = [flat.clone() for flat, _ in layout.values()]
    wrong: set[str] = set(sizes)
    try:
        for digit in (0, 1):
            for flat, fragments in layout.values():
                for f in fragments:
                    f.of(flat).copy_(_digits(first[f.name] + f.start, f.length, digit))
            seen = {name for name, whole in gathered() if name in sizes and _counts(whole, first[name], digit)}
            wrong = set(sizes) - seen if digit == 0 else wrong | (set(sizes) - seen)
    finally:
        for (flat, _), weights in zip(layout.values(), kept, strict=True):
            flat.copy_(weights)
    if wrong:
        raise ShardMapError(f"{min(wrong)}: layers do not receive what the shards contain, in the known order")


def _counts(whole: Tensor, first: int, digit: int) -> bool:
    return torch.equal(whole.detach().reshape(-1).cpu(), _digits(first, whole.numel(), digit))


def _digits(start: int, length: int, digit: int) -> Tensor:
    numbers = torch.arange(start, start + length)
    return (numbers // DIGIT if digit else numbers % DIGIT).float()
