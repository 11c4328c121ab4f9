"""A record never meets another: the forward pass is given one record, and PyTorch's `vmap` batches it.

`forward()` sees a batch of one, or the few rows of one record where it has views or belongs to a unit. So a mean over
the batch is a mean over one, and a sort sorts one. A branch on data, rows chosen by what they hold, a random draw and a
write into a tensor that all records share are refused by PyTorch itself. Nothing has to be known about the module, and
nothing of it is probed.

Some functions must be called with the tensors of all records at once: those whose operands a clip engine keeps, and
those for which vmap has no rule and would loop. They leave vmap for one call. What is called so is ours, or a
framework's hook that gathers weights and changes no activation.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
from torch._C._functorch import TransformType  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.predispatch import lazy_load_decompositions
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from murmuration.train.clip.rule import ClipError

# Records are batched at the first level; a module's own torch.func transforms lie above it.
LEVEL = 1
ASK_ABOUT_MASKS = {"transformers.masking_utils", "transformers.modeling_attn_mask_utils"}
# Whose hooks gather weights. Their packages as a whole would be too many: the hooks that PyTorch's `distribute_module`
# makes call functions of a module's own.
FRAMEWORKS = ("deepspeed.runtime.", "torch.distributed.fsdp.")
PRINTING = (torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__str__)
# Hooks on saved tensors that look at none: of checkpoints, of offloading, and of engines that lend their weights.
KNOWN_HOOKS = ("torch.utils.checkpoint", "torch.autograd.graph", "murmuration.")
_SCRIPTED: Any = torch._C.ScriptFunction  # pyright: ignore[reportAttributeAccessIssue]
_RUN_SCRIPTED = _SCRIPTED.__call__
_HAS_KERNEL: Any = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportAttributeAccessIssue]
# Packages of operators whose rules for vmap come with PyTorch.
OF_PYTORCH = ("aten", "prims", "prim")
# Autograd functions whose rule for vmap is known to keep records apart.
KNOWN_RULES = ("torch.", "murmuration.")


class CaughtError(ClipError, RuntimeError):
    """As a function's own error, so that records for which forward() catches one can be left out."""


class _Within(TorchFunctionMode):
    """Notes what is raised within an autograd function of the module's own."""

    def __init__(self, whole: OneMicroBatch) -> None:
        super().__init__()
        self._whole = whole

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = within_memory(func, args, kwargs or {})
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self._whole.note(error, args, kwargs)
            raise


# What runs in this context sees plain tensors; those of records must be taken out of vmap first (`leave`).
outside = temporarily_clear_interpreter_stack


def is_of_records(x: Any) -> bool:
    """Whether a tensor may differ between records: in an isolated pass, all that is computed from an input."""
    if not isinstance(x, Tensor):
        return False
    while functorch.is_gradtrackingtensor(x):  # a module's own torch.func.grad
        x = functorch.get_unwrapped(x)
    return functorch.is_batchedtensor(x)


def directly() -> bool:
    """Whether forward() itself runs, isolated, and not a torch.func transform of the module's own."""
    return functorch.maybe_current_level() == LEVEL


def enter(tensor: Tensor, of_pass: OneMicroBatch | None = None) -> Tensor:
    """[B, …] as forward() sees it: […], for each record its own. `of_pass`: the only one that may use it; None: the
    first one whose function is given it."""
    record = functorch._add_batch_dim(tensor, 0, LEVEL)
    if of_pass is not None:
        record.of_pass = of_pass
    return record


def leave(tensor: Tensor, slots: int) -> Tensor:
    """[B, …]: the tensor of all records."""
    whole, dimension = functorch._unwrap_batched(tensor, LEVEL)
    if dimension is None:
        return whole.unsqueeze(0).expand(slots, *whole.shape)
    return whole if dimension == 0 else whole.movedim(dimension, 0)


def arguments(args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (tuple, list)):
            yield from x
        else:
            yield x


