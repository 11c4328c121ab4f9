"""The model sharded by stock DeepSpeed. The only file that imports it.

Clipped gradients are totalled in fp64 outside DeepSpeed; `WholeSums` and `ShardedSums` add them up over the ranks and
prove it. The noise enters through a step pre-hook on our optimizer, which sees the fp32 gradient that DeepSpeed reduced
for exactly this rank's shard. There the exact total replaces it. Both must agree, or the step ends the run: independent
evidence that nothing is scaled, and that shards lie where the shard map says.

For this, DeepSpeed is handed an ordinary gradient: by each rank its own total or, at stage 3, the part of the reduced
total that lies in its shard. Handing over all of it would send every sum a second time. So at stages 1 and 2 an engine
hands over all until each parameter has had a sum that is not zero, which proves the map (the self-test has such a
step), and then one module per step, which take turns. At stage 0 there is no map, and DeepSpeed reduces nothing.

DeepSpeed can lose such a hook, or skip a step, without an error; therefore the hook demands a one-shot update and every
step is checked afterwards.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.isolated import let_frameworks_see_all_records
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.config.section import COLLECTIVE_SECONDS
from murmuration.train.distributed.process import describe_process
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.rendezvous import init_method
from murmuration.train.distributed.shards import Fragment, whole_parameters
from murmuration.train.engines.base import NOT_FINITE, AppliedUpdate, all_finite, modes_of
from murmuration.train.engines.exchange import WholeSums
from murmuration.train.engines.forward import EngineOfForward, PlainForward, PrivateForward, require_fp32
from murmuration.train.engines.shard_map import partitioned_parameters, prove_slice, zero_slices
from murmuration.train.engines.sharded_sums import ShardedSums
from murmuration.train.noise.update import Update, UpdateError
from murmuration.train.optim.base import FlatOptimizer
from murmuration.train.optim.optimizers import AdamW, Kernel

# Whether other machines that share the cache are still compiling cannot be seen from here; it takes about a minute.
MOST_COMPILING = 300.0


# Tolerance between DeepSpeed's fp32 reduction of a sum and the exact one, relative to the largest element of the
# fragment; and what fp32 may lose where the sums of the ranks cancel, relative to the largest element of the shard.
AGREEMENT, ROUNDING = 1e-4, 1e-5
# ZeRO-3 steps the optimizer once per group of at most `sub_group_size` elements, and replaces the linear function that
# clip engines watch by one of its own.
STAGE_3 = {"sub_group_size": 1 << 40, "memory_efficient_linear": False}

CPU_OPERATION = "deepspeed_shm_comm"


def start_ranks() -> Ranks:
    """Joins the process group that the launcher describes; without a launcher, makes a group of one."""
    device = describe_process()
    make_ready()
    if device.type == "cpu":
        # DeepSpeed would compile it (a minute) and leave 66 MiB per rank in /dev/shm at every run, for a collective of
        # inference that nothing in training calls.
        deepspeed.ops.__compatible_ops__[CPU_OPERATION] = False
    with _numbered_by(device):
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        deepspeed.init_distributed(auto_mpi_discovery=False, timeout=limit, verbose=False, init_method=init_method())
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
    ranks.barrier()
    return ranks


@contextmanager
def _numbered_by(device: torch.device) -> Iterator[None]:
    """DeepSpeed takes the GPU of the process's number on its machine, but Slurm may show each process its own GPU
    alone, as number 0."""
    number = os.environ["LOCAL_RANK"]
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = number


class DeepSpeedEngine(EngineOfForward):
    def __init__(
        self,
        forward: PrivateForward | PlainForward,
        optimizer: FlatOptimizer,
        zero: ZeroOptimization,
        micro_batch: int,
        ranks: Ranks,
    ) -> None:
        super().__init__(forward, optimizer, ranks)
        self._pending: Update | None = None
        self._zero = zero
        # DeepSpeed warns about every optimizer but its own; ours is tested against the textbook at every stage.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        with _numbered_by(ranks.device):
            self._engine: Any = deepspeed.initialize(
                model=forward, optimizer=optimizer, config=deepspeed_config(zero, micro_batch)
            )[0]
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.model: nn.Module = forward.model
        self.partitioned = zero.stage == 3
        if isinstance(forward, PrivateForward) and self.partitioned:
            let_frameworks_see_all_records(forward.model)
            for parameter in forward.model.parameters():
                parameter.lent = True  # pyright: ignore[reportAttributeAccessIssue]
            # ZeRO-3 gathers what a module owns when that is called. A tap uses parameters of another module, and within
            # a compiled block no module is called.
            uses = [(tap, tap.taken) for tap in forward.handover.taps]  # pyright: ignore[reportCallIssue]
            if isinstance(forward.clip, BookKeepingClip) and forward.clip.blocks is not None:
                uses += [(block, block.parameters()) for block in forward.clip.blocks.modules]
            for module, parameters in uses:
                for parameter in parameters:  # pyright: ignore[reportGeneralTypeIssues]
                    deepspeed.zero.register_external_parameter(module, parameter)
        # ZeRO-3 has no option to reduce by a sum.
        self._scale = ranks.world if zero.stage == 3 else 1
        require_fp32(self._forward)
        self._require_own_optimizer()
        self._layout = self._map()
        if isinstance(forward, PrivateForward):
            self._begin(forward, micro_batch)
        optimizer.bind(self._layout, self._add_up if zero.stage else None)
        if zero.offload_optimizer is not None and zero.offload_optimizer.adam == "deepspeed":
            assert isinstance(optimizer, AdamW), "the config refuses that kernel for other optimizers"
            optimizer.kernel = _cpu_adam(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._before_optimizer_step)

    def _begin(self, forward: PrivateForward, micro_batch: int) -> None:
        self._turn, self._handed_over, self._unproven = 0, frozenset(self.shapes), set(self.shapes)
        fragments = [fragment for _, parts in self._layout.values() for fragment in parts]
        if self.partitioned:
            forward.begin(self.device, ShardedSums(self.shapes, fragments, self.ranks, micro_batch))
            return
        forward.begin(self.device)
        self._whole_sums = WholeSums(
            forward.exact_sums, self.shapes, fragments, self.ranks, sharded=self._zero.stage > 0
        )
        if self._zero.stage == 0:
            self._engine.enable_backward_allreduce = False

    def _map(self) -> dict[int, tuple[Tensor, list[Fragment]]]:
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        flats = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._zero.stage == 0:
            return whole_parameters(trainable)
        if self._zero.stage < 3:
            return zero_slices(trainable, flats)
        layout = partitioned_parameters(trainable, self._engine.optimizer, self.ranks.rank)
        for flat, fragments in layout.values():
            for name, parameter in trainable.items():  # every rank gathers each in turn, whichever ranks hold it
                with deepspeed.zero.GatheredParameters([parameter]):
                    prove_slice(flat, [f for f in fragments if f.name == name], {name: parameter})
        return layout

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        batch = batch.to(self.device)
        loss = self._engine(batch.inputs, batch.present, rule)
        if not isinstance(self._forward, PrivateForward):
            self._engine.backward(loss)

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._require_own_optimizer()
        try:
            if isinstance(self._forward, PrivateForward):
                self._hand_over(self._forward)
            self._pending, self._misplaced = update, []
            self._engine.step()
        finally:
            self._pending = None
            if isinstance(self._forward, PrivateForward):
                self._forward.clear()
        return self._check(update)

    def _hand_over(self, forward: PrivateForward) -> None:
        if self.partitioned:
            forward.sharded_sums.reduce()
            self._engine.backward(self._engine())
            return
        turn = None if self._unproven or not self._zero.stage else self._turn
        self._engine.backward(self._engine(turn=turn))
        not_zero = self._whole_sums.reduce()
        if turn is None:
            self._handed_over = frozenset(self.shapes)
            self._unproven -= not_zero
        else:
            self._handed_over = forward.handover.tap_of(turn).names
            self._turn += 1

    def discard(self) -> None:
        if isinstance(self._forward, PrivateForward):
            self._forward.clear()
        self._engine.zero_grad()
        # ZeRO-3 frees some weights only after a backward pass of its own, which this step will no longer have.
        self._engine.empty_partition_cache()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        update, self._pending = self._pending, None
        if update is None:
            raise UpdateError("the optimizer was asked to step without an update for this logical step")
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if id(flat) not in self._layout or flat.grad is None:
                    raise UpdateError("the optimizer holds a tensor that is not in the shard map, or has no gradient")
                fragments = self._layout[id(flat)][1]
                total = self._total(flat.grad, fragments)
                update.finish(total, fragments)
                flat.grad.copy_(total)

    def _total(self, reduced: Tensor, fragments: list[Fragment]) -> Tensor:
        """The sum over all ranks for this flat tensor; in a private phase in fp64, checked against what DeepSpeed
        reduced of it."""
        if self._scale != 1:
            reduced.mul_(self._scale)
        if not isinstance(self._forward, PrivateForward):
            return reduced
        exact = torch.zeros_like(reduced, dtype=torch.float64)
        for fragment in fragments:
            sums = self._forward.sharded_sums if self.partitioned else self._whole_sums
            fragment.of(exact).copy_(sums.of(fragment))
        if self._zero.stage:
            # Parameters that were handed over, and of which DeepSpeed reduced another sum.
            found = []
            rounding = ROUNDING * exact.abs().max() + torch.finfo(torch.float32).tiny
            for fragment in fragments:
                if fragment.name not in self._handed_over:
                    continue
                total = fragment.of(exact)
                apart = (fragment.of(reduced) - total).abs().max()
                if not bool(apart <= AGREEMENT * total.abs().max() + rounding):
                    found.append(fragment.name)
            self._misplaced += found
        return exact

    def _check(self, update: Update) -> AppliedUpdate:
        """Checks for what DeepSpeed may silently lose (the hook, the step, elements) or misplace, and that weights are
        finite. All ranks learn of it together: where one of them stopped before, the others would wait for it."""
        # Weights only: the padding behind them is memory that was never written.
        finite = all_finite(f.of(flat) for flat, parts in self._layout.values() for f in parts)
        applied = bool(self._engine.was_step_applied())
        said = torch.tensor(
            [update.elements, int(applied), int(finite), len(self._misplaced)], device=self.device
        )  # fmt: skip
        elements, steps, healthy, misplaced = self.ranks.add(said).tolist()
        if misplaced:
            name = self._misplaced[0] if self._misplaced else "a parameter of another rank's shard"
            raise UpdateError(
                f"what DeepSpeed reduced for {name} is not the sum that was handed to it; its shards are not where the "
                "shard map says, or something scales gradients"
            )
        expected = self.trainable_elements * (self.ranks.world if self._zero.stage == 0 else 1)
        if elements != expected:
            raise UpdateError(f"{elements} of {expected} elements were finished; some got no noise, or got it twice")
        if steps != self.ranks.world:
            raise UpdateError("DeepSpeed skipped the optimizer step on some rank")
        if healthy != self.ranks.world:
            raise UpdateError(NOT_FINITE)
        return AppliedUpdate(self.trainable_elements)

    def _require_own_optimizer(self) -> None:
        outer = self._engine.optimizer
        if outer is not self._optimizer and getattr(outer, "optimizer", None) is not self._optimizer:
            raise UpdateError(
                "DeepSpeed replaced the optimizer, and the noise hook with it; use one of those in train/optim"
            )

    def _add_up(self, sums: Tensor) -> Tensor:
        """Adds up over the ranks, wherever the optimizer's state is kept."""
        return self.ranks.add(sums.to(self.device)).to(sums.device)

    def whole_weights(self) -> dict[str, Tensor]:
        """The whole model's state on every rank."""
        state = dict(self.model.state_dict())
        if self._zero.stage < 3:
            return state
        # A clipped pass without an update, as in measurements, leaves weights gathered.
        self._engine.empty_partition_cache()
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                state[name] = parameter.detach().clone()
        return state

    def plain_model(self) -> nn.Module | None:
        if self._zero.stage < 3 or not isinstance(self._forward, PrivateForward):
            return None
        return self._forward.plain_copy.filled(self.whole_weights(), modes_of(self.model), self.device)

    def close(self) -> None:
        self._hook.remove()
        self._engine.destroy()


