"""The kernels for GPUs, as far as they can be seen without one: numbers by Triton's interpreter, code by ptxas."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import murmuration.train.clip
from murmuration.train.clip.norms import KERNEL_PART as PART
from tests.support.interpreted import results_of
from tests.support.kernel_code import compiled

if TYPE_CHECKING:
    from murmuration.train.clip.gram_triton import Cut

pytest.importorskip("triton", reason="this build of PyTorch comes without Triton")
ROUNDING = 1e-6
HALF = 2.0**-11
# What a program may share: on the smallest of the cards that bf16 runs on (compute capability 8.6, with the code for
# 8.0), and on Hopper.
MOST_SHARED = {80: 99 << 10, 90: 227 << 10}
ADDING = Path(murmuration.train.clip.__file__).with_name("add_parts_triton.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results_of(Path(__file__).with_name("clip_kernels_worker.py"))


@pytest.mark.parametrize(("precision", "shapes"), [("fp16", 15), ("fp32", 8), ("parts", 5)])
def test_sums_and_diagonals_are_those_of_the_products_at_every_border_of_tiles(
    found: dict[str, Any], precision: str, shapes: int
) -> None:
    rows = found[precision]
    assert len(rows) == shapes
    for row in rows:
        assert max(row["inner"], row["length"], row["doubted"]) <= ROUNDING, row


@pytest.mark.parametrize("precision", ["fp16", "fp32", "parts"])
def test_sums_over_tokens_are_within_the_rounding_of_additions_at_every_border_of_tiles(
    found: dict[str, Any], precision: str
) -> None:
    """Of either operand, and nothing else changes by them in any bit."""
    for row in found[precision]:
        assert row["sums"] <= 1 and row["alike"], row
    turned = [row["turned"] for row in found[precision] if row["turned"] is not None]
    assert all(far <= 1 for far in turned)
    assert bool(turned) == (precision != "fp32"), "in fp32, no kernel measures"


def test_sums_that_miss_tokens_or_mix_up_strips_and_records_are_found(found: dict[str, Any]) -> None:
    honest, *faulty = found["planted"]
    assert honest <= 1 and len(faulty) == 6
    assert min(faulty) > 2, faulty


def test_a_record_that_is_no_number_has_no_norm_and_its_neighbour_has_one(found: dict[str, Any]) -> None:
    assert all(found["not a number"])


def test_only_half_precision_takes_the_kernel_and_then_counts_with_numbers_cut_off(found: dict[str, Any]) -> None:
    for row in found["fp32"]:
        assert row["measured"] == 0 and row["doubt"] == 1, "the same operations, to the bit"
    for row in found["fp16"]:
        assert row["measured"] <= ROUNDING and row["doubt"] > 1, row
    assert any(row["measured"] > 0 for row in found["fp16"]), "other operations do not agree in every bit"


def test_a_layer_norm_s_scale_and_shift_are_summed_record_by_record(found: dict[str, Any]) -> None:
    assert len(found["layer norm"]) == 4
    for row in found["layer norm"]:
        assert row["scale"] <= ROUNDING and row["shift"] <= ROUNDING and row["nan"] and row["without"], row
        assert row["below"] <= 2e-5, "as PyTorch's own, to fp32"


def test_a_group_norm_s_scale_and_shift_are_summed_row_by_row(found: dict[str, Any]) -> None:
    assert len(found["group norm"]) == 4
    for row in found["group norm"]:
        assert row["scale"] <= ROUNDING and row["shift"] <= ROUNDING and row["nan"] and row["without"], row
        assert row["below"] <= 2e-5, "as PyTorch's own, to fp32"


def test_standardised_rows_are_summed_and_led_back_as_in_fp64(found: dict[str, Any]) -> None:
    assert len(found["standardised"]) == 4
    assert all(row["squares"] <= 1e-12 for row in found["standardised"]), "from the same sums, in fp64"
    for row in found["standardised"][:3]:
        assert row["sums"] <= ROUNDING, "of the sums of their terms' sizes"
        assert row["back"] <= 1e-12
        assert row["kept"] <= 1.2, "what is so small that it may vanish"


def test_parts_are_added_in_fp64_where_they_may_be(found: dict[str, Any]) -> None:
    assert len(found["added"]["same"]) == 12 and all(found["added"]["same"])
    assert len(found["added"]["left"]) == 3 and all(found["added"]["left"])


def test_records_are_scaled_as_by_torch_to_the_bit_and_those_left_out_are_zeros(found: dict[str, Any]) -> None:
    assert len(found["scaled"]) == 12 and all(found["scaled"])


def test_an_embedding_s_rows_are_summed_and_faults_in_that_are_found(found: dict[str, Any]) -> None:
    honest, *faulty = found["rows"]
    assert honest <= 1 and len(faulty) == 4
    assert min(faulty) > 10, faulty


def test_parts_are_found_beyond_the_reach_of_32_bits(found: dict[str, Any]) -> None:
    assert found["far apart"] == [15.0, 18.0, 21.0, 24.0, 27.0]


@pytest.mark.parametrize("model", ["mae", "caption"])
def test_clipped_sums_with_the_kernel_are_those_without(found: dict[str, Any], model: str) -> None:
    seen = found["clipped"][model]
    assert seen["calls"] >= 5, "once for every layer with tokens"
    assert seen["sums"] >= (4 if model == "mae" else 1), "a captioner's decoder has few biases"
    assert seen["sum"] <= ROUNDING and seen["norms"] <= ROUNDING
    # Another kernel's gradients of inputs differ in their last bits, and are then rounded to fp16 by the layers below.
    every = found["all"][model]
    assert every["sum"] <= HALF and every["norms"] <= HALF
    assert every["used"]["layer_norm_backward"] > 0


def test_a_residual_network_with_its_kernels_is_clipped_as_without(found: dict[str, Any]) -> None:
    every = found["all"]["resnet"]
    assert every["sum"] <= HALF and every["norms"] <= HALF
    assert every["used"]["group_norm_backward"] >= 4 and every["used"]["standardised"] >= 4


@functools.cache
def compiled_gram(kind: str, tokens: int, capability: int, summed: bool = True) -> tuple[Any, Cut]:
    from murmuration.train.clip import gram_triton

    own = gram_triton.cut(tokens)
    kernel: Any = gram_triton._few_tokens if own.few else gram_triton._many_tokens
    kinds = {"left": f"*{kind}", "right": f"*{kind}", "inner": "*fp64"}
    kinds |= dict.fromkeys(("left_sizes", "right_sizes", "sums"), "*fp32")
    constants: dict[str, Any] = {"PART": PART, "SUMMED": summed}
    if own.few:
        constants |= {"COLUMNS": own.padded}
    else:
        constants |= {"BLOCKS": own.blocks, "NEAR": gram_triton.NEAR, "PADDED": own.padded}
    # As at run time, where widths and strides are multiples of 16.
    aligned = [name for name in kernel.arg_names if name not in {*constants, "tokens", "rest"}]
    stages = gram_triton.FEW_STAGES if own.few else gram_triton.STAGES
    options = {"num_warps": gram_triton.WARPS, "num_stages": stages}
    return compiled(kernel, kinds, constants, capability, aligned, **options), own


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("kind", "tokens"), [("bf16", 50), ("bf16", 197), ("fp16", 300)])
def test_it_compiles_for_cards_to_tensor_cores(kind: str, tokens: int, capability: int) -> None:
    found, _ = compiled_gram(kind, tokens, capability)
    code = found.asm["ptx"]
    assert "wgmma.mma_async" in code or "mma.sync" in code
    assert capability < 90 or "wgmma.mma_async" in code, "Hopper's own instruction, for 64 rows"
    assert found.metadata.shared <= MOST_SHARED[capability]
    assert ".local" not in code and len(found.asm["cubin"]) > 1000


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", [50, 197])
def test_sums_load_nothing_that_the_products_do_not(tokens: int, capability: int) -> None:
    """The compiler could bring an operand from memory a second time, or in another way than the products want it."""
    moving = ("async_copy_global_to_local", "tt.load ", "local_alloc", "wgmma.mma_async", "mma.sync")
    counts = [
        {what: found.asm["ttgir"].count(what) + found.asm["ptx"].count(what) for what in moving}
        for found, _ in (compiled_gram("bf16", tokens, capability, summed) for summed in (False, True))
    ]
    assert counts[0] == counts[1] and counts[0]["async_copy_global_to_local"] > 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", [50, 197])
def test_parts_are_added_outside_the_tensor_cores(tokens: int, capability: int) -> None:
    """The compiler would rather let a product begin with the sum so far, which the bound on rounding does not allow."""
    found, _ = compiled_gram("bf16", tokens, capability)
    product = re.compile(r"(%\w+) = (?:tt\.dot|ttng\.warp_group_dot) %\w+, %\w+, (%[\w#]+) .* : \S*?<\d+x(\d+)xbf16")
    # Of each product that stands in the code, the columns that it ends a sum of.
    columns: dict[str, int] = {}
    most = 0
    for line in found.asm["ttgir"].splitlines():
        if (match := product.search(line)) is None:
            assert "tt.dot " not in line and "warp_group_dot " not in line, line
            for name in re.findall(r"(%\w+) = ", line):  # names come again, as those of what a loop carries
                columns.pop(name, None)
            continue
        ended, begun, own = match.groups()
        assert begun.startswith("%cst") or begun in columns, f"begins with the sum of earlier parts: {line}"
        columns[ended] = columns.get(begun, 0) + int(own)
        most = max(most, columns[ended])
    assert most == PART


@pytest.mark.parametrize("tokens", [40, 50, 197, 320, 255])
def test_the_products_that_are_issued_are_those_that_are_counted(tokens: int) -> None:
    """Each program's branches stand in the code once; all warps issue what stands there."""
    from murmuration.train.clip.gram_triton import NEAR, WARPS

    found, own = compiled_gram("bf16", tokens, 80)
    per_loop = found.asm["ptx"].count("mma.sync.aligned.m16n8k16") // 2 // (PART // 16)
    expected = own.products
    if not own.few:
        # Of blocks with as many earlier ones as are near, and of pairs of distant ones, there is one branch for all.
        block, pair = 64 * 64 + 64 * own.padded, 64 * 64
        alike = max(0, own.blocks - NEAR - 1)
        expected -= alike * (block + NEAR * pair) + max(0, alike * (alike + 1) // 2 - 1) * pair
    assert per_loop * WARPS * 16 * 8 == expected


@pytest.mark.parametrize(("tokens", "most"), [(197, 1.37), (257, 1.32), (50, 3.3), (16, 7.6)])
def test_few_products_are_computed_that_are_not_needed(tokens: int, most: float) -> None:
    from murmuration.train.clip.gram_triton import cut

    assert cut(tokens).products <= most * tokens * (tokens + 1) / 2


@pytest.mark.parametrize("strips", [1, 4])
def test_what_makes_one_number_of_the_tiles_compiles_too(strips: int) -> None:
    from murmuration.train.clip.gram_triton import COLUMNS, _finish

    constants = {"SHARE": 1e-5, "ADDED": 1e-5, "LOST_LEFT": 1e-38, "LOST_RIGHT": 1e-38, "PARTS": 16, "TOKENS": 256,
                 "STRIPS": strips, "COLUMNS": COLUMNS}  # fmt: skip
    kinds = {"inner": "*fp64", "left_sizes": "*fp32", "right_sizes": "*fp32", "found": "*fp64",
             "of_strips": "*fp32", "sums": "*fp32"}  # fmt: skip
    code = compiled(_finish, kinds, constants, 90).asm["ptx"]
    assert "fma.rn.f64" in code or "mul.rn.f64" in code, "in fp64"
    assert ("add.f32" in code) == (strips > 1), "sums of strips, and in ordinary additions"


def adding_kernel(source: Path, asked: bool, total: str = "*fp64") -> dict[str, str]:
    """The kernel of a file like add_parts_triton.py, compiled for a GPU."""
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    kinds = {"total": total, "found": "*fp32", "only_if": "*i1" if asked else total}
    return compiled(found._add_parts, kinds, {"ASKED": asked, "BLOCK": found.BLOCK}).asm


@pytest.mark.parametrize("total", ["*fp64", "*fp32"])
@pytest.mark.parametrize("asked", [True, False])
def test_what_adds_parts_compiles_to_fp64_without_spilling(asked: bool, total: str) -> None:
    code = adding_kernel(ADDING, asked, total)["ptx"]
    assert "add.f64" in code or "add.rn.f64" in code
    assert ".local" not in code


@pytest.mark.parametrize(
    ("written", "instead", "fault"),
    [
        ("", "", False),
        ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)", True),
        ("row += stride", "row = found + (_ + 1) * stride", True),
    ],
)  # fmt: skip
def test_no_place_is_computed_in_32_bits(tmp_path: Path, written: str, instead: str, fault: bool) -> None:
    """Totals and parts may have more than 2^31 elements, which no test can hold; a place that overflowed would add one
    record's gradient to another weight."""
    source = tmp_path / "adding.py"
    source.write_text(ADDING.read_text().replace(written, instead) if written else ADDING.read_text())
    assert source.read_text() != ADDING.read_text() or not written
    found = adding_kernel(source, True)["ttir"]
    narrow = re.findall(r"arith\.(?:muli|addi|shli) .* : (?:tensor<\w+xi32>|i32)\b", found)
    assert bool(narrow) == fault, narrow


