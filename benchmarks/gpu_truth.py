"""What must hold on a device before any of its numbers is worth having: each case says whether its claim holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from gpu_cases import Case, Found, Setting, batch_of, clip_of, model_of, shape_of
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip import kernels, norms
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.engine import ClipEngine, assert_exact_matmul, clipped_totals
from murmuration.train.clip.per_record import OuterProduct, TokenSum
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.standardised import ALONG, Standardisation
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.noise import chacha
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise

# Records, tokens, columns, rows: those of the recipes' layers, borders of tiles, and a vocabulary.
PRODUCTS = ((8, 50, 768, 768), (8, 197, 512, 2048), (4, 257, 1024, 4096), (4, 40, 768, 32768), (5, 65, 33, 130))
SMALL = ((3, 7, 9, 5), (2, 20, 16, 24))
# Records, channels, positions: the first and the last stage of a ResNet-50; and of its convolutions, rows and elements
# of one.
GROUPS, GROUPED = 32, ((8, 64, 3136), (8, 256, 3136), (8, 2048, 49))
ROWS = ((8, 64, 147), (8, 512, 4608), (1, 2048, 512))
SIGMA, ELEMENTS = 1.5, 1_000_003


def cases(setting: Setting) -> Iterator[Case]:
    for size in SMALL if setting.smoke else PRODUCTS:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"norms {'x'.join(map(str, size))} {str(dtype)[6:]}"
            yield Case(name, partial(norms_within_their_doubt, size, dtype, setting))
        yield Case(f"layer norm {'x'.join(map(str, size))}", partial(layer_norm_sums, size, setting))
    for size in ((2, 64, 9),) if setting.smoke else GROUPED:
        yield Case(f"group norm {'x'.join(map(str, size))}", partial(group_norm_sums, size, setting))
    for size in ((2, 5, 520),) if setting.smoke else ROWS:
        yield Case(f"standardised {'x'.join(map(str, size))}", partial(standardised_sums, size, setting))
    for model in setting.models:
        for precision in ("fp32", "bf16"):
            yield Case(f"brute force {model} {precision}", partial(as_brute_force, model, precision, setting))
        yield Case(f"order of rows {model}", partial(order_of_rows, model, setting))
        yield Case(f"doubtful {model}", partial(doubtful, model, setting))
        yield Case(f"repeated {model}", partial(repeated, model, setting))
        yield Case(f"added later {model}", partial(added_later, model, setting))
        yield Case(f"replayed {model}", partial(replayed, model, setting))
    yield Case("chacha20 words", partial(chacha_words, setting))
    yield Case("noise", partial(noise_is_what_is_planned, setting))


def norms_within_their_doubt(size: tuple[int, int, int, int], dtype: torch.dtype, setting: Setting) -> Found:
    """Squares as the device's kernel gives them, no further from fp64 than the doubt that it states; and a bias's sums
    over tokens, no further than additions in fp32 may be."""
    records, tokens, columns, rows = size
    draw = torch.Generator().manual_seed(1)
    left = torch.randn(records, tokens, columns, generator=draw).to(setting.device, dtype)
    right = torch.randn(records, tokens, rows, generator=draw).to(setting.device, dtype)
    right[0] -= right[0].double().mean(0).to(dtype)  # a record whose tokens cancel
    piece = OuterProduct("w", left, right, torch.Size((columns, rows)))
    found = norms.measure([piece], over=right)
    far = _far_from_sum(found.sums, right)
    exact = _squares(left, right)
    off = (found.square.double() - exact).abs()
    doubt = torch.zeros_like(off) if found.doubt is None else found.doubt
    return {
        "holds": bool((off <= doubt + 1e-9 * exact).all()) and far <= 1,
        "largest_error": float((off / exact).max()), "largest_doubt": float((doubt / exact).max()),
        "sums_by_kernel": found.sums is not None, "sums_error": far,
    }  # fmt: skip


def _far_from_sum(sums: Tensor | None, over: Tensor) -> float:
    """In units of what T - 1 additions in fp32 may do."""
    found = TokenSum("b", over, over.shape[2:]).taken(sums).value
    steps = (over.shape[1] - 1) * torch.finfo(torch.float32).eps / 2
    exact, size = over.double().sum(1), over.double().abs().sum(1)
    return float(((found - exact).abs() / (size * steps / (1 - steps))).max())


def _squares(left: Tensor, right: Tensor) -> Tensor:
    """In fp64 on the device, one record at a time."""
    return torch.stack([(a.double().T @ g.double()).square().sum() for a, g in zip(left, right, strict=True)])


def layer_norm_sums(size: tuple[int, int, int, int], setting: Setting) -> Found:
    records, tokens, width, _ = size
    draw = torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(records, tokens, width, generator=draw).to(setting.device) for _ in range(2))
    mean, inverse = x.mean(2, keepdim=True), x.var(2, keepdim=True).add(1e-5).rsqrt()
    kernel = kernels.layer_norm_backward(setting.device)
    if kernel is None:
        return {"skipped": "no kernel on this device"}
    weight = torch.randn(width, generator=draw).to(setting.device)
    wide = [each.double() for each in (gradient, x, mean, inverse, weight)]
    below = torch.ops.aten.native_layer_norm_backward(
        wide[0], wide[1], [width], wide[2], wide[3], wide[4], None, [True, False, False]
    )[0]
    exact = below, ((wide[1] - wide[2]) * wide[3] * wide[0]).sum(1), wide[0].sum(1)
    far = [
        float((found.double() - true).abs().max() / true.abs().max())
        for found, true in zip(kernel(x, gradient, mean, inverse, weight, records), exact, strict=True)
    ]
    return {"holds": all(x < 1e-4 for x in far), "input_error": far[0], "scale_error": far[1], "shift_error": far[2]}


def group_norm_sums(size: tuple[int, int, int], setting: Setting) -> Found:
    (records, channels, _), draw = size, torch.Generator().manual_seed(2)
    kernel = kernels.group_norm_backward(setting.device)
    if kernel is None:
        return {"skipped": "no kernel on this device"}
    x, gradient = (torch.randn(size, generator=draw).to(setting.device) for _ in range(2))
    weight, extent = torch.randn(channels, generator=draw).to(setting.device), (*size, GROUPS)
    _, mean, inverse = torch.native_group_norm(x, None, None, *extent, 1e-5)
    wide = [each.double() for each in (gradient, x, mean, inverse, weight)]
    normal = (wide[1].view(records, GROUPS, -1) - wide[2].unsqueeze(2)) * wide[3].unsqueeze(2)
    exact = (
        torch.ops.aten.native_group_norm_backward(*wide, *extent, [True, False, False])[0],
        (normal.view_as(x) * wide[0]).sum(2), wide[0].sum(2),
    )  # fmt: skip
    far = [
        float((found.double() - true).abs().max() / true.abs().max())
        for found, true in zip(kernel(x, gradient, mean, inverse, weight), exact, strict=True)
    ]
    return {"holds": all(x < 1e-4 for x in far), "input_error": far[0], "scale_error": far[1], "shift_error": far[2]}


def standardised_sums(size: tuple[int, int, int], setting: Setting) -> Found:
    """Sums over rows in fp32, within the rounding that is allowed for them; and the Jacobian in fp64."""
    if kernels.standardised(setting.device) is None:
        return {"skipped": "no kernel on this device"}
    draw = torch.Generator().manual_seed(2)
    by = Standardisation.of(torch.randn(1, *size[1:], generator=draw).to(setting.device), None, 1e-8)
    there = Standardisation(by.direction.cpu().double(), by.scale.cpu().double())
    written = torch.randn(size, generator=draw)
    terms = written.double().abs()
    sizes = torch.stack([terms.square().sum(2), terms.sum(2), (terms * there.direction.abs()).sum(2)])
    exact, whole = there.row_sums(written.double()), there.back(written.double())
    sums = by.row_sums(written.to(setting.device))
    far = float(((sums.cpu() - exact).abs() / sizes).max())
    squares = [torch.stack(each).cpu() for each in (by.squares(sums), there.squares(sums.cpu()))]
    off = float(((squares[0] - squares[1]).abs() / squares[1][1]).max())
    back = float((by.back(written.to(setting.device), torch.float64).cpu() - whole).norm() / whole.norm())
    holds = far < ALONG * torch.finfo(torch.float32).eps / 2 and off < 1e-10 and back < 1e-6
    return {"holds": holds, "sums_error": far, "largest_error": off, "input_error": back}


def as_brute_force(model: str, precision: str, setting: Setting) -> Found:
    """The check of every start: records by the engine against plain autograd, one at a time, on this device."""
    assert_exact_matmul()  # as the engines of runs do
    clip, body = clip_of(4, precision), model_of(model).to(setting.device)
    clip.prepare(body)
    batch = batch_of(model, 4, setting)
    try:
        check_gradients(clip, body, batch.inputs, batch.present)
    except ClipError as error:
        return {"holds": False, "why": str(error)}
    return {"holds": True}


def order_of_rows(model: str, setting: Setting) -> Found:
    """The same records in another order, and with another record in one row: what others add must not move."""
    body, clip, batch = _prepared(model, 16, setting)
    turned = MicroBatch({name: x.flip(0) for name, x in batch.inputs.items()}, batch.present.flip(0))
    blanked = batch.present.clone()
    blanked[3] = False
    first, second, without = (_summed(clip, body, each) for each in (batch, turned, MicroBatch(batch.inputs, blanked)))
    order, one = _apart(first, second), _apart(first, without)
    return {"holds": order < clip.rule.allowance and one <= 1.0, "order": order, "one_record": one}


def doubtful(model: str, setting: Setting) -> Found:
    """The share of records whose gradients must be written out, at the recipe's real widths: none."""
    body, clip, batch = _prepared(model, 16, setting)
    shape = shape_of(model)
    if "tokens" in batch.inputs:
        for record, length in enumerate(torch.linspace(4, shape.text_length, 16).int().tolist()):
            batch.inputs["tokens"][record, length:] = 0
    _, found = clipped_totals(clip, body, batch.inputs, batch.present)
    share = 0.0 if found.doubtful is None else float(found.doubtful.double().mean())
    return {"holds": share == 0.0, "share": share}


