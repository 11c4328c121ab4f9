"""What the self-test sends through the live engine in the place of private records, and how it looks at the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.batches import MicroBatch
from model.drop import DROP_KEY
from model.settings import Shape
from train.engine import Shard
from train.fragment import Fragment
from train.gradient import Update

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class Capture:
    """Lets the real update work on the gradient, and keeps what it made of it."""

    def __init__(self, inner: Update) -> None:
        self.inner = inner
        self.found: list[tuple[Fragment, Tensor]] = []

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self.inner.finish(flat, fragments)
        self.found += [(fragment, fragment.of(flat).detach().cpu().clone()) for fragment in fragments]


class Push:
    """The same gradient everywhere."""

    def __init__(self) -> None:
        self.elements = 0

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            fragment.of(flat).fill_(1.0)
            self.elements += fragment.length


def arrived_evenly(shard: Shard, fragment: Fragment, kept: Tensor) -> bool:
    """A first moment shows that one and the same gradient arrived everywhere, decay of the weights apart."""
    kind = next((name for name in FIRST_MOMENTS if name in shard.state), None)
    if kind is None:
        return True
    moment = fragment.of(shard.state[kind])
    if kind == "exp_avg":
        return not bool((moment != moment[0]).any())
    # momentum = ratio · (gradient + decay · weight): a straight line over the weights, whatever ratio and decay are.
    x, y = fragment.of(kept).double(), moment.double()
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x).clamp(min=1e-30)
    return float((y - slope * x).abs().max()) <= 1e-5 * float(moment.abs().max())


def synthetic_batch(shape: Shape, objective: str, size: int, seed: int) -> MicroBatch:
    """Random inputs of the right form; nothing of any data set."""
    draw = torch.Generator().manual_seed(seed)
    inputs = {"images": torch.randn(size, 3, shape.image_size, shape.image_size, generator=draw)}
    if objective == "mae":
        inputs["mask_noise"] = torch.rand(size, shape.patches, generator=draw)
    elif objective == "classify":
        inputs["labels"] = torch.randint(0, shape.head.classes, (size,), generator=draw)
    else:
        inputs["tokens"] = torch.randint(1, shape.vocabulary, (size, shape.text_length), generator=draw)
    if shape.drops:
        inputs[DROP_KEY] = torch.randint(-(1 << 63), (1 << 63) - 1, (size,), generator=draw)
    return MicroBatch(inputs, torch.ones(size, dtype=torch.bool))