class OneMicroBatch(TorchFunctionMode):
    """Marks what one pass computes of its records, so that no other pass can use it.

    A module may keep a tensor in a list or an attribute. In the next micro-batch, vmap would pair its records with
    those of this one.
    """

    recorded = False
    """Whether the pass is one of tensors without values, for a compiler (`compiled.py`), which takes PyTorch's own
    functions and no kernel of ours."""
    failed: str | None = None
    """What a function of records' tensors raised; whoever began the pass asks for it in the end."""

    def __enter__(self) -> Self:
        self._below = _below()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An engine that gathers weights calls thousands of functions in the backward pass. All that follows is about
        # vmap, gradients, or a record's tensor.
        outside_vmap = functorch.maybe_current_level() is None
        if outside_vmap and not torch.is_grad_enabled() and not any(map(is_of_records, arguments(args, kwargs))):
            return func(*args, **kwargs)
        self.look_below()
        if func in PRINTING and is_of_records(args[0]):
            raise ClipError("forward() prints a record's tensor, or makes a text of it; leave that out")
        # Language models of transformers skip a mask that hides nothing, which would be a branch on data. It is always
        # right to keep it.
        if (
            func is torch.Tensor.__bool__
            and is_of_records(args[0])
            and sys._getframe(1).f_globals.get("__name__") in ASK_ABOUT_MASKS  # who asks
        ):
            return False
        for x in (*args, *kwargs.values()):
            self.look_at(x if isinstance(x, (tuple, list)) else (x,))
        args, kwargs = within_memory(func, args, kwargs)
        if getattr(func, "__module__", "") == F.__name__:  # some are given a function of the model's own
            args, kwargs = [*map(self.watched, args)], {name: self.watched(x) for name, x in kwargs.items()}
        try:
            out = self.call(func, args, kwargs)
        except Exception as error:
            self.note(error, args, kwargs)
            raise
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if is_of_records(tensor):
                tensor.of_pass = self
        return out

    def watched(self, given: Any) -> Any:
        """Puts this mode around a function of the model's own, such as a distance: it is off within PyTorch's function,
        which calls it."""
        if not callable(given) or isinstance(given, type):
            return given

        def act(*args: Any, **kwargs: Any) -> Any:
            with self:
                return given(*args, **kwargs)

        return act

    def look_below(self) -> None:
        if functorch.maybe_current_level() is not None and _more_below(self._below):
            raise ClipError(
                "forward() runs functions under a TorchDispatchMode or saved_tensors_hooks of its own, which are given "
                "all records together; leave them out"
            )

    def look_at(self, given: Iterable[Any]) -> None:
        """Refuses a tensor of records that is not of this pass."""
        for tensor in given:
            if not is_of_records(tensor):
                continue
            inner = tensor
            while functorch.is_gradtrackingtensor(inner) and getattr(inner, "of_pass", None) is None:
                inner = functorch.get_unwrapped(inner)
            if getattr(inner, "of_pass", None) is None:  # of an input, or of a transform of the module's own
                inner.of_pass = self
            if inner.of_pass is not self or isinstance(tensor, nn.Parameter):
                raise ClipError(
                    "the model kept a tensor of an earlier micro-batch and used it again, so records would meet "
                    "those of other steps; let forward() keep nothing"
                )

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def note(self, error: Exception, args: Any, kwargs: dict[str, Any]) -> None:
        """Notes what a function raised, if it was given a record's tensors."""
        its_own = type(error).__module__ == checkpoint.__name__  # by which it ends a layer that runs again
        if not its_own and any(map(is_of_records, pytree.tree_leaves((args, kwargs)))):
            self.failed = self.failed or type(error).__name__  # not the error, whose frames hold records

    def require_none_caught(self) -> None:
        """A function raises for all records as soon as one of them has a number that it does not take. Where forward()
        catches that, the record would choose how all others are computed."""
        if self.failed is not None:
            raise CaughtError(
                f"forward() catches an error ({self.failed}) that a function raised of a record's tensors, and goes on "
                "in another way with all records; let it pass, or choose with torch.where what each record needs"
            )


def _rows_of(table: str, place: int) -> Callable[[Tensor, Callable[..., Any]], Tensor]:
    def held(ids: Tensor, given: Callable[..., Any]) -> Tensor:
        rows = given(table, place)
        return ids.clamp(0, len(rows) - 1) if is_of_records(rows) else ids  # PyTorch checks those of one table

    return held


def _from_its_end(index: Tensor, given: Callable[..., Any]) -> Tensor:
    filled = given("input", 0)
    return index.remainder(filled.shape[given("dim", 1)] if filled.dim() else 1)


def _of_a_class(targets: Tensor, given: Callable[..., Any]) -> Tensor:
    return targets.clamp(0, given("log_probs", 0).shape[-1] - 1)


def _within_picture(grid: Tensor, given: Callable[..., Any]) -> Tensor:
    del given
    return grid.nan_to_num(0.0).clamp(-FARTHEST, FARTHEST)


