"""Runs the kernels in Triton's interpreter and says how far they are from fp64; needs TRITON_INTERPRET=1 at its start.

The interpreter has no bf16 for products: half precision is fp16 here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import murmuration.train.clip.kernels as kernels
import murmuration.train.clip.norms as norms
from murmuration.model.build import Objective, build
from murmuration.train.clip.add_parts_triton import add_parts
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.gram_triton import gram
from murmuration.train.clip.norms import KERNEL_PART as PART
from murmuration.train.clip.per_record import OuterProduct
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.standardised import Standardisation
from murmuration.train.clip.triton_kernels import group_norm_backward, layer_norm_backward, row_sums, scale
from tests.support.interpreted import patch_once
from tests.support.parity_cases import CASES
from tests.support.train_helpers import SHAPE, nano_inputs

# Around the borders of blocks (16, 64 tokens) and of parts (64 columns); without a rest, and with a rest of each padded
# size; with up to two blocks that lie further apart than a program reaches.
SHAPES = (
    (2, 7, 9),
    (16, 32, 64),
    (17, 33, 65),
    (32, 7, 70),
    (50, 96, 33),
    (63, 64, 65),
    (64, 64, 20),
    (65, 16, 16),
    (96, 130, 7),
    (129, 40, 130),
    (190, 64, 129),
    (192, 8, 8),
    (197, 24, 70),
    (257, 20, 65),
    (330, 9, 12),
)


def largest(errors: Tensor) -> float:
    """NaN counts as infinity: unwritten memory may hold it, and `max` of Python passes over it."""
    return float(errors.nan_to_num(nan=torch.inf).max())


def far(found: Tensor, exact: Tensor) -> float:
    return largest((found.double() - exact).abs() / exact.abs().clamp(min=1e-30))


def products(dtype: torch.dtype, part: int, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> list[dict[str, Any]]:
    """`part` as the product has it, or so short that narrow widths have several."""
    rows = []
    for tokens, left_width, right_width in shapes:
        draw = torch.Generator().manual_seed(tokens)
        left = torch.randn(2, tokens, left_width, generator=draw).to(dtype)
        right = torch.randn(2, right_width, tokens, generator=draw).to(dtype).transpose(1, 2)  # not as rows lie
        bounds = norms.Bounds(3e-8, 1e-7, 1e-9, 2e-9)  # so that each part of the doubt is seen
        inner, doubt, lengths, sums = gram(left, right, part, bounds, True)
        without = gram(left, right, part, bounds) if tokens in (17, 50, 65, 197) else (inner, doubt, lengths)
        wide_left, wide_right = left.double(), right.double()
        a, g = wide_left.square().sum(2), wide_right.square().sum(2)
        exact, length = (wide_left.transpose(1, 2) @ wide_right).square().sum((1, 2)), (a * g).sqrt().sum(1)
        added = bounds.added * length
        doubted = bounds.share * length.square() + (2 * exact.sqrt() + added) * added
        doubted += bounds.lost_left * a.amax(1) + bounds.lost_right * g.amax(1)
        piece = OuterProduct("w", left, right, torch.Size((left_width, right_width)))
        kernels.DEVICES = ()
        plain = norms.measure([piece, piece])
        kernels.DEVICES = ("cpu",)
        fused = norms.measure([piece, piece])
        turned = norms.measure([piece], over=right).sums  # None where no kernel measures
        assert plain.doubt is not None and fused.doubt is not None
        rows.append({
            "tokens": tokens,
            "inner": far(inner, exact), "length": far(lengths, length), "doubted": far(doubt, doubted),
            "sums": far_from_sum(sums, left), "alike": all(map(torch.equal, without, (inner, doubt, lengths))),
            "turned": None if turned is None else far_from_sum(turned, right),
            "measured": far(fused.square, plain.square), "doubt": float((fused.doubt / plain.doubt).min()),
        })  # fmt: skip
    return rows


def far_from_sum(found: Tensor, over: Tensor) -> float:
    """How far sums over tokens are from fp64, in units of what T - 1 additions in fp32 may do."""
    steps = (over.shape[1] - 1) * torch.finfo(torch.float32).eps / 2
    exact, size = over.double().sum(1), over.double().abs().sum(1)
    assert found.shape == exact.shape and found.dtype == torch.float32
    return largest((found - exact).abs() / (size * steps / (1 - steps)))


Faults = Sequence[tuple[str, str]]


def faulty(kernel: Any, faults: Faults, error: Callable[[ModuleType], float]) -> list[float]:
    """How far what the kernel's file computes is off, first as it is and then with each change, a planted fault."""
    source, found = Path(sys.modules[kernel.__module__].__file__ or "").read_text(), []
    for number, (written, instead) in enumerate((("", ""), *faults)):
        assert not written or source.count(written) == 1, written
        place = Path(tempfile.mkdtemp()) / f"{kernel.__name__}_{number}.py"  # from a file, which Triton reads
        place.write_text(source.replace(written, instead) if written else source)
        spec = importlib.util.spec_from_file_location(place.stem, place)
        assert spec is not None and spec.loader is not None
        module = sys.modules[place.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(error(module))
    return found


# What to change in the kernel so that its sums are wrong: a token, a rest or a strip is left out, written over
# another's or into another record's, or added up in half precision.
GRAM_FAULTS = (
    ("_rows(base, 0, tokens, stride, along, width, 64)", "_rows(base, 1, tokens, stride, along, width, 64)"),
    ("sums + record * rows, tokens", "sums, tokens"),
    ("sums + (record * STRIPS + part) * rows", "sums + record * STRIPS * rows"),
    ("sums + (record * STRIPS + BLOCKS) * rows", "sums + (record * STRIPS + BLOCKS - 1) * rows"),
    ("(strip[:, None] < strips)", "(strip[:, None] < strips - 1)"),
    ("tl.sum(rows.to(tl.float32), 0)", "tl.sum(rows, 0).to(tl.float32)"),
)


def sums_of_tokens(module: ModuleType) -> float:
    worst = 0.0
    for tokens in (50, 135):
        draw = torch.Generator().manual_seed(tokens)
        left = (torch.randn(2, tokens, 20, generator=draw) + 3).half()
        worst = max(worst, far_from_sum(module.gram(left, left[:, :, :9], PART, (0.0,) * 4, True)[3], left))
    return worst


def not_a_number() -> list[bool]:
    """Of two records, one holds NaN in one place: for each place, whether it alone has no square, no doubt, and no sum
    in that column."""
    found = []
    for tokens, side in ((7, 0), (70, 0), (70, 1)):
        sides = [torch.ones(2, tokens, 8, dtype=torch.float16) for _ in range(2)]
        sides[side][0, tokens - 1, 3] = torch.nan
        square, doubt, _, sums = gram(*sides, PART, (1e-7, 1e-7, 0.0, 0.0), True)
        missing = sums.isnan().nonzero().tolist()
        found.append(square.isnan().tolist() == doubt.isnan().tolist() == [True, False])
        found.append(missing == ([[0, 3]] if side == 0 else []))
    return found


def layer_norms() -> list[dict[str, float]]:
    """Around the borders of tokens taken at once, of chunks and of widths; the last record holds a number that is
    none."""
    rows = []
    for tokens, width in ((1, 5), (3, 128), (64, 129), (131, 60)):
        draw = torch.Generator().manual_seed(tokens)
        x, gradient = torch.randn(2, 3, tokens, width, generator=draw).unbind()
        x[2, 0, width - 1] = torch.nan
        mean, inverse = x.mean(2, keepdim=True), x.var(2, keepdim=True).add(1e-5).rsqrt()
        weight = torch.randn(width, generator=draw)
        below, scale, shift = layer_norm_backward(x, gradient, mean, inverse, weight, 3)
        assert below is not None
        none, *without = layer_norm_backward(x, gradient, mean, inverse, weight, 3, wanted=False)
        expected = torch.ops.aten.native_layer_norm_backward(
            gradient.double(), x.double(), [width], mean.double(), inverse.double(), weight.double(), None,
            [True, False, False],
        )[0]  # fmt: skip
        normal = (x.double() - mean.double()) * inverse.double()
        size = (normal * gradient).abs().sum(1)
        exact, whole = (normal * gradient.double()).sum(1), gradient.double().sum(1)
        rows.append({
            "scale": float(((scale - exact).abs() / size)[:2].max()),
            "shift": float(((shift - whole).abs() / gradient.abs().sum(1)).max()),
            "below": float((below - expected)[:2].norm(dim=2).div(expected[:2].norm(dim=2)).max()),
            "without": none is None and torch.equal(without[0][:2], scale[:2]) and torch.equal(without[1], shift),
            "nan": bool(scale[2].isnan().all()) and not bool(torch.cat([scale[:2], below[:2, 0]]).isnan().any()),
        })  # fmt: skip
    return rows


def added() -> dict[str, list[bool]]:
    """Around the border of blocks, with parts that lie apart: whether the totals are those of additions one by one, and
    whether a condition that is false leaves them as they were, whatever was found."""
    same, left = [], []
    for parts, elements in ((1, 5), (2, 1024), (3, 1025)):
        draw = torch.Generator().manual_seed(elements)
        found = torch.randn(parts, elements + 7, generator=draw)[:, :elements]
        for only_if in (None, torch.tensor(True)):
            for dtype in (torch.float64, torch.float32):  # the totals of sharded sums' windows are fp32
                total = torch.full((elements,), 1 / 3, dtype=dtype)
                expected = total.double()
                for part in found:
                    expected.add_(part)
                add_parts(total, found, only_if)
                same.append(torch.equal(total, expected.to(dtype)))
        total = torch.full((elements,), 1 / 3, dtype=torch.float64)
        add_parts(total, torch.full_like(found, torch.nan), torch.tensor(False))
        left.append(bool((total == 1 / 3).all()))
    return {"same": same, "left": left}


def scaled() -> list[bool]:
    """Around the border of blocks, and not as rows lie: whether records times factors are torch's to the bit, and
    whether a record that is left out becomes zeros, whatever it holds, and changes no other."""
    same = []
    for shape in ((3, 5, 7), (2, 64, 64), (3, 64, 65), (4, 130, 33)):
        draw = torch.Generator().manual_seed(shape[1])
        value, factors = torch.randn(shape, generator=draw).half(), torch.rand(shape[0], generator=draw)
        expected = torch.mul(value, factors.view(-1, 1, 1), out=torch.empty_like(value))
        same.append(torch.equal(scale(value, factors, None), expected))
        same.append(torch.equal(scale(value.transpose(1, 2), factors, None), expected.transpose(1, 2)))
        value[1], keep = torch.nan, torch.arange(shape[0]) != 1
        expected[1] = 0
        same.append(torch.equal(scale(value, factors, keep), expected))
    return same


ROW_FAULTS = (
    ("start += AT_ONCE", "start += AT_ONCE + 1"), ("== AT_ONCE\n", "< 0\n"), ("if row != before:", "if True:"),
    ("token[:, None] * width", "place[:, None] * width"),
)  # fmt: skip


def sums_of_rows(module: ModuleType) -> float:
    """How far the sums of an embedding's rows are from fp64, in units of their terms' rounding: rows that occur once,
    never, and more often than a program adds at a time."""
    worst = 0.0
    for tokens, width in ((1, 3), (40, 256), (150, 300)):
        draw = torch.Generator().manual_seed(tokens)
        rows = torch.where(torch.rand(tokens, generator=draw) < 0.4, 7, torch.randint(50, (tokens,), generator=draw))
        values = torch.randn(tokens, width, generator=draw)
        exact = torch.zeros(50, width, dtype=torch.float64).index_add_(0, rows, values.double())
        size = torch.zeros(50, width, dtype=torch.float64).index_add_(0, rows, values.double().abs())
        sums = module.row_sums(rows, values, 50)
        worst = max(worst, largest((sums - exact).abs() / (size * 1e-6).clamp(min=1e-30)))
    return worst


def far_apart() -> list[float]:
    """Parts whose distances pass 2^31 elements together. Memory in between is never touched, so it costs nothing."""
    apart = 1 << 30
    found = torch.empty(2 * apart + 5, dtype=torch.float32).as_strided((3, 5), (apart, 1))
    found.copy_(torch.arange(15.0).view(3, 5))
    total = torch.zeros(5, dtype=torch.float64)
    add_parts(total, found, None)
    return total.tolist()


def group_norms() -> list[dict[str, Any]]:
    """Groups of one tile and of several, in both directions; the last row holds a number that is none."""
    rows = []
    for groups, channels, positions in ((2, 3, 5), (1, 70, 9), (3, 2, 1100), (1, 6, 2050)):
        draw = torch.Generator().manual_seed(positions)
        x, gradient = torch.randn(2, 3, groups * channels, positions, generator=draw).unbind()
        x[2, -1, positions - 1] = torch.nan
        weight = torch.randn(groups * channels, generator=draw)
        extent = (3, groups * channels, positions, groups)
        _, mean, inverse = torch.native_group_norm(x.double() + 2, None, None, *extent, 1e-5)
        mean, inverse = (mean - 2).float(), inverse.float()
        below, scale, shift = group_norm_backward(x, gradient, mean, inverse, weight)
        none, *without = group_norm_backward(x, gradient, mean, inverse, weight, wanted=False)
        wide = [each.double() for each in (gradient, x, mean, inverse, weight)]
        expected = torch.ops.aten.native_group_norm_backward(*wide, *extent, [True, False, False])[0]
        normal = (wide[1].view(3, groups, -1) - wide[2].unsqueeze(2)) * wide[3].unsqueeze(2)
        terms = normal.view_as(x) * wide[0]
        last = torch.arange(len(weight)) >= len(weight) - channels
        assert below is not None
        rows.append({
            "scale": float(((scale - terms.sum(2)).abs() / terms.abs().sum(2))[:2].max()),
            "shift": float(((shift - wide[0].sum(2)).abs() / wide[0].abs().sum(2)).max()),
            "below": float((below - expected)[:2].norm() / expected[:2].norm()),
            "without": none is None and torch.equal(without[0][:2], scale[:2]) and torch.equal(without[1], shift),
            "nan": torch.equal(scale[2].isnan(), last) and not bool(scale[:2].isnan().any() or below[:2].isnan().any()),
        })  # fmt: skip
    return rows


def standardised_rows() -> list[dict[str, float]]:
    """Rows of one block and of several; whether one that vanishes in fp32 counts for what it may be. Squares alone take
    several rows at once: of more than a block of them, the rest would be the same programs a thousand times."""
    found = []
    for rows, elements, eps in ((1, 9, 1e-8), (5, 512, 1e-3), (3, 1153, 1.0), (1030, 4, 1e-8)):
        draw = torch.Generator().manual_seed(elements)
        by = Standardisation.of(torch.randn(1, rows, elements, generator=draw), None, eps)
        written = torch.randn(3, rows, elements, generator=draw) + 1
        written[2] *= 1e-22
        exact = Standardisation(by.direction.double(), by.scale.double())
        kernels.DEVICES = ()
        plain = exact.row_sums(written.double())
        expected = [torch.stack(exact.squares(sums)) for sums in (plain, plain * 1.5)]
        back = exact.back(written.double())
        kernels.DEVICES = ("cpu",)
        squares = [torch.stack(by.squares(of)) for of in (plain, plain * 1.5)]
        found.append(
            {"squares": max(float(((a - b).abs() / b[1]).max()) for a, b in zip(squares, expected, strict=True))}
        )
        if rows > 1024:
            continue
        sums, size = by.row_sums(written.clone()), written.double().abs()
        terms = torch.stack([size.square().sum(2), size.sum(2), (size * exact.direction.abs()).sum(2)])
        found[-1].update({
            "sums": float(((sums - plain).abs() / terms)[:, :2].max()),
            "back": max(
                float((by.back(written, dtype) - back).norm() / back.norm()) * unit
                for dtype, unit in ((None, 1e-6), (torch.float64, 1.0))
            ),
            "kept": float((sums[0, 2] / terms[0, 2]).max()),
        })  # fmt: skip
    return found


KERNELS = {
    name: getattr(kernels, name)
    for name in ("layer_norm_backward", "group_norm_backward", "scale", "row_sums", "standardised")
}


def clipped(which: str, all_kernels: bool) -> dict[str, Any]:
    """The whole engine in fp16, with the Gram kernel, or with all kernels, and without."""
    calls, sums, used = 0, 0, Counter[str]()

    def counted(left: Tensor, right: Tensor, part: int, bounds: Any, summed: bool) -> tuple[Tensor, ...]:
        nonlocal calls, sums
        calls, sums = calls + 1, sums + summed
        return gram(left, right, part, bounds, summed)

    def given(name: str, device: torch.device) -> Any:
        own = KERNELS[name](device) if all_kernels else None
        used[name] += own is not None
        return own

    if which == "resnet":
        model, inputs = CASES["big_transfer"].model(), CASES["big_transfer"].batch(6)
    else:
        model, inputs = build(SHAPE, cast(Objective, which)), nano_inputs(cast(Objective, which), 6)
    present, found = torch.ones(6, dtype=torch.bool), {}
    kernels.gram = lambda device: counted if device.type in kernels.DEVICES else None
    for name in KERNELS:
        setattr(kernels, name, partial(given, name))
    for devices in ((), ("cpu",)):
        kernels.DEVICES = devices
        clip = BookKeepingClip(ClipRule("flat", 0.5, 0.0), "fp16", hold=0.0)
        clip.prepare(model)
        totals, seen = clipped_totals(clip, model, inputs, present)
        found[bool(devices)] = torch.cat([t.flatten().double() for t in totals.values()]), seen.norms
    (plain, plain_norms), (fused, fused_norms) = found[False], found[True]
    return {
        "calls": calls, "sums": sums, "sum": float((fused - plain).norm() / plain.norm()),
        "norms": far(fused_norms, plain_norms), "used": used,
    }  # fmt: skip


if __name__ == "__main__":
    patch_once()
    print("RESULTS " + json.dumps({
        "fp16": products(torch.float16, PART), "fp32": products(torch.float32, PART, SHAPES[::2]),
        "parts": products(torch.float16, 16, SHAPES[1::3]), "not a number": not_a_number(),
        "planted": faulty(gram, GRAM_FAULTS, sums_of_tokens), "rows": faulty(row_sums, ROW_FAULTS, sums_of_rows),
        "layer norm": layer_norms(), "group norm": group_norms(), "standardised": standardised_rows(),
        "added": added(), "scaled": scaled(), "far apart": far_apart(),
        "clipped": {"mae": clipped("mae", False), "caption": clipped("caption", False)},
        "all": {each: clipped(each, True) for each in ("mae", "caption", "resnet")},
    }))  # fmt: skip
