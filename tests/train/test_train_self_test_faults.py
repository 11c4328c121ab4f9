"""Every planted fault is caught by the self-test, and by all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor, nn

from murmuration.train.clip.engine import Clipped
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.noise.aes import AESNoise
from murmuration.train.self_test.self_test import SelfTestError
from tests.support.planted_faults import (
    ChangedAfterwards,
    DividesByRealised,
    EqualPerParameter,
    EqualPerRank,
    EqualPerStep,
    Gap,
    HalfHook,
    HookLost,
    KeepsState,
    LastMicroBatch,
    Mean,
    ModelDrifts,
    MovesAtRateZero,
    NoiseBeforeSum,
    NoiseTwice,
    OwnRankOnly,
    StaleGradient,
    Unmoved,
    Untrained,
    factor_halved,
    factor_ignored,
    losses_mixed,
    nan_leaks,
    own_stream,
    scaled,
    swapped,
)
from tests.support.self_test_world import caption_model, tried
from tests.support.train_helpers import alone, on_ranks

ONE_RANK: dict[str, tuple[dict[str, Any], str]] = {
    "the hook is lost": ({"engine": HookLost}, "elements were finished"),
    "noise dropped": ({"change": scaled(0.0)}, "sigma = 0.0000"),
    "sigma x 0.3": ({"change": scaled(0.3)}, "sigma = 0.4"),
    "sigma x 0.9": ({"change": scaled(0.9)}, "sigma = 1.3"),
    "noise added twice": ({"engine": NoiseTwice}, "sigma = 2.1"),
    "a part without noise": ({"engine": HalfHook}, "no noise"),
    "equal noise on all parameters": ({"change": swapped(EqualPerParameter)}, "same noise was drawn"),
    "equal noise at all steps": ({"change": swapped(EqualPerStep)}, "same noise was drawn"),
    "clip factor ignored": ({"change": factor_ignored}, "clipping does not hold"),
    "sensitivity 2C": ({"change": factor_halved}, "clipping does not hold"),
    "NaN leaks": ({"change": nan_leaks}, "moved the sum by nan"),
    "records reach others' losses": ({"change": losses_mixed}, "changed the losses of other records"),
    "one parameter gets no gradient": ({"engine": Untrained}, "get no gradient"),
    "one parameter never moves": ({"engine": Unmoved}, "does not move"),
    "accumulation overwrites": ({"engine": LastMicroBatch}, "reduced sum differs"),
    "a gradient is left over": ({"engine": StaleGradient}, "sigma|left|keeps a gradient|reduced sum"),
    "the gradient is changed after the noise": ({"engine": ChangedAfterwards}, "after the noise was added"),
    "weights move at rate 0": ({"engine": MovesAtRateZero}, "changed the weights"),
    "the model drifts from its shards": ({"engine": ModelDrifts}, "changed the weights"),
    "optimizer state is kept": ({"engine": KeepsState}, "optimizer's state"),
    "divided by another number": ({"engine": DividesByRealised}, "sigma = 1.0"),
}


# The core has a fault that is smaller or as large, and that the same check must find.
DEARER = {"noise dropped", "sigma x 0.3", "the mean over replicas"}


def with_rest(faults: Iterable[str]) -> list[Any]:
    return [pytest.param(fault, marks=pytest.mark.rest if fault in DEARER else ()) for fault in faults]


@pytest.mark.parametrize("fault", with_rest(ONE_RANK))
def test_a_planted_fault_is_caught(fault: str) -> None:
    options, message = ONE_RANK[fault]
    with pytest.raises(SelfTestError, match=message):
        tried(alone(), **options)


@pytest.mark.parametrize("fault", ["clip factor ignored", "sensitivity 2C"])
def test_it_does_not_take_gradients_above_c_to_see_that_clipping_is_broken(fault: str) -> None:
    options, message = ONE_RANK[fault]
    with pytest.raises(SelfTestError, match=message):
        tried(alone(), clip_norm=1e4, **options)


class Counting(nn.Module):
    """Remembers in Python how often it ran, which tells how many micro-batches there were."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes = inner, 0

    def forward(self, inputs: Any) -> Tensor:
        self.passes += 1
        return self.inner(inputs)


class Normalised(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(1)

    def forward(self, inputs: Any) -> Tensor:
        return self.norm(self.inner(inputs)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("wrap", "why"),
    [(Counting, r"the attribute passes changed"), (Normalised, r"norm \(BatchNorm1d\) .* running statistics")],
)
def test_a_model_that_keeps_something_of_its_records_is_caught(wrap: type[nn.Module], why: str) -> None:
    with pytest.raises(SelfTestError, match=why):
        tried(alone(), model=wrap(caption_model()))


TWO_RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "noise before the sum": ({"engine": NoiseBeforeSum, "replicated": True, "change": own_stream}, "sigma = 2.1"),
    "equal noise on disjoint shards": ({"change": swapped(EqualPerRank)}, "same noise was drawn"),
    "different noise on replicas": ({"replicated": True, "change": own_stream}, "replicas drew different noise"),
    "the mean over ranks": ({"engine": Mean}, "reduced sum differs"),
    "the mean over replicas": ({"engine": Mean, "replicated": True}, "reduced sum differs"),
    "the own rank's sum alone": ({"engine": OwnRankOnly}, "reduced sum differs"),
    "a gap and an overlap": ({"engine": Gap}, "twice, or never"),
}


@pytest.mark.parametrize("fault", with_rest(TWO_RANKS))
def test_a_planted_fault_between_ranks_is_caught_by_all_of_them(fault: str) -> None:
    options, message = TWO_RANKS[fault]
    caught: list[str] = []

    def act(ranks: Any) -> None:
        try:
            tried(ranks, **options)
        except SelfTestError as error:
            caught.append(str(error))

    on_ranks(2, act)
    assert len(caught) == 2, "both ranks must stop, or one waits for ever"
    with pytest.raises(SelfTestError, match=message):
        raise SelfTestError(caught[0])


@pytest.mark.parametrize(("change", "why"), [(nan_leaks, "moved the sum"), (losses_mixed, "changed the losses")])
def test_a_fault_on_one_rank_stops_every_rank_after_as_many_passes(change: Callable[..., None], why: str) -> None:
    """A rank that stopped before the others would leave them waiting where weights are gathered."""
    caught: dict[int, str] = {}
    passes = [0, 0]

    def act(ranks: Any) -> None:
        def plant(engine: Any, clip: ReferenceClip, noise: AESNoise) -> None:
            if ranks.rank == 1:
                change(engine, clip, noise)
            real = clip.add_clipped

            def counting(*given: Any, **options: Any) -> Clipped:
                passes[ranks.rank] += 1
                return real(*given, **options)

            clip.add_clipped = counting

        try:
            tried(ranks, change=plant)
        except SelfTestError as error:
            caught[ranks.rank] = str(error)

    on_ranks(2, act)
    assert caught[0] == caught[1] and why in caught[0]
    assert passes[0] == passes[1]