def _filled_of_its_own(value: Tensor, given: Callable[..., Any]) -> Tensor:
    if not is_of_records(given("input", 0)):
        raise ClipError("index_fill would fill what all records share with the value of the first; use torch.where")
    return value


def _not_a_single_number(x: Tensor, given: Callable[..., Any]) -> Tensor:
    del given
    if not x.dim():
        raise ClipError("roll of a single number would give it another record's; leave it out")
    return x


FARTHEST = 1e4
"""Of a grid's coordinates, which are -1 and 1 at the ends of a picture."""
_PLACES = "may read beyond a record where a record says at what places; give the same for all records, or use "
_FULL_RANK = "leaves out residuals for all records as soon as one is not of full rank; use linalg.pinv"
_BAGS, _BOXES = _PLACES + "bags of equal length as rows", _PLACES + "grid_sample"
_SCALE = "would give all records the scale of the first; use fake_quantize_per_tensor_affine"
_RESIZED = "gives a record the memory behind it; use reshape, or fill x.new_zeros"
_LENGTHS = _PLACES + "lengths, which are checked unless unsafe=True"
# Tensors of all records lie together. Operators that do not check where they are pointed to would read a neighbour's
# there, or write into its gradient; vmap lays the tables of all records in a row. For each, by its name in torch, aten
# or torchvision: the argument that points, its place, and what holds it within the record, or why it is refused.
_POINTED: dict[str, tuple[tuple[str, int, Callable[[Tensor, Callable[..., Any]], Tensor] | str], ...]] = {
    "ctc_loss": (("targets", 1, _of_a_class),),
    "F.embedding": (("input", 0, _rows_of("weight", 1)),),
    "embedding": (("indices", 1, _rows_of("weight", 0)),),
    "index_fill": (("index", 2, _from_its_end), ("value", 3, _filled_of_its_own)),
    "roll": (("input", 0, _not_a_single_number),),
    **dict.fromkeys(("resize", "resize_", "resize_as_"), (("input", 0, _RESIZED),)),
    # Its backward pass on processors writes to the place that NaN comes to as a whole number.
    **dict.fromkeys(
        ("grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_cpu_fallback"),
        (("grid", 1, _within_picture),),
    ),
    **dict.fromkeys(("embedding_bag", "embedding_bag_forward_only"), (("offsets", 2, _BAGS),)),
    **dict.fromkeys(("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"), (("rois", 1, _BOXES),)),
    "deform_conv2d": (("offset", 2, _BOXES),),
    "segment_reduce": (("offsets", 4, _LENGTHS),),
    "linalg_lstsq": (("input", 0, _FULL_RANK), ("b", 1, _FULL_RANK)),
    # Records' quantised tensors are stacked into one, which has one scale.
    "quantize_per_tensor_dynamic": (("input", 0, _SCALE),),
    "quantize_per_tensor": (("scale", 1, _SCALE), ("zero_point", 2, _SCALE)),
}


