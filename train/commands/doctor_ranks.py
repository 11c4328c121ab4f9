"""What `doctor` finds when a launcher starts it as all ranks of a job: whether they have the same packages, code,
records and clock and see one folder, and how fast they add up a gradient."""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from murmuration.accounting.errors import RunError
from murmuration.accounting.escaping import first_line
from murmuration.train.commands.finding import FAIL, OK, WARN, Finding
from murmuration.train.distributed.process import describe_process, quiet_libraries
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.rendezvous import init_method, open_to_others

MEET = timedelta(seconds=120)
MOST_SKEW = 1.0
"""Seconds between two clocks: logs of hosts are read side by side, and files' times tell which is newer."""
USUAL_BYTES, MOST_BYTES = 64 * 2**20, 2**30
"""Of what is added up where no config says how large the gradient is, and at most."""
ROUNDS = 5
CODE = Path(__file__).resolve().parents[2]
NAMED = 8
"""Hosts or ranks that a line names before it ends in dots."""

Facts = dict[str, tuple[str, str]]
"""What must be the same on all ranks: what is shown of it, and what is compared and not shown."""


def across(local: Callable[[], list[Finding]], facts: Callable[[], Facts], size: int) -> tuple[list[Finding], bool]:
    """The same findings on every rank, and whether this one prints them. `local` examines a rank by itself; `size`:
    bytes of the gradient, 0 if nobody knows."""
    quiet_libraries()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        device = describe_process()
        dist.init_process_group(backend, init_method=init_method(), timeout=MEET)
    except (RunError, RuntimeError, ValueError) as error:
        who, where = _who(int(os.environ["RANK"])), open_to_others() or "this machine"
        told = (
            f"{who} cannot meet the others at {where} ({first_line(error, 160)}); look at firewall and hostname, and "
            "where hosts have several networks, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        return [Finding(FAIL, "ranks", told)], True
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
    found: list[Finding] = []
    try:
        found += _each(ranks, local())
        for part in (_same(ranks, facts()), _folder(ranks), _clocks(ranks), _all_reduce(ranks, backend, size)):
            found += part
        return found, ranks.main
    except RuntimeError as error:  # of a collective operation: this rank can only tell its own story
        return [*found, Finding(FAIL, "ranks", f"{_who(ranks.rank)} lost the others ({first_line(error, 160)})")], True
    finally:
        dist.destroy_process_group()


def _who(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _each(ranks: Ranks, own: list[Finding]) -> Iterator[Finding]:
    """What several ranks found by themselves is told once."""
    found = ranks.gather((socket.gethostname(), own))
    hosts = list(dict.fromkeys(host for host, _ in found))
    yield Finding(OK, "ranks", f"{ranks.world} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: {_listed(hosts)}")
    told: dict[Finding, list[str]] = {}
    for rank, (_, findings) in enumerate(found):
        for each in findings:
            told.setdefault(each, []).append(str(rank))
    for each, those in told.items():
        some = "" if len(those) == ranks.world else f" (rank{'s' if len(those) > 1 else ''} {_listed(those)})"
        yield Finding(each.verdict, each.what, each.told + some)


def _same(ranks: Ranks, own: Facts) -> Iterator[Finding]:
    found = ranks.gather((_who(ranks.rank), own | {"code": (f"version {_code()}", "")}))
    first, expected = found[0]
    names = list(dict.fromkeys(name for _, facts in found for name in facts))
    differing = [name for name in names if any(facts.get(name) != expected.get(name) for _, facts in found)]
    for name in differing:
        odd = [(who, facts.get(name)) for who, facts in found if facts.get(name) != expected.get(name)]
        (who, other), reference = odd[0], expected.get(name)
        shown, wanted = ("none" if each is None else each[0] for each in (other, reference))
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        if shown == wanted:
            shown = f"{shown}, but of other contents"
        yield Finding(
            FAIL, "same", f"{name}: {shown} for {who}{more}, {wanted} for {first}; give all hosts the same files"
        )
    if not differing:
        yield Finding(OK, "same", f"on all ranks: {', '.join(names)}")


def _code() -> str:
    found = hashlib.sha256()
    for folder in ("accounting", "data", "model", "train"):
        for path in sorted((CODE / folder).rglob("*.py")):
            found.update(str(path.relative_to(CODE)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _folder(ranks: Ranks) -> Iterator[Finding]:
    """The run directory must be one for all ranks."""
    here = Path.cwd()
    if not all(ranks.gather(os.access(here, os.W_OK))):
        return  # doctor's `disk` says so
    with tempfile.TemporaryDirectory(dir=here, prefix=".doctor-") as own:
        names = ranks.gather(own)
        blind = [who for who, sees in ranks.gather((_who(ranks.rank), Path(names[0]).exists())) if not sees]
    if blind:
        told = f"{blind[0]} does not see what rank 0 wrote in {here}; start where all hosts see the same files"
        yield Finding(FAIL, "shared folder", told)
    else:
        yield Finding(OK, "shared folder", f"all ranks see {here}")


def _clocks(ranks: Ranks) -> Iterator[Finding]:
    """Read right behind a barrier. Ranks leave it one by one, so the closest of several readings counts."""
    spreads: list[tuple[float, str, str]] = []
    for _ in range(ROUNDS):
        ranks.barrier()
        times = ranks.gather((time.time(), _who(ranks.rank)))
        (early, slow), (late, fast) = min(times), max(times)
        spreads.append((late - early, fast, slow))
    seconds, fast, slow = min(spreads)
    if seconds > MOST_SKEW:
        yield Finding(WARN, "clocks", f"{fast} is {seconds:.1f} s ahead of {slow}; synchronise all hosts by NTP")
    else:
        yield Finding(OK, "clocks", f"at most {seconds:.3f} s apart")


def _all_reduce(ranks: Ranks, backend: str, size: int) -> Iterator[Finding]:
    part = min(size or USUAL_BYTES, MOST_BYTES) // 4 * 4
    numbers, seconds = torch.empty(part // 4, device=ranks.device), list[float]()
    for _ in range(1 + ROUNDS):
        numbers.fill_(1.0)
        ranks.barrier()
        begin = time.perf_counter()
        ranks.add(numbers)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if not all(ranks.gather(bool((numbers == ranks.world).all()))):
        yield Finding(FAIL, "all-reduce", f"the sum of {ranks.world} ones came out wrong; look at the network's cards")
        return
    usual = statistics.median(seconds[1:])  # the first one opens connections
    rate = 2 * (ranks.world - 1) / ranks.world * part / usual / 1e9  # a ring sends each byte nearly twice
    whole = f", of the gradient's {size / 2**20:,.0f}" if size > part else ", as large as the gradient" if size else ""
    yield Finding(
        OK, "all-reduce",
        f"{part / 2**20:,.1f} MiB{whole}: {usual * 1e3:,.1f} ms by {backend}, {rate:.2f} GB/s (plan.py --link)",
    )  # fmt: skip
