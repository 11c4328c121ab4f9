"""Counts what a GPU would do for one micro-batch: kernels, bytes, operations, synchronisations, memory, and where.

    python tests/gpu/count.py table [--model mae/base --records 64]     prints the counts of the shipped recipes
    python tests/gpu/count.py refreeze --compiled                       commits to them (counted.json)
    python tests/gpu/count.py kernels --model mae/base --records 128    each kind of kernel by itself, as JSON

Everything runs on fake tensors of a pretended device (pretended.py). Bytes are those that a kernel reads and writes if
no cache helps it; views cost nothing. The Gram kernel is counted by the tiles that it would take. Each kernel is priced
by the rate of its kind (kinds.py, prices.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place or ".").resolve() != Path(__file__).parent)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import murmuration.train.clip.compiled as compiled  # noqa: E402
import murmuration.train.clip.kernels as kernels  # noqa: E402
import murmuration.train.clip.sums as sums  # noqa: E402
from murmuration.data.draw.micro_batch import MicroBatch  # noqa: E402
from murmuration.model.build import build  # noqa: E402
from murmuration.model.settings import ModelSettings  # noqa: E402
from murmuration.train.clip.bookkeeping import BookKeepingClip  # noqa: E402
from murmuration.train.clip.gram_triton import cut  # noqa: E402
from murmuration.train.clip.rule import ClipRule  # noqa: E402
from murmuration.train.engines.forward import PlainForward, PrivateForward  # noqa: E402
from murmuration.train.self_test.probes import synthetic_batch  # noqa: E402
from tests.gpu.kinds import PRODUCTS, attention, kind_of, precision, product  # noqa: E402
from tests.gpu.prices import FUSED, NOT_MEASURED, Kernel, Rates, in_lines  # noqa: E402

COUNTED = Path(__file__).with_name("counted.json")
COMPILED = "private, compiled"
GPU = torch.device("cuda", 0)
OBJECTIVES = {"mae": "mae", "captioner": "caption", "classifier": "classify"}
# Models of the shipped recipes at the micro-batches that they ship with.
CASES = {
    "mae/base": 256, "mae/large": 256, "captioner/base": 256, "captioner/large": 256, "classifier/base": 32,
    "classifier/r50x1": 32,
}  # fmt: skip

VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes",
    "unbind", "detach", "alias", "unsqueeze", "squeeze", "as_strided", "diagonal", "_reshape_alias", "lift_fresh",
    "narrow", "unfold", "view_as", "detach_", "chunk", "real",
}  # fmt: skip
NO_KERNEL = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device", "size", "dim", "is_pinned",
    "_has_same_storage_numel", "set_", "resize_", "lift", "record_stream", "sym_size", "sym_stride", "sym_numel",
}  # fmt: skip
WRITE_ONLY = {
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "full",
    "full_like",
    "fill_",
    "zero_",
    "new_zeros",
    "new_full",
}
CONVOLUTIONS = {"convolution", "convolution_backward"}
# What cannot go on without an answer from the device.
ASKING = {"nonzero", "is_nonzero", "equal", "masked_select"}


@dataclass
class Counts:
    kernels: int = 0
    each: Counter[Kernel] = field(default_factory=Counter)
    """How many kernels are alike."""
    bytes: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    """By the place that asked."""
    fed: Counter[str] = field(default_factory=Counter)
    """What comes from the host's memory, by place: a CUDA graph would replay what lay there once."""
    kernels_at: Counter[str] = field(default_factory=Counter)
    bytes_at: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    def seconds(self, rates: Rates) -> dict[str, float]:
        """As priced, by kind."""
        found: dict[str, float] = {}
        for kernel, times in self.each.items():
            found[kernel.kind] = found.get(kernel.kind, 0.0) + times * rates.seconds(kernel)
        return found

    def as_dict(self, rates: Rates) -> dict[str, Any]:
        flops = {kind: round(count / 1e9, 3) for kind, count in sorted(self.flops.items())}
        return {
            "kernels": self.kernels, "megabytes": round(self.bytes / 1e6, 1), "gigaflops": flops,
            "priced_ms": {kind: round(1e3 * seconds, 3) for kind, seconds in sorted(self.seconds(rates).items())},
            "syncs": dict(sorted(self.syncs.items())), "fed": dict(sorted(self.fed.items())),
            "peak_mib": round(self.peak / 2**20, 1),
            "kernels_at": dict(self.kernels_at.most_common()),
            "megabytes_at": {place: round(count / 1e6, 1) for place, count in self.bytes_at.most_common()},
        }  # fmt: skip


