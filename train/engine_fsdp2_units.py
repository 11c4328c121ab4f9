"""A model cut up for FSDP2: which parts are gathered together, and the model as those see it who know its parameters.

Between calls a rank holds its rows of every parameter, and nothing else. While a part runs, forwards or backwards, its
parameters are whole on every rank; they are let go of as soon as it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from train.ranks import Ranks
from train.shard_map import ShardMapError


class Units:
    """The parts of a sharded model. What they do together is a collective act."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ShardMapError(
                    f'{name} has no rows to share out; give it the shape [1], or use run.engine "deepspeed"'
                )
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        self.model = model
        self._parts = [fully_shard(part, mesh=mesh, reshard_after_forward=True) for part in parts_of(model)]
        for part in self._parts:
            # Sums, not means, of what non-private phases reduce.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under each of its names, whole while the caller looks at it; go through to the end."""
        for part in self._parts:
            part.unshard()
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if not isinstance(parameter, DTensor):
                    yield name, parameter
            part.reshard()

    def let_go(self) -> None:
        """Of whatever is whole."""
        for part in self._parts:
            part.reshard()

    @torch.no_grad()
    def local(self) -> dict[str, Tensor]:
        """This rank's rows of each parameter, without padding: the memory that the next gathering reads."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise ShardMapError(
                    f"{name} is whole where only its shard should be; the model would not see an update"
                )
            found[name] = parameter.to_local()
        return found


class GatheredModel(nn.Module):
    """The sharded model, its parameters being the whole ones with which its layers compute.

    FSDP2 puts these in place while a layer runs, always the same, and gives them memory only then. Clip engines know
    parameters by identity, so this is the model that they are shown.
    """

    def __init__(self, units: Units) -> None:
        super().__init__()
        self._sharded = (units.model,)  # in a tuple: nothing is registered a second time
        self._whole = dict(units.gathered())
        for parameter in self._whole.values():
            parameter.lent = True  # pyright: ignore[reportAttributeAccessIssue]  # its memory, while a layer runs
        if any(self._whole[name] is not parameter for name, parameter in units.gathered()):
            raise ShardMapError("FSDP2 makes whole parameters anew at each gathering; this version is not supported")

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self._sharded[0](inputs)

    def train(self, mode: bool = True) -> GatheredModel:
        self._sharded[0].train(mode)
        return super().train(mode)

    def named_modules(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._sharded[0].named_modules(*arguments, **options)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, _ in self._sharded[0].named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._whole[name.removeprefix(f"{prefix}.") if prefix else name]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Repeated blocks, each a part of its own; last the model, which takes the rest.

    A block that shares a parameter with something outside is left to the model: it must be whole in both places.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    parts = []
    for block in _blocks(model):
        own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
        if own and all(uses[parameter] == count for parameter, count in own.items()):
            parts.append(block)
    return [*parts, model]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    kinds = [type(child) for child in module.children()]
    chain = isinstance(module, nn.Sequential) and len(kinds) > 1 and len(set(kinds)) == 1
    for child in module.children():
        if (chain or isinstance(module, nn.ModuleList)) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from _blocks(child)
