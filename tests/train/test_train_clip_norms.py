"""Every way to a norm gives the norm, and terms that may cancel leave a doubt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.train.clip.norms import (
    KERNEL_PART,
    PART,
    STRIPS_FROM,
    chain,
    cut_off,
    gram_is_cheaper,
    measure,
    measure_affine,
)
from murmuration.train.clip.per_record import Dense, OuterProduct, squared_length


@settings(max_examples=60, deadline=None)
@given(
    records=st.integers(1, 4), tokens=st.integers(1, 2 * STRIPS_FROM), rows=st.integers(1, 9),
    columns=st.integers(1, 9), sparse=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_every_way_to_a_norm_gives_the_norm(
    records: int, tokens: int, rows: int, columns: int, sparse: bool, seed: int
) -> None:
    """Closed form, Gram matrices whole and in strips, and written out: of one use and of two, against fp64."""
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(records, tokens, rows, generator=draw)
    left = torch.randint(0, rows, (records, tokens), generator=draw) if sparse else dense
    one = OuterProduct("w", left, torch.randn(records, tokens, columns, generator=draw), torch.Size((rows, columns)))
    other = OuterProduct("w", dense[:, :1], torch.randn(records, 1, columns, generator=draw), one.shape)
    whole = Dense("w", torch.randn(records, rows, columns, generator=draw))
    for pieces in ([one], [one, other], [other, one, one], [one, whole]):
        exact = torch.stack([piece.instances(slice(None), torch.float64) for piece in pieces]).sum(0)
        expected = exact.flatten(1).square().sum(1)
        found = measure(list(pieces))
        trace = torch.stack([piece.spread().sqrt() for piece in pieces]).sum(0).square()
        # A doubt is an estimate; four times it is far inside what C is lowered by (1e-4 of a square calls for fp64).
        assert bool(((found.square - expected).abs() <= 4 * found.doubt + 1e-6 * expected).all())
        cancels = len(pieces) > 1 or tokens > 1
        least = 1e-7 * (trace * found.square.clamp(min=0.0)).sqrt()
        assert not cancels or bool((found.doubt >= least).all()), "terms that may cancel leave a doubt"


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("width", [8, 640])
def test_every_doubt_holds_what_additions_do_to_the_sum_of_a_record_s_own_tokens(width: int, uses: int) -> None:
    """Written out where it is narrow, by Gram matrices where it is wide; all tokens alike, so that rounding adds up."""
    tokens = 300
    piece = OuterProduct("w", torch.ones(2, tokens, width), torch.ones(2, tokens, width), torch.Size((width, width)))
    assert gram_is_cheaper(piece) is (width == 640)
    found = measure([piece] * uses)
    length = float(uses * tokens * width)
    assert torch.allclose(found.square.sqrt(), torch.tensor(length).double(), rtol=1e-6)
    error = tokens * torch.finfo(torch.float32).eps * length
    assert found.doubt is not None and bool((found.doubt >= (2 * length + error) * error).all())


def test_what_is_measured_without_the_kernel_is_within_its_bound() -> None:
    """Where a weight is used twice, the kernel's bound also stands for what the uses have in common."""
    unit = torch.finfo(torch.float32).eps / 2
    assert PART > KERNEL_PART
    assert all(chain(parts * PART, unit) == (PART + parts - 1) * unit for parts in (1, 2, 9)), "one addition per part"
    assert all(chain(width, unit) <= cut_off(width) for width in (*range(1, 2 * PART + 2), 768, 32768, 50257))


@pytest.mark.parametrize("lengths", [True, False])
def test_a_weight_and_its_bias_share_what_is_measured(lengths: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    gradient = torch.randn(5, 1, 7, generator=draw)
    weight = OuterProduct("w", gradient, torch.randn(5, 1, 9, generator=draw), torch.Size((7, 9)))
    together = measure_affine(weight, lengths)
    alone, bias = measure([weight], lengths), measure([Dense("b", gradient.squeeze(1))], lengths)
    assert torch.allclose(together.square, alone.square + bias.square, rtol=1e-12)
    assert together.doubt is not None and alone.doubt is not None and torch.equal(together.doubt, alone.doubt)
    assert (together.length is None) is not lengths
    assert together.length is None or torch.equal(together.length, alone.length)  # pyright: ignore[reportArgumentType]


def test_norms_of_millions_of_elements_are_added_up_in_stretches() -> None:
    """fp32 squares, one after the other, are 0.2 % short at two million."""
    value = torch.full((2, 2_400_001), 1.0371)
    expected = 2_400_001 * float(value[0, 0]) ** 2
    assert torch.allclose(squared_length(value), torch.tensor(expected).double(), rtol=1e-5)
    few = torch.arange(24.0).view(2, 3, 4)
    assert torch.allclose(squared_length(few), few.double().square().sum(-1), rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(2, 400), width=st.sampled_from([64, 65, 384, 768, 1536]), kinds=st.integers(1, 3),
    uses=st.integers(1, 2), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_the_bound_holds_for_tokens_that_repeat_and_cancel(
    tokens: int, width: int, kinds: int, uses: int, seed: int
) -> None:
    """Products of equal tokens are rounded equally, so their errors add up, however many there are."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.rand(kinds, 1, generator=draw).expand(kinds, width) + 0.5
    kind = torch.arange(tokens) * kinds // tokens
    sign = torch.where(torch.arange(tokens) < tokens // 2, 1.0, -1.0)
    pieces = [
        OuterProduct("w", values[kind].unsqueeze(0), sign[None, :, None].expand(1, tokens, 8), torch.Size((width, 8)))
        for _ in range(uses)
    ]
    exact = sum(piece.instances(slice(None), torch.float64) for piece in pieces).square().sum()  # pyright: ignore
    found = measure(list(pieces))
    assert found.doubt is not None
    assert abs(float(found.square) - float(exact)) <= float(found.doubt)
