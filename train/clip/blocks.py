"""A model's repeated blocks: what can be compiled, sharded or computed again part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from murmuration.train.clip.rule import ClipError


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of lists, and of chains of one kind of module, but not what lies within them."""
    kinds = [type(child) for child in module.children()]
    chain = isinstance(module, nn.Sequential) and len(kinds) > 1 and len(set(kinds)) == 1
    for child in module.children():
        if (chain or isinstance(module, nn.ModuleList)) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from repeated_blocks(child)


def checkpointed_blocks(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """To be entered around each forward pass."""
    if not (blocks := list(dict.fromkeys(repeated_blocks(model)))):  # lists may share one
        raise ClipError("the model has no list of blocks that could be checkpointed; leave gradient_checkpointing out")
    return partial(checkpointing, blocks)


@contextmanager
def checkpointing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """For the backward pass, blocks keep what they are given, and compute the rest again.

    Their hooks stay outside: frameworks that shard weights gather those of a block before its backward pass anyway.
    """
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        # Nothing in a block draws from the generators: masks are keyed by record.
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            vars(block).pop("forward") if own is None else vars(block).update(forward=own)
