"""What GPUs do to keep the host ahead, on the CPU: small layers share products, sums are added many at a time, and a
micro-batch is added on the condition that it is an ordinary one, which the host learns later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murmuration.model.build import Objective, build
from murmuration.train.clip import accumulator
from murmuration.train.clip import sums as sums_module
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Clipped, Precision
from murmuration.train.clip.functions import TILE
from murmuration.train.clip.per_record import ClipWeights, Dense, OuterProduct
from murmuration.train.clip.rule import ClipRule, Grouping
from murmuration.train.clip.sums import SMALL, ExactSums, Float32Sums, OnlyIf, trainable_shapes
from murmuration.train.distributed.ranks import Alone
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.forward import AHEAD, PrivateForward
from murmuration.train.engines.local import LocalEngine
from murmuration.train.engines.sharded_sums import ShardedSums
from murmuration.train.noise.update import PlainUpdate
from murmuration.train.optim.optimizers import make_optimizer
from tests.support.train_helpers import ADAMW, SHAPE, nano_inputs

CPU = torch.device("cpu")
RULE = ClipRule("flat", 0.05, 0.0)
WIDTH = 140  # 140 · 140 elements: not a small parameter


class Mixed(nn.Module):
    """Small and large parameters, one that is used twice, an embedding, and one token or several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(7, WIDTH)
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        x = self.table(inputs["words"]) * inputs["scale"][:, None, None] + self.start
        x = self.norm(self.inner(self.inner(x).tanh()))
        return self.head(x.mean(1)).float().square().sum(1) * inputs["weight"]


def mixed(
    records: int, hostile: Mapping[int, float] | None = None, faint: Mapping[int, float] | None = None
) -> dict[str, Tensor]:
    """`hostile`: records whose embedding is multiplied by such a number; `faint`: whose loss is."""
    draw = torch.Generator().manual_seed(records)
    found = {"words": torch.randint(0, 7, (records, 4), generator=draw)}
    for name, chosen in (("scale", hostile), ("weight", faint)):
        found[name] = torch.ones(records)
        for record, factor in (chosen or {}).items():
            found[name][record] = factor
    return found


def clip_of(model: nn.Module, precision: Precision = "fp32", together: bool = True, **rule: Any) -> BookKeepingClip:
    clip = BookKeepingClip(
        ClipRule("flat", RULE.bound, 0.0, **rule), precision, round_operands=together, together=together
    )
    clip.prepare(model)
    return clip


def summed(
    clip: BookKeepingClip, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, deferred: bool = False
) -> tuple[dict[str, Tensor], Clipped]:
    sums = ExactSums(trainable_shapes(model), CPU)
    add = clip.add_if_ordinary if deferred else clip.add_clipped
    seen = add(model, inputs, present, sums)
    return sums.totals, seen


