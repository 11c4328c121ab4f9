"""A record never meets another, whatever the module: each of the zoo is refused, or clips what a loop over single
records clips."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import ops

import murmuration
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.isolated import enter, entered, kept_of_records, outside
from murmuration.train.clip.losses import isolated, losses_of
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.self_test.self_test import SelfTestError
from tests.support import zoo
from tests.support.brute_force import one_by_one, size
from tests.support.own_module import settings_of
from tests.support.zoo import BOUND

RULE = ClipRule("flat", BOUND, 0.0)
Make = Callable[[], nn.Module]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return size(one[name].double() - other[name].double() for name in one)


def moved(clip: BookKeepingClip, model: nn.Module, inputs: zoo.Inputs, whole: dict[str, Tensor]) -> float:
    """How far the sum moves, in units of C, when a record gives way to an empty slot, which is all zeros."""
    worst = 0.0
    for row in range(len(next(iter(inputs.values())))):
        blank = {name: x.clone() for name, x in inputs.items()}
        for x in blank.values():
            x[row] = 0
        present = torch.arange(len(next(iter(inputs.values())))) != row
        far = distance(whole, clipped_totals(clip, model, blank, present)[0]) / BOUND
        assert math.isfinite(far)  # `max` would pass over what is no number
        worst = max(worst, far)
    return worst


def clipped(model: nn.Module, inputs: zoo.Inputs) -> tuple[BookKeepingClip, dict[str, Tensor]]:
    clip = BookKeepingClip(RULE)
    clip.prepare(model)
    return clip, clipped_totals(clip, model, inputs, torch.ones(len(next(iter(inputs.values()))), dtype=torch.bool))[0]


REFUSED = {
    "padding dropped": "picks rows or elements", "packed by lengths": "packed sequences",
    "branch on the batch": "branches on what a record holds", "a number read": "reads a number",
    "frozen counter": "writes a record's values", "counter in a buffer": "writes a record's values",
    "counter by .data": "writes a record's values", "buffer replaced": "in the place of counts",
    "frozen max_norm": "max_norm", "trained max_norm": "max_norm", "scaled by frequency": "scale_grad_by_freq",
    "prototypes moved": "writes a record's values", "frozen prototypes moved": "writes a record's values",
    "queue": "kept a tensor of an earlier", "late queue": "kept a tensor of an earlier",
    "global list": "kept a tensor of an earlier", "running mean": "kept a tensor of an earlier",
    "one mean": "losses of shape", "batch norm": "running statistics", "sync batch norm": "running statistics",
    "instance norm with statistics": "running statistics", "dropout": "draws random numbers",
    "rrelu": "cannot run for one record at a time",
    "noise": "draws random numbers",
    "hook on a tensor": "registers a hook", "hook on a module": "has a backward hook",
    "function of one's own": "autograd.Function of its own", "experts by index": "picks rows or elements",
    "counted": "as long as what a record holds",
    "a word not found": "catches an error", "one not found by a script": "catches an error",
    "one not found within a function": "catches an error", "not factorised": "catches an error",
    "a rule of its own": "rule for vmap of its own", "an operator's rule": "rule for vmap of its own",
    "a dispatch mode": "TorchDispatchMode", "hooks on saved tensors": "saved_tensors_hooks",
    "buffer swapped": "in the place of counts", "weights moved by .data": "writes a record's values",
    "kept for a gradient": "kept a tensor of an earlier",
    "gradient changed in place": "writes into a tensor", "last labels": "kept a tensor of an earlier",
    "last labels of a layer that runs again": "kept a tensor of an earlier",
    "an operator's rule by its name": "rule for vmap of its own", "a dispatch mode within vmap": "TorchDispatchMode",
    "a dispatch mode within a distance": "TorchDispatchMode",
    "quantised": "the scale of the first", "added over ranks": "to other ranks",
    "printed": "prints a record's tensor", "scripted": "is scripted",
    "a gradient inside": "asks autograd for a gradient", "weights thawed": "of a record's tensor or a weight",
}  # fmt: skip


def test_a_pass_within_a_pass_leaves_the_outer_one_watched() -> None:
    """A compiled block is recorded within the pass that meets it first."""
    call = type(zoo.scripted_rows).__call__
    with entered(2):
        watched = type(zoo.scripted_rows).__call__
        with outside(), entered(2):
            pass
        assert type(zoo.scripted_rows).__call__ is watched is not call
    assert type(zoo.scripted_rows).__call__ is call


@pytest.mark.parametrize("name", zoo.hostile())
def test_a_module_that_would_let_records_meet_is_refused_or_cannot(name: str) -> None:
    model = zoo.hostile()[name]()
    inputs: zoo.Inputs = model.data()  # pyright: ignore[reportCallIssue]
    before = copy.deepcopy(model.state_dict())
    if name in REFUSED:
        with pytest.raises(ClipError, match=REFUSED[name]):
            clip, whole = clipped(model, inputs)
            moved(clip, model, inputs, whole)
    else:
        clip, whole = clipped(model, inputs)
        assert moved(clip, model, inputs, whole) <= 1 + 1e-5
        assert distance(whole, one_by_one(model, inputs, BOUND)) <= 1e-5 * size(whole.values())
    if name not in ("buffer replaced", "buffer swapped"):
        # BatchNorm counts its passes before it meets a record.
        same = {key: torch.equal(x, before[key]) for key, x in model.state_dict().items() if "num_batches" not in key}
        assert all(same.values()), f"it wrote into {same}"


@pytest.mark.parametrize("name", zoo.ordinary())
def test_an_ordinary_module_is_clipped_record_by_record(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = zoo.ordinary()[name]()
        inputs: zoo.Inputs = model.data()  # pyright: ignore[reportCallIssue]
        kept = kept_of_records()
        clip, whole = clipped(model, inputs)
        assert moved(clip, model, inputs, whole) <= 1 + 1e-5
        assert distance(whole, one_by_one(model, inputs, BOUND)) <= 2e-5 * size(whole.values())
    assert not kept_of_records() - kept


def test_only_what_can_still_be_reached_is_kept_of_records() -> None:
    kept, held = kept_of_records(), list[object]()
    with entered(2):
        held.append(enter(torch.ones(2, 3)))
        held.append(held)  # a cycle, which only the garbage collector frees
        assert kept_of_records() - kept == {id(held[0])}
        del held
    assert not kept_of_records() - kept


@pytest.mark.parametrize("make", [zoo.TokensOfTheBatch, zoo.SortedByLength, zoo.RareContrast])
def test_the_reference_says_the_same(make: Make) -> None:
    model = make()
    inputs: zoo.Inputs = model.data()  # pyright: ignore[reportCallIssue]
    clip, present = ReferenceClip(RULE), torch.ones(zoo.RECORDS, dtype=torch.bool)
    clip.prepare(model)
    assert distance(clipped_totals(clip, model, inputs, present)[0], clipped(model, inputs)[1]) <= 1e-6


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_given_no_sum_without_noise(kind: str) -> None:
    """Where an engine reduces gradients, it would be."""
    model = zoo.Text()
    PrivateForward(model, BookKeepingClip(RULE))
    handle = getattr(model.inner.weight, kind)(lambda x: None)
    with pytest.raises(ClipError, match=r"inner\.weight has a hook on its gradient"):
        PrivateForward(model, BookKeepingClip(RULE))
    handle.remove()
    PrivateForward(model, BookKeepingClip(RULE))


def test_the_place_of_a_refusal_is_the_users_own_line() -> None:
    with pytest.raises(ClipError, match=r"the model \(BranchOnTheBatch\) at zoo\.py:\d+ branches on"):
        clipped(zoo.BranchOnTheBatch(), zoo.pictures())
    with pytest.raises(ClipError, match=r"layer \(BatchNorm2d\) at zoo\.py:\d+ "):
        clipped(zoo.Normalised(nn.BatchNorm2d(4)), zoo.pictures())


def test_rows_of_one_record_may_meet() -> None:
    """Views of a record, or the records of a patient, are clipped as one."""
    seen: list[tuple[int, ...]] = []

    def model(inputs: zoo.Inputs) -> Tensor:
        seen.append(tuple(inputs["x"].shape))
        return inputs["x"].mean() * inputs["x"]

    inputs = {"x": torch.arange(6.0), "row_share": torch.full((6,), 0.5)}
    assert losses_of(model, inputs, 3).tolist() == [0.25, 6.25, 20.25]
    assert seen == [(2,)]


def test_whatever_is_computed_of_one_record_is_given_back_for_all() -> None:
    found = isolated(lambda record: record["x"].softmax(0), {"x": torch.randn(4, 3)}, 4)
    assert torch.equal(found, torch.ones(4, 1, 3)), "a softmax over the batch is one over one record"
    assert torch.equal(isolated(lambda record: torch.ones(2), {"x": torch.randn(4, 3)}, 4), torch.ones(4, 2))


def hides_nothing(mask: Tensor) -> Tensor:
    return torch.zeros(()) if mask.all() else torch.ones(())


def test_only_transformers_itself_is_told_that_a_mask_hides_something() -> None:
    """What it calls, a user's own mask function say, may not branch on data; whoever calls it may."""
    its = {"__name__": "transformers.masking_utils", "torch": torch, "hides_nothing": hides_nothing}
    asks = FunctionType(hides_nothing.__code__, its)
    passes_on = FunctionType((lambda mask: hides_nothing(mask)).__code__, its)
    masks = {"x": torch.ones(3, 2, dtype=torch.bool)}
    assert isolated(lambda record: asks(record["x"]), masks, 3).tolist() == [1, 1, 1]
    with pytest.raises(ClipError, match="branches on what a record holds"):
        isolated(lambda record: passes_on(record["x"]), masks, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda *given: F.ctc_loss(*given, reduction="none"),
        lambda *given: torch.ctc_loss(*given, reduction=0),
        lambda *given: torch._ctc_loss(*given)[0],  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        lambda *given: torch.ops.aten.ctc_loss(*given, 0, 0),
        lambda *given: torch.ops.aten.ctc_loss.Tensor(*given, 0, 0),
        lambda scores, targets, *lengths: F.ctc_loss(
            log_probs=scores,
            targets=targets,
            **dict(zip(("input_lengths", "target_lengths"), lengths, strict=True)),
            reduction="none",
        ),
    ],
    ids=["F", "torch", "torch._", "aten", "aten.Tensor", "by keywords"],
)
def test_a_target_that_is_no_class_reaches_no_memory_beside_its_scores(function: Any) -> None:
    """PyTorch's kernel reads there, and its backward pass writes there."""
    scores, targets = torch.randn(3, 5, 4).log_softmax(-1), torch.tensor([[4, 1], [1, 2], [-1, 3]])

    def losses(scores: Tensor, targets: Tensor) -> Tensor:
        count = len(scores)
        lengths = torch.full((count,), 5), torch.full((count,), 2)
        return function(scores.transpose(0, 1), targets, *lengths)

    found = isolated(lambda record: losses(record["x"], record["y"]), {"x": scores, "y": targets}, 3)
    assert torch.allclose(found.flatten(), losses(scores, targets.clamp(0, 3)))


