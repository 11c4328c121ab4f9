"""A whole micro-batch as one launch: recorded once as a CUDA graph, then replayed.

Launching a thousand kernels takes the host longer than the device needs for a small micro-batch. `add_if_ordinary`
asks the device nothing, so everything that it launches can be recorded. A replay runs the same kernels on the same
memory: inputs are copied to where they lay, and what it shows is copied out before the next replay overwrites it.
Whatever else the recording took from the host is part of it: the clipping rule, the modules' modes, the addresses of
weights and totals. Where one of them has changed, the micro-batch is computed as without a graph.

Before a recording is used, it is proved: on the rows of its inputs in another order, a replay must give every bit that
the ordinary way gives, in the totals as in what is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from murmuration.accounting.escaping import first_line
from murmuration.train.clip.engine import Clipped, DeferringClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import ExactSums

T = TypeVar("T")
# So often a kernel's first launch, and a library's choice among kernels, are left behind before anything is recorded.
WARM_UPS = 2
# A recording that did not fit so many micro-batches in a row is made anew, if these were alike (weights may have moved
# to other memory); but only a few times, and where C adapts at every step, nothing is kept.
ALIKE, MOST_RECORDINGS, MOST_MISSES = 3, 3, 32


class Recorder(Protocol):
    """What a device offers for recording its work."""

    def warm_up(self, run: Callable[[], object]) -> None: ...

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What `run` returned, whose tensors each replay overwrites, and the replay."""
        ...


class CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def warm_up(self, run: Callable[[], object]) -> None:
        """On a stream of its own, as the recording: libraries keep workspaces for each stream."""
        usual, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            run()
        usual.wait_stream(side)

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Its memory is its own pool. The threads that read records go on with their own work on the device.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = run()
        return found, graph.replay


@dataclass(frozen=True)
class _Recording:
    baked: tuple[Any, ...]
    inputs: dict[str, Tensor]
    present: Tensor
    seen: Clipped
    replay: Callable[[], None]

    def run(self, inputs: Mapping[str, Tensor], present: Tensor) -> Clipped:
        for name, own in self.inputs.items():
            own.copy_(inputs[name])
        self.present.copy_(present)
        self.replay()
        seen = self.seen
        return replace(
            seen, losses=seen.losses.clone(), norms=seen.norms.clone(), factors=seen.factors.clone(),
            doubtful=None if seen.doubtful is None else seen.doubtful.clone(),
            ordinary=None if seen.ordinary is None else seen.ordinary.clone(), measured=None,
        )  # fmt: skip


class MicroBatchGraph:
    """`add_if_ordinary` of a clip engine, replayed where that is possible. `why_not` says why it never will be, as soon
    as that is known."""

    def __init__(self, clip: DeferringClip, recorder: Recorder) -> None:
        self._clip, self._recorder = clip, recorder
        self._recording: _Recording | None = None
        self.why_not: str | None = None
        self.replays = self.recordings = 0
        self._missed: list[tuple[Any, ...]] = []

    def add_if_ordinary(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: ExactSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        # A measurement between steps leaves modules in evaluation mode: a few micro-batches, not worth a recording.
        if self.why_not is None and model.training:
            baked = _baked(model, inputs, present, sums, rule or self._clip.rule)
            if self._recording is None:
                self._record(model, inputs, present, sums, rule, baked)
            if self._recording is not None and self._recording.baked == baked:
                self.replays += 1
                self._missed.clear()
                return self._recording.run(inputs, present)
            self._missed.append(baked)
            if len(self._missed) > MOST_MISSES:
                self._recording = None
                self.why_not = "the clipping rule, the shapes or the memory of the model keep changing"
            elif self._missed[-ALIKE:] == [baked] * ALIKE and self.recordings < MOST_RECORDINGS:
                self._recording = None
        return self._clip.add_if_ordinary(model, inputs, present, sums, rule)

    def _record(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: ExactSums, rule: ClipRule | None,
        baked: tuple[Any, ...],
    ) -> None:  # fmt: skip
        before: dict[str, Tensor] = {}
        try:
            before = {name: total.clone() for name, total in sums.totals.items()}
            own, nobody = {name: value.clone() for name, value in inputs.items()}, torch.zeros_like(present)

            def run() -> Clipped:
                return self._clip.add_if_ordinary(model, own, nobody, sums, rule)

            # Without a record, nothing is added but zeros.
            for _ in range(WARM_UPS):
                self._recorder.warm_up(run)
            seen, replay = self._recorder.record(run)
            recording = _Recording(baked, own, nobody, seen, replay)
            different = self._differs(recording, model, inputs, sums, rule, before)
        except RuntimeError as error:  # out of memory is one of them
            self.why_not = f"the device would not record a micro-batch ({first_line(error, most=None)})"
        else:
            if different is None:
                self._recording, self.recordings = recording, self.recordings + 1
            else:
                self.why_not = f"a replayed micro-batch had other {different} than the same one computed as usual"
        finally:
            _restore(sums, before)

    def _differs(
        self, recording: _Recording, model: nn.Module, inputs: Mapping[str, Tensor], sums: ExactSums,
        rule: ClipRule | None, before: Mapping[str, Tensor],
    ) -> str | None:  # fmt: skip
        """In what a replay differs from the ordinary way, with every slot taken and rows that were not recorded."""
        rolled = {name: value.roll(1, 0) for name, value in inputs.items()}
        everyone = torch.ones_like(recording.present)
        expected = self._clip.add_if_ordinary(model, rolled, everyone, sums, rule)
        totals = {name: total.clone() for name, total in sums.totals.items()}
        _restore(sums, before)
        found = recording.run(rolled, everyone)
        for name in ("losses", "norms", "factors", "doubtful", "ordinary"):
            if not _same_bits(getattr(found, name), getattr(expected, name)):
                return name
        return None if all(_same_bits(sums.totals[name], total) for name, total in totals.items()) else "totals"


def _baked(
    model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: ExactSums, rule: ClipRule
) -> tuple[Any, ...]:  # fmt: skip
    """All that a recording takes from the host, besides code: two micro-batches for which it is equal launch the same
    kernels on the same memory."""
    weights = (*model.parameters(), *model.buffers())
    return (
        id(model), rule, tuple(module.training for module in model.modules()),
        tuple((weight.data_ptr(), weight.requires_grad) for weight in weights),
        tuple(total.data_ptr() for total in sums.totals.values()),
        tuple((name, value.shape, value.dtype) for name, value in sorted(inputs.items())), present.shape,
    )  # fmt: skip


def _restore(sums: ExactSums, before: Mapping[str, Tensor]) -> None:
    for name, total in before.items():
        sums.totals[name].copy_(total)


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
