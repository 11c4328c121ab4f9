"""The module that a sharded engine wraps: the model, and the part that turns per-record losses into gradient sums."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.engine import (
    ClipEngine,
    Clipped,
    DeferringClip,
    Observation,
    Precision,
    assert_exact_matmul,
    autocast,
)
from murmuration.train.clip.isolated import FRAMEWORKS
from murmuration.train.clip.losses import slot_losses
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.clip.sums import ExactSums, trainable_shapes
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.base import OptimizerShard, evaluating
from murmuration.train.noise.update import UpdateError
from murmuration.train.optim.base import FlatOptimizer

if TYPE_CHECKING:  # an engine that shards brings its sums along
    from murmuration.train.engines.micro_batch_graph import MicroBatchGraph, Recorder
    from murmuration.train.engines.sharded_sums import ShardedSums

# Micro-batches that may be on their way to the device: their inputs are kept until they are settled.
AHEAD = 2


class _Unsettled:
    """A micro-batch of which the host does not know yet whether it was ordinary, and so whether it was added."""

    def __init__(
        self, inputs: dict[str, Tensor], present: Tensor, rule: ClipRule | None, training: bool, seen: Clipped
    ) -> None:  # fmt: skip
        assert seen.ordinary is not None, "the clip engine left nothing open"
        self.inputs, self.present, self.rule, self.training, self._seen = inputs, present, rule, training, seen
        self._ready = None
        if not present.is_cuda:
            self._ordinary = seen.ordinary
            return
        self._ordinary = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._ordinary.copy_(seen.ordinary, non_blocking=True)
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(present.device))

    def was_ordinary(self) -> bool:
        """Waits for this micro-batch alone, not for those behind it."""
        if self._ready is not None:
            self._ready.synchronize()
        return bool(self._ordinary)

    def correct(self, exact: Clipped) -> None:
        seen = self._seen
        for old, new in ((seen.losses, exact.losses), (seen.norms, exact.norms), (seen.factors, exact.factors)):
            old.copy_(new)
        if seen.doubtful is not None and exact.doubtful is not None:
            seen.doubtful.copy_(exact.doubtful)


class PrivateForward(nn.Module):
    """Called with a micro-batch, it adds clipped gradients to its totals; called without one, it hands the totals over.

    The scalar that the second kind of call returns has the totals as its gradient, so the engine's own hooks carry
    them.

    A host that waits for the device after each micro-batch cannot keep it busy. So with `defer` (None: on GPUs) a
    micro-batch is added as an ordinary one, on condition that it is one, which the host reads later; those that were
    not are computed again, with care. Engines that shard the model cannot do so: ranks must call it together.

    With `graph`, such a micro-batch is recorded and replayed where there is a recorder (None: on GPUs).
    """

    def __init__(
        self, model: nn.Module, clip: ClipEngine, defer: bool | None = None, graph: bool = True,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.plain_copy = PlainCopy(model)
        self.model, self.clip = model, clip
        clip.prepare(model)
        require_no_hooks(model)
        self.shapes = trainable_shapes(model)
        self.handover = GradientInjector(model)
        self.sums: ExactSums | ShardedSums = ExactSums(self.shapes, torch.device("cpu"))
        self.observed: Clipped | None = None
        self._defer, self._graph, self._recorder = defer, graph, recorder
        self.graph: MicroBatchGraph | None = None
        self._unsettled: list[_Unsettled] = []
        self.kept_from_swap = False
        """Whether the totals, which are sums of records without noise, are locked into memory."""

    def begin(self, device: torch.device, sharded: ShardedSums | None = None) -> None:
        """`sharded`: the sums, where the model is sharded, so that calling it is a collective operation."""
        wanted = device.type == "cuda" if self._defer is None else self._defer
        self._defer = wanted and sharded is None
        recorded = self._graph and self._defer and (device.type == "cuda" or self._recorder is not None)
        if recorded and isinstance(self.clip, DeferringClip):
            from murmuration.train.engines.micro_batch_graph import CudaRecorder, MicroBatchGraph

            self.graph = MicroBatchGraph(self.clip, self._recorder or CudaRecorder(device))
        self.sums = ExactSums(self.shapes, device) if sharded is None else sharded
        self.kept_from_swap = self.sums.keep_from_swap()

    def forward(
        self, inputs: dict[str, Tensor] | None = None, present: Tensor | None = None, rule: ClipRule | None = None,
        turn: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`turn`: whose totals alone are handed over (`GradientInjector`)."""
        if inputs is None or present is None:
            self.settle()
            return self.handover(self.sums.totals if isinstance(self.sums, ExactSums) else self.sums.spread(), turn)
        if self._defer and isinstance(self.clip, DeferringClip) and isinstance(self.sums, ExactSums):
            self.settle(but=AHEAD - 1)
            adding = self.graph or self.clip
            self.observed = adding.add_if_ordinary(self.model, inputs, present, self.sums, rule)
            self._unsettled.append(_Unsettled(inputs, present, rule, self.model.training, self.observed))
        else:
            if not isinstance(self.sums, ExactSums):
                self.sums.begin_micro_batch(len(present))
            self.observed = self.clip.add_clipped(self.model, inputs, present, self.sums, rule)
        return torch.zeros((), device=present.device)

    def settle(self, but: int = 0) -> None:
        """Adds micro-batches that were not ordinary, up to the last few; call it before the totals are used. What was
        observed of them is corrected in place."""
        while len(self._unsettled) > but:
            found = self._unsettled.pop(0)
            if not found.was_ordinary():
                # In the mode of its first pass: what is dropped in training is not dropped in a measurement.
                with nullcontext() if found.training else evaluating(self.model):
                    exact = self.clip.add_clipped(self.model, found.inputs, found.present, self.sums, found.rule)
                found.correct(exact)

    @property
    def exact_sums(self) -> ExactSums:
        assert isinstance(self.sums, ExactSums), "no rank has the totals of a sharded model"
        return self.sums

    @property
    def sharded_sums(self) -> ShardedSums:
        assert not isinstance(self.sums, ExactSums), "every rank has the totals of a whole model"
        return self.sums

    def clear(self) -> None:
        """Forgets the open step."""
        self._unsettled.clear()
        self.sums.clear()

    def about_graph(self) -> str:
        """How micro-batches reach the device, as a note for the owner."""
        if self.graph is not None and self.graph.why_not is None:
            return "micro-batches are replayed as a CUDA graph, which gave the same bits as without one"
        if self.graph is not None:
            why = self.graph.why_not
        elif not self._graph:
            why = 'run.cuda_graph = "off"'
        elif not self._defer:
            why = "the model is sharded, or is not on a GPU"
        else:
            why = "this clip engine asks the device for answers"
        return f"micro-batches are launched kernel by kernel: {why}"

    def observation(self) -> Observation:
        assert self.observed is not None, "nothing was accumulated yet"
        seen = self.observed
        return Observation(seen.losses, seen.norms, seen.sensitivity, seen.doubtful)


