"""DeepSpeed's own layout of a checkpoint, written and read without DeepSpeed, so that its tools stay usable.

Only weights are written, as ZeRO-1 of one rank: `zero_to_fp32` reads them, and so does
`load_checkpoint(load_module_only=True)` at any world size. Moments are left out: with them DeepSpeed would take over
settings that belong to another optimizer. ZeRO 1 to 3 of any number of ranks can be read. Such files are pickles, which
may run any code; only their tensors and plain containers are unpickled.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from murmuration.accounting.errors import RunError
from murmuration.accounting.escaping import first_line
from murmuration.model.load_report import WeightsError
from murmuration.model.weight_files import load_plain
from murmuration.train.storage.checkpoint_read import WEIGHTS, Loaded

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class LayoutError(RunError, ValueError):
    """The folder is not a readable DeepSpeed checkpoint; the message names the file."""


def write_deepspeed(loaded: Loaded, out: Path) -> None:
    """Writes DeepSpeed's `latest` and a folder for the step into `out`."""
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
    """fp32 weights and buffers by name; `folder` contains DeepSpeed's `latest`, or is the folder of one step."""
    pointer, place = folder / "latest", folder
    if pointer.is_file():
        tag = pointer.read_text(errors="replace").strip()
        if not tag or tag != Path(tag).name or "\0" in tag:
            raise LayoutError(f"{pointer} does not name a folder beside it; correct it, or name the folder of one step")
        place = folder / tag
    models, optimizers = (
        sorted((path for path in place.glob(names) if path.is_file()), key=_rank)
        for names in ("*_model_states.pt", "*_optim_states.pt")
    )
    if not models or not optimizers:
        raise LayoutError(f"{place} has no *_model_states.pt and *_optim_states.pt; name a checkpoint of DeepSpeed")
    try:
        states = [_load(path)["optimizer_state_dict"] for path in optimizers]
        heads = [_load(path) for path in models]
        return _merged(heads, states)
    except LayoutError:
        raise
    except WeightsError as error:
        raise LayoutError(str(error)) from None
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        reason = first_line(error, most=None)
        raise LayoutError(f"{place} is not laid out as a ZeRO checkpoint of DeepSpeed ({reason})") from None


def _merged(heads: list[dict[str, Any]], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    head, parted = heads[0], "fp32_flat_groups" in states[0]  # ZeRO-3; its number is an object of DeepSpeed's
    count = states[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if count != len(states):
        raise LayoutError(f"only {len(states)} of {count} *_optim_states.pt are there; copy the others, too")
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
    if not parted:  # ZeRO-1 stores frozen parameters nowhere else
        found = {name: tensor.float() for name, tensor in head["module"].items() if name not in found} | found
    return {name: _plain(name, tensor) for name, tensor in found.items()}


def _plain(name: str, tensor: Any) -> Tensor:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(f"{str(name)[:80]!r} names a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise TypeError(f"{name!r} is not a dense tensor with values")
    return tensor.detach().float().clone()


def _cut(flat: Tensor, shapes: dict[str, torch.Size], padding: list[int] | None) -> dict[str, Tensor]:
    """ZeRO 1 and 2: parameters one after the other, possibly with padding after each."""
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
    digits = [int(part) for part in path.name.split("_") if part.isdecimal()]
    return digits[0] if digits else 0


def _load(path: Path) -> dict[str, Any]:
    loaded = load_plain(path, inert=True)
    if not isinstance(loaded, dict):
        raise LayoutError(f"{path} does not contain what DeepSpeed writes; name a checkpoint of DeepSpeed")
    return loaded