class Count(TorchDispatchMode):
    """Sees each operation that PyTorch sends to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counts()
        self._live = 0
        self._seen: Any = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            self.found.syncs[place()] += 1
            return {"any": False, "all": True}.get(getattr(args[0], "asked", ""), 0.0)
        if name in ASKING or (name == "index" and any(_is_mask(x) for x in tree_leaves(args[1]))):
            self.found.syncs[place()] += 1
        if name == "_to_copy" and _crosses(args[0], kwargs) and not kwargs.get("non_blocking"):
            self.found.syncs[place()] += 1
        out = func(*args, **kwargs)
        if _feeds(tree_leaves((args, kwargs)), out):
            self.found.fed[place()] += 1
        outs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for each in outs:
            self._hold(each)
            if name in ("any", "all"):
                each.asked = name  # pyright: ignore[reportAttributeAccessIssue]
        if name in VIEWS or name in NO_KERNEL or func._schema.name.startswith("prim::"):
            return out
        read = (args, {key: value for key, value in kwargs.items() if key != "out"})
        if name in CONVOLUTIONS:
            self._convolution(name, args, outs)
            return out
        self._kernel(name, [each for each in tree_leaves(read) if isinstance(each, Tensor)], outs)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen or tensor.device.type != "cuda":
            return
        self._seen[storage] = True
        size = storage.nbytes()
        self._live += size
        self.found.peak = max(self.found.peak, self._live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self._live -= size

    def _kernel(self, name: str, ins: list[Tensor], outs: list[Tensor]) -> None:
        if all(each.device.type != "cuda" for each in (*ins, *outs)):
            return
        moved = sum(map(touched, outs if name in WRITE_ONLY and outs else [*ins, *outs]))
        if name == "embedding":
            moved = 2 * sum(map(touched, outs))
        if name in PRODUCTS:
            kind, flops = product(ins, outs[0])
            self.add(Kernel(kind, moved, flops), f"product {precision(ins[-1])}", flops)
        elif "scaled_dot_product" in name:
            kind, flops, in_tiles = attention(name, ins)
            self.add(Kernel(kind, moved, in_tiles), "attention", flops)
        else:
            self.add(Kernel(kind_of(name, ins, outs), moved))

    def _convolution(self, name: str, args: Any, outs: list[Tensor]) -> None:
        """As many kernels as gradients are asked for; each reads its two operands and writes what it is for."""
        if name == "convolution":
            (out,), (x, weight) = outs, args[:2]
            self._convolved((x, weight, out), x, weight, out)
            return
        gradient, x, weight, mask = *args[:3], args[-1]
        for result, wanted in zip((x, weight), mask, strict=False):
            if wanted:
                self._convolved((x, weight, gradient), result, weight, gradient)

    def _convolved(self, moved: tuple[Tensor, ...], x: Tensor, weight: Tensor, out: Tensor) -> None:
        """A convolution from x to `out`; each of its gradients takes as many operations."""
        of, flops = precision(x), 2 * out.numel() * weight[0].numel()
        self.add(Kernel(f"convolution {of}", sum(map(touched, moved)), flops), f"product {of}", flops)

    def add(self, kernel: Kernel, work: str = "", flops: int = 0) -> None:
        """`flops`: operations, counted under `work`; tiles that a library pads are not counted, but priced."""
        where, found = place(), self.found
        found.each[kernel] += 1
        found.kernels += 1
        found.bytes += kernel.bytes
        found.kernels_at[where] += 1
        found.bytes_at[where] += kernel.bytes
        if flops:
            found.flops[work] += flops


def touched(tensor: Tensor) -> int:
    """Bytes of its own: an expanded side is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _crosses(tensor: Tensor, kwargs: dict[str, Any]) -> bool:
    """From the device to the host: the host waits."""
    target = kwargs.get("device")
    return tensor.device.type == "cuda" and target is not None and torch.device(target).type == "cpu"


def _feeds(ins: list[Any], out: Any) -> bool:
    """From the host to the device; numbers without a dimension are arguments of a kernel."""
    tensors = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    given = [each for each in ins if isinstance(each, Tensor)]
    to_device = any(each.device.type == "cuda" for each in tensors)
    whole = any(each.device.type == "cpu" and (each.dim() or len(given) == 1) for each in given)
    return to_device and whole


