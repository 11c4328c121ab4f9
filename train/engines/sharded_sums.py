"""The totals of a logical step where the model is sharded (ZeRO-3, FSDP2): each rank keeps those of its own shard.

A rank adds the products of its records to a window: fp32, of the whole model. Every few micro-batches each rank sends
every other one the part of the window that lies in the other's shard, and adds what it receives to its own shard's
totals, in fp64 and in the order of the ranks. So a rank needs 4 bytes per trainable weight and 8 for each of its shard,
instead of 8 for all, and a weight's partial sum is sent once per window, in 4 bytes. Nothing is rounded on the way.

The error that windows add. A window is rounded to fp32 twice per micro-batch at most: once for the records whose
gradients were written out, once for all products of the micro-batch, which are added up in fp64 before. A sum of R
clipped gradients has norm R·C at most, so rounding it moves it by at most u·R·C. Two neighbouring data sets differ in
one micro-batch of one rank. The windows of other steps, ranks and times are the same numbers for both, and the window
of that micro-batch is rounded in both worlds, maybe in opposite directions: by at most 2·2·u·ΣR·C, where R is the
number of its slots after each of its micro-batches. A window is therefore sent before ΣR exceeds MOST_SLOTS, which is
WINDOW_ROUNDING in units of C: five micro-batches of 128 records, seven of 64, a single one of more than 699. `rule.py`
counts this share within its allowance. Micro-batches that alone have more than MOST_SLOTS get windows in fp64, whose
rounding does not matter.

Where ranks hold several copies of the model (HSDP), a rank sends windows to those that hold its own copy. At the end of
a step the ranks that hold equal shards add up their totals, once and before any noise.

The proof of each step is that of `exchange.py`, over all windows together, once they are sent and empty. With several
copies, equal shards must have the same bits, and each copy the sum of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from murmuration.train.clip.rule import UNIT_ROUNDOFF, WINDOW_ROUNDING, ClipError
from murmuration.train.clip.sums import FlatSums, cut, product, require_wide
from murmuration.train.distributed.process import keep_from_swap
from murmuration.train.distributed.ranks import Alone, Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.exchange import RUNS, SHORTEST_RUN, Arrived, Exchange, require_sums, weigh, weighed
from murmuration.train.noise.update import UpdateError

# ΣR above: how many slots the micro-batches of a window may have, those of earlier ones counted again with each later.
MOST_SLOTS = int(WINDOW_ROUNDING / (4 * UNIT_ROUNDOFF))
# Tolerance of the proof: of totals to which a thousand ranks may have added thousands of windows each.
AGREEMENT = 1e-9


def micro_batches_per_window(micro_batch: int) -> int | None:
    """How many micro-batches of so many slots are added to a window before it is sent; None: all of a step."""
    if micro_batch > MOST_SLOTS:
        return None
    return int(((1 + 8 * (MOST_SLOTS / micro_batch)) ** 0.5 - 1) / 2)


class ShardedSums:
    """`fragments` are the pieces of parameters that this rank's optimizer holds. Ranks must add equally many slots per
    micro-batch, and make, reduce and clear their sums together. `ranks` hold one copy of the model; `replicas`, if
    there are several copies, the same pieces of each."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], fragments: Sequence[Fragment], ranks: Ranks, micro_batch: int,
        replicas: Ranks | None = None,
    ) -> None:  # fmt: skip
        self._ranks, self._shapes, self._replicas = ranks, shapes, replicas or Alone(ranks.device)
        self._limit = MOST_SLOTS if micro_batch <= MOST_SLOTS else None
        self._window = FlatSums(shapes, ranks.device, torch.float64 if self._limit is None else torch.float32)
        self._exchange = Exchange(shapes, self._window.places, fragments, ranks)
        self._fragments = {fragment.name: fragment for fragment in fragments}
        lengths = [fragment.length for fragment in fragments]
        self._totals = torch.zeros(sum(lengths), dtype=torch.float64, device=ranks.device)
        self._own = dict(zip(self._fragments, self._totals.split(lengths), strict=True))
        self._waiting: tuple[str, Tensor] | None = None
        self._sent = torch.zeros(2, len(shapes), dtype=torch.float64, device=ranks.device)
        self._slots = self._slots_summed = 0
        self._reduced = False
        self._beside = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._under_way = False

    def begin_micro_batch(self, slots: int) -> None:
        """Sends the window first, if rounding this micro-batch too would exceed its share. Collective."""
        if self._reduced:
            raise UpdateError("a micro-batch came after the step's sum was reduced")
        if self._limit is None:
            return
        if slots > self._limit:
            raise ClipError(
                f"a micro-batch of {slots} slots is larger than the {self._limit} for which sums are laid out; raise "
                "train_micro_batch_size_per_gpu"
            )
        if self._slots_summed + self._slots + slots > self._limit:
            self.send()
        self._slots += slots
        self._slots_summed += self._slots

    # What clip engines call.

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        """Waits for further values of the same parameter, so that the window is rounded once for all of them."""
        require_wide(name, value)
        if self._waiting is not None and self._waiting[0] == name:
            self._waiting = (name, self._waiting[1].double() + value)
            return
        self._settle()
        self._waiting = (name, value)

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        for part in cut(left, right, at_once):
            self.add(name, product(*part).view(self._shapes[name]))

    def spans(self, names: Collection[str], parts: int) -> list[list[str]]:
        return self._window.spans(names, parts)

    def add_span(self, names: list[str], found: Tensor, only_if: Tensor | None = None) -> None:
        self._settle()
        self._wait()
        self._window.add_span(names, found, only_if)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._wait()
            self._window.add(*waiting)

    # What the engine calls.

    @torch.no_grad()
    def send(self) -> None:
        """Moves what the window holds to the shards in which it lies. Collective.

        On a GPU all this happens on a stream of its own, beside the next micro-batch, which needs the window only when
        its gradients are added up.
        """
        self._settle()
        self._wait()
        with self._on_its_own_stream():
            self._sent += weigh(self._window.totals)
            self._take_all()
            self._window.clear()
        self._slots = self._slots_summed = 0

    def _take_all(self) -> None:
        done = 0

        def take(arrived: Arrived) -> None:
            nonlocal done
            self._take(arrived.parts, done)
            done += arrived.parts.shape[1]

        self._exchange.run(self._window.flat, take)

    def _take(self, parts: Tensor, start: int) -> None:
        """Adds the ranks' parts of the same elements, in the order of the ranks."""
        totals = self._totals[start : start + parts.shape[1]]
        for part in parts:
            totals.add_(part)

    def reduce(self) -> None:
        """Sends the last window, and proves that the shards hold the sum of all. Collective, the same on all ranks."""
        self.send()
        self._wait()
        equal = self._add_copies()
        found = torch.zeros_like(self._sent)
        for number, name in enumerate(self._shapes):
            if (fragment := self._fragments.get(name)) is not None:
                found[:, number] = weighed(self._own[name], fragment.start)
        left = (self._window.flat.count_nonzero() + (self._waiting is not None)).expand_as(found[0])
        differ = torch.full_like(found[0], not equal)
        said = self._replicas.add(self._ranks.add(torch.stack([*self._sent, found[0], left, differ])))
        expected, size, found, left, differ = said
        self._reduced = True
        if bool(left.any()):
            raise UpdateError("a window of clipped gradients was not sent, or not emptied and would be added twice")
        # Every copy has the whole sum, so that all have it as often as there are copies.
        require_sums(list(self._shapes), expected, size, found / self._replicas.world, AGREEMENT)
        if bool(differ.any()):
            raise UpdateError("ranks with equal shards got different sums; collective operations are unreliable here")

    def _add_copies(self) -> bool:
        """Adds up the totals of the ranks that hold equal shards; whether all of them have the same bits then."""
        if self._replicas.world == 1:
            return True
        # In runs, as windows are sent: some backends need twice the memory of what they add up.
        for run in self._totals.split(max(SHORTEST_RUN, len(self._totals) // RUNS)):
            self._replicas.add(run)
        return self._replicas.same_bits([self._totals])

    def of(self, fragment: Fragment) -> Tensor:
        """The sum over all ranks of a piece that this rank holds, in fp64; it may be changed in place."""
        own = self._fragments.get(fragment.name)
        if not self._reduced:
            raise UpdateError("the step's sum was asked for before its windows were sent")
        if own is None or (own.start, own.length) != (fragment.start, fragment.length):
            raise UpdateError(f"{fragment.name}: the optimizer holds another piece of it than the shard map says")
        return self._own[fragment.name]

    @torch.no_grad()
    def spread(self) -> dict[str, Tensor]:
        """This rank's part of the reduced sum where it belongs in each whole parameter, in fp32, and zeros elsewhere:
        added up over the ranks, the sum. It takes the window's memory, until the sums are cleared."""
        for fragment in self._fragments.values():
            whole = self._window.totals[fragment.name].view(-1)
            whole[fragment.start : fragment.start + fragment.length] = self.of(fragment)
        return self._window.totals

    def clear(self) -> None:
        """Forgets the open step."""
        self._waiting = None
        self._wait()
        for tensor in (self._totals, self._sent):
            tensor.zero_()
        self._window.clear()
        self._slots = self._slots_summed = 0
        self._reduced = False

    def keep_from_swap(self) -> bool:
        """Locks window and totals in memory if the system allows it; returns whether it does."""
        return self._window.keep_from_swap() and keep_from_swap(self._totals)

    @contextmanager
    def _on_its_own_stream(self) -> Iterator[None]:
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        with torch.cuda.stream(self._beside):
            yield
        self._under_way = True

    def _wait(self) -> None:
        """Whatever touches window or totals next happens after what was sent last."""
        if self._beside is not None and self._under_way:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
        self._under_way = False
