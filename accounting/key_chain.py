"""Forward secrecy: the keys of private steps come from a chain whose past is forgotten at every durable checkpoint.

A segment's chain begins with 32 bytes from the operating system, from which nothing else is derived. It moves one link
at each step, so a key is a function of (first link, purpose, step) alone: the number of ranks, the times at which the
run was stopped and those at which it was saved change no draw. Anyone who obtains a link can continue from it, but not
go back. Links before the last durable checkpoint are forgotten: no step before it is repeated in the same segment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, overload
from weakref import WeakSet

from murmuration.accounting.keys import (
    Key,
    KeyFileError,
    LastingPurpose,
    Link,
    Purpose,
    RunKey,
    StepPurpose,
    load,
    rewrite,
)

KEPT_AHEAD = 3
"""How far from the step in work links and keys are kept, besides the first link: steps ahead are being prepared."""


class KeyChain:
    """The keys of one segment in memory, from a first step on; several threads may use it."""

    def __init__(
        self, link: Link, guard: Callable[[bytes | bytearray], object] = lambda held: None, together: int = 1
    ) -> None:
        """`guard` may lock the bytes that it is given into memory. `together`: how many steps use each other's keys."""
        self._nearby = KEPT_AHEAD + together - 1
        self._segment, self._guard, self._lock = link.segment, guard, threading.Lock()
        self._first, self._slots = link.step, link.slots
        self._states: dict[int, bytearray] = {}
        self._keys: dict[tuple[int, StepPurpose], bytes] = {}
        self._hold(link)
        _chains.add(self)

    @property
    def segment(self) -> str:
        return self._segment

    @property
    def first(self) -> int:
        """The earliest step whose keys can still be derived."""
        return self._first

    def key(self, purpose: StepPurpose, step: int) -> bytes:
        with self._lock:
            if step < self._first:
                raise KeyFileError(
                    f"the keys of step {step} were forgotten when a checkpoint after it became durable; no step "
                    "before that checkpoint may be repeated"
                )
            if (step, purpose) not in self._keys:
                key = self._link(step).key(purpose)
                self._guard(key)
                self._keys[step, purpose] = key
                # However rarely a run is saved, only what nearby steps need is kept; the rest follows
                # from the first link.
                self._drop(lambda other: other != self._first and abs(other - step) > self._nearby)
            return self._keys[step, purpose]

    def forget(self, done: int) -> None:
        """Forgets steps up to `done` for good: overwrites links and drops keys. (Python may have copied either.)"""
        with self._lock:
            if done >= self._first:
                self._link(done + 1)
                self._first = done + 1
                self._drop(lambda step: step <= done)

    def close(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._first = 1 << 63
            self._drop(lambda step: True)

    def close_here(self) -> None:
        """The same in a process that was just forked, where a thread that holds the lock is gone."""
        self._lock = threading.Lock()
        self.close()

    def held(self) -> list[bytes]:
        """All secrets that this object still has; for tests and inspection."""
        with self._lock:
            return [*(bytes(state) for state in self._states.values()), *self._keys.values()]

    def _link(self, step: int) -> Link:
        """The link of a step, derived from the nearest known one up to it."""
        at = max(known for known in self._states if known <= step)
        link = Link(self._segment, at, bytes(self._states[at]), self._slots).at(step)
        self._hold(link)
        return link

    def _hold(self, link: Link) -> None:
        if link.step not in self._states:
            self._states[link.step] = state = bytearray(link.state)
            self._guard(state)

    def _drop(self, condition: Callable[[int], bool]) -> None:
        for step in [each for each in self._states if condition(each)]:
            self._states[step][:] = bytes(len(self._states[step]))
            del self._states[step]
        for place in [each for each in self._keys if condition(each[0])]:
            del self._keys[place]


_chains: WeakSet[KeyChain] = WeakSet()


def _close_all() -> None:
    """A forked process, such as one that reads records, makes no step. It would not forget one either, and what is
    locked into memory here is not locked there."""
    for chain in list(_chains):
        chain.close_here()


os.register_at_fork(after_in_child=_close_all)


@dataclass(frozen=True)
class PhaseKeys:
    """A `Derive`: keys of private steps come from the chain if there is one, all others from the lasting secret."""

    lasting: Callable[[Purpose], bytes]
    chain: KeyChain | None

    @overload
    def __call__(self, purpose: StepPurpose, /) -> Key: ...

    @overload
    def __call__(self, purpose: LastingPurpose, /) -> bytes: ...

    def __call__(self, purpose: Any, /) -> Key:
        if self.chain is not None and purpose in get_args(StepPurpose):
            return partial(self.chain.key, purpose)
        return self.lasting(purpose)


# The chain in the secret file. The ledger is the authority on the segment, and names it before the file does.


def why_unusable(key: RunKey, segment: str, done: int, begun: bool) -> str | None:
    """Why the steps after `done` cannot have the keys that the segment gives them; None if they can.

    `begun`: steps of the segment were opened. Before that, a chain that is not in the file was never used: the process
    was killed between writing the segment's line to the ledger and writing the file, and another chain may begin.
    """
    chain = key.chain
    if chain is None or chain.segment != segment:
        return "the run key is older or newer than the ledger: it has no keys for the segment" if begun else None
    if chain.step > done + 1:
        return f"the keys of the steps up to {chain.step - 1} were forgotten, so none after step {done} can be repeated"
    return None


def forgettable(done: int, together: int) -> int:
    """The last step whose keys no step after `done` needs, where the steps of each block of `together` use each other's
    keys: the noise of a step is then made of draws of its whole block so far."""
    return done - done % together


def enter(path: Path, segment: str, first: int, done: int, begun: bool, slots: int = 1) -> Link:
    """The link to continue from after `done` steps, from the file. A segment's first link is created and stored; with
    `slots` above 1, for epochs of so many steps."""
    key = load(path)
    if (fault := why_unusable(key, segment, done, begun)) is not None:
        raise KeyFileError(f"{fault}; restore the run key, the ledger and the checkpoints as they last were")
    if key.chain is not None and key.chain.segment == segment:
        return key.chain
    link = key.first_link(segment, first, slots)
    rewrite(replace(key, chain=link), path)
    return link


def forget(path: Path, segment: str, done: int) -> None:
    """Forgets steps up to `done` in the file. Call only once a checkpoint of `done` is durable and in the ledger.

    Does nothing if that was done before, or if another segment has begun, whose chain has replaced this one.
    """
    key = load(path)
    if key.chain is not None and key.chain.segment == segment and key.chain.step <= done:
        rewrite(replace(key, chain=key.chain.at(done + 1)), path)


def burn(path: Path, segment: str, done: int, head: dict[str, Any]) -> None:
    """The same before anyone can see the weights of step `done`, checkpoint or not: these steps are never made again.
    The file also keeps the ledger's head, so that neither can be exchanged for an older one alone."""
    key = load(path)
    if key.chain is None or key.chain.segment != segment:
        raise KeyFileError("the secret file was exchanged while the run lasted; start the run again")
    rewrite(replace(key, chain=key.chain.at(done + 1), head=head), path)