def flat(totals: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([total.double().flatten() for total in totals.values()])


def far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert list(one) == list(other)
    return float((flat(one) - flat(other)).norm() / flat(other).norm())


@pytest.mark.parametrize("grouping", ["all", "layer"])
@pytest.mark.parametrize("missing", [[], [0, 130]])
@pytest.mark.parametrize("records", [1, 5, 128, 131, 256])
def test_sums_and_norms_are_those_of_layers_one_by_one(records: int, missing: list[int], grouping: Grouping) -> None:
    """Also in stretches of records that are equally long, and in others."""
    model, inputs = Mixed(), mixed(records)
    assert any(p.numel() > SMALL for p in model.parameters()) and any(p.numel() <= SMALL for p in model.parameters())
    present = torch.tensor([record not in missing for record in range(records)])
    found, seen = summed(clip_of(model, grouping=grouping), model, inputs, present)
    expected, plain = summed(clip_of(model, together=False, grouping=grouping), model, inputs, present)
    torch.testing.assert_close(seen.norms, plain.norms, rtol=1e-6, atol=0)
    if present.any():
        assert far(found, expected) < 1e-6
    assert seen.ordinary is None, "asked, not left open"


@pytest.mark.parametrize("objective", ["mae", "caption"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_for_whole_models_in_every_precision(objective: Objective, precision: Precision) -> None:
    model, inputs, present = build(SHAPE, objective), nano_inputs(objective, 6), torch.ones(6, dtype=torch.bool)
    clip, plain = clip_of(model, precision), clip_of(model, precision)
    plain.together = False
    assert far(summed(clip, model, inputs, present)[0], summed(plain, model, inputs, present)[0]) < 1e-6
    deferred, seen = summed(clip, model, inputs, present, deferred=True)
    assert bool(seen.ordinary)
    assert torch.equal(flat(deferred), flat(summed(clip, model, inputs, present)[0])), "the same kernels, late or not"


HOSTILE = {"no number": float("nan"), "infinite": float("inf")}
VANISHING = {3: 1e-22}  # the square of its gradient vanishes in fp32


@pytest.mark.parametrize("records", [6, 131, 256])
@pytest.mark.parametrize("kind", ["no number", "infinite", "in doubt"])
def test_a_micro_batch_that_is_not_ordinary_leaves_the_totals_as_they_were(kind: str, records: int) -> None:
    model, present = Mixed(), torch.ones(records, dtype=torch.bool)
    inputs = mixed(records, {3: HOSTILE[kind]}) if kind in HOSTILE else mixed(records, faint=VANISHING)
    clip, sums = clip_of(model), ExactSums(trainable_shapes(model), CPU)
    for total in sums.totals.values():
        total.fill_(1 / 3)
    seen = clip.add_if_ordinary(model, inputs, present, sums)
    assert seen.ordinary is not None and not bool(seen.ordinary)
    assert seen.doubtful is not None and bool(seen.doubtful.any() if kind == "in doubt" else seen.norms.isnan().any())
    assert all(bool((total == 1 / 3).all()) for total in sums.totals.values())


def test_slots_without_a_record_do_not_make_a_micro_batch_unusual() -> None:
    """The last micro-batch of every step has some."""
    model, inputs = Mixed(), mixed(9)
    present = torch.arange(9) < 4
    found, seen = summed(clip_of(model), model, inputs, present, deferred=True)
    assert bool(seen.ordinary)
    assert torch.equal(flat(found), flat(summed(clip_of(model), model, inputs, present)[0]))


BATCHES: list[tuple[dict[str, Tensor], Tensor]] = [
    (mixed(130), torch.ones(130, dtype=torch.bool)),
    (mixed(130, {2: float("nan"), 7: 3.0}), torch.ones(130, dtype=torch.bool)),
    (mixed(130, {1: float("inf")}), torch.arange(130) != 5),
    (mixed(130, {9: 0.5}), torch.arange(130) < 40),
    (mixed(130, faint=VANISHING), torch.ones(130, dtype=torch.bool)),
    (mixed(130, {129: float("-inf")}), torch.zeros(130, dtype=torch.bool)),
]


def forwarded(defer: bool) -> PrivateForward:
    model = Mixed()
    forward = PrivateForward(model, clip_of(model), defer=defer)
    forward.begin(CPU)
    return forward


def test_what_was_left_open_is_added_before_the_totals_are_used_and_what_was_seen_is_corrected() -> None:
    late, careful = forwarded(True), forwarded(False)
    seen: list[tuple[Any, Any]] = []
    for inputs, present in BATCHES:
        late(inputs, present)
        careful(inputs, present)
        seen.append((late.observation(), careful.observation()))
    late()
    assert far(late.sums.totals, careful.sums.totals) < 1e-12, "the same numbers, added in another order"
    assert seen[4][1].doubtful is not None and float(seen[4][1].norms[3]) > 0
    for ours, theirs in seen:
        assert torch.equal(ours.norms.nan_to_num(-1.0), theirs.norms.nan_to_num(-1.0))
        assert torch.equal(ours.losses.nan_to_num(-1.0), theirs.losses.nan_to_num(-1.0))
        assert ours.sensitivity == theirs.sensitivity


def test_the_host_is_never_further_ahead_than_it_keeps_inputs_for() -> None:
    forward = forwarded(True)
    for inputs, present in [*BATCHES, *BATCHES]:
        forward(inputs, present)
        assert len(forward._unsettled) <= AHEAD
    forward.settle()
    assert not forward._unsettled


def test_a_dropped_step_leaves_nothing_behind() -> None:
    forward = forwarded(True)
    forward(*BATCHES[1])
    forward.clear()
    forward()
    assert not any(bool(total.any()) for total in forward.sums.totals.values())


def test_the_rule_of_a_step_is_that_of_its_late_micro_batches_too() -> None:
    """Where C adapts, each step passes its own."""
    late, careful = forwarded(True), forwarded(False)
    rule = RULE.at(RULE.bound / 8)
    for forward in (late, careful):
        forward(*BATCHES[1], rule)
        forward()
    assert far(late.sums.totals, careful.sums.totals) < 1e-12
    assert float(flat(late.sums.totals).norm()) <= 130 * rule.bound


def test_ranks_that_must_call_the_model_together_leave_nothing_open() -> None:
    model = Mixed()
    forward = PrivateForward(model, clip_of(model), defer=True)
    pieces = [Fragment(name, n, 0, shape.numel(), 0) for n, (name, shape) in enumerate(forward.shapes.items())]
    forward.begin(CPU, ShardedSums(forward.shapes, pieces, Alone(CPU), micro_batch=8))
    forward(*BATCHES[1])
    assert not forward._unsettled


def test_an_engine_steps_to_the_same_weights() -> None:
    from murmuration.data.draw.micro_batch import MicroBatch

    found = []
    for defer in (True, False):
        model = Mixed()
        engine = LocalEngine(
            PrivateForward(model, clip_of(model), defer=defer),
            make_optimizer(ADAMW, [(n, p) for n, p in model.named_parameters() if p.requires_grad]), Alone(CPU),
        )  # fmt: skip
        for step in range(2):
            for inputs, present in BATCHES[::-1][:-1]:
                engine.accumulate(MicroBatch(inputs, present))
            engine.update(PlainUpdate(100, step), 1e-3)
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert far(*found) < 1e-9


def test_sums_add_parts_only_where_they_may() -> None:
    shapes = {"w": torch.Size((150, 120)), "b": torch.Size((150,)), "v": torch.Size((4, 3)), "s": torch.Size(())}
    assert shapes["w"].numel() > SMALL
    for sums in (ExactSums(shapes, CPU), Float32Sums(shapes)):
        runs = sums.spans(["s", "b", "w", "v"], 3)
        assert sorted(name for run in runs for name in run) == sorted(shapes)
        for run in runs:
            parts = torch.randn(3, sum(shapes[name].numel() for name in run))
            sums.add_span(run, torch.full_like(parts, torch.nan), torch.tensor(False))
            sums.add_span(run, parts, torch.tensor(True))
            sums.add_span(run, parts)
            sizes = [shapes[name].numel() for name in run]
            for name, part in zip(run, parts.double().sum(0).split(sizes), strict=True):
                torch.testing.assert_close(sums.totals[name].double().flatten(), 2 * part, rtol=1e-5, atol=1e-5)
    assert ExactSums(shapes, CPU).spans(["b", "s"], 1) == [["b"], ["s"]], "`v` lies between them"


def test_nothing_that_is_not_finite_passes_a_condition_that_is_false() -> None:
    sums = ExactSums({"w": torch.Size((2, 3))}, CPU)
    closed = OnlyIf(sums, torch.tensor(False))
    closed.add("w", torch.full((2, 3), torch.inf))
    closed.add_product("w", torch.full((5, 2), torch.nan), torch.ones(5, 3))
    assert not bool(sums.totals["w"].any())
    OnlyIf(sums, torch.tensor(True)).add_product("w", torch.ones(5, 2), torch.ones(5, 3))
    assert bool((sums.totals["w"] == 5).all())


@pytest.mark.parametrize("keep", [None, torch.arange(6) < 9])
def test_operands_lie_alike_whether_a_record_is_masked_or_not(keep: Tensor | None) -> None:
    """Otherwise a library may choose another kernel, whose rounding would move what all other records add."""
    wide = torch.randn(6, 4, 30)
    weights = ClipWeights(torch.ones(6), keep)
    outer = OuterProduct("w", wide[:, :, 3:10], wide.transpose(1, 2)[:, 2:6, :5], torch.Size((7, 5)))
    dense = Dense("b", wide.flatten(1)[:, 7:19])
    for operand in (*outer.operands(weights), *dense.operands(weights)):
        assert operand.is_contiguous() and operand.storage_offset() == 0


@pytest.mark.parametrize("records", [6, 131, 256])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_others_add_does_not_change_in_any_bit_because_of_a_hostile_record(
    kind: str, precision: Precision, records: int
) -> None:
    """With it the micro-batch is computed again, with masks; without it the micro-batch is an ordinary one."""
    found = []
    for there in (True, False):
        model = Mixed()
        forward = PrivateForward(model, clip_of(model, precision), defer=True)
        forward.begin(CPU)
        present = torch.ones(records, dtype=torch.bool)
        present[3] = there
        forward(mixed(records, {3: HOSTILE[kind]} if there else None), present)
        forward.settle()
        found.append(flat(forward.sums.totals))
    assert bool(found[0].any()) and torch.equal(*found)


def test_a_span_is_bounded_over_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {name: torch.Size((10,)) for name in "abcdef"}
    monkeypatch.setattr(sums_module, "SPAN", 60)
    sums = ExactSums(shapes, CPU)
    assert sums.spans(list(shapes), 1) == [list("abcdef")]
    assert sums.spans(list(shapes), 3) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert sums.spans(list(shapes), 7) == [[name] for name in "abcdef"]


def test_a_parameter_too_wide_for_all_its_parts_is_added_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, present = Mixed(), mixed(256), torch.ones(256, dtype=torch.bool)
    expected = summed(clip_of(model), model, inputs, present)[0]
    monkeypatch.setattr(accumulator, "WIDEST_SPAN", 2 * WIDTH)
    largest: list[int] = []
    whole = ExactSums.add_span

    def watched(self: ExactSums, names: list[str], found: Tensor, only_if: Tensor | None = None) -> None:
        largest.append(max(self.totals[name].numel() for name in names))
        whole(self, names, found, only_if)

    monkeypatch.setattr(ExactSums, "add_span", watched)
    assert far(summed(clip_of(model), model, inputs, present)[0], expected) < 1e-6
    assert largest and max(largest) <= WIDTH


def test_what_is_computed_again_is_computed_in_the_mode_of_its_first_pass() -> None:
    seen: list[bool] = []

    class Noting(Mixed):
        def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
            seen.append(self.training)
            return super().forward(inputs)

    model = Noting()
    forward = PrivateForward(model, clip_of(model), defer=True)
    forward.begin(CPU)
    model.eval()
    forward(*BATCHES[1])
    model.train()
    forward(*BATCHES[1])
    forward.settle()
    assert seen == [False, True, False, True] and model.training and model.head.training


class _Products(TorchDispatchMode):
    """Over how many elements each product in bf16 sums, where its rows are those of records."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left = args[-2]
            if left.dtype == torch.bfloat16:
                self.summed.append(left.shape[1])
        return func(*args, **(kwargs or {}))


class Odd(nn.Module):
    """Layers of odd widths: one that is frozen, one whose bias alone is trained, and two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(nn.Linear(17, 33), nn.Linear(33, 35), nn.Linear(35, 37), nn.Linear(37, 3))
        self.layers[0].requires_grad_(False)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.layers(inputs["x"]).float().square().sum(1)


def test_products_in_bf16_on_a_processor_sum_over_whole_tiles() -> None:
    """Where they do not, matrix units read into the next record's row, and 0 times what is not finite is not, either.
    That shows itself on some processors only; so it is the shapes that are looked at."""
    model, inputs = Odd(), {"x": torch.randn(130, 17)}
    present = torch.ones(130, dtype=torch.bool)
    with _Products() as seen:
        found, _ = summed(clip_of(model, "bf16"), model, inputs, present)
    assert len(seen.summed) >= 6 and all(length % TILE == 0 for length in seen.summed), seen.summed
    exact, _ = summed(clip_of(model), model, inputs, present)
    assert far(found, exact) < 2e-2, "zeros were added, and nothing else"
    hostile = {"x": inputs["x"].clone()}
    hostile["x"][5] = torch.inf
    without, _ = summed(clip_of(model, "bf16"), model, inputs, present.clone().index_fill_(0, torch.tensor([5]), False))
    for name, each in summed(clip_of(model, "bf16"), model, hostile, present)[0].items():
        assert torch.equal(each, without[name]), name