def deepspeed_config(zero: ZeroOptimization, micro_batch: int) -> dict[str, Any]:
    """The complete config that DeepSpeed receives; the user's file cannot add to it."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        **({"gradient_allreduce_op": "sum"} if zero.stage < 3 else {}),
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": zero.model_dump(exclude_none=True, exclude={"offload_optimizer": {"adam"}})
        | (STAGE_3 if zero.stage == 3 else {}),
    }


def _cpu_adam(optimizer: AdamW) -> Kernel:
    """DeepSpeedCPUAdam's kernel, run on stretches of our flat tensors, so that rates and decay may vary among them."""
    params = optimizer.params
    stock = DeepSpeedCPUAdam([torch.zeros(1)], betas=params.betas, eps=params.eps)

    def update(
        weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, rate: float, decay: float
    ) -> None:  # fmt: skip
        stock.ds_opt_adam.adam_update(
            stock.opt_id, step, rate, *params.betas, params.eps, decay, True,  # the bias of the moments is corrected
            weights, gradient, first, second,
        )  # fmt: skip

    return update


# What DeepSpeed compiles at the start of a run, and where.
#
# That is at most its Adam for offloaded optimizers (`zero_optimization.offload_optimizer.adam`). torch compiles under
# a lock that it never considers stale, so a killed run may not harm the next one.
#
# torch compiles for all environments of a home directory into one folder, and ninja recompiles where a command has
# changed. The commands name the folders of the environment, so two checkouts would undo each other's work at every
# start. Therefore each environment, compiler and processor has a folder of its own here.


