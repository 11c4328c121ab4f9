"""Why a module cannot run on one record at a time: what PyTorch objects to, where, and what to do instead."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from murmuration.train.clip.rule import ClipError

OURS = Path(__file__).resolve().parent


class Objection(NamedTuple):
    """`says`: a part of PyTorch's message."""

    says: str
    what: str
    instead: str


# Tensors that are made within forward() are seen as one for all records, unless they are made of a record's.
FILLED = "let forward() write into nothing that outlives it, and begin what it fills from its input (x.new_zeros)"
OBJECTIONS = [
    Objection(
        "data-dependent control flow", "branches on what a record holds",
        "compute both sides and choose with torch.where, or give the mask as an input",
    ),
    Objection(
        ".item() on a Tensor", "reads a number out of a record's tensor (.item(), int(), float(), tolist())",
        "keep it a tensor",
    ),
    Objection(
        "dynamic shape", "picks rows or elements by what they hold (a boolean index, nonzero, unique)",
        "keep the shape, and mask with torch.where",
    ),
    Objection(  # whose own words tell the sizes
        "stack expects each tensor to be equal size",
        "makes tensors as long as what a record holds says (bincount, repeat_interleave, argwhere)",
        "keep the shape, as one_hot with num_classes does",
    ),
    Objection(
        "random operation", "draws random numbers for all records together",
        "set rates of dropout to 0, and make every other random choice an input",
    ),
    Objection(
        "running_mean or running_var", "keeps running statistics of the records",
        "use LayerNorm or GroupNorm, or freeze it in evaluation mode",
    ),
    Objection(
        "SyncBatchNorm", "normalises with statistics of all ranks' records",
        "use LayerNorm or GroupNorm, or freeze it in evaluation mode",
    ),
    Objection(
        "more than 1 value per channel", "normalises with statistics of the whole batch",
        "use LayerNorm or GroupNorm, or freeze it in evaluation mode",
    ),
    Objection(
        "vmap: inplace", "writes a record's values into a tensor that all records share", FILLED,
    ),
    Objection(
        "mutating directly with `.data`", "writes a record's values into a tensor that all records share", FILLED,
    ),
    Objection(
        "mutate a captured Tensor", "writes into a tensor that outlives it",
        "let forward() write into nothing that outlives it, such as running statistics",
    ),
    Objection(
        "match the broadcast shape", "writes a record's values into a tensor that all records share", FILLED,
    ),
    Objection(
        "(self, *extra_args) is not possible", "writes a record's values into a tensor that all records share",
        f"{FILLED}; leave a router's load-balancing loss out",
    ),
    Objection(
        "cannot register a hook", "registers a hook on a record's tensor", "scale the loss instead of its gradient",
    ),
    Objection(
        "generate_vmap_rule", "calls an autograd.Function of its own",
        "give it setup_context and generate_vmap_rule = True, or write it with plain functions",
    ),
    Objection(
        "setup_context", "calls an autograd.Function of its own",
        "give it setup_context and generate_vmap_rule = True, or write it with plain functions",
    ),
    Objection(
        "atching rule not implemented", "calls a function that PyTorch cannot run for one record at a time",
        'write it with plain functions, or use run.clip_engine = "opacus"',
    ),
    Objection(
        "vmap: we do not yet support", "calls a function that PyTorch cannot run for one record at a time",
        "write it with plain functions",
    ),
    Objection(
        "call Tensor.requires_grad_()", "calls requires_grad_() of a record's tensor or a weight",
        "leave it out, or use torch.func.grad of a function of a record's tensors",
    ),
    Objection(
        "does not have a grad_fn", "asks autograd for a gradient within forward()",
        "use torch.func.grad of a function of a record's tensors",
    ),
    Objection(
        "support saved tensor hooks", "calls torch.func within a layer that is checkpointed",
        "leave checkpointing out",
    ),
    Objection(
        "TransformType.Vmap", "calls code that compiles itself (flex_attention)",
        "use scaled_dot_product_attention, or run it uncompiled",
    ),
    Objection(
        "storage", "asks for the memory of a record's tensor (.numpy(), .data_ptr(), .tolist())",
        "keep it a tensor",
    ),
]  # fmt: skip


def refused(error: Exception, model: Any) -> ClipError | None:
    """The sentence, if the error is one of PyTorch's objections to what forward() does with a record."""
    text = str(error)
    steps = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "autograd.Function" in text and "checkpoint" in steps:
        return ClipError(
            f"{_place(error, model)} is checkpointed reentrantly; pass use_reentrant=False to torch.utils.checkpoint"
        )
    found = next((objection for objection in OBJECTIONS if objection.says in text), None)
    if found is None:
        return None
    return ClipError(f"{_place(error, model)} {found.what}; {found.instead}")


def _place(error: Exception, model: Any) -> str:
    """The innermost module that was running, and the last line outside of PyTorch and of this package."""
    names = {id(part): name for name, part in model.named_modules()} if isinstance(model, nn.Module) else {}
    module, line = "forward()", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = names.get(id(owner), "")
            module = f"{name} ({type(owner).__name__})" if name else f"the model ({type(owner).__name__})"
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and OURS not in path.resolve().parents:
            line = f" at {path.name}:{number}"
    return module + line
