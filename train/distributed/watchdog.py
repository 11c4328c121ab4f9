"""Ends the job with a clear message where it would hang: a dead, frozen or cut-off rank, or a read that never ends.

One thread checks whether the main thread makes progress; another reports through the rendezvous store that this process
is alive, and looks for the other ranks once this one waits too long. Both work under any backend, since threads keep
running during a collective operation that never ends. Only monotonic time is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from murmuration.accounting.errors import RESUME_ME
from murmuration.train.distributed.ranks import Pulse, Ranks, Store, rendezvous_store

# Seconds between two signs of life: a dead rank is known before launchers kill the others, 30 s after SIGTERM.
LONGEST_PERIOD = 6.0
# This many periods without a sign of life count as silence.
SILENT = 2.5
LONGER = ", or needs longer: then raise run.stall_seconds"


@dataclass
class Seen:
    """Another rank's last message, when it was new, and when the rank was last seen to make progress."""

    said: bytes
    at: float
    moved: float | None = None

    @property
    def beats(self) -> int:
        return int(self.said.split()[1])

    @property
    def exchanging(self) -> bool:
        return self.said.split()[2] == b"exchanging"

    @property
    def progress(self) -> tuple[bytes, bytes]:
        return self.said.split()[1], self.said.split()[3]


class Watchdog:
    def __init__(
        self, rank: int, world: int, pulse: Pulse, store: Store, stall_seconds: float, ended: Callable[[str], None],
        asked: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`ended` is called with the reason right before the process ends. `asked`: why the run is to stop, if it is;
        then nobody waits for a rank that died, since launchers soon kill what does not end."""
        self.rank, self.world, self.pulse, self.store = rank, world, pulse, store
        self.stall_seconds, self.ended, self._asked = stall_seconds, ended, asked
        self.period = min(LONGEST_PERIOD, stall_seconds / 8)
        self._over = threading.Event()
        self._seen: dict[int, Seen] = {}
        self._parted: set[int] = set()
        self._asked_since: float | None = None
        self._answered = time.monotonic()

    def start(self) -> Watchdog:
        self.pulse.beat()
        for act in (self._tell, self._watch):
            threading.Thread(target=act, name="watchdog", daemon=True).start()
        return self

    def stop(self, parted: bool = True) -> None:
        """`parted`: this rank is done, so that others, which may still be writing, must not take it for dead."""
        self._over.set()
        if parted:
            with contextlib.suppress(RuntimeError):  # the store ends with the first rank that leaves
                self.store.set(_parted_key(self.rank), "1")  # a key of its own, which no late sign of life overwrites

    def _idle(self) -> float:
        return time.monotonic() - self.pulse.since

    def _tell(self) -> None:
        count = 0
        while not self._over.wait(self.period):
            count += 1
            self.pulse.look()
            # A store that is gone is no reason to end; only a lack of progress is, and its message may name the store.
            with contextlib.suppress(RuntimeError):
                where = "exchanging" if self.pulse.exchanging else "between"
                self.store.set(_key(self.rank), f"{count} {self.pulse.beats} {where} {self.pulse.computed}")
                if self._idle() > self.stall_seconds / 2 or self._asked() is not None:
                    self._ask()
                self._answered = time.monotonic()

    def _ask(self) -> None:
        now = time.monotonic()
        self._asked_since = self._asked_since or now
        for other in range(self.world):
            key = _key(other)
            if other != self.rank and self.store.check([_parted_key(other)]):
                self._parted.add(other)
            if other != self.rank and self.store.check([key]):
                said, known = self.store.get(key), self._seen.get(other)
                if known is None:
                    self._seen[other] = Seen(said, now)
                elif known.said != said:
                    news = Seen(said, now)
                    news.moved = now if news.progress != known.progress else known.moved
                    self._seen[other] = news

    def _watch(self) -> None:
        while not self._over.wait(self.period / 2):
            late = time.monotonic() - self.stall_seconds
            # Between two meetings, some ranks process their micro-batches faster: this one may wait for them.
            others = any(seen.moved is not None and seen.moved > late for seen in list(self._seen.values()))
            if self._idle() > self.stall_seconds and not others:
                self._end(f"no progress for {self.stall_seconds:g} s (run.stall_seconds)")
            asked = self._asked()
            if asked is not None and self._idle() > SILENT * self.period and self._silent():
                self._end(f"stopped by {asked}")
            if self._idle() < self.stall_seconds / 2 and asked is None:
                self._asked_since = None
                self._seen.clear()

    def _end(self, because: str) -> None:
        silent = self._silent()
        reason = f"{because}: {self._why(silent)}"
        with contextlib.suppress(Exception):
            self.ended(reason)
        if self.rank == min(set(range(self.world)) - set(silent)):
            print(
                f"error (rank {self.rank}): {reason}; start the same command again to resume from the last checkpoint",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        os._exit(RESUME_ME)

    def _silent(self) -> list[int]:
        """Ranks whose processes reported nothing new while this rank was looking for them."""
        if self._asked_since is None or time.monotonic() - self._asked_since < SILENT * self.period:
            return []
        late = time.monotonic() - SILENT * self.period
        others = (other for other in range(self.world) if other != self.rank and other not in self._parted)
        return [other for other in others if other not in self._seen or self._seen[other].at < late]

    def _why(self, silent: list[int]) -> str:
        if time.monotonic() - self._answered > 3 * self.period:
            return "the rendezvous store does not answer; the host of rank 0 died or is cut off"
        if silent:
            return f"rank {_list(silent)} gave no sign of life; its process or host died, is frozen, or is cut off"
        beats = {self.rank: self.pulse.beats} | {other: seen.beats for other, seen in self._seen.items()}
        behind = [rank for rank in sorted(beats) if beats[rank] == min(beats.values())]
        if len(behind) < len(beats):
            return f"rank {_list(behind)} holds up the others; a read, a decoder or its device hangs{LONGER}"
        if self.world == 1:
            return f"a read, a decoder or the device hangs{LONGER}"
        if self.pulse.exchanging and all(seen.exchanging for seen in self._seen.values()):
            return "all ranks wait in an exchange; the network between them or a device hangs"
        return f"no rank waits for another; reads, decoders or devices hang{LONGER}"


def _key(rank: int) -> str:
    return f"murmuration/pulse/{rank}"


def _parted_key(rank: int) -> str:
    return f"murmuration/parted/{rank}"


def _list(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def watch(
    ranks: Ranks, stall_seconds: float, ended: Callable[[str], None], asked: Callable[[], str | None]
) -> Watchdog:  # fmt: skip
    """Starts a watchdog; through the store, the ranks show each other that they are alive."""
    store = rendezvous_store(ranks) or dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return Watchdog(ranks.rank, ranks.world, ranks.pulse, store, stall_seconds, ended, asked).start()
