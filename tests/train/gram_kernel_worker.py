"""Runs the Gram kernel in Triton's interpreter and says how far it is from fp64; needs TRITON_INTERPRET=1 at its start.

The interpreter has no bf16 for products: half precision is fp16 here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import murmuration.train.clip.norms as norms
from murmuration.model.build import Objective, build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.gram_triton import gram
from murmuration.train.clip.per_record import OuterProduct
from murmuration.train.clip.rule import ClipRule
from tests.support.train_helpers import SHAPE, nano_inputs

# Around the borders of tiles (16, 32, 64 tokens) and of steps along the width (32 and 64 numbers).
SHAPES = (
    (2, 7, 9),
    (16, 32, 64),
    (17, 33, 65),
    (50, 96, 33),
    (64, 64, 20),
    (65, 16, 16),
    (129, 40, 130),
    (197, 24, 70),
)


def far(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=1e-30)).max())


def products(dtype: torch.dtype, part: int) -> list[dict[str, Any]]:
    """`part` as the product has it, or so short that these widths have several."""
    rows = []
    for tokens, left_width, right_width in SHAPES:
        draw = torch.Generator().manual_seed(tokens)
        left = torch.randn(3, tokens, left_width, generator=draw).to(dtype)
        right = torch.randn(3, right_width, tokens, generator=draw).to(dtype).transpose(1, 2)  # not as rows lie
        inner, left_sizes, right_sizes = gram(left, right, part)
        wide_left, wide_right = left.double(), right.double()
        piece = OuterProduct("w", left, right, torch.Size((left_width, right_width)))
        norms.KERNEL_DEVICES = ()
        plain = norms.measure([piece, piece])
        norms.KERNEL_DEVICES = ("cpu",)
        fused = norms.measure([piece, piece])
        assert plain.doubt is not None and fused.doubt is not None
        rows.append({
            "tokens": tokens,
            "inner": far(inner, (wide_left.transpose(1, 2) @ wide_right).square().sum((1, 2))),
            "left": far(left_sizes, wide_left.square().sum(2)), "right": far(right_sizes, wide_right.square().sum(2)),
            "measured": far(fused.square, plain.square), "doubt": float((fused.doubt / plain.doubt).min()),
        })  # fmt: skip
    return rows


def clipped(objective: Objective) -> dict[str, Any]:
    """The whole engine in fp16, with the kernel and without."""
    model = build(SHAPE, objective)
    inputs, present = nano_inputs(objective, 6), torch.ones(6, dtype=torch.bool)
    calls = 0

    def counted(left: Tensor, right: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return gram(left, right, part)

    found = {}
    norms._kernel = lambda: counted
    for devices in ((), ("cpu",)):
        norms.KERNEL_DEVICES = devices
        clip = BookKeepingClip(ClipRule("flat", 0.5, 0.0), "fp16", hold=0.0)
        clip.prepare(model)
        totals, seen = clipped_totals(clip, model, inputs, present)
        found[bool(devices)] = torch.cat([t.flatten().double() for t in totals.values()]), seen.norms
    (plain, plain_norms), (fused, fused_norms) = found[False], found[True]
    return {"calls": calls, "sum": float((fused - plain).norm() / plain.norm()), "norms": far(fused_norms, plain_norms)}


if __name__ == "__main__":
    print("RESULTS " + json.dumps({
        "fp32": products(torch.float32, norms.PART), "fp16": products(torch.float16, norms.PART),
        "parts": products(torch.float16, 64),
        "clipped": {"mae": clipped("mae"), "caption": clipped("caption")},
    }))  # fmt: skip
