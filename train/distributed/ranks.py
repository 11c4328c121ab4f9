"""The few collective operations that the trainer itself needs, so that every rank makes the same decision."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from murmuration.accounting.errors import REFUSED, RunError

# Seconds of the processor between two looks: a start on a machine that is shared by many gets few, a wait gets none.
LEAST_COMPUTED = 0.005


T = TypeVar("T")
# A rank that died closes its connections at once; one that is slow may be a whole step behind.
APART = timedelta(hours=6)
SUMMED_AT_ONCE = 1 << 20


class Pulse:
    """The progress of the main thread. All ranks have equally many micro-batches and exchanges, so one with fewer beats
    than the others holds them up."""

    def __init__(self) -> None:
        self.beats = 0
        self.since = time.monotonic()
        self.exchanging = False
        self.preparing = False
        """Set while a phase's model, engine and self-test are made, with few exchanges: there, computing is progress.
        Later it is none, since a thread that waits for a device that hangs may compute without end."""
        self.computed = 0
        """How often the main thread was found to have computed while it prepared."""
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._spent = 0.0

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        self.beat()
        self.exchanging = True
        try:
            yield
        finally:
            self.exchanging = False
        self.beat()

    def beat(self) -> None:
        self.beats += 1
        self.since = time.monotonic()

    def look(self) -> None:
        """Notes whether the main thread has computed since the last look. An exchange is left out: it may spin."""
        spent, before = time.clock_gettime(self._clock), self._spent
        self._spent = spent
        if self.preparing and not self.exchanging and spent - before >= LEAST_COMPUTED:
            self.computed += 1
            self.since = time.monotonic()


class Store(Protocol):
    """The part of torch's rendezvous store that the watchdog needs."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Disagreement(RunError, RuntimeError):
    """Ranks have different values where they must have the same."""

    exit_code = REFUSED


def raised_on_all_ranks(error: Exception) -> Exception:
    """Marks an error that every rank raises: one may report it for all."""
    error.everywhere = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device
    pulse: Pulse = field(default_factory=Pulse, compare=False, repr=False)
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """Where these are not all ranks of the job. `barrier` and what is done on the main rank are for all of them."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: int) -> int:
        total = torch.tensor(value, dtype=torch.int64, device=self.device)
        with self.pulse.exchange():
            dist.all_reduce(total, group=self.group)
        return int(total)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        with self.pulse.exchange():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def same_bits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all ranks have the same numbers in them: compared by sums of their bits, so it is evidence against
        accidents alone. Where some differ, at least one rank learns of it."""
        sums = []
        for tensor in tensors:  # a part at a time, since the sum may need a wider copy
            parts = tensor.detach().view(-1).view(torch.int32).split(SUMMED_AT_ONCE)
            sums.append(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum())
        bits = torch.stack(sums)
        return torch.equal(self.add(bits.clone()), bits * self.world)

    def swap(self, received: torch.Tensor, sent: torch.Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        """Starts to send rank r the r-th part of `sent`, of sizes[r] elements, and to receive every rank's part for
        this one, side by side in the order of the ranks. All ranks give the same sizes. What is returned waits: the
        host on a CPU, the current stream on a GPU."""
        with self.pulse.exchange():
            mine = [sizes[self.rank]] * self.world
            work = dist.all_to_all_single(received, sent, mine, list(sizes), self.group, async_op=True)
        assert work is not None, "this rank is in no group"

        def wait() -> None:
            with self.pulse.exchange():
                work.wait()

        return wait

    def any(self, value: bool) -> bool:
        return self.sum(int(value)) > 0

    def barrier(self) -> None:
        with self.pulse.exchange():
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        with self.pulse.exchange():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def gather_apart(self) -> Callable[[Any], list[Any]]:
        """A `gather` over connections of its own, for one thread beside the main one. All ranks ask for it together."""
        group = dist.new_group(backend="gloo", timeout=APART)

        def gather(value: Any) -> list[Any]:
            found: list[Any] = [None] * self.world
            dist.all_gather_object(found, value, group=group)
            return found

        return gather

    def require_same(self, what: str, value: Any) -> None:
        found = self.gather(value)
        if any(other != found[0] for other in found):
            raise raised_on_all_ranks(
                Disagreement(f"the ranks disagree about {what}; check that all machines have the same files and code")
            )

    def on_main(self, act: Callable[[], T]) -> T:
        """Runs on rank 0 and gives every rank its result or its error: no rank is left waiting."""
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        with self.pulse.exchange():
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise raised_on_all_ranks(outcome[1])
        return outcome[0]

    def keep_on_main(self, act: Callable[[], T]) -> T | None:
        """Like `on_main`, for results that cannot be sent: the result stays on rank 0."""
        kept: list[T] = []
        self.on_main(lambda: kept.append(act()))
        return kept[0] if self.main else None


class Alone(Ranks):
    """One process without a process group: it performs collective operations by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 1, device)

    def sum(self, value: int) -> int:
        self.pulse.beat()
        return value

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pulse.beat()
        return tensor

    def swap(self, received: torch.Tensor, sent: torch.Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        del sizes
        received.copy_(sent)
        return self.pulse.beat

    def barrier(self) -> None:
        self.pulse.beat()

    def gather(self, value: Any) -> list[Any]:
        self.pulse.beat()
        return [value]

    def on_main(self, act: Callable[[], T]) -> T:
        self.pulse.beat()
        try:
            return act()
        except Exception as error:
            raise raised_on_all_ranks(error) from None


def on_all(ranks: Ranks, act: Callable[[], T], *errors: type[Exception]) -> T:
    """The result of `act` on this rank; if it raises one of `errors` on any rank, all ranks raise it and none waits."""
    kept: list[T] = []
    results_of_all(ranks, lambda: kept.append(act()), *errors)
    return kept[0]


def results_of_all(ranks: Ranks, act: Callable[[], T], *errors: type[Exception]) -> list[T]:
    """What `act` gives on each rank; if it raises one of `errors` on any rank, all ranks raise it and none waits."""
    outcome: list[Any] = [None, None]
    try:
        outcome[0] = act()
    except errors as error:
        outcome[1] = error
    found = ranks.gather(outcome)
    for _, trouble in found:
        if trouble is not None:
            raise raised_on_all_ranks(trouble)
    return [result for result, _ in found]


def by_copy(of_ranks: Sequence[T], ranks_per_copy: int) -> list[Sequence[T]]:
    """What the ranks gave, for each copy of the weights and of the optimizer's state: its ranks are neighbours. With 0,
    all ranks share a single copy."""
    size = ranks_per_copy or len(of_ranks)
    return [of_ranks[first : first + size] for first in range(0, len(of_ranks), size)]


def lost_rank(error: BaseException) -> bool:
    """Whether a collective operation failed because another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def rendezvous_store(ranks: Ranks) -> Store | None:
    """The store through which the ranks of a process group found each other; None for a single process."""
    # The private name is the only way to the store: the process group is not made by us.
    return dist.distributed_c10d._get_default_store() if ranks.world > 1 and dist.is_initialized() else None
