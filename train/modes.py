"""Training mode and evaluation mode: what is measured drops nothing, what is trained does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode meanwhile; afterwards the mode that was there, also after an error."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
