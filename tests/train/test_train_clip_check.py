"""The check of a clip engine at start-up: an honest one passes, a wrong one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipError, ClipRule
from tests.support.clip_world import FLAT
from tests.support.train_helpers import Toy, toy_batch


@pytest.mark.parametrize("make", [ReferenceClip, BookKeepingClip])
def test_an_honest_engine_passes_the_check_and_a_wrong_one_does_not(make: Callable[[ClipRule], ClipEngine]) -> None:
    batch = toy_batch(5, absent=(0,))
    clip = make(FLAT)
    check_gradients(clip, Toy(), batch.inputs, batch.present)
    assert clip.rule == FLAT

    class Coupled(nn.Module):
        """Records in another order: a weight is added to rows of the wrong record."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(48, 5)

        def forward(self, inputs: Any) -> Tensor:
            return self.layer(inputs["images"].flatten(1).flip(0)).flip(0).square().sum(1)

    if make is BookKeepingClip:
        with pytest.raises(ClipError, match="is off by"):
            check_gradients(clip, Coupled(), batch.inputs, batch.present)
        assert clip.rule == FLAT
