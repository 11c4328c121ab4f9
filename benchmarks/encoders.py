"""Which encoders of timm can be trained record by record, at toy size: `model.family = "timm"`.

    python benchmarks/encoders.py                    # all names; those that are in the results are skipped
    python benchmarks/encoders.py convnext xcit      # only names that contain one of these words, measured again
    python benchmarks/encoders.py --page             # writes docs/encoders.md from the results

For each name the smallest size that its constructor allows is built as a classifier of five classes, as a run would
build it. Then the book-keeping engine's clipped sum of three records is compared with a loop over single records by
plain autograd, both in fp64; and a clipped micro-batch of eight is timed against an ordinary backward pass of the same
model, in turns, in fp32 on one thread, by processor time. Results are written after every name, so that the command can
be stopped and continued.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from encoder_names import NAMES  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from murmuration.model.build import build  # noqa: E402
from murmuration.model.safety import keeps_statistics  # noqa: E402
from murmuration.model.settings import ModelSettings, SettingsError  # noqa: E402
from murmuration.train.clip.bookkeeping import BookKeepingClip  # noqa: E402
from murmuration.train.clip.rule import ClipError, ClipRule  # noqa: E402
from murmuration.train.clip.sums import Float32Sums, trainable_shapes  # noqa: E402
from murmuration.train.clip.tracker import ParameterTracker, TrackedTensor  # noqa: E402
from tests.support import brute_force  # noqa: E402
from tests.support.parity_engines import summed  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "encoders.json"
PAGE = ROOT / "docs" / "encoders.md"
CLASSES, JUDGED, MICRO_BATCH, ROUNDS = 5, 3, 8, 5
Inputs = dict[str, Tensor]


def measured(name: str, side: int, args: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"side": side, "args": args}
    try:
        given = {"family": "timm", "name": name, "image_size": side, "classes": CLASSES, "head_scale": 1.0}
        model = build(ModelSettings.model_validate({**given, "model_args": args}), "classify")
    except SettingsError as error:
        return row | {"refused": str(error)}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    row["statistics"] = any(keeps_statistics(part) for part in model.modules())
    stirred(model)
    try:
        with copied() as written_out:
            row["error"] = error_of(model, side)
    except ClipError as error:
        return row | {"refused": f"the clip engine: {error}"}
    row["written_out"] = written_out
    return row | {"ratio": ratio_of(model, side)}


@torch.no_grad()
def stirred(model: nn.Module) -> None:
    """No parameter or statistic at a special value (zero biases, unit scales): a lost term would not be seen."""
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
    for name, stored in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            stored.add_(0.2 * torch.rand(stored.shape, generator=draw))


def batch(count: int, side: int) -> Inputs:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, side, side, generator=draw)
    return {"images": images, "labels": torch.randint(0, CLASSES, (count,), generator=draw)}


class copied:
    """Collects the weights of layers that have no rule: they become one copy for each record."""

    def __enter__(self) -> list[str]:
        self._found: list[str] = []
        self._plain = plain = ParameterTracker._per_record

        def noted(tracker: ParameterTracker, source: TrackedTensor) -> Tensor:
            if source.tensor.dim() > 1 and min(source.shape) > 1:
                self._found.extend(name for name in source.leaves if name not in self._found)
            return plain(tracker, source)

        ParameterTracker._per_record = noted
        return self._found

    def __exit__(self, *error: Any) -> None:
        ParameterTracker._per_record = self._plain


def error_of(model: nn.Module, side: int) -> float:
    """Largest relative error: of all sums as one vector, or of one parameter's whose share of that is not tiny."""
    model = model.double()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in batch(JUDGED, side).items()}
    with arithmetic_batch_norm():
        records = brute_force.records_of(model, inputs)
    bound = statistics.median(record.norm() for record in records)
    everyone = torch.ones(JUDGED, dtype=torch.bool)
    expected = brute_force.clipped_sum(records, brute_force.factors_of(records, everyone, brute_force.flat(bound)))
    clip = BookKeepingClip(ClipRule("flat", bound, 0.0))
    clip.prepare(model)
    found, _ = summed(clip, model, [(inputs, everyone)], double=True)
    whole = brute_force.size(expected.values())
    errors = [brute_force.relative_error(found, expected)]
    for name, tensor in expected.items():
        if brute_force.size([tensor]) > 1e-6 * whole:
            errors.append(brute_force.relative_error({name: found[name]}, {name: tensor}))
    model.float()
    return max(errors)


@contextmanager
def arithmetic_batch_norm() -> Iterator[None]:
    """PyTorch's backward pass of BatchNorm by stored statistics is wrong on processors where the gradient comes
    transposed (torch 2.13: levit, xcit), so single records are judged by plain arithmetic."""
    own = F.batch_norm

    def by_stored(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, *more: Any) -> Tensor:
        eps, places = more[-1], [-1, *[1] * (x.dim() - 2)]
        scale, shift, center = (y.view(places) for y in (weight * (var + eps).rsqrt(), bias, mean))
        return (x - center) * scale + shift

    F.batch_norm = by_stored
    try:
        yield
    finally:
        F.batch_norm = own


def ratio_of(model: nn.Module, side: int) -> float:
    inputs, everyone = batch(MICRO_BATCH, side), torch.ones(MICRO_BATCH, dtype=torch.bool)
    clip = BookKeepingClip(ClipRule("flat", 1.0, 0.0))
    clip.prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    sums = Float32Sums(trainable_shapes(model))

    def plain() -> None:
        torch.autograd.grad(model(inputs).sum(), trained)

    def private() -> None:
        clip.add_clipped(model, inputs, everyone, sums)

    def seconds(run: Any) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain(), private()
        return statistics.median(1 / seconds(plain) * seconds(private) for _ in range(ROUNDS))


def setting() -> dict[str, str]:
    libraries = {library: version(library) for library in ("timm", "torch")}
    return {**libraries, "processor": platform.processor() or platform.machine()}


def known() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"command": "", "setting": {}, "names": {}}


def measure(words: list[str]) -> None:
    torch.set_num_threads(1)
    for name, (side, args) in NAMES.items():
        found = known()
        if any(word in name for word in words) if words else name not in found["names"]:
            start = time.monotonic()
            try:
                row = measured(name, side, args)
            except Exception as error:  # one odd architecture must not end the table
                row = {"side": side, "args": args, "broken": f"{type(error).__name__}: {str(error)[:300]}"}
            found["names"][name] = row
            found |= {"command": "python benchmarks/encoders.py", "setting": setting()}
            found["names"] = {each: found["names"][each] for each in NAMES if each in found["names"]}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            shown = {key: value for key, value in row.items() if key not in ("side", "args")}
            print(f"{name:45} {time.monotonic() - start:5.1f} s  {shown}", flush=True)
            gc.collect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--page", action="store_true", help="write docs/encoders.md from the results, measure nothing")
    arguments = parser.parse_args()
    if arguments.page:
        from encoder_page import page

        PAGE.write_text(page(known()))
    else:
        measure(arguments.words)