LOOK_UPS = {
    "F": F.embedding,
    "by keyword": lambda ids, table: F.embedding(ids, weight=table),
    "torch": lambda ids, table: torch.embedding(table, ids),
    "aten": lambda ids, table: torch.ops.aten.embedding(table, indices=ids),
}


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
@pytest.mark.parametrize("odd", [-2, 4, 11])
def test_an_id_that_is_none_of_a_record_s_table_is_no_row_of_its_neighbour_s(look_up: Any, odd: int) -> None:
    """vmap lays the tables in a row."""
    tables, ids = torch.randn(3, 4, 2), torch.tensor([[0, 1], [1, odd], [3, 3]])
    found = isolated(lambda record: look_up(record["i"][0], record["t"][0]), {"i": ids, "t": tables}, 3)
    assert torch.equal(found, torch.stack([table[own.clamp(0, 3)] for table, own in zip(tables, ids, strict=True)]))


@pytest.mark.parametrize("fill", [torch.index_fill, torch.Tensor.index_fill, torch.ops.aten.index_fill])
@pytest.mark.parametrize("odd", [-2, 6])
def test_an_index_from_the_end_fills_nothing_of_a_neighbour_s(fill: Any, odd: int) -> None:
    rows, ids = torch.rand(3, 4) + 1, torch.tensor([[0], [odd], [1]])
    found = isolated(lambda record: fill(record["x"][0], 0, record["i"][0], 0.0), {"x": rows, "i": ids}, 3)
    assert found.eq(0).nonzero().tolist() == [[0, 0], [1, 2], [2, 1]]


