"""What a model holds between passes: weights, buffers, and whatever Python keeps in its modules.

A record's own values cannot be written into tensors that records share (`clip/isolated.py`). This is the second line:
nothing in the model may differ after a pass, but for the weights that an update moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.train.clip.isolated import is_of_records
from murmuration.train.engines.base import digest_of

# Words that are added up at a time: on a processor they stay in its cache, which takes a fifth to a twentieth of the
# time; a GPU would rather be launched seldom.
ON_HOST, ON_DEVICE = 1 << 18, 1 << 25
PLACES = torch.from_numpy(np.arange(1, 2 * ON_HOST, 2, dtype=np.int32))
"""Made once, since fresh memory for them takes as long as the sums. By NumPy: PyTorch would start OpenMP's threads at
the import, and a process that is forked from one with such threads waits for them forever."""
WORDS = range(4, 1 << 16, 4)
"""Bytes of a small tensor, whole words."""
# Attributes in which engines that shard a model keep their books; those of every module are PyTorch's own.
OF_ENGINES = (
    "ds_", "_ds_", "applied_pre_backward", "_external_params", "_original_parameters", "pre_bwd_fn", "post_bwd_fn",
    "all_parameters", "_fsdp", "fsdp_",
)  # fmt: skip
OF_MODULES = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DEEP, LONG = 3, 100
"""How far into containers, and how many of their elements are looked at."""


@dataclass(frozen=True)
class Held:
    tensors: dict[str, tuple[int, ...]]
    """Checksums of parameters and buffers, of this rank's part where they are sharded."""
    attributes: dict[str, str]
    trained: frozenset[str]

    @staticmethod
    def by(model: nn.Module, weights: bool = True) -> Held:
        """Without `weights` at any time: between passes FSDP2 takes back the memory of those that it has gathered."""
        parameters = {f"the parameter {name}": p for name, p in model.named_parameters()} if weights else {}
        found = {name: _part(p) for name, p in parameters.items()}
        found |= {f"the buffer {name}": buffer for name, buffer in model.named_buffers()}
        trained = frozenset(name for name, p in parameters.items() if p.requires_grad)
        odd = {name: "a record's" for name, tensor in found.items() if is_of_records(tensor)}
        return Held(
            checksums({name: x for name, x in found.items() if name not in odd}), attributes_of(model) | odd, trained
        )

    def but_for_trained(self) -> Held:
        frozen = {name: found for name, found in self.tensors.items() if name not in self.trained}
        return replace(self, tensors=frozen)

    def changed(self, now: Held) -> str | None:
        """The first thing that differs, in words."""
        for before, after in ((self.tensors, now.tensors), (self.attributes, now.attributes)):
            if before == after:
                continue
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    return name
        return None


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Two sums of each tensor's bits, the second weighted by place. They are computed where the tensors are, and
    fetched together."""
    bits = {name: tensor.detach().contiguous().flatten().view(torch.uint8) for name, tensor in tensors.items()}
    small = [name for name, own in bits.items() if own.device.type == "cpu" and len(own) in WORDS]
    sums = dict(zip(small, _together([bits.pop(name) for name in small]), strict=True))
    if bits:
        large = [_checksum(own) for own in bits.values()]
        device = large[0].device
        sums |= dict(zip(bits, torch.stack([each.to(device) for each in large]).tolist(), strict=True))
    return {name: (*tensor.shape, *sums[name]) for name, tensor in tensors.items()}


def _together(each: list[Tensor]) -> list[list[int]]:
    """Of several small tensors, side by side: one by one, starting the operations takes longer than they do."""
    if not each:
        return []
    lengths = [len(bits) // 4 for bits in each]
    starts = np.cumsum([0, *lengths[:-1]])
    words, places = torch.cat(each).view(torch.int32).numpy(), PLACES.numpy()
    weighted = words * np.concatenate([places[:length] for length in lengths])  # wraps, as below
    return np.stack([np.add.reduceat(part, starts, dtype=np.int64) for part in (words, weighted)], 1).tolist()


@torch.no_grad()
def _checksum(flat: Tensor) -> Tensor:
    whole = len(flat) // 4 * 4
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    on_host = flat.device.type == "cpu"
    stretch = ON_HOST if on_host else ON_DEVICE
    for words in (flat[:whole].view(torch.int32), flat[whole:].int()):
        for start in range(0, len(words), stretch):
            part = words[start : start + stretch]
            # Products wrap as in C; an odd factor loses no bit of a word, nor of the stretches before.
            places = (
                PLACES[: len(part)]
                if on_host
                else torch.arange(1, 2 * len(part), 2, dtype=torch.int32, device=flat.device)
            )
            total = 3 * total + torch.stack([part.sum(), (part * places).sum()])
    return total


def _part(parameter: Tensor) -> Tensor:
    """What this rank has of it, where FSDP2 (whose DTensor is slow to import) or DeepSpeed shards it."""
    to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
    return getattr(parameter, "ds_tensor", parameter) if to_local is None else to_local()


def attributes_of(model: nn.Module) -> dict[str, str]:
    """What Python keeps in each module, as words that change when it does: numbers, lengths, digests of tensors. The
    model's own weights and buffers, which an LSTM keeps in a list as well, are looked at by themselves."""
    found: dict[str, str] = {}
    modules = dict(model.named_modules())
    # As the modules hold them: an engine that shards may list others.
    own = {
        id(tensor): f"{path}.{name}"
        for path, module in modules.items()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    for path, module in modules.items():
        place = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name not in OF_MODULES and not name.startswith(OF_ENGINES):
                found[f"the attribute {place}{name}"] = _in_words(value, own, DEEP)
        for name in HOOKS:
            found[f"the hooks {place}{name}"] = str([id(hook) for hook in vars(module)[name].values()])
    return found


def _in_words(value: Any, own: Mapping[int, str], depth: int) -> str:
    kind = type(value).__name__
    if id(value) in own:
        return f"the model's {own[id(value)]}"
    if isinstance(value, Tensor):
        return "a record's" if is_of_records(value) else f"{list(value.shape)} {digest_of(value)}"
    if isinstance(value, np.ndarray):
        return f"{kind} {value.shape} {hash(value.tobytes())}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, nn.Module) or not depth:
        return kind
    if isinstance(value, Mapping):
        return f"{kind} of {len(value)}: {_each(value.items(), own, depth)}"
    if isinstance(value, (Sequence, AbstractSet)):
        return f"{kind} of {len(value)}: {_each(value, own, depth)}"
    return f"{kind} {_each(vars(value).items(), own, depth)}" if hasattr(value, "__dict__") else kind


def _each(values: Iterable[Any], own: Mapping[int, str], depth: int) -> list[str]:
    return [_in_words(value, own, depth - 1) for value, _ in zip(values, range(LONG), strict=False)]
