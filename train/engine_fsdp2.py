"""The model sharded by PyTorch's own FSDP2 (`fully_shard`); needs no DeepSpeed.

In a private phase FSDP2 only gathers weights. Clipped gradients are totalled in fp64 beside it and added up over the
ranks by one all-reduce per logical step, the only reduction; every rank then finishes and applies the rows that it
holds. Nothing of FSDP2 touches a gradient on the way, so what could go wrong is that an update does not reach what the
model computes with: that is proved when the engine is made, and looked for after every step. In a phase without
privacy gradients are ordinary ones, which FSDP2 sums and shares out after every micro-batch, in fp32.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.batches import MicroBatch
from train.clip import assert_exact_matmul
from train.config_run import COLLECTIVE_SECONDS
from train.engine import Applied, Observation, Shard
from train.engine_fsdp2_units import GatheredModel, Units
from train.engine_proofs import reduce_and_prove
from train.fingerprint import digests_of
from train.forward import PlainForward, PrivateForward, require_fp32
from train.gradient import Update, UpdateError
from train.optim_flat import FlatOptimizer
from train.process import describe_process
from train.ranks import Ranks
from train.shard_map import ShardMapError, prove_numbering, row_slices


def start_ranks() -> Ranks:
    """Joins the process group that the launcher describes; alone, without one, a group of one is made."""
    device = describe_process()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


class FSDP2Engine:
    def __init__(self, forward: PrivateForward | PlainForward, optimizer: FlatOptimizer, ranks: Ranks) -> None:
        assert_exact_matmul()
        self.ranks = ranks
        self.device = ranks.device
        self._forward = forward
        self._optimizer = optimizer
        require_fp32(self._forward)
        self.shapes = forward.shapes
        self.partitioned = True
        self.trainable_elements = sum(shape.numel() for shape in self.shapes.values())
        _same_everywhere(forward.model, ranks)
        before = digests_of(forward.model.state_dict())
        self._units = Units(forward.model, ranks)
        self._trained = self._trained_rows()
        self._layout = row_slices(self._trained, self.shapes, ranks.rank, ranks.world)
        self._prove()
        self.model: nn.Module = GatheredModel(self._units)
        forward.model = self.model
        if digests_of(self.whole_weights()) != before:
            raise ShardMapError("sharding changed the weights; what layers are given is not what the model had")
        if isinstance(forward, PrivateForward):
            del forward.handover  # its taps keep the weights from before; sums need not pass through FSDP2
            forward.begin(self.device)
        (group,) = optimizer.param_groups
        group["params"] = [flat for flat, _ in self._layout.values()]
        optimizer.bind(self._layout, self._add_up)

    def _trained_rows(self) -> dict[str, Tensor]:
        return {name: local for name, local in self._units.local().items() if name in self.shapes}

    def _prove(self) -> None:
        """Each element lies in one shard, and there alone."""
        if list(self._trained) != list(self.shapes):
            raise ShardMapError("sharding changed the names or the order of parameters, by which noise is drawn")
        held = self.ranks.sum(sum(f.length for _, fragments in self._layout.values() for f in fragments))
        if held != self.trainable_elements:
            raise ShardMapError(
                f"the shards hold {held} of {self.trainable_elements} elements; some lie in two, or in none"
            )
        prove_numbering(self._layout, {name: s.numel() for name, s in self.shapes.items()}, self._units.gathered)

    def accumulate(self, batch: MicroBatch) -> None:
        batch = batch.to(self.device)
        loss = self._forward(batch.inputs, batch.present)
        if not isinstance(self._forward, PrivateForward):
            loss.backward()

    def update(self, update: Update, learning_rate: float) -> Applied:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        before = self._optimizer.steps_done
        try:
            if isinstance(self._forward, PrivateForward):
                reduce_and_prove(self._forward.sums, self.ranks)
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
            totals = self._forward.sums.totals
            every = [f for _, fragments in self._layout.values() for f in fragments]
            return {f.name: totals[f.name].view(-1)[f.start : f.start + f.length] for f in every}
        found: dict[str, Tensor] = {}
        for name, parameter in self._units.model.named_parameters():
            if name in self.shapes:
                gradient = parameter.grad
                found[name] = (
                    gradient.to_local() if isinstance(gradient, DTensor) else torch.zeros_like(self._trained[name])
                )
        return found

    def discard(self) -> None:
        """Sums, gradients, and gathered weights that a pass left behind."""
        if isinstance(self._forward, PrivateForward):
            self._forward.sums.clear()
        self._units.let_go()
        for parameter in self._units.model.parameters():
            parameter.grad = None
        for flat, _ in self._layout.values():
            flat.grad = None

    def _check(self, update: Update, applied: bool) -> Applied:
        """What may be lost in silence: elements, the step, the tie between shards and model, finite weights."""
        own = all(_is(local, self._trained[name]) for name, local in self._trained_rows().items())
        # Of weights alone: padding behind them is memory that nobody ever wrote.
        finite = all(bool(torch.isfinite(f.of(flat)).all()) for flat, parts in self._layout.values() for f in parts)
        said = torch.tensor([update.elements, int(applied), int(own), int(finite)], device=self.device)
        elements, steps, owners, healthy = self.ranks.add(said).tolist()
        if elements != self.trainable_elements:
            raise UpdateError(
                f"{elements} of {self.trainable_elements} elements were finished; some got no noise, or got it twice"
            )
        if steps != self.ranks.world:
            raise UpdateError("the optimizer did not take exactly one step on some rank")
        if owners != self.ranks.world:
            raise UpdateError("the model's shards are no longer those that the optimizer updates; something moved them")
        if healthy != self.ranks.world:
            raise UpdateError("the weights are no longer finite; resume with a lower learning rate and --new-segment")
        return Applied(self.trainable_elements)

    def observe(self) -> Observation:
        return self._forward.observation()

    def shards(self) -> list[Shard]:
        return [Shard(flat, parts, self._optimizer.state_tensors(flat)) for flat, parts in self._layout.values()]

    def optimizer_step(self) -> int:
        return self._optimizer.steps_done

    def set_optimizer_step(self, step: int) -> None:
        """Prepares the optimizer state to be filled by a checkpoint, or forgets it at step 0."""
        self._optimizer.restart(step)

    def _add_up(self, sums: Tensor) -> Tensor:
        return self.ranks.add(sums)

    def whole_weights(self) -> dict[str, Tensor]:
        state = dict(self._units.model.state_dict())
        state |= {name: whole.detach().clone() for name, whole in self._units.gathered()}
        return state

    def close(self) -> None:
        self.discard()


def _same_everywhere(model: nn.Module, ranks: Ranks) -> None:
    """Every rank starts from the main rank's weights."""
    for tensor in model.state_dict().values():
        given = tensor.detach().to(ranks.device, copy=True)
        dist.broadcast(given, src=0)
        tensor.copy_(given)


def _is(one: Tensor, other: Tensor) -> bool:
    """The same memory."""
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()
