"""The kernel for GPUs, as far as it can be seen without one: its numbers by Triton's interpreter, its code by ptxas."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import murmuration.train.clip
from tests.support.interpreted import results_of

pytest.importorskip("triton", reason="this build of PyTorch comes without Triton")
ROUNDING = 1e-6
HALF = 2.0**-11
# What a program may share on the smallest of the cards that bf16 runs on (compute capability 8.6).
MOST_SHARED = 99 << 10
ADDING = Path(murmuration.train.clip.__file__).with_name("add_parts_triton.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results_of(Path(__file__).with_name("gram_kernel_worker.py"))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "parts"])
def test_sums_and_diagonals_are_those_of_the_products_at_every_border_of_tiles(
    found: dict[str, Any], precision: str
) -> None:
    rows = found[precision]
    assert len(rows) == 8
    for row in rows:
        assert max(row["inner"], row["length"], row["doubted"]) <= ROUNDING, row


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


def test_parts_are_added_in_fp64_where_they_may_be(found: dict[str, Any]) -> None:
    assert len(found["added"]["same"]) == 12 and all(found["added"]["same"])
    assert len(found["added"]["left"]) == 3 and all(found["added"]["left"])


def test_parts_are_found_beyond_the_reach_of_32_bits(found: dict[str, Any]) -> None:
    assert found["far apart"] == [15.0, 18.0, 21.0, 24.0, 27.0]


@pytest.mark.parametrize("model", ["mae", "caption"])
def test_clipped_sums_with_the_kernel_are_those_without(found: dict[str, Any], model: str) -> None:
    seen = found["clipped"][model]
    assert seen["calls"] >= 5, "once for every layer with tokens"
    assert seen["sum"] <= ROUNDING and seen["norms"] <= ROUNDING
    # Another kernel's gradients of inputs differ in their last bits, and are then rounded to fp16 by the layers below.
    every = found["all"][model]
    assert every["sum"] <= HALF and every["norms"] <= HALF


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("kind", "tile"), [("bf16", 16), ("bf16", 64), ("fp16", 64)])
def test_it_compiles_for_cards_to_tensor_cores_without_spilling(kind: str, tile: int, capability: int) -> None:
    """By Triton's compiler and NVIDIA's assembler, which need no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from murmuration.train.clip.gram_triton import STAGES, WARPS, _tile_pair

    pointers = {"left": kind, "right": kind, "inner": "fp32", "left_sizes": "fp32", "right_sizes": "fp32"}
    constants = {"TILE": tile, "DEPTH": 64, "PART": 64}
    names: list[str] = _tile_pair.arg_names
    signature = {name: f"*{pointers[name]}" if name in pointers else "i32" for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    # As at run time, where widths and strides are multiples of 16.
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in {*constants, "tokens"}
    }
    compiled = triton.compile(
        ASTSource(_tile_pair, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS, "num_stages": STAGES},
    )  # fmt: skip
    code = compiled.asm["ptx"]
    assert "wgmma.mma_async" in code or "mma.sync" in code
    assert capability < 90 or tile < 64 or "wgmma.mma_async" in code, "Hopper's own instruction, from 64 rows on"
    assert compiled.metadata.shared <= MOST_SHARED
    assert ".local" not in code and len(compiled.asm["cubin"]) > 1000


def test_what_makes_one_number_of_the_tiles_compiles_too() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from murmuration.train.clip.gram_triton import _finish

    constants = {"SHARE": 1e-5, "ADDED": 1e-5, "LOST_LEFT": 1e-38, "LOST_RIGHT": 1e-38, "PAIRS": 16, "TOKENS": 256}
    pointers = dict.fromkeys(("inner", "left_sizes", "right_sizes"), "*fp32") | {"found": "*fp64"}
    names: list[str] = _finish.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(_finish, signature, values), target=GPUTarget("cuda", 90, 32))
    assert "fma.rn.f64" in compiled.asm["ptx"] or "mul.rn.f64" in compiled.asm["ptx"], "in fp64"


def adding_kernel(source: Path, asked: bool, total: str = "*fp64") -> dict[str, str]:
    """The kernel of a file like add_parts_triton.py, compiled for a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    names: list[str] = found._add_parts.arg_names
    constants = {"ASKED": asked, "BLOCK": found.BLOCK}
    pointers = {"total": total, "found": "*fp32", "only_if": "*i1" if asked else total}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(found._add_parts, signature, values), target=GPUTarget("cuda", 80, 32)).asm


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


@pytest.mark.parametrize("wanted", [True, False])
def test_the_backward_pass_of_a_layer_norm_compiles_without_spilling(wanted: bool) -> None:
    """At the widest of the recipes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from murmuration.train.clip.layer_norm_triton import CHUNK, ROWS, WARPS, _backward

    names: list[str] = _backward.arg_names
    constants = {"WANTED": wanted, "CHUNK": CHUNK, "ROWS": ROWS, "WIDTH": 2048}
    signature = {name: "constexpr" if name in constants else "*fp32" for name in names}
    signature |= {"tokens": "i32", "width": "i32"}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(_backward, signature, values), target=GPUTarget("cuda", 80, 32), options={"num_warps": WARPS}
    )
    assert ".local" not in compiled.asm["ptx"] and compiled.metadata.shared <= MOST_SHARED