def place() -> str:
    """The innermost line of the product that is at work; autograd's own steps have none."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/murmuration/" in path or path.startswith((f"{ROOT}/train/", f"{ROOT}/model/")):
            inside = Path(path).resolve().relative_to(ROOT)
            return f"{inside}:{frame.f_code.co_name}"
        frame = frame.f_back  # pyright: ignore[reportAssignmentType]
    return "autograd"


def gram_stand_in(count: Count) -> Any:
    """What the Gram kernel returns, counted by the tiles that it takes."""

    def gram(left: Tensor, right: Tensor, part: int, bounds: Any, summed: bool = False) -> tuple[Tensor, ...]:
        records, tokens, rows = left.shape
        width, own = rows + right.shape[2], cut(tokens)
        issued = records * own.products * 2 * width
        of_strips = left.new_empty((records, own.strips, rows) if summed else 0, dtype=torch.float32)
        written = 2 * records * tokens * width + touched(of_strips)
        # With few tokens, a kernel waits for its operands.
        kernel = Kernel("gram, few tokens", written) if own.few else Kernel("gram", written, issued)
        count.add(kernel, "gram", issued)
        count.found.flops["gram that is needed"] += records * tokens * (tokens + 1) * width
        sums = of_strips if own.strips == 1 else left.new_empty((records, rows), dtype=torch.float32)
        again = touched(of_strips) + touched(sums) if summed and own.strips > 1 else 0
        count.add(Kernel("other", 8 * records * (own.programs + tokens) + again))  # one number of a record's parts
        found = torch.empty(3, records, dtype=torch.float64, device=GPU).unbind()
        return (*found, sums.view(records, rows)) if summed else found

    return gram


def layer_norm_stand_in(count: Count) -> Any:
    def backward(
        x: Tensor, gradient: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, records: int, wanted: bool = True
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        width = weight.numel()
        chunks = -(-x.numel() // (records * width * 64))
        parts = [torch.empty(records, chunks, width, device=GPU) for _ in range(2)]
        below = torch.empty_like(x) if wanted else None
        moved = sum(map(touched, [x, gradient, *parts, *([] if below is None else [below])]))
        count.add(Kernel("our layer norm backward", moved))
        return below, *(part.squeeze(1) if chunks == 1 else part.sum(1) for part in parts)

    return backward


def add_parts_stand_in(count: Count) -> Any:
    def add_parts(total: Tensor, found: Tensor, only_if: Tensor | None) -> None:
        count.add(Kernel("add parts", 2 * touched(total) + touched(found)))

    return add_parts


def scale_stand_in(count: Count) -> Any:
    def scale(value: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
        scaled = torch.empty_like(value, memory_format=torch.contiguous_format)
        count.add(Kernel("scale", touched(value) + touched(scaled)))
        return scaled

    return scale


def row_sums_stand_in(count: Count) -> Any:
    def row_sums(rows: Tensor, values: Tensor, table: int) -> Tensor:
        total = torch.zeros(table, values.shape[1], device=GPU)
        torch.sort(rows, stable=True)
        count.add(Kernel(NOT_MEASURED, 3 * touched(rows) + 2 * touched(values)))
        return total

    return row_sums


def group_norm_stand_in(count: Count) -> Any:
    def backward(
        x: Tensor, gradient: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, wanted: bool = True
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        scale, shift = (torch.empty(x.shape[:2], device=GPU) for _ in range(2))
        below = torch.empty_like(x) if wanted else None
        read = touched(x) + touched(gradient)
        written = sum(map(touched, [scale, shift, *([] if below is None else [below])]))
        count.add(Kernel("our group norm backward", read + written))
        return below, scale, shift

    return backward


def standardised_stand_in(count: Count) -> Any:
    def sums(written: Tensor, direction: Tensor) -> Tensor:
        found = torch.empty(3, *written.shape[:2], dtype=torch.float64, device=GPU)
        count.add(Kernel("standardised sums", sum(map(touched, (written, direction, found)))))
        return found

    def squares(found: Tensor, scale: Tensor, level: Tensor, size: Tensor, elements: int) -> Tensor:
        count.add(Kernel("other", touched(found)))
        return torch.empty(2, found.shape[1], dtype=torch.float64, device=GPU)

    def back(gradients: Tensor, direction: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        found = torch.empty(gradients.shape, dtype=dtype, device=GPU)
        count.add(Kernel("standardised back", sum(map(touched, (gradients, direction, found)))))
        return found

    return kernels.StandardisedKernels(sums, squares, back)


STAND_INS = {
    "gram": gram_stand_in, "layer_norm_backward": layer_norm_stand_in, "group_norm_backward": group_norm_stand_in,
    "scale": scale_stand_in, "row_sums": row_sums_stand_in, "standardised": standardised_stand_in,
}  # fmt: skip


def code_stand_in(count: Count, mode: FakeTensorMode) -> Any:
    """What the compiler's code of a block launches: PyTorch's own products and attention, and one kernel for each group
    of other operations that Inductor would fuse. It lowers and schedules them, and no code is written."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    def launched(part: Any) -> Any:
        given = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
        with V.set_fake_mode(mode):
            post_grad_passes(part, False)
            lowered = GraphLowering(part, example_inputs=given, is_inference=False)
            with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                lowered.run(*given)
                lowered._update_scheduler()
                nodes = [each for each in lowered.scheduler.nodes if not isinstance(each, NopKernelSchedulerNode)]
                others = [each for each in nodes if isinstance(each, ExternKernelSchedulerNode)]
                fused = [each.get_read_write_buffers_sizes() for each in nodes if each not in others]
        calls = [node for node in part.graph.nodes if _is_library_call(node)]
        launches = [each for each in others if not isinstance(each.node, MultiOutput)]
        assert len(calls) == len(launches), "a call of a library that is not counted"
        asked = {node: number for number, node in enumerate(part.graph.find_nodes(op="placeholder"))}

        def run(tensors: list[Tensor]) -> list[Tensor]:
            for moved in fused:
                count.add(Kernel(FUSED, moved))
            for node in calls:
                ins, outs = (
                    [x for x in tree_leaves(values) if isinstance(x, Tensor)]
                    for values in ([each.meta["val"] for each in node.all_input_nodes], node.meta["val"])
                )
                count._kernel(_name_of(node), ins, outs)
            made: dict[Any, Tensor] = {}
            for node in part.graph.output_node().args[0]:
                base = _seen_through_views(node)
                if base not in made:
                    own = base.meta["val"]
                    made[base] = (
                        tensors[asked[base]]
                        if base in asked
                        else torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=GPU)
                    )
            results = [(node.meta["val"], made[_seen_through_views(node)]) for node in part.graph.output_node().args[0]]
            tensors.clear()
            return [base.as_strided(x.shape, x.stride(), x.storage_offset()) for x, base in results]

        return run

    def both_ways(recorded: Any, like: list[Tensor], outputs: int, example: list[Tensor], lent: Sequence[int]) -> Any:
        del example
        forward, backward, taken = compiled.divided(recorded, like, outputs, lent)
        return compiled.Codes(launched(forward), launched(backward), taken)

    return both_ways


