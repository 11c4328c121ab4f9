"""The books of a micro-batch against gradients written out: norms by groups, sums of the records that are kept."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from murmuration.train.clip.accumulator import BF16_ROUNDING, NormAccumulator
from murmuration.train.clip.per_record import Dense, OuterProduct, PerRecordGradient
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.sums import ExactSums

CPU = torch.device("cpu")
SHAPE = torch.Size((5, 4))
GROUPS = {"w": 0, "b": 0, "v": 1}
USES = {"w": 1, "b": 1, "v": 2}
SHAPES = {"w": SHAPE, "b": torch.Size((5,)), "v": SHAPE}


def layer(seed: int, tokens: int, records: int = 6) -> list[PerRecordGradient]:
    draw = torch.Generator().manual_seed(seed)
    left, right = torch.randn(records, tokens, 5, generator=draw), torch.randn(records, tokens, 4, generator=draw)
    bias = left[:, 0] if tokens == 1 else left.sum(1)
    return [OuterProduct("w", left, right, SHAPE), Dense("b", bias)]


def twice(seed: int, cancelling: int | None = None) -> list[list[PerRecordGradient]]:
    """Two uses of one parameter, whose gradients add up; of one record they cancel but for a millionth."""
    draw = torch.Generator().manual_seed(seed)
    first, second = torch.randn(6, *SHAPE, generator=draw), torch.randn(6, *SHAPE, generator=draw)
    if cancelling is not None:
        second[cancelling] = -first[cancelling] * (1 - 2.0**-18)
    return [[Dense("v", first)], [Dense("v", second)]]


def written(pieces: list[PerRecordGradient]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for piece in pieces:
        gradient = piece.instances(slice(None), torch.float64)
        found[piece.name] = found[piece.name] + gradient if piece.name in found else gradient
    return found


def by_groups(gradients: Mapping[str, Tensor]) -> Tensor:
    squares = torch.zeros(2, 6, dtype=torch.float64)
    for name, gradient in gradients.items():
        squares[GROUPS[name]] += gradient.flatten(1).square().sum(1)
    return squares.sqrt()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("cancelling", [None, 4])
@pytest.mark.parametrize("hold", [0.0, 1e9])
@pytest.mark.parametrize("missing", [[], [1, 5]])
def test_norms_and_sums_are_those_of_gradients_written_out(
    tokens: int, cancelling: int | None, hold: float, missing: list[int]
) -> None:
    accumulator = NormAccumulator(GROUPS, 6, hold, False, CPU)
    reports = [layer(1, tokens), *twice(2, cancelling)]
    gradients = written([piece for report in reports for piece in report])
    for report in reports:
        accumulator.add(report, USES)
    keep = torch.tensor([record not in missing for record in range(6)])
    norms = accumulator.norms(keep)
    torch.testing.assert_close(norms[:, keep], by_groups(gradients)[:, keep], rtol=1e-4, atol=0)
    assert torch.equal(accumulator.keep, keep)

    factors = torch.rand(2, 6, generator=torch.Generator().manual_seed(3))
    sums = ExactSums(SHAPES, CPU)
    accumulator.write_sums(torch.where(keep, factors, 0.0), sums)
    for name, gradient in gradients.items():
        expected = torch.tensordot(torch.where(keep, factors[GROUPS[name]], 0.0).double(), gradient, dims=1)
        torch.testing.assert_close(sums.totals[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", [[], [2]])
def test_a_record_whose_tokens_cancel_is_measured_and_added_as_written_out_in_fp64(missing: list[int]) -> None:
    """Also where no slot is empty, so that nothing else makes the micro-batch an unusual one."""
    draw = torch.Generator().manual_seed(4)
    left, right = torch.randn(4, 2, 64, generator=draw), torch.randn(4, 2, 64, generator=draw)
    left[1, 1], right[1, 1] = left[1, 0], -right[1, 0] * (1 - 1e-5)
    piece = OuterProduct("w", left, right, torch.Size((64, 64)))
    accumulator = NormAccumulator({"w": 0}, 4, 0.0, False, CPU)
    accumulator.add([piece], {"w": 1})
    keep = torch.tensor([record not in missing for record in range(4)])
    norms = accumulator.norms(keep)[0]
    exact = torch.einsum("bto,bti->boi", left.double(), right.double())
    torch.testing.assert_close(norms[keep], exact.flatten(1).norm(dim=1)[keep], rtol=1e-5, atol=0)
    assert accumulator.doubtful is not None and accumulator.doubtful.tolist() == [False, True, False, False]
    factors = torch.where(keep, torch.tensor([0.0, 1.0, 0.0, 0.0]), 0.0)
    sums = ExactSums({"w": piece.shape}, CPU)
    accumulator.write_sums(factors.unsqueeze(0), sums)
    torch.testing.assert_close(sums.totals["w"], exact[1], rtol=1e-9, atol=0)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("scale", [1e-14, 1e12])
def test_norms_whose_squares_vanish_or_overflow_in_fp32_are_right(tokens: int, scale: float) -> None:
    weight, bias = layer(1, tokens)
    assert isinstance(weight, OuterProduct) and isinstance(bias, Dense)
    with torch.no_grad():
        for tensor in {
            id(t): t for t in (weight.left, weight.right, bias.value) if t._base is not weight.left
        }.values():
            tensor[3] *= scale
    accumulator = NormAccumulator({"w": 0, "b": 0}, 6, 0.0, False, CPU)
    accumulator.add([weight, bias], USES)
    norms = accumulator.norms(torch.ones(6, dtype=torch.bool))
    torch.testing.assert_close(norms[0], by_groups(written([weight, bias]))[0], rtol=1e-4, atol=0)


def test_a_record_that_is_no_number_leaves_the_others_alone_and_out_of_the_sums() -> None:
    clean, hostile = layer(1, 1), layer(1, 1)
    assert isinstance(hostile[0], OuterProduct)
    hostile[0].right[2] = float("nan")
    found = []
    for report in (clean, hostile):
        accumulator = NormAccumulator({"w": 0, "b": 0}, 6, 0.0, False, CPU)
        accumulator.add(report, USES)
        keep = torch.tensor([True, True, False, True, True, True])
        norms = accumulator.norms(keep)[0]
        sums = ExactSums({"w": SHAPE, "b": torch.Size((5,))}, CPU)
        accumulator.write_sums(torch.where(keep, 0.5, 0.0).unsqueeze(0), sums)
        found.append((norms[keep], sums.totals["w"], sums.totals["b"]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("again", [slice(0, 2), slice(0, 1), slice(1, 2)])
def test_a_layer_that_reports_again_is_refused(tokens: int, again: slice) -> None:
    accumulator = NormAccumulator({"w": 0, "b": 0}, 6, 0.0, False, CPU)
    report = layer(1, tokens)
    accumulator.add(report, USES)
    with pytest.raises(ClipError, match="more uses"):
        accumulator.add(report[again], USES)


def test_a_use_that_never_came_is_measured_with_those_that_did() -> None:
    """Among others of its group: by itself it would leave no norm at all, and records in doubt are measured again."""
    accumulator = NormAccumulator(dict.fromkeys(GROUPS, 0), 6, 0.0, False, CPU)
    own, (report, _) = layer(1, 3), twice(2)
    accumulator.add(own, USES)
    accumulator.add(report, USES)
    norms = accumulator.norms(torch.ones(6, dtype=torch.bool))[0]
    torch.testing.assert_close(norms, by_groups(written([*own, *report])).square().sum(0).sqrt(), rtol=1e-6, atol=0)


def test_the_rounding_of_bf16_is_the_largest_there_is_and_part_of_the_norm_where_operands_are_rounded() -> None:
    """Of all numbers between two powers of two, in steps of a thirty-second of bf16's."""
    numbers = 1 + torch.arange(1 << 12, dtype=torch.float64) / (1 << 12)
    largest = float(((numbers.bfloat16().double() - numbers).abs() / numbers).max())
    assert 0.98 * BF16_ROUNDING < largest <= BF16_ROUNDING
    norms, measured = [], []
    for rounded in (False, True):
        accumulator = NormAccumulator({"w": 0, "b": 0}, 6, 0.0, rounded, CPU)
        accumulator.add(layer(1, 3), USES)
        norms.append(accumulator.norms(torch.ones(6, dtype=torch.bool)))
        measured.append(accumulator.measured)
    assert measured[0] is None and torch.equal(measured[1], norms[0])
    assert bool((norms[1] > (1 + 0.98 * BF16_ROUNDING) * norms[0]).all()), (
        "terms are together no shorter than their sum"
    )