@pytest.mark.parametrize("masked", [True, False])
def test_what_scales_records_compiles_and_reads_and_writes_many_halves_at_once(masked: bool) -> None:
    from murmuration.train.clip.triton_kernels import SCALE_BLOCK, SCALE_WARPS, _scale

    constants = {"MASKED": masked, "BLOCK": SCALE_BLOCK}
    kinds = {"value": "*bf16", "scaled": "*bf16", "factors": "*fp32", "keep": "*i1" if masked else "*bf16"}
    aligned = [name for name in _scale.arg_names if name not in constants]
    code = compiled(_scale, kinds, constants, aligned=aligned, num_warps=SCALE_WARPS).asm["ptx"]
    assert "ld.global.v4.b32" in code and "st.global.v4.b32" in code and ".local" not in code
    assert "mul.f32" in code and "cvt.rn.bf16" in code, "multiplied in fp32, rounded once to the nearest"


def test_what_sums_an_embedding_s_rows_compiles_to_ordinary_additions() -> None:
    """Without atomic ones, whose order is any."""
    from murmuration.train.clip.triton_kernels import AT_ONCE, ROW_BLOCK, _sum_rows

    kinds = {"rows": "*i64", "order": "*i64", "values": "*fp32", "total": "*fp32"}
    code = compiled(_sum_rows, kinds, {"AT_ONCE": AT_ONCE, "BLOCK": ROW_BLOCK}).asm["ptx"]
    assert "add.f32" in code and "atom" not in code and "red." not in code and ".local" not in code


