"""A hang ends by itself, with a sentence that names the rank that holds up the others: real processes and store."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from murmuration.train.distributed import watchdog as watchdog_module
from murmuration.train.distributed.ranks import Pulse
from murmuration.train.distributed.watchdog import Watchdog

# A rank counts as silent after a third of it, which a process on a busy machine must not be.
STALL = 10.0
HANGS = f"no progress for {STALL:g} s (run.stall_seconds)"


def waits(pulse: Pulse) -> None:
    """As in a collective act that the other rank never enters."""
    with pulse.exchange():
        time.sleep(20 * STALL)


def reads_without_end(pulse: Pulse) -> None:
    del pulse
    time.sleep(20 * STALL)


def is_frozen(pulse: Pulse) -> None:
    del pulse
    os.kill(os.getpid(), signal.SIGSTOP)


def dies(pulse: Pulse) -> None:
    del pulse
    os._exit(0)


def works(pulse: Pulse) -> None:
    """Longer than a stall, with a sign of progress now and then."""
    for _ in range(12):
        time.sleep(STALL / 4)
        with pulse.exchange():
            pass
    os._exit(0)


def parts(pulse: Pulse) -> None:
    del pulse
    time.sleep(0.3)
    WATCHDOGS[-1].stop()


def writes(pulse: Pulse) -> None:
    """The end of a checkpoint, while the others have left."""
    del pulse
    time.sleep(8)


def waits_for_the_slow_one(pulse: Pulse) -> None:
    with pulse.exchange():
        time.sleep(3 * STALL)


def computes_for_long(pulse: Pulse) -> None:
    """In a step, where it is no progress: a thread that waits for a hanging device may spin."""
    del pulse
    compute(3 * STALL)


def prepares_for_long(pulse: Pulse) -> None:
    """Imports and the self-test, on a machine that gives this process a small part of a core."""
    pulse.preparing = True
    compute(1.5 * STALL)
    os._exit(0)


def waits_for_one_that_prepares(pulse: Pulse) -> None:
    with pulse.exchange():
        time.sleep(1.5 * STALL)


def prepares_and_hangs(pulse: Pulse) -> None:
    pulse.preparing = True
    time.sleep(20 * STALL)


def prepares_and_waits(pulse: Pulse) -> None:
    """In an exchange that spins, as some do."""
    pulse.preparing = True
    with pulse.exchange():
        compute(3 * STALL)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        sum(range(100_000))


WATCHDOGS: list[Watchdog] = []


Acts = list[Callable[[Pulse], None]]
"""Each is the main thread of a rank."""


class Started:
    """Ranks that were forked and run."""

    def __init__(
        self, acts: Acts, folder: Path, stall: float = STALL, asked: Callable[[], str | None] = lambda: None,
        period: float | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.log = folder, folder / "log"
        self.left: dict[int, Callable[[Pulse], None]] = {}
        for rank, act in enumerate(acts):
            pid = os.fork()
            if pid == 0:
                sys.stderr = self.log.open("a")
                pulse = Pulse()
                store = dist.FileStore(str(folder / "store"), len(acts))
                ended = (folder / f"ended{rank}").write_text
                note = lambda reason, write=ended: write(reason) and None  # noqa: E731
                watchdog = Watchdog(rank, len(acts), pulse, store, stall, note, asked)
                watchdog.period = period or watchdog.period
                WATCHDOGS.append(watchdog.start())
                act(pulse)
                os._exit(0)
            self.left[pid] = act

    def end(self) -> tuple[list[int], str]:
        """Exit codes (-1: had to be killed), and what was written."""
        codes = [
            -1 if act is is_frozen else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for pid, act in self.left.items()
        ]
        self.left = {pid: act for pid, act in self.left.items() if act is is_frozen}
        self.kill()
        return codes, self.log.read_text() if self.log.exists() else ""

    def kill(self) -> None:
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.left = {}


HANGING: list[tuple[Acts, list[int], str | None]] = [
    ([waits, reads_without_end], [75, 75], f"error (rank 0): {HANGS}: rank 1 holds"),
    ([waits, is_frozen], [75, -1], "rank 1 gave no sign of life; its process or host died, is frozen, or is cut"),
    ([dies, waits, waits], [0, 75, 75], f"error (rank 1): {HANGS}: rank 0 gave no"),
    ([waits, waits], [75, 75], "all ranks wait in an exchange; the network between them or a device hangs"),
    ([reads_without_end] * 2, [75, 75], "no rank waits for another; reads, decoders or devices hang, or"),
    ([reads_without_end], [75], "a read, a decoder or the device hangs, or needs longer: then raise run.stall_sec"),
    ([computes_for_long] * 2, [75, 75], "no rank waits for another"),
    ([prepares_for_long, waits_for_one_that_prepares], [0, 0], None),
    ([prepares_for_long] * 2, [0, 0], None),
    ([prepares_for_long], [0], None),
    ([prepares_and_hangs] * 2, [75, 75], "no rank waits for another"),
    ([prepares_and_waits] * 2, [75, 75], "all ranks wait in an exchange"),
]
OTHERS: dict[str, dict[str, Any]] = {
    "asked to stop": {"acts": [dies, waits], "stall": 600.0, "asked": lambda: "SIGTERM", "period": 0.2},
    # Silence counts after two and a half periods, and `writes` outlasts them.
    "done": {"acts": [parts, writes], "stall": 60.0, "asked": lambda: "SIGTERM", "period": 1.0},
    "slow": {"acts": [works, works]},
    "one is slow": {"acts": [waits_for_the_slow_one, works]},
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int | str, Started]]:
    """All at once: nearly all that they do is to wait, four minutes if one came after the other."""
    cases: dict[int | str, dict[str, Any]] = {number: {"acts": acts} for number, (acts, _, _) in enumerate(HANGING)}
    found = {name: Started(folder=tmp_path_factory.mktemp("ranks"), **case) for name, case in (cases | OTHERS).items()}
    yield found
    for each in found.values():
        each.kill()


@pytest.mark.parametrize("case", range(len(HANGING)))
def test_a_hang_ends_with_75_and_names_who_is_to_blame(started: dict[int | str, Started], case: int) -> None:
    _, codes, said = HANGING[case]
    found, log = started[case].end()
    assert found == codes, log
    if said is None:
        assert log == ""
        return
    assert said in log and "start the same command again" in log, log
    assert log.count("error (rank") == 1, "one rank speaks for all"
    for rank, code in enumerate(found):
        assert (started[case].folder / f"ended{rank}").exists() == (code == 75), "what is to be written last is written"


def test_who_was_asked_to_stop_does_not_wait_long_for_a_dead_rank(started: dict[int | str, Started]) -> None:
    found, log = started["asked to stop"].end()
    assert found == [0, 75] and "error (rank 1): stopped by SIGTERM: rank 0 gave no sign of life" in log, log


def test_a_rank_that_is_done_is_not_taken_for_dead_by_one_that_still_writes(started: dict[int | str, Started]) -> None:
    assert started["done"].end() == ([0, 0], "")


def test_a_late_sign_of_life_does_not_take_back_that_a_rank_is_done(tmp_path: Path) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    done, other = (Watchdog(rank, 2, Pulse(), store, STALL, lambda reason: None) for rank in (0, 1))
    done.stop()
    store.set(watchdog_module._key(0), "9 9")  # its thread was about to
    other._ask()
    other._asked_since = time.monotonic() - 60
    other._seen[0].at -= 60
    assert other._silent() == []
    other._parted.clear()
    assert other._silent() == [0]


def test_progress_however_slow_is_no_hang(started: dict[int | str, Started]) -> None:
    assert started["slow"].end() == ([0, 0], "")


def test_who_waits_for_a_slower_rank_that_gets_on_does_not_end_the_job(started: dict[int | str, Started]) -> None:
    """Between two meetings, ranks have micro-batches of their own."""
    assert started["one is slow"].end() == ([0, 0], "")


def test_an_exchange_is_progress_where_it_begins_and_where_it_ends() -> None:
    pulse = Pulse()
    with pulse.exchange():
        assert pulse.beats == 1
        pulse.since = 0.0
    assert pulse.beats == 2 and pulse.since > 0.0


def test_an_exchange_that_fails_is_over() -> None:
    pulse = Pulse()
    with pytest.raises(RuntimeError), pulse.exchange():
        assert pulse.exchanging
        raise RuntimeError("a rank is gone")
    assert not pulse.exchanging


def test_a_store_that_does_not_answer_is_named_before_any_rank() -> None:
    store: Any = None  # never asked
    watchdog = Watchdog(0, 2, Pulse(), store, STALL, lambda reason: None)
    assert "rendezvous store" not in watchdog._why([1])
    watchdog._answered -= STALL
    assert "the rendezvous store does not answer" in watchdog._why([1])
