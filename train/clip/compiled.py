"""A model's repeated blocks as compiled code in private passes, forward and backward.

No block is written twice. At its first call, the isolated pass itself is recorded: vmap hands the block's own forward
one record, the layers' rules keep their operands, and autograd runs backward. What is recorded are the operations on
the tensors of all records of which this pass consists. They are compiled, and what the layers reported becomes results
of the backward code. Norms, doubts, factors and sums are then found from these by the same code as without a compiler.

Why no record meets another in compiled code: the operations are those of the isolated pass, which keeps records apart
as `isolated.py` says, and nothing can make them other operations for the records to come.

- No record is there while a block is recorded, only shapes. What asks for a value ends the recording.
- The code reads its arguments alone: the block's inputs, its weights and buffers, and the masks of its dropout. Any
  other tensor that the block holds ends the recording, so no record of an earlier pass is part of the code.
- A block reports operands of products and gradients that are written out, all of them results of the code. A report of
  any other kind ends the recording.

A block that cannot be recorded or compiled runs as it is written. What the compiler makes of the operations is trusted
as PyTorch's own kernels are, and tested like these: by the self-test, on whole micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage]
from torch.overrides import _len_torch_function_stack, _pop_mode_temporarily  # pyright: ignore
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from murmuration.accounting.escaping import first_line
from murmuration.model.drop import Drops
from murmuration.train.clip.blocks import repeated_blocks
from murmuration.train.clip.functions import changeable
from murmuration.train.clip.isolated import directly, enter, entered, is_of_records, leave, outside
from murmuration.train.clip.layers import LAYER_RULES
from murmuration.train.clip.per_record import Dense, OuterProduct, TokenSum
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.tracker import ParameterTracker, is_lent

# What a block may report, and which fields of it are tensors.
TENSORS_OF: Mapping[type, Sequence[str]] = {OuterProduct: ("left", "right"), TokenSum: ("over",), Dense: ("value",)}

Code = Callable[[list[Tensor]], Sequence[Tensor]]
PLACE = "the place of a tensor"


@dataclass(frozen=True)
class Codes:
    """Those of both directions. `taken`: for each tensor that the backward code asks for, its number among the inputs
    of the forward code, where it is one that an engine only lends."""

    forward: Code
    backward: Code
    taken: Sequence[int | None]


Compiler = Callable[[Any, list[Tensor], int, list[Tensor], Sequence[int]], Codes]


class NotCompiled(Exception):
    """Why a block runs as it is written."""


@dataclass(frozen=True)
class _Call:
    """All that shapes what a block computes, besides its own code and attributes."""

    form: Any
    """Of the arguments, as a tree."""
    leaves: Sequence[Any]
    """Of this tree, with a mark in the place of each tensor."""
    of_records: Sequence[bool]
    """Of each tensor."""
    rows: int
    """Those of a record that dropout sees; 0: nothing is dropped."""
    graded: Sequence[int]
    """The tensors that have a gradient."""
    trained: Sequence[str]
    alike: Sequence[Any]
    """What tensors and weights are like."""
    training: Sequence[bool]
    half: torch.dtype | None


@dataclass(frozen=True)
class _Recorded:
    """A block's code for one kind of call, and what its results are."""

    codes: Codes
    outputs: int
    form: Any
    """Of what the block returns, as a tree."""
    below: Sequence[int]
    """The tensors that get a gradient, in the order of the backward code's results."""
    reports: Sequence[Sequence[tuple[Any, Sequence[int]]]]
    """What each layer reports: every piece without its tensors, and which of the further results these are."""
    used: Mapping[str, int]
    """How often the block uses each of its parameters."""
    masks: Sequence[tuple[int, int]]
    """What is dropped: the numbers of a module and of its places."""
    scales: Tensor
    """Of these modules. In them and the masks, blocks of the same code differ."""