@pytest.mark.parametrize("wanted", [True, False])
def test_the_backward_pass_of_a_layer_norm_compiles_without_spilling(wanted: bool) -> None:
    """At the widest of the recipes."""
    from murmuration.train.clip.triton_kernels import CHUNK, NORM_WARPS, _layer_norm_backward, rows_at_once

    constants = {"WANTED": wanted, "CHUNK": CHUNK, "ROWS": rows_at_once(2048), "WIDTH": 2048}
    tensors = dict.fromkeys(set(_layer_norm_backward.arg_names) - {*constants, "tokens", "width"}, "*fp32")
    found = compiled(_layer_norm_backward, tensors, constants, num_warps=NORM_WARPS)
    assert ".local" not in found.asm["ptx"] and found.metadata.shared <= MOST_SHARED[80]


def compiled_as(kernel: Any, constants: dict[str, Any], kinds: dict[str, str], **options: Any) -> Any:
    """Also as Triton compiles it anew where all numbers are 1, since it takes each 1 for a constant."""
    numbers = dict.fromkeys(set(kernel.arg_names) - constants.keys() - kinds.keys(), 1)
    compiled(kernel, kinds, constants | numbers, **options)
    return compiled(kernel, kinds, constants, **options)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(("channels", "positions"), [(2, 3136), (64, 49)])