def repeated(model: str, setting: Setting) -> Found:
    """The same micro-batch twice. Bits may differ where a kernel adds in any order; the sum must not notice."""
    body, clip, batch = _prepared(model, 16, setting)
    first, second = (_summed(clip, body, batch) for _ in range(2))
    apart = _apart(first, second)
    equal = all(torch.equal(first[name], second[name]) for name in first)
    return {"holds": apart < clip.rule.allowance, "bit_equal": equal, "apart": apart}


def added_later(model: str, setting: Setting) -> Found:
    """Sums that are added on a condition which the host reads later, against sums after asking; one micro-batch has a
    record that is no number, so it must be computed again. Bits are equal where kernels repeat."""
    totals = []
    for defer in (True, False):
        body, clip, batch = _prepared(model, 16, setting)
        forward = PrivateForward(body, clip, defer=defer, graph=False)
        forward.begin(setting.device)
        broken = {name: x.clone() for name, x in batch.inputs.items()}
        broken["images"][3] = math.nan
        for inputs in (batch.inputs, broken, batch.inputs):
            forward(inputs, batch.present)
        forward.settle()
        totals.append(forward.exact_sums.totals)
    apart = _apart(*totals)
    return {"holds": apart < forward.clip.rule.allowance, "apart": apart}


def replayed(model: str, setting: Setting) -> Found:
    """Micro-batches that are replayed as a CUDA graph, against those that are not, while the weights move."""
    if setting.device.type != "cuda":
        return {"skipped": "there is no GPU"}
    totals, how = [], ""
    for graph in (True, False):
        body, clip, batch = _prepared(model, 16, setting)
        forward = PrivateForward(body, clip, graph=graph)
        forward.begin(setting.device)
        for _ in range(3):
            forward(batch.inputs, batch.present)
            with torch.no_grad():
                for parameter in body.parameters():
                    parameter.mul_(0.99)
        forward.settle()
        totals.append(forward.sums.totals)
        how = forward.about_graph() if graph else how
    apart = _apart(*totals)
    return {"holds": apart < clip_of(16).rule.allowance, "apart": apart, "how": how}