def _seen_through_views(node: Any) -> Any:
    while _name_of(of := node.args[0] if node.target is getitem else node) in VIEWS:
        node = of.args[0]
    return node


def _is_library_call(node: Any) -> bool:
    return _name_of(node) in PRODUCTS or "scaled_dot_product" in _name_of(node)


def _name_of(node: Any) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]


class _SameMode:
    """In the place of a recording's own mode: here, all tensors hold nothing already."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.from_tensor = mode, Tensor.detach

    def __enter__(self) -> FakeTensorMode:
        return self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


@contextmanager
def on_a_gpu() -> Iterator[FakeTensorMode]:
    """CUDA as PyTorch would find it, and tensors that hold nothing."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.current_device = lambda: 0
    torch.set_num_threads(1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def let_the_compiler_ask() -> None:
    """What Inductor asks of a device before it fuses anything."""
    from torch._dynamo.device_interface import CudaInterface

    about = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448, gcnArchName="",
        L2_cache_size=50 << 20, max_threads_per_block=1024,
    )  # fmt: skip
    torch.cuda.get_device_properties = torch.cuda._get_device_properties = lambda device=None: about
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device_count = lambda: 1
    CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: about)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 90)
    CudaInterface.is_triton_capable = staticmethod(lambda device=None: True)
    CudaInterface.raise_if_triton_unavailable = staticmethod(lambda device=None: None)


def shape_of(model: str) -> Any:
    family, size = model.split("/")
    settings: dict[str, Any] = {"family": family, "size": size}
    if family == "captioner":
        settings |= {"text_length": 40, "vocabulary": 32768}
    if family == "classifier":
        settings |= {"classes": 1000}
    return ModelSettings.model_validate(settings).resolved()