MISTAKEN = {
    "a number rolled": lambda x: x[0].sum().roll(1),
    "one value for all": lambda x: torch.zeros(4).index_fill(0, torch.tensor([1]), x[0].sum()),
    "one scale for all": lambda x: torch.quantize_per_tensor(x, x.amax(), torch.tensor(0), torch.qint8).dequantize(),
    "one zero for all": lambda x: torch.quantize_per_tensor(
        x, torch.tensor(0.01), (100 * x.amax()).int(), torch.qint8
    ).dequantize(),
    "of each its own scale": lambda x: torch.quantize_per_tensor_dynamic(x[0], torch.qint8, False).dequantize(),
    "resized": lambda x: x.clone().resize_(2, 4),
    "resized as another": lambda x: x.clone().resize_as_(torch.zeros(2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("function", MISTAKEN.values(), ids=MISTAKEN)
def test_operators_in_which_vmap_itself_mixes_records_are_refused(function: Any) -> None:
    with pytest.raises(ClipError, match=r"the first|behind it|another record"):
        isolated(lambda record: function(record["x"]), {"x": torch.randn(3, 4)}, 3)


def test_the_same_operators_are_computed_where_it_mixes_nothing() -> None:
    x = torch.randn(3, 4)
    rolled = isolated(lambda record: record["x"].roll(1), {"x": x}, 3)
    assert torch.equal(rolled.view(3, 4), x.roll(1, 1))
    filled = isolated(lambda record: record["x"].index_fill(1, torch.tensor([2]), record["x"].sum()), {"x": x}, 3)
    assert torch.equal(filled.view(3, 4)[:, 2], x.sum(1))
    by_a_step = isolated(
        lambda record: torch.quantize_per_tensor(record["x"], 0.1, 0, torch.qint8).dequantize(), {"x": x}, 3
    )
    assert torch.equal(by_a_step.view(3, 4), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())


def test_a_deformed_convolution_learns_where_its_offsets_are_no_record_s() -> None:
    class Deformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.offset = ops.DeformConv2d(3, 2, 3, padding=1), torch.rand(1, 18, 4, 4)

        def forward(self, record: zoo.Inputs) -> Tensor:
            return (
                self.convolution(record["x"], self.offset.expand(len(record["x"]), -1, -1, -1)).square().sum((1, 2, 3))
            )

    model, inputs = Deformed(), {"x": torch.randn(3, 3, 4, 4)}
    found = clipped(model, inputs)[1]
    assert distance(found, one_by_one(model, inputs, BOUND)) <= 1e-5 * size(found.values())


def test_what_a_record_s_rank_decides_for_all_is_refused() -> None:
    with pytest.raises(ClipError, match="linalg_lstsq leaves out residuals"):
        isolated(lambda record: torch.linalg.lstsq(record["x"][0], torch.ones(4, 1))[0], {"x": torch.randn(2, 4, 3)}, 2)


class LooksUp(nn.Module):
    def __init__(self, look_up: Any) -> None:
        super().__init__()
        self.weight, self.look_up = nn.Parameter(torch.randn(4, 2)), look_up

    def forward(self, record: zoo.Inputs) -> Tensor:
        return self.look_up(record["x"], self.weight).square().sum((1, 2))


def test_nor_is_it_a_row_of_its_neighbour_s_gradient() -> None:
    """Where a weight has no rule, each record has a copy of its own, and vmap lays the copies in a row."""
    model, inputs = LooksUp(LOOK_UPS["torch"]), {"x": torch.tensor([[0, 1], [1, -2], [3, 3]])}
    clip, present = BookKeepingClip(RULE), torch.ones(3, dtype=torch.bool)
    clip.prepare(model)
    held = {"x": inputs["x"].clamp(0, 3)}
    found = clipped_totals(clip, model, inputs, present)[0]
    assert distance(found, one_by_one(model, held, BOUND)) <= 1e-5 * size(found.values())


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sample",
    [
        lambda x, grid, padding: F.grid_sample(x, grid, padding_mode=padding, align_corners=False),
        lambda x, grid, padding: F.grid_sample(x, grid=grid, padding_mode=padding, align_corners=True),
        lambda x, grid, padding: torch.grid_sampler_2d(
            x, grid, 0, ("zeros", "border", "reflection").index(padding), True
        ),
        lambda x, grid, padding: torch.ops.aten.grid_sampler_2d(x, grid, 0, 1, False),
    ],
    ids=["F", "by keyword", "torch", "aten"],
)
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_grid_that_is_not_finite_points_into_its_own_picture(sample: Any, padding: str, odd: float) -> None:
    """The backward pass of PyTorch's kernel writes where NaN points, and ends the process."""
    picture, grid = torch.randn(3, 2, 5, 5), torch.rand(3, 4, 4, 2) * 2.4 - 1.2
    grid[1, 2, 3, 0] = odd
    inputs = {"x": picture.requires_grad_(), "grid": grid.requires_grad_()}
    found = isolated(lambda record: sample(record["x"], record["grid"], padding), inputs, 3)[:, 0]
    given = torch.autograd.grad(found.square().sum(), (picture, grid))
    held = grid.detach().nan_to_num(0.0).clamp(-1e4, 1e4).requires_grad_()
    alone = sample(picture, held, padding)
    expected = torch.autograd.grad(alone.square().sum(), (picture, held))
    assert torch.allclose(found, alone)
    assert torch.allclose(given[0], expected[0]) and given[1].isfinite().all()
    assert torch.allclose(given[1][::2], expected[1][::2])


@pytest.mark.parametrize("crop", [ops.roi_align, ops.roi_pool, ops.ps_roi_align, ops.ps_roi_pool])
def test_boxes_of_a_record_are_refused_where_they_may_name_its_neighbour(crop: Any) -> None:
    pictures, boxes = torch.randn(3, 4, 8, 8), torch.tensor([0.0, 0.0, 0.0, 6.0, 6.0]).expand(3, 2, 5)
    with pytest.raises(ClipError, match=r"roi_\w+ may read beyond a record"):
        isolated(lambda record: crop(record["x"], record["y"].flatten(0, 1), (2, 2)), {"x": pictures, "y": boxes}, 3)
    found = isolated(lambda record: crop(record["x"], boxes[0], (2, 2)), {"x": pictures}, 3)
    assert torch.allclose(found, torch.stack([crop(picture[None], boxes[0], (2, 2)) for picture in pictures]))


@pytest.mark.parametrize("operator", [torch.ops.torchvision.roi_pool, torch.ops.torchvision.roi_pool.default])
def test_they_are_refused_however_the_operator_is_called(operator: Any) -> None:
    records = {"x": torch.randn(2, 4, 8, 8), "boxes": torch.zeros(2, 1, 5)}
    with pytest.raises(ClipError, match="roi_pool may read beyond a record"):
        isolated(lambda record: operator(record["x"], record["boxes"].flatten(0, 1), 1.0, 2, 2)[0], records, 2)
    with pytest.raises(ClipError, match="roi_pool may read beyond a record"):
        its = {"spatial_scale": 1.0, "pooled_height": 2, "pooled_width": 2}
        isolated(lambda record: operator(input=record["x"], rois=record["boxes"].flatten(0, 1), **its)[0], records, 2)


@pytest.mark.parametrize(
    "bag",
    [
        lambda ids, weight, offsets: F.embedding_bag(ids, weight, offsets, mode="sum"),
        lambda ids, weight, offsets: F.embedding_bag(ids, weight, offsets=offsets, mode="sum"),
        lambda ids, weight, offsets: torch.embedding_bag(weight, ids, offsets)[0],
        lambda ids, weight, offsets: torch.ops.aten._embedding_bag.default(weight, ids, offsets)[0],
        lambda ids, weight, offsets: torch.ops.aten._embedding_bag_forward_only(weight, ids, offsets)[0],
    ],
    ids=["F", "by keyword", "torch", "aten", "aten, without gradients"],
)
def test_bags_that_begin_where_a_record_says_are_refused(bag: Any) -> None:
    """PyTorch takes negative offsets, which are a neighbour's words, and whatever memory lies before them."""
    ids, weight, offsets = torch.tensor([[5, 6, 7], [1, 2, 3]]), torch.randn(10, 4), torch.tensor([[0, 2], [0, -2]])
    with pytest.raises(ClipError, match=r"embedding_bag\w* may read beyond a record"):
        isolated(lambda record: bag(record["x"][0], weight, record["y"][0]), {"x": ids, "y": offsets}, 2)
    found = isolated(lambda record: bag(record["x"][0], weight, offsets[0]), {"x": ids}, 2)
    assert torch.allclose(found.reshape(2, 2, 4), torch.stack([bag(each, weight, offsets[0]) for each in ids]))


class Bags(nn.Module):
    """The sum of the words of each bag, plainly or within a function of its own."""

    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(weight: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
            return F.embedding_bag(ids, weight, offsets, mode="sum")

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return None, None, None

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.weight, self.scale, self.own = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.ones(4)), own

    def forward(self, record: zoo.Inputs) -> Tensor:
        given = self.weight.detach(), record["x"][0], record["y"][0]
        bags = self.Own.apply(*given) if self.own else F.embedding_bag(given[1], given[0], given[2], mode="sum")
        return (bags * self.scale).sum()[None] + self.weight.sum()


@pytest.mark.parametrize("engine", [BookKeepingClip, ReferenceClip])
@pytest.mark.parametrize("own", [False, True])
def test_no_engine_runs_them_nor_does_a_function_of_the_model_s_own(engine: Any, own: bool) -> None:
    records = {"x": torch.tensor([[5, 6, 7], [1, 2, 3]]), "y": torch.tensor([[0, 2], [0, -2]])}
    clip, model = engine(RULE), Bags(own)
    clip.prepare(model)
    with pytest.raises(ClipError, match="embedding_bag may read beyond a record"):
        clipped_totals(clip, model, records, torch.ones(2, dtype=torch.bool))


def test_segments_that_begin_where_a_record_says_are_refused() -> None:
    """PyTorch checks lengths, but not offsets."""
    records = {"x": torch.arange(8.0).reshape(2, 4), "y": torch.tensor([[0, 2, 4], [-4, 2, 4]])}

    def sums(record: Any, **given: Any) -> Tensor:
        return torch.segment_reduce(record["x"][0], "sum", axis=0, **given)

    for name, unsafe in (("offsets", False), ("lengths", True)):
        with pytest.raises(ClipError, match="segment_reduce may read beyond a record"):
            isolated(
                lambda record, name=name, unsafe=unsafe: sums(record, **{name: record["y"][0]}, unsafe=unsafe),
                records,
                2,
            )
    lengths = {**records, "y": torch.tensor([[1, 3], [2, 2]])}
    found = isolated(lambda record: sums(record, lengths=record["y"][0]), lengths, 2)
    assert found.flatten().tolist() == [0, 6, 9, 13]


def test_offsets_of_a_record_are_refused_where_they_may_point_anywhere() -> None:
    convolution = ops.DeformConv2d(3, 2, 3, padding=1)
    inputs = {"x": torch.randn(2, 3, 4, 4), "offset": torch.randn(2, 18, 4, 4)}
    with pytest.raises(ClipError, match="deform_conv2d may read beyond a record"):
        isolated(lambda record: convolution(record["x"], record["offset"]), inputs, 2)


# Through the public class, on the data that show the worst: the runs that once had a certificate and were told apart.


def trained_on(folder: Path, module: nn.Module, inputs: zoo.Inputs, **more: Any) -> dict[str, Tensor]:
    def synthetic(count: int, seed: int) -> zoo.Inputs:
        draw = torch.Generator().manual_seed(seed)
        return {
            "tokens": torch.randint(2, zoo.WORDS, (count, zoo.TOKENS), generator=draw),
            "targets": torch.randint(0, zoo.CLASSES, (count, zoo.TOKENS), generator=draw),
            "label": torch.randint(0, 3, (count,), generator=draw),
        }

    def read(number: np.ndarray) -> zoo.Inputs:
        return {name: x[number] for name, x in inputs.items()}

    settings: dict[str, Any] = dict(
        synthetic=synthetic, records=len(inputs["label"]), dataset="worst", run_dir=folder, steps=1, epsilon=8,
        delta=1e-5, expected_batch=len(inputs["label"]), micro_batch=8, clip_norm=BOUND, debug_seed=5,
    )  # fmt: skip
    asked, rest = settings_of(folder, **(settings | more))
    with murmuration.PrivateTraining(module, read, asked, **rest) as training:
        training.prove()
        training.step(1, 1.0)
        return {name: tensor.clone() for name, tensor in training.weights().items()}


def test_a_loss_over_the_tokens_of_the_batch_moves_a_run_by_c_at_most(tmp_path: Path) -> None:
    """It once moved by 20·C, under a certificate: forward() sees one record, whose tokens are all there are."""
    from murmuration.train.config.optimizer import Optimizer, OptimizerParams

    tokens = torch.full((32, zoo.TOKENS), zoo.PAD)
    tokens[:, :2] = 7
    there = {"tokens": tokens, "targets": tokens % zoo.CLASSES, "label": torch.zeros(32, dtype=torch.long)}
    blank = {name: x.clone() for name, x in there.items()}
    blank["tokens"][0] = 0
    sgd = Optimizer(type="SGD", params=OptimizerParams(momentum=0.0, weight_decay=0.0))
    weights = []
    for name, inputs in (("there", there), ("blank", blank)):
        torch.manual_seed(0)
        weights.append(trained_on(tmp_path / name, zoo.TokensOfTheBatch(), inputs, optimizer=sgd))
    # The same keys, and so the same noise: what differs is one record's share of the sum, divided by the batch.
    assert 0 < distance(*weights) * 32 <= 2 * BOUND * (1 + 1e-3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (zoo.FrozenCounter, "writes a record's values"), (zoo.FrozenMaxNorm, "max_norm"),
        (zoo.MovedFrozenPrototypes, "writes a record's values"), (zoo.LateMixup, "the attribute calls changed"),
        (zoo.LateQueue, "kept a tensor|the attribute queue"),
        (zoo.SpectralNorm, "the buffer .*_u changed while the model ran"),
        (zoo.LastHidden, "the attribute latents still holds tensors of the self-test's records"),
    ],
)  # fmt: skip
def test_what_forward_would_keep_is_refused_before_the_first_record(tmp_path: Path, make: Make, why: str) -> None:
    with pytest.raises((SelfTestError, LedgerError), match=why):
        trained_on(tmp_path / "run", make(), zoo.texts())
    # Nothing but the ledger's first lines was written, and the folder can be used again.
    assert not re.search('"kind": ?"open"', (tmp_path / "run" / "ledger.jsonl").read_text())
    trained_on(tmp_path / "run", zoo.Text(), zoo.texts(), new_segment="another module")


@pytest.mark.parametrize(
    ("make", "why"),
    [(zoo.ContrastAlone, "a test record alone has no gradient"), (zoo.Overflowing, "the loss of a test record is inf")],
)
def test_a_loss_that_no_record_alone_can_lower_is_refused(tmp_path: Path, make: Make, why: str) -> None:
    with pytest.raises(SelfTestError, match=why):
        trained_on(tmp_path / "run", make(), zoo.texts())


def test_a_weight_without_elements_is_left_alone(tmp_path: Path) -> None:
    model = zoo.Empty()
    with pytest.raises(ClipError, match="registers has no elements to train"):
        BookKeepingClip(RULE).prepare(model)
    assert trained_on(tmp_path / "run", model, zoo.texts())["registers"].shape == (0, zoo.WIDTH)


def test_the_form_of_a_public_example_suffices_for_the_self_test(tmp_path: Path) -> None:
    inputs = zoo.texts()
    example = {name: x[1:3] for name, x in inputs.items()} | {"label": torch.tensor([0, 3])}
    asked, _ = settings_of(tmp_path, dataset="texts", steps=1, epsilon=8, expected_batch=6, micro_batch=3)
    read = lambda number: {name: x[number] for name, x in inputs.items()}  # noqa: E731
    more: dict[str, Any] = {"records": zoo.RECORDS, "schedule": 0.1}
    with murmuration.PrivateTraining(zoo.Text(), read, asked, example=example, **more) as training:
        assert training.prove().largest_hostile <= 1
        training.step(1, 0.1)