def chacha_words(setting: Setting) -> Found:
    """The keystream on the device, by its kernel and by torch, against the processor's, bit by bit."""
    fixed = chacha.fixed_words(bytes(range(32)), 7, torch.device("cpu"))
    block, parameter = torch.arange(2**32 - 500, 2**32 + 500), torch.arange(1000) % 3
    true = chacha.keystream(fixed, block, parameter)
    ways = {"torch": chacha.keystream}
    if setting.device.type in chacha.KERNEL_DEVICES and (kernel := chacha._kernel()) is not None:
        ways["kernel"] = kernel
    moved = [x.to(setting.device) for x in (fixed, block, parameter)]
    equal = {name: torch.equal(way(*moved).cpu(), true) for name, way in ways.items()}
    return {"holds": all(equal.values()), **equal}


def noise_is_what_is_planned(setting: Setting) -> Found:
    """Deviation, and the device's ChaCha20 draw against the processor's: at most the last bits differ."""
    fragments = [Fragment("w", 3, 5, 20_003 if setting.smoke else ELEMENTS, 0)]
    found: Found = {}
    key = bytes(range(32))
    for mechanism in (ChaChaNoise(key, SIGMA, 1.0), AESNoise(key, SIGMA, 1.0)):
        drawn = torch.cat([noise.double() for _, noise in mechanism.chunks(9, fragments, setting.device)])
        found[f"sigma {mechanism.generator}"] = float(drawn.square().mean().sqrt()) / SIGMA
        if mechanism.generator == ChaChaNoise.generator:
            here = torch.cat([noise for _, noise in mechanism.chunks(9, fragments, torch.device("cpu"))])
            found["differs_from_cpu_by"] = float((drawn.cpu() - here).abs().max())
    error = 5 / math.sqrt(2 * fragments[0].length)
    fits = all(abs(value - 1) < error for name, value in found.items() if name.startswith("sigma"))
    return found | {"holds": fits and found["differs_from_cpu_by"] < 1e-13 * SIGMA}


def _prepared(model: str, records: int, setting: Setting) -> tuple[nn.Module, ClipEngine, MicroBatch]:
    body = model_of(model).to(setting.device)
    clip = clip_of(records)
    clip.prepare(body)
    return body, clip, batch_of(model, records, setting)


def _summed(clip: ClipEngine, body: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
    return clipped_totals(clip, body, batch.inputs, batch.present)[0]


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """In units of C, which is 1."""
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))