def counted(model: str, records: int, private: bool, blocks: bool = False) -> Counts:
    """One micro-batch as the engines make it, without what ranks do together. `blocks`: run as compiled code."""
    shape, objective = shape_of(model), OBJECTIVES[model.split("/")[0]]
    empty = build(shape, objective, device="meta")  # pyright: ignore[reportArgumentType]
    example = {
        name: (value.shape[1:], value.dtype) for name, value in synthetic_batch(shape, objective, 1, 0).inputs.items()
    }
    with on_a_gpu() as mode:
        body: nn.Module = empty.to_empty(device=GPU)
        inputs = {
            name: torch.empty((records, *size), dtype=dtype, device=GPU) for name, (size, dtype) in example.items()
        }
        batch = MicroBatch(inputs, torch.empty(records, dtype=torch.bool, device=GPU))
        count = Count()
        sums._add_parts = lambda: add_parts_stand_in(count)
        for name, stand_in in STAND_INS.items():
            setattr(kernels, name, partial(lambda kernel, device: kernel, stand_in(count)))
        if private:
            clip = BookKeepingClip(ClipRule("flat", 1.0, 1e-3), "bf16", compiled=records if blocks else 0)
            forward = PrivateForward(body, clip, graph=False)
            forward.begin(GPU)
            if clip.blocks is not None:
                let_the_compiler_ask()
                clip.blocks.compiler = code_stand_in(count, mode)
                compiled._without_values = lambda: _SameMode(mode)
                forward(batch.inputs, batch.present)  # which records the blocks
                assert not clip.blocks.why_not, clip.blocks.about()
                count.found = Counts()
            with count:
                forward(batch.inputs, batch.present)
                forward.observation()
        else:
            for parameter in body.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            with count:
                PlainForward(body, "bf16")(batch.inputs, batch.present).backward()
    return count.found


def sides(model: str, records: int, compiled: bool) -> dict[str, Counts]:
    """`compiled`: also private with compiled blocks, which a ResNet's are not."""
    names = ("plain", "private", *([COMPILED] if compiled and "r50" not in model else []))
    return {name: counted(model, records, name != "plain", name == COMPILED) for name in names}


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | micro-batch | kernels | GB | GFLOP of products | syncs | peak GiB | priced ms | ratio | compiled |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        plain, private = each["plain"], each["private"]
        compiled = f"{sum(each[COMPILED]['priced_ms'].values()):.1f}" if COMPILED in each else ""

        def pair(key: str, unit: float = 1.0, digits: int = 0, plain: Any = plain, private: Any = private) -> str:
            return f"{plain[key] / unit:,.{digits}f} → {private[key] / unit:,.{digits}f}"

        flops = [f"{sum(v for k, v in x['gigaflops'].items() if 'needed' not in k):,.0f}" for x in (plain, private)]
        syncs = [str(sum(x["syncs"].values())) for x in (plain, private)]
        times = [sum(x["priced_ms"].values()) for x in (plain, private)]
        lines.append(
            f"| {name} | {CASES.get(name, '')} | {pair('kernels')} | {pair('megabytes', 1e3, 1)} | "
            f"{' → '.join(flops)} | {' → '.join(syncs)} | {pair('peak_mib', 1024, 1)} | "
            f"{times[0]:.1f} → {times[1]:.1f} | {times[0] / times[1]:.2f} | {compiled} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("act", choices=("table", "refreeze", "json", "kernels"))
    parser.add_argument(
        "--model", action="append", help="mae/base, captioner/large, …; default: the models of the shipped recipes"
    )
    parser.add_argument("--records", type=int, help="of the micro-batch; default: as shipped")
    parser.add_argument("--compiled", action="store_true", help="count compiled blocks, too: a minute for each model")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        from tests.gpu.pretended import run

        done = run(Path(__file__), *sys.argv[1:], "--inside")
        sys.stderr.write(done.stderr)
        sys.stdout.write(done.stdout)
        sys.exit(done.returncode)
    cases = CASES if arguments.model is None else {
        name: arguments.records or CASES.get(name, 32) for name in arguments.model
    }  # fmt: skip
    counts = {name: sides(name, records, arguments.compiled) for name, records in cases.items()}
    if arguments.act == "kernels":
        each = {
            name: {side: [[*kernel, times] for kernel, times in found.each.items()] for side, found in own.items()}
            for name, own in counts.items()
        }
        print("KERNELS " + json.dumps(each))
        return
    rates = Rates.committed()
    found = {name: {side: each.as_dict(rates) for side, each in own.items()} for name, own in counts.items()}
    if arguments.act == "table":
        print(table(found))
    elif arguments.act == "json":
        print("COUNTED " + json.dumps(found))
    else:
        COUNTED.write_text(in_lines(found))


if __name__ == "__main__":
    main()
