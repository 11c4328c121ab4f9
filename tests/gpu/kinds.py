"""What kind of kernel PyTorch runs for an operation: as fine as the names of the kernels on a GPU tell them apart."""

from __future__ import annotations

from math import ceil

from torch import Tensor, float32, float64

from tests.gpu.prices import NOT_MEASURED

# Products for which cuBLAS has no kernel that loads whole vectors.
UNALIGNED = "product half, unaligned"
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
COPIES = {"clone", "copy_", "_to_copy", "stack", "cat"}
# Fills, and copies what it was given into the slice.
OF_A_SLICE = "slice_backward"
# One pass over their operands. Rectified linear units are as fast as additions (GPU: 4.3 TB/s).
ELEMENTWISE = {*COPIES, "add", "add_", "relu", "relu_", "threshold_backward"}
BY_NAME = {
    "native_layer_norm": "layer norm", "native_layer_norm_backward": "layer norm backward", "gelu": "gelu",
    "gelu_backward": "gelu", "native_group_norm": "group norm", "native_group_norm_backward": "group norm backward",
    "im2col": "patches", "max_pool2d_with_indices": "max pool", "max_pool2d_with_indices_backward": "max pool",
    "sort": NOT_MEASURED,
}  # fmt: skip
# Rows and columns of a tile of attention, and the heads' width, as cuDNN's kernels state them in their names.
TILES = {"attention": (64, 128, 64), "attention backward": (64, 64, 64)}


def kind_of(name: str, ins: list[Tensor], outs: list[Tensor]) -> str:
    """Of an operation that is no product and no attention."""
    if name in BY_NAME:
        return BY_NAME[name]
    if name == "sum" and ins[0].dtype.itemsize == 2 and ins[0].dim() > 1:
        return "bias sum"
    types = {each.dtype for each in (*ins, *outs) if each.dim()}
    if name not in (*ELEMENTWISE, OF_A_SLICE) or float64 in types:
        return "other"
    dense = any(each.is_contiguous() or each.stride() == outs[0].stride() for each in ins)
    if name in (*COPIES, OF_A_SLICE) and not dense:
        return "strided copy"
    if name == OF_A_SLICE:
        return "other"
    # Halving has a kernel of its own, as fast as if types were equal.
    halving = name in COPIES and ins[0].dtype == float32 and outs[0].dtype.itemsize == 2
    return "elementwise" if len(types) == 1 or halving else "elementwise, two types"


def precision(tensor: Tensor) -> str:
    return {2: "half", 4: "fp32"}.get(tensor.dtype.itemsize, "fp64")


def product(ins: list[Tensor], out: Tensor) -> tuple[str, int]:
    """The kind, and how many operations."""
    one, two = [each for each in ins if each.dim() >= 2][-2:]
    batch = one.shape[0] if one.dim() == 3 else 1
    kind = f"product {precision(one)}"
    if kind == "product half" and not all(map(aligned, (one, two, out))):
        kind = UNALIGNED
    return kind, 2 * batch * one.shape[-2] * one.shape[-1] * two.shape[-1]


def aligned(matrix: Tensor) -> bool:
    """Whether each of its rows (or columns, if it is transposed) starts where whole vectors of 8 elements do."""
    rows, columns = matrix.shape[-2:]
    return (columns if matrix.stride(-1) == 1 else rows) % 8 == 0


def attention(name: str, ins: list[Tensor]) -> tuple[str, int, int]:
    """The kind, how many operations, and how many in whole tiles."""
    kind = "attention backward" if "backward" in name else "attention"
    query, key = ins[1:3] if "backward" in name else ins[:2]
    records, heads, tokens, width = query.shape
    others, each = key.shape[-2], (10 if "backward" in name else 4) * records * heads
    whole = [ceil(size / tile) * tile for size, tile in zip((tokens, others, width), TILES[kind], strict=True)]
    return kind, each * tokens * others * width, each * whole[0] * whole[1] * whole[2]