def make_ready() -> None:
    """Call this before DeepSpeed joins the ranks."""
    cache = own_cache()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache)
    # Only one rank of a machine: a second might mistake the live lock of the first for a stale one.
    if os.environ["LOCAL_RANK"] == "0":
        drop_dead_locks(cache, _alone())


def drop_dead_locks(cache: Path, alone: bool) -> None:
    """Removes the locks of processes that were killed while compiling: every later start would wait for them forever.

    A live holder keeps the file open, so a lock that nobody has open belongs to a dead process or to another machine.
    """
    for lock in cache.glob("**/lock"):
        try:
            age = time.time() - lock.stat().st_mtime
            if not _open_somewhere(lock) and (alone or age > MOST_COMPILING):
                lock.unlink()
                print(f"removed {lock}, which a killed process had left there", flush=True)
        except FileNotFoundError:
            continue  # released meanwhile, or another rank was quicker


def own_cache() -> Path:
    """The user's TORCH_EXTENSIONS_DIR, or a folder keyed by everything that shapes the compiled code and ninja's
    commands."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    from torch.utils.cpp_extension import get_default_build_root

    deepspeed = importlib.util.find_spec("deepspeed")
    shaping = [
        torch.__file__, torch.__version__, str(deepspeed.origin if deepspeed else None), version("deepspeed"),
        sys.version, sysconfig.get_path("include"), os.environ.get("CXX", "c++"), _processor(),
    ]  # fmt: skip
    return Path(get_default_build_root()) / hashlib.sha256("\n".join(shaping).encode()).hexdigest()[:16]


def _processor() -> str:
    """What DeepSpeed's `-march=native` depends on: machines of several kinds may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.lower().startswith(("flags", "features", "model name"))}
    return platform.machine() + "".join(sorted(kinds))


def _alone() -> bool:
    """Whether all ranks of the run are on this machine; DeepSpeed's launcher and torchrun use different variables."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"]
    return here == os.environ["WORLD_SIZE"]


def _open_somewhere(file: Path) -> bool:
    wanted = file.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = descriptor.stat()
        except OSError:  # gone meanwhile, or hidden from us
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
