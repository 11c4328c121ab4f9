"""Totals of a sharded model: windows in fp32 that ranks send each other, and fp64 totals of each rank's own shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmuration.train.clip.accumulator import add_in_stretches
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.per_record import ClipWeights, Dense
from murmuration.train.clip.rule import WINDOW_ROUNDING, ClipError, ClipRule, rounding_allowance
from murmuration.train.clip.sums import ExactSums, FlatSums, product
from murmuration.train.distributed.ranks import Alone
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines import exchange, sharded_sums
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.engines.shard_map import ShardMapError
from murmuration.train.engines.sharded_sums import MOST_SLOTS, ShardedSums, micro_batches_per_window
from murmuration.train.noise.update import UpdateError
from tests.support.train_helpers import on_ranks

CPU = torch.device("cpu")
SHAPES = {"w": torch.Size((7, 5)), "bias": torch.Size((3,)), "one": torch.Size(()), "table": torch.Size((40, 6))}
MICRO_BATCH = 8


def pieces(rank: int, world: int, shapes: Mapping[str, torch.Size] = SHAPES) -> list[Fragment]:
    """As ZeRO-3 cuts: ⌈elements / world⌉ of each parameter, so that late ranks hold nothing of small ones. In another
    order than the model's, as an optimizer with groups has them."""
    found = []
    for number, (name, shape) in reversed(list(enumerate(shapes.items()))):
        most = -(-shape.numel() // world)
        start = min(rank * most, shape.numel())
        if length := min(most, shape.numel() - start):
            found.append(Fragment(name, number, start, length, 100 * number))
    return found


def per_window(micro_batch: int) -> int:
    found = micro_batches_per_window(micro_batch)
    assert found is not None
    return found


def values(rank: int, number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + number)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def summed(ranks: Any, micro_batches: int, change: Callable[[ShardedSums], object] | None = None) -> dict[str, Tensor]:
    """This rank's part of the sums, by name."""
    sums = ShardedSums(SHAPES, pieces(ranks.rank, ranks.world), ranks, MICRO_BATCH)
    if change is not None:
        change(sums)
    for number in range(micro_batches):
        sums.begin_micro_batch(MICRO_BATCH)
        for name, value in values(ranks.rank, number).items():
            sums.add(name, value)
    sums.reduce()
    return {fragment.name: sums.of(fragment).clone() for fragment in pieces(ranks.rank, ranks.world)}


@pytest.mark.parametrize("at_once", [7, 100, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_shard_gets_the_sum_of_all_ranks(world: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several windows, sent whole or a few elements at a time; some ranks hold nothing of a parameter."""
    monkeypatch.setattr(exchange, "RUNS", 1 << 20)
    monkeypatch.setattr(exchange, "SHORTEST_RUN", at_once)
    micro_batches = 2 * per_window(MICRO_BATCH) + 3
    exact = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank in range(world):
        for number in range(micro_batches):
            for name, value in values(rank, number).items():
                exact[name] += value
    for rank, found in enumerate(on_ranks(world, lambda ranks: summed(ranks, micro_batches))):
        for f in pieces(rank, world):
            expected = exact[f.name].view(-1)[f.start : f.start + f.length]
            torch.testing.assert_close(found[f.name], expected, rtol=1e-5, atol=1e-5)
    assert world < 3 or len(pieces(world - 1, world)) < len(SHAPES)


def test_one_micro_batch_of_one_product_per_parameter_is_rounded_nowhere() -> None:
    for rank, found in enumerate(on_ranks(3, lambda ranks: summed(ranks, 1))):
        for f in pieces(rank, 3):
            one, two, three = (values(r, 0)[f.name].view(-1)[f.start : f.start + f.length].double() for r in range(3))
            assert torch.equal(found[f.name], one + two + three)


def test_a_rank_holds_a_window_of_the_whole_model_and_the_totals_of_its_shard() -> None:
    whole = sum(shape.numel() for shape in SHAPES.values())

    def held(ranks: Any) -> tuple[int, int]:
        sums = ShardedSums(SHAPES, pieces(ranks.rank, ranks.world), ranks, MICRO_BATCH)
        return sums._window.flat.nbytes, sums._totals.nbytes

    for world in (1, 2, 3, 4):
        found = on_ranks(world, held)
        assert [window for window, _ in found] == [4 * whole] * world
        assert sum(totals for _, totals in found) == 8 * whole


# The share of C that windows may add.


@pytest.mark.parametrize("micro_batch", [1, 8, 64, 128, 256, 699, 700, MOST_SLOTS])
def test_a_window_is_sent_before_its_rounding_can_exceed_its_share(
    micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    sent: list[int] = []
    sums = ShardedSums(SHAPES, pieces(0, 1), Alone(CPU), micro_batch)
    real = sums.send
    monkeypatch.setattr(sums, "send", lambda: (sent.append(number), real())[1])
    most = per_window(micro_batch)
    number = 0
    for number in range(3 * most + 1):  # noqa: B007
        sums.begin_micro_batch(micro_batch)
    assert sent == [most, 2 * most, 3 * most]
    # Two roundings of each micro-batch's window, in two worlds, by u each.
    share = 4 * 2.0**-24 * sum(micro_batch * each for each in range(1, most + 1))
    more = share + 4 * 2.0**-24 * micro_batch * (most + 1)
    assert share <= WINDOW_ROUNDING < more


def test_unequal_micro_batches_share_a_window_as_far_as_it_goes_and_larger_ones_get_fp64() -> None:
    sums = ShardedSums(SHAPES, pieces(0, 1), Alone(CPU), 128)
    sums.begin_micro_batch(MOST_SLOTS)
    assert sums._window.flat.dtype == torch.float32
    with pytest.raises(ClipError, match="a micro-batch of 2098 slots is larger than the 2097 for which sums are laid"):
        sums.begin_micro_batch(MOST_SLOTS + 1)
    wide = ShardedSums(SHAPES, pieces(0, 1), Alone(CPU), MOST_SLOTS + 1)
    wide.begin_micro_batch(10 * MOST_SLOTS)
    assert micro_batches_per_window(MOST_SLOTS + 1) is None
    assert wide._window.flat.dtype == torch.float64


def test_the_product_of_each_stretch_is_added_in_fp64() -> None:
    draw, shapes = torch.Generator().manual_seed(4), {"w": torch.Size((70, 50))}
    left, right = torch.randn(300, 70, generator=draw), torch.randn(300, 50, generator=draw)
    expected = torch.zeros(70, 50, dtype=torch.float64)
    for start in (0, 128, 256):
        expected += product(left[start : start + 128], right[start : start + 128])
    sums = ShardedSums(shapes, pieces(0, 1, shapes), Alone(CPU), MOST_SLOTS + 1)  # with a window in fp64
    sums.begin_micro_batch(300)
    sums.add_product("w", left, right, 128)
    sums.reduce()
    assert torch.equal(sums.of(pieces(0, 1, shapes)[0]).view(70, 50), expected)


def aligned(factors: Tensor, rows: Sequence[Tensor], micro_batch: int) -> tuple[Tensor, Tensor]:
    """The sum of clipped rows by windows, and by fp64 totals of everything."""
    shapes = {"w": rows[0].shape[1:]}
    sharded, exact = ShardedSums(shapes, pieces(0, 1, shapes), Alone(CPU), micro_batch), ExactSums(shapes, CPU)
    for number, own in enumerate(rows):
        sharded.begin_micro_batch(len(own))
        chosen = factors[number * micro_batch : (number + 1) * micro_batch]
        for sums in (sharded, exact):
            add_in_stretches(Dense("w", own), ClipWeights(chosen, None), sums)
    sharded.reduce()
    return sharded.of(pieces(0, 1, shapes)[0]).clone(), exact.totals["w"]


@pytest.mark.parametrize("micro_batch", [16, 128, 2048, 4096])
def test_a_record_moves_an_aligned_sum_by_c_at_most(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record zeroed in the first, a middle and the last slot of 32,768, all aligned and clipped. A window that is
    sent too late moves the sum by more than its share."""
    count, width, c = 32_768, 48, 1.0
    allowance = rounding_allowance(micro_batch)
    draw = torch.Generator().manual_seed(3)
    direction = torch.rand(width, generator=draw) + 0.5
    scales = torch.rand(count, generator=draw) * 3 + 1.01
    factors = ClipRule("flat", c / (1 + allowance), allowance).factors(direction.double().norm() * scales.double())
    rows = [scales[start : start + micro_batch, None] * direction for start in range(0, count, micro_batch)]

    def further() -> float:
        """By how much more than of fp64 totals one record moves the sum of windows, at most; in units of C."""
        whole, exact = aligned(factors, rows, micro_batch)
        most = 0.0
        for zeroed in (0, count // 2, count - 1):
            without = factors.clone()
            without[zeroed] = 0.0
            other, other_exact = aligned(without, rows, micro_batch)
            moved = float((whole - other).norm())
            assert moved <= c or late
            most = max(most, float(((whole - other) - (exact - other_exact)).norm()) / c)
        return most

    late = False
    assert further() <= WINDOW_ROUNDING
    if micro_batch == 16:
        late = True
        monkeypatch.setattr(sharded_sums, "MOST_SLOTS", 10**9)
        assert further() > WINDOW_ROUNDING


class Twice(nn.Module):
    """A weight that is used twice, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.inner, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        x = self.inner(self.inner(self.table(inputs["words"])).tanh())
        return self.head(x.mean(1)).square().sum(1) * inputs["weight"]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("records", [6, 300])
def test_a_window_is_rounded_twice_per_micro_batch_at_most_even_by_hostile_records(
    records: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 300 records in three stretches, and by as many whose gradients must be written out one by one."""
    model, rounded = Twice(), Counter[str]()
    clip = BookKeepingClip(ClipRule("flat", 0.05, 0.0), together=together)
    forward = PrivateForward(model, clip)
    shapes = forward.shapes
    sums = ShardedSums(shapes, pieces(0, 1, shapes), Alone(CPU), records)
    forward.begin(CPU, sums)
    add, add_span = FlatSums.add, FlatSums.add_span

    def one(self: FlatSums, name: str, value: Tensor) -> None:
        rounded[name] += 1
        add(self, name, value)

    def several(self: FlatSums, names: list[str], found: Tensor, only_if: Tensor | None = None) -> None:
        rounded.update(names)
        add_span(self, names, found, only_if)

    monkeypatch.setattr(FlatSums, "add", one)
    monkeypatch.setattr(FlatSums, "add_span", several)
    draw = torch.Generator().manual_seed(1)
    inputs = {"words": torch.randint(0, 9, (records, 4), generator=draw), "weight": torch.ones(records)}
    inputs["weight"][::2] = 1e-20
    inputs["weight"][1] = float("nan")
    forward(inputs, torch.ones(records, dtype=torch.bool))
    sums.reduce()
    assert forward.observed is not None and forward.observed.doubtful is not None
    assert int(forward.observed.doubtful.sum()) > 1, "no record was written out"
    assert set(rounded) == set(shapes) and set(rounded.values()) <= {1, 2}
    exact = ExactSums(shapes, CPU)
    monkeypatch.undo()
    clip.add_clipped(model, inputs, torch.ones(records, dtype=torch.bool), exact)
    for f in pieces(0, 1, shapes):
        torch.testing.assert_close(sums.of(f), exact.totals[f.name].view(-1), rtol=2e-7, atol=1e-9)


# What goes wrong is said by every rank, and a step that is given up leaves nothing behind.


def told(world: int, act: Callable[[Any], object]) -> list[str]:
    def one(ranks: Any) -> str:
        try:
            act(ranks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "went through"

    return on_ranks(world, one)


def wrong_slice(sums: ShardedSums) -> None:
    """One rank sends what lies one element beside another's shard."""
    if sums._ranks.rank == 1:
        stretches = sums._exchange._parcels[0].stretches
        stretches[0] = slice(stretches[0].start + 1, stretches[0].stop + 1)


def swapped(sums: ShardedSums) -> None:
    """One rank adds what is another parameter's to its totals of one that is as long."""
    if sums._ranks.rank == 1:
        sums._totals = sums._totals.flip(0)
        sums._own = dict(zip(sums._own, sums._totals.split([len(own) for own in sums._own.values()]), strict=True))
        take = sums._take
        sums._take = lambda parts, start: take(parts.flip(1), start)  # pyright: ignore[reportAttributeAccessIssue]


def second_window_twice(sums: ShardedSums) -> None:
    """One rank adds what it received in the second window two times."""
    real, windows = sums._take_all, Counter[str]()

    def exchange() -> None:
        windows["all"] += 1
        take = sums._take
        if windows["all"] == 2 and sums._ranks.rank == 0:
            sums._take = lambda parts, start: (take(parts, start), take(parts, start))  # pyright: ignore
        real()
        sums._take = take  # pyright: ignore[reportAttributeAccessIssue]

    sums._take_all = exchange  # pyright: ignore[reportAttributeAccessIssue]


def second_window_lost(sums: ShardedSums) -> None:
    """What one rank received in the second window is not added."""
    real, windows = sums._take_all, Counter[str]()

    def exchange() -> None:
        windows["all"] += 1
        kept = sums._totals.clone()
        real()
        if windows["all"] == 2 and sums._ranks.rank == 1:
            sums._totals.copy_(kept)

    sums._take_all = exchange  # pyright: ignore[reportAttributeAccessIssue]


def last_window_lost(sums: ShardedSums) -> None:
    real = sums.reduce
    sums.reduce = lambda: (setattr(sums, "send", lambda: None), real())[1]  # pyright: ignore[reportAttributeAccessIssue]


def never_emptied(sums: ShardedSums) -> None:
    sums._window.clear = lambda: None  # pyright: ignore[reportAttributeAccessIssue]


def last_value_forgotten(sums: ShardedSums) -> None:
    """What waits for more of the same parameter is not added to the window at the end."""
    real = sums.reduce
    sums.reduce = lambda: (setattr(sums, "_settle", lambda: None), real())[1]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (wrong_slice, "UpdateError: what was reduced for "),
        (swapped, "UpdateError: what was reduced for "),
        (second_window_twice, "UpdateError: what was reduced for "),
        (second_window_lost, "UpdateError: what was reduced for "),
        (last_window_lost, "UpdateError: a window of clipped gradients was not sent"),
        (last_value_forgotten, "UpdateError: a window of clipped gradients was not sent"),
        (never_emptied, "UpdateError: a window of clipped gradients was not sent"),
    ],
)
def test_what_happens_to_a_window_on_its_way_stops_every_rank(
    fault: Callable[[ShardedSums], object], said: str
) -> None:  # fmt: skip
    micro_batches = 3 * per_window(MICRO_BATCH)
    assert told(3, lambda ranks: summed(ranks, micro_batches)) == ["went through"] * 3
    assert all(each.startswith(said) for each in told(3, lambda ranks: summed(ranks, micro_batches, fault)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: [Fragment(f[0].name, f[0].parameter, f[0].start + 1, f[0].length, 0), *f[1:]], "in two shards, or"),
        (lambda f: f[1:], "its elements up to|the shards hold"),
        (lambda f: [f[0], *f], "two pieces of one parameter"),
    ],
)
def test_shards_that_overlap_or_leave_elements_out_are_refused(change: Any, said: str) -> None:
    def make(ranks: Any) -> None:
        own = pieces(ranks.rank, 3)
        ShardedSums(SHAPES, change(own) if ranks.rank == 1 else own, ranks, MICRO_BATCH)

    with pytest.raises(ShardMapError, match=said):
        on_ranks(3, make)
    assert all(each.startswith("ShardMapError") for each in told(3, make))


def test_a_step_is_summed_once_and_a_step_that_is_given_up_leaves_nothing() -> None:
    shapes = {"w": torch.Size((4,))}
    own = pieces(0, 1, shapes)[0]
    sums = ShardedSums(shapes, [own], Alone(CPU), MICRO_BATCH)
    for _ in range(per_window(MICRO_BATCH) + 1):
        sums.begin_micro_batch(MICRO_BATCH)
        sums.add("w", torch.ones(4))
    with pytest.raises(UpdateError, match="before its windows were sent"):
        sums.of(own)
    sums.clear()
    sums.reduce()
    assert not bool(sums.of(own).any())
    with pytest.raises(UpdateError, match="after the step's sum was reduced"):
        sums.begin_micro_batch(MICRO_BATCH)
    with pytest.raises(UpdateError, match="w: the optimizer holds another piece"):
        sums.of(Fragment("w", 0, 1, 3, 0))
    sums.clear()
    sums.begin_micro_batch(MICRO_BATCH)
    sums.add("w", torch.full((4,), float("nan")))
    with pytest.raises(UpdateError, match="the sum of clipped gradients of w is not finite"):
        sums.reduce()
    with pytest.raises(TypeError, match="would round records away"):
        sums.add("w", torch.ones(4, dtype=torch.bfloat16))


def test_what_each_rank_hands_over_adds_up_to_the_sum() -> None:
    def spread(ranks: Any) -> dict[str, Tensor]:
        sums = ShardedSums(SHAPES, pieces(ranks.rank, ranks.world), ranks, MICRO_BATCH)
        sums.begin_micro_batch(MICRO_BATCH)
        for name, value in values(ranks.rank, 0).items():
            sums.add(name, value)
        sums.reduce()
        found = {name: total.clone() for name, total in sums.spread().items()}
        sums.clear()
        assert not bool(sums._window.flat.any())
        return found

    every = on_ranks(3, spread)
    for name in SHAPES:
        expected = sum(values(rank, 0)[name].double() for rank in range(3))
        assert torch.equal(sum(found[name] for found in every), expected.float())  # pyright: ignore