def _refuse_operator(operator: OpOverload | OpOverloadPacket, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuses an operator of another package that would be given all records together, or would send them to other
    ranks. The kernel of one that has no rule for vmap is given one record after the other."""
    name = str(operator._qualified_op_name if isinstance(operator, OpOverloadPacket) else operator.name())
    package = name.partition("::")[0]
    if package in OF_PYTORCH or not any(map(is_of_records, pytree.tree_leaves((args, kwargs)))):
        return
    if "c10d" in package or package == "symm_mem":
        raise ClipError(
            f"{name} sends a record's tensor to other ranks, where it would meet their records; leave it out"
        )
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, x) for x in operator.overloads()]
    if name not in OPDEFS and any(_HAS_KERNEL(each.name(), "FuncTorchBatched") for each in overloads):
        _refuse_rule()


def within_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments, held within what the operator may read of a record; or a refusal."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        _refuse_operator(func, args, kwargs)
    name = "F.embedding" if func is F.embedding else getattr(func, "__name__", "").partition(".")[0].removeprefix("_")

    def given(argument: str, place: int) -> Any:
        return kwargs[argument] if argument in kwargs else args[place] if place < len(args) else None

    rules = _POINTED.get(name, ())
    if name == "segment_reduce" and kwargs.get("unsafe"):
        rules = (*rules, ("lengths", 2, _LENGTHS))
    for argument, place, held in rules:
        pointer = given(argument, place)
        if not is_of_records(pointer):  # what is computed of weights keeps its identity
            continue
        if isinstance(held, str):
            raise ClipError(f"{name} {held}")
        pointer = held(pointer, given)
        if argument in kwargs:
            kwargs = {**kwargs, argument: pointer}
        else:
            args = (*args[:place], pointer, *args[place + 1 :])
    return args, kwargs


def _mode() -> OneMicroBatch | None:
    return next((mode for mode in _get_current_function_mode_stack()[::-1] if isinstance(mode, OneMicroBatch)), None)


def _below() -> tuple[int, Any]:
    """What sees tensors below vmap, where those of all records lie together: modes of dispatch, and hooks on what
    autograd saves, but for PyTorch's own."""
    hooks = _hooks()
    ours = hooks is None or getattr(hooks[0], "__module__", "").startswith(KNOWN_HOOKS)
    return torch._C._len_torch_dispatch_stack(), None if ours else hooks


def _hooks() -> Any:
    """What is called of each tensor that autograd saves, and when it asks for it again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]


def in_checkpoint() -> bool:
    """Whether a layer runs of which autograd saves nothing, because it will run again."""
    return (hooks := _hooks()) is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _more_below(before: tuple[int, Any]) -> bool:
    modes, hooks = _below()
    return modes > before[0] or (hooks is not None and hooks != before[1])


def kept_of_records() -> set[int]:
    """The tensors of records that are held somewhere, by id(); a pass should leave none."""
    # Usually there is none, and then none can be left once Python has collected what is unreachable, which takes long.
    if not _of_records():
        return set()
    gc.collect()
    return _of_records()


def _of_records() -> set[int]:
    kinds, found = {Tensor}, [Tensor]
    while found:  # looking a type up is several times as fast as asking whether it is a subclass
        found = [kind for base in found for kind in type.__subclasses__(base) if kind not in kinds]
        kinds.update(found)
    return {id(x) for x in gc.get_objects() if type(x) in kinds and is_of_records(x)}


def let_frameworks_see_all_records(model: nn.Module) -> None:
    """Frameworks that shard weights gather and release them in hooks on modules, by autograd functions that have no
    rule for vmap and act once for all records. Hooks of anyone else see one record, as the model does."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if str(getattr(hook, "__module__", "")).startswith(FRAMEWORKS):
                    hooks[key] = _of_all_records(hook)


def _of_all_records(hook: Callable[..., Any]) -> Callable[..., Any]:

    @wraps(hook)
    def act(module: nn.Module, *given: Any, **options: Any) -> Any:
        if functorch.maybe_current_level() is None:
            return hook(module, *given, **options)
        flat, form = pytree.tree_flatten((given, options))
        if not directly() and any(is_of_records(x) for x in flat):
            raise ClipError(
                f"{type(module).__name__} is called within a torch.func transform of the model's own, where "
                "its sharded weights cannot be gathered; leave the transform out, or use ZeRO 0 to 2"
            )
        with outside(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            # What is made of weights alone is left as it is: the clip engine knows it by identity, and has own copies.
            whole = [_first(x) if is_of_records(x) else None if isinstance(x, Tensor) else x for x in flat]
            own, more = pytree.tree_unflatten(whole, form)
            found = hook(module, *own, **more)
        if found is None:
            return None
        # Hooks return what they were given last, the inputs or the output, in the same form.
        results, form = pytree.tree_flatten(found)
        before = next(x for x in (pytree.tree_leaves(given[-1]), pytree.tree_leaves(given)) if len(x) == len(results))
        mode = _mode()
        return pytree.tree_unflatten(
            [enter(new, mode) if is_of_records(old) else old for new, old in zip(results, before, strict=True)], form
        )

    return act


def _first(tensor: Tensor) -> Tensor:
    """No view for autograd, which would forget a framework's hook on it where a model changes it in place."""
    whole, dimension = functorch._unwrap_batched(tensor, LEVEL)
    whole = whole if dimension == 0 else whole.movedim(dimension, 0)
    return torch.ops.aten._unsafe_view(whole, whole.shape) if whole._is_view() else whole


@contextmanager
def entered(slots: int) -> Iterator[None]:
    """Tensors that `enter` here are batched over so many records; a checkpointed layer enters again to run again."""
    with _vmap(slots), _checkpoints_isolated(slots):
        yield


@contextmanager
def _vmap(slots: int) -> Iterator[None]:
    # Not torch.func.vmap, which would forbid hooks on saved tensors; checkpointed layers are made of them.
    if functorch.maybe_current_level() is not None:
        raise ClipError("the private forward pass was called within a torch.func transform; call it outside")
    with no_rules_of_others():
        functorch._vmap_increment_nesting(slots, "error")
        try:
            yield
        finally:
            functorch._vmap_decrement_nesting()


@contextmanager
def no_rules_of_others() -> Iterator[None]:
    """A rule for vmap that an autograd function or an operator brings along is given all records, and could let them
    meet."""
    lazy_load_decompositions()  # rules that PyTorch has in Python, without which it would loop over records
    rules, key = custom_function_call.functorch_table, TransformType.Vmap
    plain, whole, scripted = rules[key], _mode(), _SCRIPTED.__call__

    def known(interpreter: Any, function: Any, *operands: Any, **options: Any) -> Any:
        if function.vmap is not Function.vmap and not _is_known(function):
            raise ClipError(
                f"{function.__name__} has a rule for vmap of its own, which is given all records together; give it "
                "generate_vmap_rule = True in its place"
            )
        with nullcontext() if whole is None else _Within(whole):
            return plain(interpreter, function, *operands, **options)

    operators = [each for each in OPDEFS.values() if each._vmap_fn is not None and not _is_known(each._vmap_fn)]
    theirs = [each._vmap_fn for each in operators]
    for each in operators:
        each._vmap_fn = _refuse_rule
    rules[key] = known
    _SCRIPTED.__call__ = _noted
    try:
        yield
    finally:
        rules[key], _SCRIPTED.__call__ = plain, scripted
        for each, rule in zip(operators, theirs, strict=True):
            each._vmap_fn = rule


def _noted(function: Any, *given: Any, **options: Any) -> Any:
    """A scripted function is called past every mode."""
    try:
        return _RUN_SCRIPTED(function, *given, **options)
    except Exception as error:
        if (mode := _mode()) is not None:
            mode.note(error, given, options)
        raise


def _is_known(rule: Any) -> bool:
    return str(rule.__module__).startswith(KNOWN_RULES)


def _refuse_rule(*given: Any, **options: Any) -> Any:
    del given, options
    raise ClipError("an operator has a rule for vmap of its own, which is given all records together; remove the rule")


@contextmanager
def _checkpoints_isolated(slots: int) -> Iterator[None]:
    """A checkpointed layer runs again in the backward pass, when vmap was left: it must enter it once more.

    torch.utils.checkpoint has no public way to say how a function is run again. What does so takes five settings and
    then the arguments, or, in newer versions of PyTorch (2.15), a tuple and a dict of arguments and then the settings.
    """
    newer = hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")
    name = f"_checkpoint_without_reentrant_generator{'_impl' * newer}"
    plain = getattr(checkpoint, name)

    def isolated(function: Callable[..., Any], *given: Any, **named: Any) -> Iterator[None]:
        args, kwargs = given if newer else (given[5:], named)

        def checkpointed(function: Callable[..., Any], args: Any, kwargs: Any) -> Generator[None, None, None]:
            return plain(function, args, kwargs, **named) if newer else plain(function, *given[:5], *args, **kwargs)

        if not directly():
            yield from checkpointed(function, args, kwargs)
            return
        flat, form = pytree.tree_flatten((args, kwargs))
        batched = [is_of_records(x) for x in flat]
        mode = _mode()
        assert mode is not None, "an isolated pass runs in a mode"
        if mode.recorded:
            raise ClipError("a part of it is checkpointed, and compiled code would keep what that part computes again")

        def again(*whole: Any) -> None:
            # Where a clip engine watches the backward pass, it is the same mode.
            with nullcontext() if _mode() is not None else mode, entered(slots):
                own = [enter(x, mode) if of_records else x for x, of_records in zip(whole, batched, strict=True)]
                args, kwargs = pytree.tree_unflatten(own, form)
                function(*args, **kwargs)

        whole = [leave(x, slots) if of_records else x for x, of_records in zip(flat, batched, strict=True)]
        steps = checkpointed(again, tuple(whole), {})
        with outside():
            next(steps)
        try:
            yield
        except BaseException as error:
            steps.throw(error)
        else:
            next(steps, None)

    setattr(checkpoint, name, isolated)
    try:
        yield
    finally:
        setattr(checkpoint, name, plain)