class CompiledBlocks:
    """Those of one model, in micro-batches of `slots` records. `why_not` says by name why a block runs as written."""

    def __init__(self, model: nn.Module, slots: int) -> None:
        self.slots, self.compiler = slots, by_inductor
        chosen = {id(block) for block in repeated_blocks(model)}
        self._blocks = {name: block for name, block in model.named_modules() if id(block) in chosen}
        self._drops = {name: Drops(block) for name, block in self._blocks.items()}
        self._recorded: dict[str, list[tuple[_Call, _Recorded]]] = {name: [] for name in self._blocks}
        self._library: dict[str, Codes] = {}
        """Compiled code by the operations that it was made of: blocks of one kind share it."""
        self.why_not: dict[str, str] = {}

    @property
    def modules(self) -> Iterable[nn.Module]:
        return self._blocks.values()

    @property
    def kinds(self) -> int:
        """How many times the compiler ran."""
        return len(self._library)

    def about(self) -> str:
        """As a note for the owner."""
        told = [f"{len(self._blocks) - len(self.why_not)} of {len(self._blocks)} blocks run as compiled code"]
        for why in dict.fromkeys(self.why_not.values()):
            names = [name for name, own in self.why_not.items() if own == why]
            told.append(f"as written run {', '.join(names)}: {why}")
        return "; ".join(told)

    @contextmanager
    def running(self, tracker: ParameterTracker) -> Iterator[None]:
        """Around a forward and backward pass of this tracker, after which the model is as it was."""
        with ExitStack() as at_end:
            for name, block in self._blocks.items() if tracker.records == self.slots else ():
                attributes, own = vars(block), block.forward
                instead = {"forward": partial(self._call, name, own, tracker)}
                at_end.callback(attributes.update, {key: attributes[key] for key in instead if key in attributes})
                at_end.callback(attributes.pop, "forward")
                attributes.update(instead)
            yield

    def _call(
        self, name: str, own: Callable[..., Any], tracker: ParameterTracker, *given: Any, **options: Any
    ) -> Any:  # fmt: skip
        if name in self.why_not or not directly() or not torch.is_grad_enabled():
            return own(*given, **options)
        flat, form = pytree.tree_flatten((given, options))
        tracker.look_below()
        tracker.look_at(flat)
        try:
            with outside(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                return self._run(name, own, tracker, flat, form)
        except NotCompiled as error:
            self.why_not[name] = str(error)
            return own(*given, **options)

    def _run(self, name: str, own: Callable[..., Any], tracker: ParameterTracker, flat: list[Any], form: Any) -> Any:
        block, drops, kind = self._blocks[name], self._drops[name], tracker.anchor.device.type
        given = [x for x in flat if isinstance(x, Tensor)]
        if any(tracker.source(x) is not None for x in given):
            raise NotCompiled("it is given a tensor that is computed from weights")
        if not all(isinstance(x, (Tensor, bool, int, float, str, type(None))) for x in flat):
            raise NotCompiled("it is given more than tensors and numbers")
        of_records = [is_of_records(x) for x in given]
        inputs = [leave(x, self.slots) if each else x for x, each in zip(given, of_records, strict=True)]
        keys = None if drops.keys is None else leave(drops.keys, self.slots)
        held = dict((*block.named_parameters(), *block.named_buffers()))
        names = {local: known for local, x in held.items() if (known := tracker.name_of(x)) is not None}
        call = _Call(
            form, [PLACE if isinstance(x, Tensor) else x for x in flat], of_records,
            0 if keys is None else keys.shape[1], [number for number, x in enumerate(inputs) if x.requires_grad],
            list(names),
            [(x.shape, x.stride(), x.dtype, x.device) for x in (*inputs, *held.values())],
            [module.training for module in block.modules()],
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )  # fmt: skip
        code = next((code for known, code in self._recorded[name] if known == call), None)
        if code is None:
            recording = _Recording(block, own, drops, call, self.slots, inputs, held)
            try:
                code = recording.compiled(self._library, self.compiler)
            except NotCompiled:
                raise
            except Exception as error:  # whatever it is: as it is written, a block refuses what must be refused
                raise NotCompiled(first_line(error)) from error
            self._recorded[name].append((call, code))
        tracker.count({names[local]: times for local, times in code.used.items()})

        def tell(found: Sequence[Tensor]) -> None:
            for report in code.reports:
                tracker.report(
                    [filled(piece, names[piece.name], [found[n] for n in places]) for piece, places in report]
                )

        masks = [] if keys is None else [drops.kept(keys, *each).contiguous() for each in code.masks]  # as recorded
        weights = list(held.values())
        tensors = (*inputs, *masks, code.scales, *(x.detach() for x in weights))
        outs = [enter(changeable(x)) for x in _Run.apply(tracker.anchor, code, tell, weights, *tensors)]  # pyright: ignore
        for out in outs:
            out.of_pass = tracker  # pyright: ignore[reportAttributeAccessIssue]
        return pytree.tree_unflatten(outs, code.form)


class _Run(Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, anchor: Tensor, code: _Recorded, tell: Callable[[Sequence[Tensor]], None], held: Sequence[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        del anchor
        ctx.code, ctx.tell, ctx.held, ctx.given = code, tell, held, len(tensors)
        found = code.codes.forward(list(tensors))
        kept = (x for x, number in zip(found[code.outputs :], code.codes.taken, strict=True) if number is None)
        # With the inputs, so that autograd notices if one is changed in place whose values are needed again.
        ctx.save_for_backward(*(tensors[number] for number in code.below), *kept)
        return tuple(found[: code.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        code: _Recorded = ctx.code
        own, below = len(code.below), dict[int, Tensor]()
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            kept, first = iter(ctx.saved_tensors[own:]), ctx.given - len(ctx.held)
            # A lent weight lies elsewhere by now: its engine took it back after the forward pass, and lent it again.
            asked = [next(kept) if number is None else ctx.held[number - first].detach() for number in code.codes.taken]
            if not all(x.untyped_storage().nbytes() for x in asked):
                raise ClipError("the sharded weights of a compiled block are not there in its backward pass")
            found = code.codes.backward([*asked, *(gradient.contiguous() for gradient in gradients)])
            ctx.tell(found[own:])
            below.update(zip(code.below, found, strict=False))
        return None, None, None, None, *(below.get(number) for number in range(ctx.given))


class _Recording:
    """The isolated pass of one block on tensors without values, from which its code is made."""

    def __init__(
        self, block: nn.Module, own: Callable[..., Any], drops: Drops, call: _Call, slots: int, inputs: list[Tensor],
        held: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._block, self._own, self._drops, self._call, self._slots = block, own, drops, call, slots
        self._device, self._inputs, self._held = inputs[0].device, inputs, held
        self._scales, self._masks = drops.scales(self._device), dict[tuple[int, int], None]()
        self._form: Any = None
        self._told: list[list[Any]] = []
        self._below: list[int] = []
        self._reports: list[list[tuple[Any, list[int]]]] = []
        self._used: dict[str, int] = {}

    def compiled(self, library: dict[str, Codes], compiler: Compiler) -> _Recorded:
        # They import the compiler, which takes seconds.
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
        from torch.fx.experimental.proxy_tensor import make_fx

        mode = _without_values()
        with ExitStack() as alone:
            alone.enter_context(torch._C._EnableTorchFunction())  # pyright: ignore
            while _len_torch_function_stack():
                alone.enter_context(_pop_mode_temporarily())
            # If the block runs within a checkpoint, nothing of the recording is to be computed again.
            alone.enter_context(saved_tensors_hooks(_unchanged, _unchanged))
            inputs, rest = (
                [mode.from_tensor(x.detach()) for x in own]
                for own in (self._inputs, (self._scales, *self._held.values()))
            )
            alone.enter_context(mode)
            versions = [x._version for x in (*inputs, *rest)]
            outs = self._forward([*inputs, *rest])[1]  # which finds the masks
            tangents = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in outs]
            primals = [*inputs, *map(self._mask, self._masks), *rest]
            if versions != [x._version for x in (*inputs, *rest)]:
                raise NotCompiled("it writes into what it is given")
            joint = dispatch_functionalize(self._joint, FunctionalTensorMode())
            recorded = make_fx(
                lambda primals, tangents: joint(primals, tangents), decomposition_table=select_decomp_table()
            )(primals, tangents)  # fmt: skip
        if any(node.op == "get_attr" for node in recorded.graph.nodes):
            raise NotCompiled("it holds a tensor that is neither weight nor buffer")
        operations = recorded.code + repr([(x.shape, x.stride(), x.dtype, x.device) for x in (*primals, *tangents)])
        if operations not in library:
            masks = [self._mask(each).fill_(True) for each in self._masks]
            example = [x.detach() for x in (*self._inputs, *masks, self._scales, *self._held.values())]
            first = len(primals) - len(self._held)
            lent = [first + number for number, x in enumerate(self._held.values()) if is_lent(x)]
            library[operations] = compiler(recorded, [*primals, *tangents], len(tangents), example, lent)
        return _Recorded(
            library[operations], len(tangents), self._form, self._below, self._reports, self._used,
            list(self._masks), self._scales,
        )  # fmt: skip

    def _mask(self, of: tuple[int, int]) -> Tensor:
        return torch.empty(self._slots, self._call.rows, of[1], dtype=torch.bool, device=self._device)

    def _forward(self, primals: list[Tensor]) -> tuple[ParameterTracker, list[Tensor]]:
        """The block's own forward on one record, with these tensors in the place of its own; what it returns of all."""
        call, told, own = self._call, list[list[Any]](), len(self._inputs)
        given, (*masks, scales) = primals[:own], primals[own : len(primals) - len(self._held)]
        held = dict(zip(self._held, primals[len(primals) - len(self._held) :], strict=True))
        for name, whole in self._held.items():
            if is_lent(whole):
                vars(held[name]).update(vars(whole))  # what ZeRO-3 asks its weights when a module reads them
        tracker = ParameterTracker(
            {local: held[local] for local in call.trained}, self._slots, self._device,  # pyright: ignore
            lambda pieces, uses: told.append(list(pieces)), LAYER_RULES, recorded=True,
        )  # fmt: skip
        with tracker, entered(self._slots), _reparametrize_module(self._block, held):
            tensors = iter([enter(x) if each else x for x, each in zip(given, call.of_records, strict=True)])
            known = {of: enter(x) for of, x in zip(self._masks, masks, strict=False)}

            def kept(module: int, places: int) -> Tensor:
                of = module, places
                if of not in known:
                    self._masks[of] = None
                    known[of] = enter(self._mask(of))
                return known[of]

            leaves = [next(tensors) if x is PLACE else x for x in call.leaves]
            args, options = pytree.tree_unflatten(leaves, call.form)
            with self._drops.lent(kept, scales.unbind()) if call.rows else nullcontext():
                found, self._form = pytree.tree_flatten(self._own(*args, **options))
            if not all(is_of_records(x) and x.is_floating_point() for x in found):
                raise NotCompiled("it returns more than numbers of records")
            outs = [leave(x, self._slots) for x in found]
        self._told, self._used, tracker.counting = told, dict(tracker.used), False
        return tracker, outs

    def _joint(self, primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        """What the block returns; the gradients of its inputs; the tensors of all that its layers report."""
        primals = [x.detach().requires_grad_(number in self._call.graded) for number, x in enumerate(primals)]
        tracker, outs = self._forward(primals)
        leaves = (tracker.anchor, *(primals[number] for number in self._call.graded))
        with tracker, torch.autocast(self._device.type, enabled=False):
            _, *below = _engine_run_backward(
                tuple(outs), tuple(tangents), False, False, leaves, True, accumulate_grad=False
            )
        self._below = [number for number, x in zip(self._call.graded, below, strict=True) if x is not None]
        results: dict[int, Tensor] = {}
        self._reports = []
        for report in self._told:
            self._reports.append([])
            for piece in report:
                fields = TENSORS_OF.get(type(piece))
                if fields is None:
                    raise NotCompiled(f"the gradient of {piece.name} is found by further code")
                tensors = [getattr(piece, field) for field in fields]
                results |= {id(x): x for x in tensors}  # a tensor that two pieces share is one result
                places = [list(results).index(id(x)) for x in tensors]
                self._reports[-1].append((filled(piece, piece.name, [None] * len(fields)), places))
        # Copies where the backward code needs the same tensors, since a model may change what a block returns.
        return [*(x.detach().clone() for x in outs), *(x for x in below if x is not None), *results.values()]


def _without_values() -> Any:
    """A mode that makes tensors without values, and takes no others."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def divided(
    recorded: Any, like: list[Tensor], outputs: int, lent: Sequence[int]
) -> tuple[Any, Any, Sequence[int | None]]:
    """The operations of both directions, and which of the `lent` tensors the backward code asks for (`Codes.taken`)."""
    from torch._inductor.compile_fx import partition_fn

    # What is computed from these alone is computed again: it may lie in their memory, which their engine takes back.
    places = recorded.graph.find_nodes(op="placeholder")
    of_lent = {places[number] for number in lent}
    for node in recorded.graph.nodes:
        if node.all_input_nodes and of_lent.issuperset(node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            of_lent.add(node)
    parts: Any = partition_fn(recorded, like, num_fwd_outputs=outputs)
    forward, backward = parts
    kept = forward.graph.output_node().args[0][outputs:]
    if [node.name for node in backward.graph.find_nodes(op="placeholder")][:-outputs] != [node.name for node in kept]:
        raise NotCompiled("its backward code asks for other tensors than its forward code keeps")
    numbers = {node.name: number for number, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    names = {node.name for node in of_lent}
    if any(node.name in names and numbers.get(node.name) not in lent for node in kept):
        raise NotCompiled("its code keeps what is computed from sharded weights alone")
    return forward, backward, [number if (number := numbers.get(node.name)) in lent else None for node in kept]


def by_inductor(recorded: Any, like: list[Tensor], outputs: int, example: list[Tensor], lent: Sequence[int]) -> Codes:
    """`like`: what its inputs and the gradients of its `outputs` are like; `example`: inputs. `lent`: which inputs an
    engine takes back between the two directions."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    # No kernel is chosen by the clock, so that every start has the same ones.
    with config.patch(deterministic=True):
        *parts, taken = divided(recorded, like, outputs, lent)
        codes: list[Any] = []
        for part in parts:
            results = part.graph.output_node()
            results.meta["user_visible_output_idxs"] = list(range(len(results.args[0])))  # laid out as recorded
            given = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
            codes.append(compile_fx_inner(part, given, is_backward=part is parts[1]))
    forward, backward = codes
    with torch.no_grad():  # what fails when it runs is to fail here
        found = forward(list(example))
        backward([*found[outputs:], *(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in found[:outputs])])
    return Codes(forward, backward, taken)


def filled(piece: Any, name: str, tensors: Sequence[Tensor | None]) -> Any:
    return replace(piece, name=name, **dict(zip(TENSORS_OF[type(piece)], tensors, strict=True)))


def _unchanged(x: Any) -> Any:
    return x
