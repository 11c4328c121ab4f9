"""The model sharded by stock DeepSpeed. The only file that imports it.

The noise enters through a step pre-hook on the stock optimizer, which sees the reduced, unscaled fp32 gradient of
exactly this rank's shard. DeepSpeed has ways to lose such a hook, or to skip a step, without an error; therefore
the hook demands a one-shot update and every step is checked afterwards.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from data.batches import MicroBatch
from train.clip import PlainForward, PrivateForward, assert_exact_matmul
from train.config import ZeroOptimization
from train.engine import Applied, Observation, Shard
from train.gradient import Update, UpdateError
from train.process import describe_process
from train.ranks import Ranks
from train.shard_map import whole_parameters, zero_slices


def start_ranks(timeout_seconds: int = 1800) -> Ranks:
    """Joins the process group that the launcher describes; alone, without one, a group of one is made."""
    device = describe_process()
    deepspeed.init_distributed(auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_seconds), verbose=False)
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


class DeepSpeedEngine:
    def __init__(
        self,
        forward: PrivateForward | PlainForward,
        optimizer: torch.optim.Optimizer,
        zero: ZeroOptimization,
        micro_batch: int,
        ranks: Ranks,
    ) -> None:
        assert_exact_matmul()
        self.ranks = ranks
        self.device = ranks.device
        self._forward = forward
        self._base = optimizer
        self._pending: Update | None = None
        self._zero = zero
        for name, parameter in forward.named_parameters():
            if parameter.dtype != torch.float32:
                raise UpdateError(f"{name} is {parameter.dtype}; parameters must be fp32, or sums are rounded")
        self._engine: Any = deepspeed.initialize(
            model=forward, optimizer=optimizer, config=deepspeed_config(zero, micro_batch)
        )[0]
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.model: nn.Module = forward.model
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.trainable_elements = sum(p.numel() for p in trainable.values())
        flats = [p for group in optimizer.param_groups for p in group["params"]]
        self._layout = zero_slices(trainable, flats) if zero.stage else whole_parameters(trainable)
        self._require_own_optimizer()
        self._hook = optimizer.register_step_pre_hook(self._before_optimizer_step)

    def accumulate(self, batch: MicroBatch) -> None:
        batch = batch.to(self.device)
        self._engine.backward(self._engine(batch.inputs, batch.present))

    def update(self, update: Update, learning_rate: float) -> Applied:
        for group in self._base.param_groups:
            group["lr"] = learning_rate
        self._require_own_optimizer()
        self._pending = update
        try:
            self._engine.step()
        finally:
            self._pending = None
        return self._check(update)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        update, self._pending = self._pending, None
        if update is None:
            raise UpdateError("the optimizer was asked to step without an update for this logical step")
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if id(flat) not in self._layout or flat.grad is None:
                    raise UpdateError("the optimizer holds a tensor that is not in the shard map, or has no gradient")
                update.finish(flat.grad, self._layout[id(flat)][1])

    def _check(self, update: Update) -> Applied:
        """What DeepSpeed may lose in silence: the hook, the step, elements; and weights that stopped being numbers."""
        finite = all(bool(torch.isfinite(flat).all()) for flat, _ in self._layout.values())
        applied = bool(self._engine.was_step_applied())
        elements = self.ranks.sum(update.elements)
        expected = self.trainable_elements * (self.ranks.world if self._zero.stage == 0 else 1)
        if elements != expected:
            raise UpdateError(f"{elements} of {expected} elements were finished; some got no noise, or got it twice")
        if self.ranks.sum(int(applied)) != self.ranks.world:
            raise UpdateError("DeepSpeed skipped the optimizer step on some rank")
        if self.ranks.sum(int(finite)) != self.ranks.world:
            raise UpdateError("the weights are no longer finite; resume with a lower learning rate and --new-segment")
        return Applied(self.trainable_elements)

    def _require_own_optimizer(self) -> None:
        outer = self._engine.optimizer
        if outer is not self._base and getattr(outer, "optimizer", None) is not self._base:
            raise UpdateError("DeepSpeed replaced the optimizer, and the noise hook with it; use AdamW")

    def observe(self) -> Observation:
        observed = self._forward.observed
        assert observed is not None, "nothing was accumulated yet"
        if isinstance(observed, Tensor):
            return Observation(observed)
        return Observation(observed.losses, observed.norms, observed.sensitivity)

    def shards(self) -> list[Shard]:
        found = []
        for flat, fragments in self._layout.values():
            state = {k: v for k, v in self._base.state.get(flat, {}).items() if k != "step"}
            found.append(Shard(flat, fragments, state))
        return found

    def optimizer_step(self) -> int:
        steps = {int(state["step"]) for state in self._base.state.values() if "step" in state}
        assert len(steps) <= 1, "parameter groups disagree about the number of steps"
        return steps.pop() if steps else 0

    def set_optimizer_step(self, step: int) -> None:
        """Prepares the optimizer state to be filled by a checkpoint, or forgets it at step 0."""
        for flat, _ in self._layout.values():
            self._base.state.pop(flat, None)
            if step:
                self._base.state[flat] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.zeros_like(flat),
                    "exp_avg_sq": torch.zeros_like(flat),
                }

    def close(self) -> None:
        self._hook.remove()
        self._engine.destroy()


def deepspeed_config(zero: ZeroOptimization, micro_batch: int) -> dict[str, Any]:
    """The whole of what DeepSpeed is told; the user's file cannot reach past it."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": zero.model_dump(),
    }