def test_the_backward_pass_of_a_group_norm_compiles_without_spilling(
    channels: int, positions: int, wanted: bool
) -> None:
    """At the first and the last stage of a ResNet-50."""
    from murmuration.train.clip.triton_kernels import NORM_WARPS, _group_norm_backward, tile

    at_once, along = tile(channels, positions)
    constants = {"WANTED": wanted, "CHANNELS": at_once, "POSITIONS": along}
    tensors = ("x", "gradient", "mean", "inverse", "weight", "below", "scale", "shift")
    found = compiled_as(_group_norm_backward, constants, dict.fromkeys(tensors, "*fp32"), num_warps=NORM_WARPS)
    assert ".local" not in found.asm["ptx"] and found.metadata.shared <= MOST_SHARED[80]


def test_sums_over_standardised_rows_compile_with_places_of_64_bits() -> None:
    """A micro-batch's written gradients have more than 2^31 elements."""
    from murmuration.train.clip.standardised_triton import ALONG, _back, _squares, _sums

    sums = compiled_as(_sums, {"ALONG": ALONG}, {"written": "*fp32", "direction": "*fp32", "found": "*fp64"})
    kinds = {"found": "*fp64", "scale": "*fp32", "level": "*fp64", "size": "*fp64", "out": "*fp64"}
    squares = compiled_as(_squares, {"TINY": 1.2e-38, "ROWS": 1024}, kinds)
    kinds = {"gradient": "*fp32", "direction": "*fp32", "scale": "*fp32", "out": "*fp64"}
    for found in (sums, squares, compiled_as(_back, {"BLOCK": 1024}, kinds)):
        code = found.asm["ptx"]
        assert ".local" not in code and ("add.f64" in code or "add.rn.f64" in code)
    strided = re.findall(r"arith\.muli .* : i32\b", sums.asm["ttir"])
    assert not strided, "a record's place is its number times its size"


def test_what_is_summed_in_fp32_is_what_the_bound_allows() -> None:
    from murmuration.train.clip import standardised, standardised_triton

    assert standardised_triton.ALONG <= standardised.ALONG
