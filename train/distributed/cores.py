"""How many processor cores this rank may fill, as the kernel tells it.

Launchers do not say: under `srun` each rank is bound to cores of its own, under `deepspeed` and `torchrun` all ranks
may run everywhere, and containers are limited to an amount of time rather than to certain cores. The variables that
they set do not show which of these holds, so each rank tells the others what it may use, and shares only what they
share.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path, PurePosixPath

from murmuration.train.distributed.ranks import Ranks

Group = tuple[int, int]
"""Identity of a control group: the same for all processes of a machine, whatever path their containers give it."""


@dataclass(frozen=True)
class Allowance:
    """What one process may use."""

    machine: str
    mask: frozenset[int]
    """The cores on which it may run."""
    quotas: dict[Group, Fraction] = field(default_factory=dict)
    """Limits in cores of its control group and of those around it; each holds for all processes within together."""


def own_cores(ranks: Ranks) -> int:
    """Called on all ranks together."""
    own = allowance()
    return share(own, ranks.gather(own))


def share(own: Allowance, everyone: Sequence[Allowance]) -> int:
    """The cores for one of these ranks; ranks that may use the same core, or the same quota, share it evenly."""
    here = [each for each in everyone if each.machine == own.machine]
    takers = Counter(core for each in here for core in each.mask)
    limits = [sum((Fraction(1, takers[core]) for core in own.mask), Fraction(0))]
    for group, quota in own.quotas.items():
        limits.append(quota / sum(group in each.quotas for each in here))
    return max(1, int(min(limits)))


def allowance() -> Allowance:
    """What the kernel allows this process."""
    # Identity of the machine: its containers have host names of their own but share the cores.
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = socket.gethostname()
    return Allowance(machine, frozenset(os.sched_getaffinity(0)), cpu_quotas())


def cpu_quotas(root: Path = Path("/")) -> dict[Group, Fraction]:
    """The limits of this process's control group and of its visible parents; empty where nothing is limited."""
    found: dict[Group, Fraction] = {}
    for folder in groups_of("cpu", root):
        # A group's limit, by version 2 (`cpu.max`) or version 1 of control groups; None where there is none.
        try:
            if (both := folder / "cpu.max").is_file():
                quota, period = both.read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            quota = Fraction(int(quota), int(period)) if quota.strip() != "max" and int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):
            quota = None  # the uppermost group has no such files
        if quota is not None:
            about = folder.stat()
            found[about.st_dev, about.st_ino] = quota
    return found


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of the control groups that contain this process and limit it by this controller (`cpu`, `memory`),
    from the inside out."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, _, told = line.partition(":")
        controllers, colon, path = told.partition(":")
        if not colon:
            continue
        if controllers and controller not in controllers.split(","):
            continue
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            kind, *_, options = after.split(" ")
            if kind == ("cgroup" if controllers else "cgroup2") and (
                not controllers or controller in options.split(",")
            ):
                shown, point = before.split(" ")[3:5]
                yield from _upwards(PurePosixPath(path), PurePosixPath(shown), root / point.lstrip("/"))


def _upwards(path: PurePosixPath, shown: PurePosixPath, point: Path) -> Iterator[Path]:
    """From `path` to `shown`, the part of the hierarchy that is mounted at `point`: in a container, often its own."""
    inside = path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else PurePosixPath()
    for part in (inside, *inside.parents):
        yield point / part
