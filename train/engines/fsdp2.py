"""The model sharded by PyTorch's own FSDP2 (`fully_shard`), without DeepSpeed.

In a private phase FSDP2 only gathers weights. Clipped gradients are totalled outside it, and the ranks send each other
what lies in their shards (`sharded_sums.py`); every rank then finishes and applies the rows that it holds. FSDP2 never
touches a gradient on the way, so the one remaining risk is that an update does not reach the weights with which the
model computes: that is ruled out when the engine is made, and checked after every step. In a phase without privacy,
gradients are ordinary ones, which FSDP2 sums and shards after every micro-batch, in fp32.

With several copies of the weights (`run.shard_over`, HSDP), ranks that hold equal shards add up their sums, finish them
with the same noise, and so keep equal weights and equal state of the optimizer: sums of their bits are compared after
every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from murmuration.train.clip.blocks import repeated_blocks
from murmuration.train.clip.isolated import let_frameworks_see_all_records
from murmuration.train.config.section import COLLECTIVE_SECONDS
from murmuration.train.distributed.process import describe_process
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.rendezvous import init_method
from murmuration.train.engines.base import NOT_FINITE, AppliedUpdate, all_finite, digests_of, modes_of
from murmuration.train.engines.forward import EngineOfForward, PlainForward, PrivateForward
from murmuration.train.engines.mesh import Mesh, require_whole_copies
from murmuration.train.engines.shard_map import ShardMapError, prove_numbering, row_slices
from murmuration.train.engines.sharded_sums import ShardedSums
from murmuration.train.noise.update import Update, UpdateError
from murmuration.train.optim.base import FlatOptimizer

# A model divided for FSDP2: which parts are gathered together, and a view of the model with its whole parameters.
#
# Between calls a rank holds only its rows of every parameter. While a part runs, forward or backward, its parameters
# are whole on every rank; they are released as soon as the part is done.


class Units:
    """The parts of a sharded model. Their operations are collective."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise ShardMapError(
                    f'{name} has no rows to shard; give it the shape [1], or use run.engine "deepspeed"'
                )
        self.model = model
        self._parts = [fully_shard(part, mesh=mesh, reshard_after_forward=True) for part in parts_of(model)]
        let_frameworks_see_all_records(model)
        for part in self._parts:
            # Non-private phases reduce to sums, not means.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under each of its names, whole while the caller uses it; iterate to the end."""
        for part in self._parts:
            part.unshard()
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if not isinstance(parameter, DTensor):
                    yield name, parameter
            part.reshard()

    def let_go(self) -> None:
        """Releases all gathered parameters."""
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
    """The sharded model, with the whole parameters with which its layers compute.

    FSDP2 puts these parameters in place while a layer runs, always the same objects, and gives them memory only then.
    Clip engines recognise parameters by identity, so they are given this model.
    """

    def __init__(self, units: Units) -> None:
        super().__init__()
        self._sharded = (units.model,)  # in a tuple: nothing is registered a second time
        self._whole = dict(units.gathered())
        for parameter in self._whole.values():
            parameter.lent = True  # pyright: ignore[reportAttributeAccessIssue]  # its memory, while a layer runs
        if any(self._whole[name] is not parameter for name, parameter in units.gathered()):
            raise ShardMapError("FSDP2 makes new whole parameters at each gathering; this version is not supported")

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
    """Repeated blocks, each a part of its own, and last the model, which takes the rest.

    A block that shares a parameter with something outside is left to the model: the parameter must be whole in both
    places.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    parts = []
    for block in repeated_blocks(model):
        own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
        if own and all(uses[parameter] == count for parameter, count in own.items()):
            parts.append(block)
    return [*parts, model]


def start_ranks(shard_over: int | None = None) -> Ranks:
    """Joins the process group that the launcher describes, once; without a launcher, makes a group of one."""
    device = describe_process()
    gpu = device if device.type == "cuda" else None
    if not dist.is_initialized():  # a program may open one training after another
        dist.init_process_group(
            "gloo" if gpu is None else "nccl", init_method(), timedelta(seconds=COLLECTIVE_SECONDS), device_id=gpu
        )
    require_whole_copies(dist.get_world_size(), shard_over)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


class FSDP2Engine(EngineOfForward):
    def __init__(
        self, forward: PrivateForward | PlainForward, optimizer: FlatOptimizer, micro_batch: int, ranks: Ranks,
        shard_over: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(forward, optimizer, ranks)
        self.partitioned = True
        _same_everywhere(forward.model, ranks)
        before = digests_of(forward.model.state_dict())
        self._mesh = Mesh.of(ranks, shard_over)
        self._units = Units(forward.model, self._mesh.device_mesh)
        self._trained = self._trained_rows()
        self._layout = row_slices(self._trained, self.shapes, self._mesh.holders.rank, self._mesh.holders.world)
        self._prove()
        self.model: nn.Module = GatheredModel(self._units)
        forward.model = self.model
        if digests_of(self.whole_weights()) != before:
            raise ShardMapError("sharding changed the weights; layers do not receive the weights that the model had")
        if isinstance(forward, PrivateForward):
            del forward.handover  # its taps keep the unsharded weights; sums need not pass through FSDP2
            fragments = [fragment for _, parts in self._layout.values() for fragment in parts]
            holders, replicas = self._mesh.holders, self._mesh.replicas
            forward.begin(self.device, ShardedSums(self.shapes, fragments, holders, micro_batch, replicas))
        (group,) = optimizer.param_groups
        group["params"] = [flat for flat, _ in self._layout.values()]
        optimizer.bind(self._layout, self._add_up)

    def _trained_rows(self) -> dict[str, Tensor]:
        return {name: local for name, local in self._units.local().items() if name in self.shapes}

    def _prove(self) -> None:
        """Checks that each element is in exactly one shard of each copy."""
        if list(self._trained) != list(self.shapes):
            raise ShardMapError("sharding changed the names or the order of parameters, by which noise is drawn")
        held = self._mesh.holders.sum(sum(f.length for _, fragments in self._layout.values() for f in fragments))
        if held != self.trainable_elements:
            raise ShardMapError(
                f"the shards contain {held} of {self.trainable_elements} elements; some are in two shards, or in none"
            )
        prove_numbering(self._layout, {name: s.numel() for name, s in self.shapes.items()}, self._units.gathered)

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        before = self._optimizer.steps_done
        try:
            if isinstance(self._forward, PrivateForward):
                self._forward.sharded_sums.reduce()
            reduced = self._reduced()
            for flat, fragments in self._layout.values():
                total = reduced.pop(fragments[0].name) if fragments else torch.zeros_like(flat)
                update.finish(total, fragments)
                flat.grad = total.to(flat.dtype).view_as(flat)
            self._optimizer.step()
        finally:
            self.discard()
        return self._check(update, self._optimizer.steps_done == before + 1)

    @torch.no_grad()
    def _reduced(self) -> dict[str, Tensor]:
        """This rank's part of the sum over all ranks, by parameter: fp64 in a private phase, else FSDP2's own fp32."""
        if isinstance(self._forward, PrivateForward):
            every = [f for _, fragments in self._layout.values() for f in fragments]
            return {f.name: self._forward.sharded_sums.of(f) for f in every}
        found: dict[str, Tensor] = {}
        for name, parameter in self._units.model.named_parameters():
            if name in self.shapes:
                gradient = parameter.grad
                found[name] = (
                    gradient.to_local() if isinstance(gradient, DTensor) else torch.zeros_like(self._trained[name])
                )
        return found

    def discard(self) -> None:
        """Drops sums, gradients, and gathered weights that a pass left behind."""
        if isinstance(self._forward, PrivateForward):
            self._forward.clear()
        self._units.let_go()
        for parameter in self._units.model.parameters():
            parameter.grad = None
        for flat, _ in self._layout.values():
            flat.grad = None

    def _check(self, update: Update, applied: bool) -> AppliedUpdate:
        """Checks what may be lost silently: elements, the step, the link between shards and model, finite weights."""
        pairs = [(local, self._trained[name]) for name, local in self._trained_rows().items()]
        own = all(one.shape == other.shape and one.data_ptr() == other.data_ptr() for one, other in pairs)
        # Weights only: the padding behind them is memory that was never written.
        finite = all_finite(f.of(flat) for flat, parts in self._layout.values() for f in parts)
        said = [update.elements, int(applied), int(own), int(finite), int(self._copies_are_equal())]
        elements, steps, owners, healthy, equal = self.ranks.add(torch.tensor(said, device=self.device)).tolist()
        expected = self.trainable_elements * self._mesh.replicas.world
        if elements != expected:
            raise UpdateError(f"{elements} of {expected} elements were finished; some got no noise, or got it twice")
        if steps != self.ranks.world:
            raise UpdateError("the optimizer did not take exactly one step on some rank")
        if owners != self.ranks.world:
            raise UpdateError("the model's shards are no longer those that the optimizer updates; something moved them")
        if healthy != self.ranks.world:
            raise UpdateError(NOT_FINITE)
        if equal != self.ranks.world:
            raise UpdateError(
                "the copies of the weights are no longer equal: a rank did not get the same update as its replicas; "
                "continue from the last checkpoint"
            )
        return AppliedUpdate(self.trainable_elements)

    @torch.no_grad()
    def _copies_are_equal(self) -> bool:
        """Whether the ranks that hold equal shards have the same bits in weights and optimizer, by sums of the bits."""
        if self._mesh.replicas.world == 1:
            return True
        kept = [tensor for shard in self.shards() for tensor in (shard.weights, *shard.state.values())]
        return self._mesh.replicas.same_bits(kept)

    def _add_up(self, sums: Tensor) -> Tensor:
        """Over the shards of a copy. All ranks add them up together, so that every copy gets the same bits."""
        return self.ranks.add(sums).div_(self._mesh.replicas.world)

    def whole_weights(self) -> dict[str, Tensor]:
        state = dict(self._units.model.state_dict())
        state |= {name: whole.detach().clone() for name, whole in self._units.gathered()}
        return state

    def plain_model(self) -> nn.Module | None:
        if not isinstance(self._forward, PrivateForward):
            return None
        return self._forward.plain_copy.filled(self.whole_weights(), modes_of(self.model), self.device)

    def close(self) -> None:
        self.discard()


def _same_everywhere(model: nn.Module, ranks: Ranks) -> None:
    """Copies the main rank's weights to every rank."""
    for tensor in model.state_dict().values():
        given = tensor.detach().to(ranks.device, copy=True)
        dist.broadcast(given, src=0)
        tensor.copy_(given)
