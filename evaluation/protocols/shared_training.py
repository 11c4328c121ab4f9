"""How processes train one model on public records together: each computes gradients of its own part of a batch, and all
make the same step with their sum.

The ranks meet twice in a step, before it and behind the backward pass, in the exchange of `sharing.py`, so that a rank
that cannot read or compute its part ends all of them with its sentence. Only then are gradients added up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from murmuration.accounting.durable import atomic
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.fine_tuning import TrainingSettings
from murmuration.evaluation.session.sharing import Sharing
from murmuration.model.weight_files import load_plain

T = TypeVar("T")
STATE = "fine_tune.pt"


@dataclass(frozen=True)
class TrainingState:
    """What a training was after each epoch, on the disk whole or not at all, from which a stopped command continues.
    `identity` covers everything that decides what is trained; the state of another training is refused."""

    path: Path
    identity: str

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """The number of epochs that are done."""
        if not self.path.is_file():
            return 0
        stored = load_plain(self.path)
        if stored["identity"] != self.identity:
            raise EvaluationError(
                f"{self.path} was begun by a command with other settings; repeat that, or name another --out"
            )
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        return int(stored["epoch"])

    def save(self, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with atomic(self.path) as file:
            torch.save({"identity": self.identity, "epoch": epoch, **state}, file)


def resumed(sharing: Sharing, epochs_done: Callable[[], int]) -> int:
    """What all ranks read from the state of a stopped training."""
    done = sharing.of_all(epochs_done)
    if len(set(done)) > 1:
        raise EvaluationError(
            f"the processes found {min(done)} and {max(done)} epochs done, so not every machine sees the same --out; "
            "name one where they do"
        )
    return done[0]


def own_part(parts: list[T], sharing: Sharing) -> list[T]:
    return parts[sharing.ranks.rank :: sharing.ranks.world]


class TrainingTask(ABC, Generic[T]):
    """What one kind of training has of its own. A `T` is this rank's part of a batch, of some records or of none."""

    name: str
    """Shown with the progress."""

    @abstractmethod
    def nothing_read(self) -> str:
        """The error of an epoch without a readable record."""

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[T]: ...

    @abstractmethod
    def records(self, part: T) -> int: ...

    @abstractmethod
    def backward(self, part: T, count: int, epoch: int, step: int) -> float:
        """Adds the gradients of this part of a batch of `count` records, and gives its part of the loss."""


def train_together(
    task: TrainingTask[T], sharing: Sharing, model: nn.Module, groups: list[dict[str, Any]],
    settings: TrainingSettings, records: int, batch: int, state: TrainingState,
) -> None:  # fmt: skip
    """Trains `model` by AdamW on batches of `batch` of the `records`, from where an earlier start was stopped."""
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    done = resumed(sharing, lambda: state.restore(model, optimizer))
    training = SharedTraining(sharing, model, optimizer)
    steps = records // batch
    progress = sharing.steps(task.name, settings.epochs * steps)
    progress(done * steps)
    model.train()
    with torch.enable_grad():
        for epoch in range(done, settings.epochs):
            batches, seen = task.batches(epoch), 0
            for step in range(steps):
                rate = settings.rate(epoch + step / steps, batch)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["scale"]
                part, count = training.next_of(batches, task.records)
                if count:
                    training.step(partial(task.backward, part, count, epoch, step), ran=task.records(part) > 0)
                seen += count
                progress(epoch * steps + step + 1)
            if not seen:
                raise EvaluationError(task.nothing_read())
            sharing.on_main(partial(state.save, epoch + 1, model, optimizer))
    model.eval()


@dataclass
class SharedTraining:
    sharing: Sharing
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        """All begin with rank 0's weights, which are random where they are new."""
        if self.alone:
            return
        self.sharing.open_gradients(self._parameters()[0].device)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0, group=self.sharing.gradients)

    @property
    def alone(self) -> bool:
        return self.sharing.ranks.world == 1

    def next_of(self, batches: Iterator[T], records: Callable[[T], int]) -> tuple[T, int]:
        """This rank's part of the next batch, and how many records all of them have."""
        kept: list[T] = []

        def read() -> int:
            kept.append(next(batches))
            return records(kept[0])

        count = sum(self.sharing.of_all(read))
        return kept[0], count

    def step(self, backward: Callable[[], float], ran: bool) -> None:
        """`backward` adds the gradients of this rank's part, and gives its part of the loss; `ran`: there is one."""
        self.optimizer.zero_grad(set_to_none=True)
        if not sum(self.sharing.of_all(backward)) < math.inf:
            raise EvaluationError("the loss is not finite; lower --base-rate")
        if not self.alone:
            self._add_gradients()
        self.optimizer.step()
        if not self.alone:
            self._average_statistics(ran)

    def _add_gradients(self) -> None:
        """Adds up gradients of parameters that some rank used; others stay without one."""
        parameters = self._parameters()
        used = torch.tensor([float(each.grad is not None) for each in parameters], device=parameters[0].device)
        flat = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        total = torch.cat([used, *(each.reshape(-1) for each in flat)])
        dist.all_reduce(total, group=self.sharing.gradients)
        used, *found = total.split([len(parameters), *(each.numel() for each in parameters)])
        for parameter, gradient, by in zip(parameters, found, used.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter) if by else None

    def _average_statistics(self, ran: bool) -> None:
        """Those of BatchNorm, which each rank has of its own part, if it had one."""
        norms = [each for each in self.model.modules() if isinstance(each, _BatchNorm)]
        own = [each for norm in norms for each in (norm.running_mean, norm.running_var) if each is not None]
        if not own:
            return
        total = torch.cat([each.reshape(-1) for each in own] + [own[0].new_ones(1)]) * float(ran)
        dist.all_reduce(total, group=self.sharing.gradients)
        means = (total[:-1] / total[-1]).split([each.numel() for each in own])
        for each, mean in zip(own, means, strict=True):
            each.copy_(mean)

    def _parameters(self) -> list[Tensor]:
        return [each for each in self.model.parameters() if each.requires_grad]