# How a finished sum reaches the sharded engine: as the gradient of a scalar, once per logical step.
#
# The engine's own hooks on the parameters fire as after any backward pass, so it reduces and shards the sum as it would
# an ordinary gradient. There is one tap per module that owns parameters, so that an engine that shards the parameters
# themselves (ZeRO-3) need not gather those of more than one module at a time.


class ModuleInjector(nn.Module):
    """A scalar zero whose gradient with respect to each of its parameters is that parameter's total, in fp32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        # In a tuple, so that they are not registered a second time: they belong to the model's own modules.
        self._taken = tuple(parameters.items())

    @property
    def taken(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._taken]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._taken)

    def forward(self, totals: Mapping[str, Tensor]) -> Tensor:
        return _Deferred.apply([totals[name] for name, _ in self._taken], *self.taken)


class GradientInjector(nn.Module):
    """All taps of a model, in the order of its modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        owners: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                owners.setdefault(name.rpartition(".")[0], {})[name] = parameter
        self.taps = nn.ModuleList(ModuleInjector(parameters) for parameters in owners.values())

    def forward(self, totals: Mapping[str, Tensor], turn: int | None = None) -> Tensor:
        """`turn`: of the modules, the one whose totals alone are handed over; they take turns."""
        if turn is not None:
            return self.tap_of(turn)(totals)
        return torch.stack([tap(totals) for tap in self.taps]).sum()

    def tap_of(self, turn: int) -> ModuleInjector:
        return self.taps[turn % len(self.taps)]  # pyright: ignore[reportReturnType]


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, totals: list[Tensor], *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.totals = totals
        return totals[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_output: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        del grad_output  # engines scale the loss by their idea of a batch size; a sum is not scaled
        return None, *(total.to(torch.float32) for total in ctx.totals)


class PlainCopy:
    """An unsharded copy of a model that an engine shards, for comparing with plain autograd.

    It is made before the engine touches the model, without the weights, which are filled in when it is needed.
    """

    def __init__(self, model: nn.Module) -> None:
        # The memo maps each weight to an empty placeholder: nothing is copied, and shared weights stay shared.
        memo = {id(p): nn.Parameter(p.detach().new_empty(0), p.requires_grad) for p in model.parameters()}
        self._empty: nn.Module | None = None
        try:
            self._empty = copy.deepcopy(model, memo)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # a module of the user's own may contain anything
            self._why = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def filled(self, weights: Mapping[str, Tensor], modes: Mapping[str, bool], device: torch.device) -> nn.Module:
        """A new model, which is freed with the last reference to it."""
        if self._empty is None:
            raise UpdateError(
                f"the model cannot be copied ({self._why}), so no gradient can be compared where weights are sharded; "
                "let copy.deepcopy() copy it, or use an engine that keeps weights whole"
            )
        model = copy.deepcopy(self._empty).to(device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.data = weights[name].to(device, parameter.dtype)
            for name, buffer in model.named_buffers():
                if name in weights:
                    buffer.copy_(weights[name])
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        return model


class PlainForward(nn.Module):
    """For a non-private phase: returns the sum of the losses of the present records.

    With `compiled`, the model's repeated blocks run under torch.compile. Blocks of one shape share their code, so that
    a transformer's are compiled once. To be called before an engine shards them. With `checkpointed`, they run again in
    the backward pass.
    """

    def __init__(
        self, model: nn.Module, precision: Precision = "fp32", compiled: bool = False, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self._again: Callable[[], AbstractContextManager[None]] = nullcontext
        if checkpointed:
            from murmuration.train.clip.blocks import checkpointed_blocks

            self._again = checkpointed_blocks(model)
        if compiled:
            from murmuration.train.clip.blocks import repeated_blocks

            for block in repeated_blocks(model):
                block.compile(dynamic=False)  # blocks of other shapes have code of their own
        self.precision: Precision = precision
        self.shapes = trainable_shapes(model)
        self.observed: Tensor | None = None

    def forward(self, inputs: dict[str, Tensor], present: Tensor, rule: ClipRule | None = None) -> Tensor:
        """Nothing is clipped, whatever the rule."""
        with autocast(self.precision, present.device), self._again():
            losses = slot_losses(self.model, inputs, len(present))
        kept = torch.where(present, losses, torch.zeros_like(losses))
        self.observed = kept.detach()
        return kept.sum()

    def observation(self) -> Observation:
        assert self.observed is not None, "nothing was accumulated yet"
        return Observation(self.observed)


def require_fp32(forward: nn.Module) -> None:
    for name, parameter in forward.named_parameters():
        if parameter.dtype != torch.float32:
            raise UpdateError(f"{name} is {parameter.dtype}; parameters must be fp32, or sums are rounded")


def require_no_hooks(model: nn.Module) -> None:
    """A hook on a parameter sees no record's gradient, and changes nothing of what is added. Where an engine reduces
    gradients, it would be given sums without noise."""
    for name, parameter in model.named_parameters():
        hooks = ((parameter, kind) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        theirs = [hook for at, kind in hooks for hook in (getattr(at, kind, None) or {}).values()]
        if any(not str(getattr(hook, "__module__", "")).startswith(FRAMEWORKS) for hook in theirs):
            raise ClipError(f"{name} has a hook on its gradient, which would be a sum without noise; remove it")


class EngineOfForward:
    """What our engines share: such a module, and an optimizer of flat tensors."""

    _layout: Mapping[int, tuple[Tensor, list[Fragment]]]
    """The optimizer's tensors, and what each is made of."""

    def __init__(self, forward: PrivateForward | PlainForward, optimizer: FlatOptimizer, ranks: Ranks) -> None:
        assert_exact_matmul()
        require_fp32(forward)
        self.ranks, self.device, self.shapes = ranks, ranks.device, forward.shapes
        self._forward, self._optimizer = forward, optimizer
        self.trainable_elements = sum(shape.numel() for shape in self.shapes.values())

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        batch = batch.to(self.device)
        loss = self._forward(batch.inputs, batch.present, rule)
        if not isinstance(self._forward, PrivateForward):
            loss.backward()

    def observe(self) -> Observation:
        return self._forward.observation()

    def shards(self) -> list[OptimizerShard]:
        return [
            OptimizerShard(flat, parts, self._optimizer.state_tensors(flat)) for flat, parts in self._layout.values()
        ]

    def optimizer_step(self) -> int:
        return self._optimizer.steps_done

    def set_optimizer_step(self, step: int) -> None:
        """Prepares the optimizer state to be filled from a checkpoint, or clears it at step 0."""
        self._optimizer.restart(step)
