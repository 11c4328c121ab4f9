"""The weights during a self-test: nothing hides behind zeros, and they are afterwards what they were, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from data.batches import MicroBatch
from train.engine import ShardedEngine
from train.fingerprint import digests_of
from train.gradient import PlainUpdate
from train.ranks import Ranks


def fill_zeros(engine: ShardedEngine, absent: MicroBatch, ranks: Ranks) -> None:
    """Matrices of nothing but zeros get fixed numbers, until `put_back`.

    A classifier's head starts at zero, and so does a LoRA's second matrix: what lies before them gets no gradient,
    and would be neither seen to be trained nor to couple records.
    """
    filled = {f.name for shard in engine.shards() for f in shard.fragments if bool(f.of(shard.weights.detach()).any())}
    anywhere = set().union(*ranks.gather(filled))
    zero = {name for name, shape in engine.shapes.items() if len(shape) > 1 and name not in anywhere}
    if not zero:
        return
    for shard in engine.shards():
        weights = shard.weights.detach()
        for fragment in shard.fragments:
            if fragment.name in zero:
                places = torch.arange(fragment.start + 1.0, fragment.start + fragment.length + 1.0)
                fragment.of(weights).copy_(places.sin() * 0.5)
    # The engine hands the shards to the model, as after every step.
    engine.accumulate(absent)
    engine.update(PlainUpdate(batch=1), learning_rate=0.0)


def put_back(engine: ShardedEngine, weights: list[Tensor]) -> None:
    """Into the shards; the model has them after the next update."""
    with torch.no_grad():
        for shard, kept in zip(engine.shards(), weights, strict=True):
            shard.weights.copy_(kept)


def fingerprint(engine: ShardedEngine) -> dict[str, str]:
    """Of the model as it computes, and of this rank's shards."""
    tensors = engine.whole_weights()
    tensors |= {f"shard {i}": shard.weights.detach() for i, shard in enumerate(engine.shards())}
    return digests_of(tensors)
