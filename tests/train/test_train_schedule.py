"""Learning rates against formulas written a second time: the papers' own loops, 0-based, and torch's schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from murmuration.train.config.optimizer import Schedule
from murmuration.train.optim.rates import learning_rate


def rates(steps: int, peak: float = 1.0, **settings: Any) -> list[float]:
    return [learning_rate(Schedule(peak=peak, **settings), steps, step) for step in range(1, steps + 1)]


def test_by_hand() -> None:
    assert rates(4, shape="constant") == [1.0] * 4
    assert rates(6, shape="constant", warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(6, shape="linear", warmup=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert rates(4, shape="linear", end=2) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert rates(4, shape="linear", end=2, floor=0.2) == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert rates(8, shape="cosine") == pytest.approx([0.5 * (1 + math.cos(math.pi * t / 8)) for t in range(8)])
    assert rates(4, shape="constant", warmup=4, start=0.5) == [0.625, 0.75, 0.875, 1.0]
    assert rates(6, shape="inverse-sqrt", warmup=2) == pytest.approx([0.5, 1, *(math.sqrt(2 / t) for t in range(3, 7))])
    assert rates(3, shape="inverse-sqrt") == pytest.approx([1, math.sqrt(1 / 2), math.sqrt(1 / 3)])


def test_the_first_step_moves() -> None:
    assert rates(3, warmup=10)[0] == pytest.approx(0.1)
    for shape in ("constant", "linear", "cosine", "inverse-sqrt"):
        found = rates(50, shape=shape, warmup=7)
        assert min(found) > 0 and max(found) == 1.0


def test_vip_exactly() -> None:
    """Multiplier of the 0-based update s: the lesser of (s + 1) / 1000 and the half-cosine of s / T; base 1.5e-5."""
    peak, total = 1.5e-5 * 81_920 / 256, 6000
    assert peak == pytest.approx(4.8e-3)
    found = rates(total, peak=peak, warmup=1000, shape="cosine", shape_from="first-step")
    for s in range(total):
        expected = peak * min((s + 1) / 1000, (math.cos(s * math.pi / total) + 1) / 2)
        assert found[s] == pytest.approx(expected, rel=1e-9)
    assert max(found) < peak, "the cosine has fallen before the warm-up is over"


@pytest.mark.parametrize(("warmup", "end", "total"), [(2000, 10_000, 5708), (600, 6000, 2854)])
def test_dpcap_exactly(warmup: int, end: int, total: int) -> None:
    """Its code sets the rate from the 0-based update s, which makes the first one 0."""
    peak = 5.12e-4
    found = rates(total, peak=peak, warmup=warmup, end=end, shape="cosine", first_step=0)
    for s in range(total):
        rising = peak * s / warmup
        falling = peak * 0.5 * (1 + math.cos(math.pi * (s - warmup) / (end - warmup)))
        assert found[s] == pytest.approx(rising if s < warmup else falling, rel=1e-9)
    assert found[0] == 0.0 and found[warmup] == pytest.approx(peak)
    if total == 5708:
        assert found[-1] == pytest.approx(2.85e-4, rel=2e-3), "as the paper's recipe states for step 5708"
    ahead = rates(total, peak=peak, warmup=warmup, end=end, shape="cosine")
    assert ahead[: warmup - 1] == pytest.approx(found[1:warmup]) and ahead[warmup:] == pytest.approx(found[warmup:])


def test_mae_per_epoch_with_a_floor() -> None:
    """The synthetic stage's rule at whole epochs: warm-up of 40 of 400, then a half-cosine to min_lr."""
    steps_of_epoch, epochs, warm, peak, least = 5, 400, 40, 3e-3, 1e-5
    settings = dict(warmup=warm * steps_of_epoch, shape="cosine", floor=least, first_step=0)
    for epoch, rate in enumerate(rates(epochs * steps_of_epoch, peak=peak, **settings)[::steps_of_epoch]):
        falling = least + (peak - least) * 0.5 * (1 + math.cos(math.pi * (epoch - warm) / (epochs - warm)))
        assert rate == pytest.approx(peak * epoch / warm if epoch < warm else falling, rel=1e-9)


def test_torchs_own_schedulers_agree() -> None:
    def torchs(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        scheduler, found = make(optimizer), []
        for _ in range(20):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    from torch.optim import lr_scheduler as torch_schedules

    cosine = torchs(lambda o: torch_schedules.CosineAnnealingLR(o, 20, eta_min=0.01))
    assert rates(20, peak=0.3, shape="cosine", floor=0.01) == pytest.approx(cosine)
    linear = torchs(lambda o: torch_schedules.LinearLR(o, 1.0, 0.1, total_iters=15))
    assert rates(20, peak=0.3, shape="linear", end=15, floor=0.03) == pytest.approx(linear)


@settings(deadline=None)
@given(
    shape=st.sampled_from(["constant", "linear", "cosine", "inverse-sqrt"]), warmup=st.integers(0, 30),
    steps=st.integers(1, 90), where=st.sampled_from(["warmup", "first-step"]), first=st.integers(0, 1),
    floor=st.floats(0, 0.2), start=st.floats(0, 0.2),
)  # fmt: skip
def test_any_schedule_rises_once_and_falls_once_between_its_bounds(
    shape: Any, warmup: int, steps: int, where: Any, first: Any, floor: float, start: float
) -> None:
    chosen = dict(shape=shape, warmup=warmup, shape_from=where, first_step=first, floor=floor, start=start)
    found = rates(steps, peak=0.5, **chosen)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1]) and found[top:] == sorted(found[top:], reverse=True)
    assert min(found) >= 0 and max(found) <= 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"floor": 2.0}, "must not exceed the peak"), ({"start": 2.0}, "must not exceed the peak"),
        ({"warmup": 10, "end": 10}, "inside the warm-up of 10 steps"),
        ({"first_step": 2}, "0 or 1"), ({"shape": "step"}, "inverse-sqrt"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Schedule(peak=1.0, **settings)
    assert Schedule(peak=1.0, warmup=10, end=10, shape_from="first-step").end == 10
