"""DeepSpeed's own layout of a checkpoint, written and read without DeepSpeed, so that its tools stay usable.

Weights are written, as ZeRO-1 of one rank: `zero_to_fp32` reads it, and `load_checkpoint(load_module_only=True)` at any
world size. Moments stay behind: with them DeepSpeed would take over settings that belong to another optimizer. Read:
ZeRO 1 to 3 of any number of ranks. Such files are pickles, which may run any code; here nothing of a pickle but tensors
and plain containers comes to life.
"""

from __future__ import annotations

import math
import pickle
import types
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.checkpoint_read import WEIGHTS, Loaded

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
ALLOWED = {
    ("collections", "OrderedDict"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"), *(("torch", str(kind).split(".")[1]) for kind in
    (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)),
}  # fmt: skip


class LayoutError(ValueError):
    """The folder is no checkpoint of DeepSpeed that can be read; the message names the file."""


def write_deepspeed(loaded: Loaded, out: Path) -> None:
    """`out` gets DeepSpeed's `latest` and a folder for the step."""
    tag = f"global_step{loaded.manifest['optimizer_step']}"
    (out / tag).mkdir(parents=True)
    weights, trained = loaded.weights(), loaded.names(WEIGHTS)
    shapes = OrderedDict((name, weights[name].shape) for name in weights if name in set(trained))
    fixed = {name: tensor for name, tensor in weights.items() if name not in shapes}
    common = {"ds_version": version("deepspeed"), "ds_config": {}}
    model = {
        "module": OrderedDict(weights), "buffer_names": list(fixed), "optimizer": None, "lr_scheduler": None,
        "param_shapes": [shapes], "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {},
        "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "skipped_steps": 0,
        "global_steps": loaded.manifest["optimizer_step"], "global_samples": 0, "dp_world_size": 1, "mp_world_size": 1,
    }  # fmt: skip
    flat = torch.cat([weights[name].reshape(-1) for name in shapes])
    optimizer = {
        "zero_stage": 1, "partition_count": [1], "dynamic_loss_scale": False, "overflow": False,
        "clip_grad": 0.0, "group_paddings": [0], "single_partition_of_fp32_groups": [flat],
        "ds_version": common["ds_version"],
    }  # fmt: skip
    torch.save(model | common, out / tag / MODEL)
    torch.save({"optimizer_state_dict": optimizer} | common, out / tag / OPTIMIZER.format(0))
    (out / "latest").write_text(tag)


def read_deepspeed(folder: Path) -> dict[str, Tensor]:
    """fp32 weights and buffers by name; `folder` holds DeepSpeed's `latest`, or is the folder of one step."""
    pointer = folder / "latest"
    place = folder / pointer.read_text().strip() if pointer.exists() else folder
    models = sorted(place.glob("*_model_states.pt"), key=_rank)
    optimizers = sorted(place.glob("*_optim_states.pt"), key=_rank)
    if not models or not optimizers:
        raise LayoutError(f"{place} holds no *_model_states.pt and *_optim_states.pt; name a checkpoint of DeepSpeed")
    try:
        states = [_load(path)["optimizer_state_dict"] for path in optimizers]
        heads = [_load(path) for path in models]
        return _merged(heads, states)
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError, pickle.UnpicklingError) as error:
        raise LayoutError(f"{place} is not laid out as DeepSpeed's ZeRO checkpoints are ({error!r})") from None


def _merged(heads: list[dict[str, Any]], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    head, parted = heads[0], "fp32_flat_groups" in states[0]  # ZeRO-3; its number is an object of DeepSpeed's
    count = states[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if count != len(states):
        raise LayoutError(f"{len(states)} of {count} *_optim_states.pt are there; copy the others, too")
    found = {name: head["module"][name].float() for name in head["buffer_names"]}
    for name, shape in (head.get("frozen_param_shapes") or {}).items():
        parts = [each["frozen_param_fragments"][name] for each in (heads if parted else heads[:1])]
        found[name] = torch.cat([part.reshape(-1) for part in parts])[: math.prod(shape)].view(shape)
    shapes: list[dict[str, torch.Size]] = head["param_shapes"]
    if parted:
        ranks = [torch.cat([flat.reshape(-1) for flat in state["fp32_flat_groups"]]) for state in states]
        found |= _zipped(ranks, {name: shape for group in shapes for name, shape in group.items()})
    else:
        paddings = states[0].get("param_alignment_paddings") or [None] * len(shapes)
        for number, (group, padding) in enumerate(zip(shapes, paddings, strict=True)):
            flat = torch.cat([state["single_partition_of_fp32_groups"][number] for state in states])
            found |= _cut(flat, group, padding)
    for name, same in head["shared_params"].items() if isinstance(head["shared_params"], dict) else ():
        found[name] = found[same]
    if not parted:  # ZeRO-1 notes frozen parameters nowhere else
        found = {name: tensor.float() for name, tensor in head["module"].items() if name not in found} | found
    return {name: tensor.float().clone() for name, tensor in found.items()}


def _cut(flat: Tensor, shapes: dict[str, torch.Size], padding: list[int] | None) -> dict[str, Tensor]:
    """ZeRO 1 and 2: parameters one after the other, maybe each with some padding behind it."""
    found, offset = {}, 0
    for number, (name, shape) in enumerate(shapes.items()):
        size = math.prod(shape)
        found[name] = flat.narrow(0, offset, size).view(shape)
        offset += size + (padding[number] if padding else 0)
    return found


def _zipped(ranks: list[Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """ZeRO-3: every rank holds an equal part of each parameter, the last ones padded."""
    found, offset = {}, 0
    for name, shape in shapes.items():
        part = -(-math.prod(shape) // len(ranks))
        whole = torch.cat([flat.narrow(0, offset, part) for flat in ranks])
        found[name] = whole[: math.prod(shape)].view(shape)
        offset += part
    return found


def _rank(path: Path) -> int:
    digits = [int(part) for part in path.name.split("_") if part.isdigit()]
    return digits[0] if digits else 0


class _Inert:
    """Stands where a pickle names any other class or function: it holds what it is given and does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        del arguments, options

    def __setstate__(self, state: Any) -> None:
        del state


# Tensors that carry attributes: the tensor is taken and what hangs on it is left.
PLAIN = {
    ("torch._tensor", "_rebuild_from_type_v2"): lambda rebuild, kind, arguments, state: rebuild(*arguments),
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, requires_grad, hooks, state: data,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in PLAIN:
            return PLAIN[module_name, global_name]
        return super().find_class(module_name, global_name) if (module_name, global_name) in ALLOWED else _Inert


def _load(path: Path) -> dict[str, Any]:
    pickles = types.SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="tensors only")
    loaded = torch.load(path, map_location="cpu", weights_only=False, pickle_module=pickles)
    if not isinstance(loaded, dict):
        raise LayoutError(f"{path} does not hold what DeepSpeed writes")
    return loaded
