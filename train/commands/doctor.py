"""doctor [--config my.json]: whether this machine can train, one line per thing that a run would trip over.

Each line says ok, warn or FAIL, and what to do. The exit code is 2 if something failed. With a config, the records of
its phases are opened, too, and the first and last one of each set are read. Started by a launcher as all ranks of a job
(torchrun, deepspeed, CHECK=1 sbatch launch/slurm.sh), it compares the ranks and times the sum of a gradient.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from murmuration.accounting.errors import BAD_INPUT, DONE, RunError
from murmuration.accounting.escaping import escape_output, printable, sentence
from murmuration.train.commands.exit_codes import complain_per_machine
from murmuration.train.commands.finding import FAIL, OK, WARN, Finding

if TYPE_CHECKING:
    from murmuration.train.commands.doctor_ranks import Facts
    from murmuration.train.config.root import Config

PACKAGES = ("torch", "deepspeed", "timm", "transformers", "opacus", "webdataset", "tensorboard", "dp-accounting")
LEAST_FREE = 20
"""GiB where runs are written; a checkpoint of ViT-L with its optimizer takes five."""
SHARED, LEAST_SHARED = Path("/dev/shm"), 1
"""GiB of shared memory for the GPUs of one machine."""
LEAST_FILES = 4096
"""Open files: each decoding process keeps some shards open."""
MOST_SKEW = 5.0
"""Seconds between this machine's clock and the file system's."""
MEET_SECONDS = 120


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="also open the records of this config")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of the config")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it to each process
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    config = None
    if arguments.config is not None:
        from murmuration.train.config.load import load

        try:  # before what takes seconds
            config = load(arguments.config, arguments.set)
        except RunError as error:
            return complain_per_machine(error)
    checks: list[Callable[[], Iterator[Finding]]] = [
        python, packages, compiler, processors, shared_memory, disk, limits, gpus,
    ]  # fmt: skip
    if config is not None:
        checks.append(lambda: records(config))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from murmuration.train.commands.doctor_ranks import across

        found, shows = across(
            lambda: [each for check in checks for each in check()], lambda: facts_of(config), gradient_bytes(config)
        )
        if shows:
            return _shown(found)
        return BAD_INPUT if any(each.verdict == FAIL for each in found) else DONE
    return _shown(found for check in (*checks, clock, ranks_meet) for found in check())


def _shown(findings: Iterable[Finding]) -> int:
    failed = 0
    for found in findings:
        print(printable(f"{found.verdict:<5} {found.what:<14} {found.told}"), flush=True)
        failed += found.verdict == FAIL
    return BAD_INPUT if failed else DONE


def python() -> Iterator[Finding]:
    yield Finding(OK, "python", f"{sys.version.split()[0]} at {sys.executable}")


def packages() -> Iterator[Finding]:
    found: list[str] = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding(FAIL, "packages", f"{name} is not installed; make setup, or pip install .")
    yield Finding(OK, "packages", ", ".join(found))


def compiler() -> Iterator[Finding]:
    """Triton compiles kernels for GPUs, DeepSpeed its Adam for offloaded optimizers, and torch.compile what
    `run.compile` asks for; nothing else is compiled."""
    import torch

    headers = Path(sysconfig.get_path("include")) / "Python.h"
    verdict = FAIL if torch.cuda.is_available() else WARN
    needed = "" if verdict == FAIL else ", should an optimizer be offloaded to DeepSpeed's Adam, or run.compile be set"
    if shutil.which("g++") is None:
        told = f"g++ is not on the PATH; install it (Debian/Ubuntu: apt-get install g++){needed}"
        yield Finding(verdict, "compiler", told)
    elif not headers.exists():
        yield Finding(verdict, "compiler", f"{headers} is missing; install python3-dev{needed}")
    else:
        yield Finding(OK, "compiler", str(shutil.which("g++")))


def processors() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(OK, "processors", f"{cores} cores, {memory:.0f} GiB of memory")


def shared_memory() -> Iterator[Finding]:
    """NCCL moves data between the GPUs of one machine through it; containers have 64 MiB unless told otherwise."""
    import torch

    free = shutil.disk_usage(SHARED).free / 2**30
    told = f"{free:.1f} GiB free in {SHARED}"
    if torch.cuda.device_count() > 1 and free < LEAST_SHARED:
        yield Finding(WARN, "shared memory", f"{told}; NCCL may end by SIGBUS: docker run --shm-size=2g")
    else:
        yield Finding(OK, "shared memory", told)


def disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    told = f"{free:.0f} GiB free in {Path.cwd()}"
    if not writable():
        told = f"{Path.cwd()} cannot be written to; start in a folder of your own, or set run.dir elsewhere"
        yield Finding(WARN, "disk", told)
    elif free < LEAST_FREE:
        yield Finding(WARN, "disk", f"{told}; large models need more for their checkpoints: set run.dir elsewhere")
    else:
        yield Finding(OK, "disk", told)


def writable() -> bool:
    return os.access(Path.cwd(), os.W_OK)


def clock() -> Iterator[Finding]:
    """A checkpoint's age and a lock's are told by times of files, which a server may set."""
    if not writable():
        return  # `disk` says so
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        skew = abs(os.fstat(file.fileno()).st_mtime - time.time())
    if skew > MOST_SKEW:
        yield Finding(WARN, "clock", f"{skew:.0f} s between this machine and the file system; synchronise both by NTP")
    else:
        yield Finding(OK, "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 2**20} MiB"
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        yield Finding(WARN, "open files", f"{files}; many decoding processes may need more: ulimit -n {LEAST_FILES}")
    else:
        yield Finding(OK, "open files", "unlimited" if files == resource.RLIM_INFINITY else str(files))
    # Keys and sums are locked in memory as far as it goes, so that they are never swapped out (docs/proof.md).
    verdict = OK if locked == resource.RLIM_INFINITY else WARN
    advice = (
        "" if verdict == OK else "; sums of private gradients beyond that may be swapped to disk: ulimit -l unlimited"
    )
    yield Finding(verdict, "locked memory", shown + advice)


def gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        why = f"; nvidia-smi is there, but torch {torch.__version__} sees none: update the driver" if driver else ""
        yield Finding(WARN if driver else OK, "GPUs", f"none, so training runs on processors{why}")
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield Finding(OK, f"GPU {number}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    from torch.cuda import nccl

    joined = ".".join(map(str, nccl.version()))  # pyright: ignore[reportArgumentType]
    yield Finding(OK, "CUDA, NCCL", f"{torch.version.cuda}, {joined}")


MEET = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
gpus = os.environ["BACKEND"] == "nccl"
if gpus:
    torch.cuda.set_device(rank)
dist.init_process_group(os.environ["BACKEND"])
one = torch.ones(1, device="cuda" if gpus else "cpu")
dist.all_reduce(one)
assert int(one) == dist.get_world_size()
dist.barrier()
dist.destroy_process_group()  # A process that exits with threads of its group still running is aborted now and then.
"""


def ranks_meet() -> Iterator[Finding]:
    """Two processes of this machine add up a number, as all ranks do at every step."""
    import torch

    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        told = "srun started several tasks, each examined alone; CHECK=1 sbatch launch/slurm.sh examines them together"
        yield Finding(WARN, "ranks", told)
        return
    many = torch.cuda.is_available() and torch.cuda.device_count() > 1
    backend = "nccl" if many else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "meet.py"
        script.write_text(MEET)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        try:
            done = subprocess.run(
                command, env=os.environ | {"BACKEND": backend}, capture_output=True, text=True, timeout=MEET_SECONDS
            )
            said = "" if done.returncode == 0 else _reason(done.stderr)
        except subprocess.TimeoutExpired:
            said = f"no answer within {MEET_SECONDS} s"
    if said:
        yield Finding(FAIL, "ranks", f"two processes cannot meet by {backend} ({said}); look at firewall and hostname")
    else:
        yield Finding(OK, "ranks", f"two processes met by {backend}")


def _reason(said: str) -> str:
    """The error of a rank in what the launcher printed: its own last words are a frame around "failed"."""
    lines = [line.strip() for line in said.splitlines()]
    errors = [line for line in lines if re.search(r"Error: |^terminate called", line) and "ChildFailed" not in line]
    return errors[0] if errors else "no reason given"


def facts_of(config: Config | None) -> Facts:
    """What must be the same on all ranks. Digests of records are compared and never shown."""
    from murmuration.data.index.open import open_index
    from murmuration.train.recipe.record_names import parts_of

    found: Facts = {"python": (sys.version.split()[0], "")}
    for name in PACKAGES:
        try:
            found[name] = (version(name), "")
        except PackageNotFoundError:
            found[name] = ("none", "")
    for number, phase in enumerate(config.phases if config is not None else ()):
        for part in parts_of(number, phase):
            try:
                index = open_index(part.path)
                found[part.key] = (f"{index.records:,} records", index.manifest_digest)
            except (RunError, OSError):
                found[part.key] = ("no records", "")
    return found


def gradient_bytes(config: Config | None) -> int:
    """Of the phase that trains most; 0 without a config that can be built."""
    from murmuration.model.build import build
    from murmuration.train.recipe.ready_phase import resolve_shape, select_trained

    most = 0
    try:
        for phase in config.phases if config is not None else ():
            if config is not None and phase.trains:
                model = build(resolve_shape(config), phase.objective, "meta")
                select_trained(model, phase)
                most = max(most, 4 * sum(each.numel() for each in model.parameters() if each.requires_grad))
    except RunError:
        return 0
    return most


def records(config: Config) -> Iterator[Finding]:
    from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source
    from murmuration.data.index.open import open_index
    from murmuration.train.recipe.record_names import parts_of

    for number, phase in enumerate(config.phases):
        for part in parts_of(number, phase):
            try:
                index = open_index(part.path)
                reader = ShardReader(index, open_source(index, ReadOptions()))
                for record in {0, index.records - 1}:
                    if not index.left_out(record):
                        reader.read(record)
            except (RunError, OSError) as error:
                yield Finding(FAIL, "records", f"{part.key}: {sentence(error)}")
            else:
                yield Finding(OK, "records", f"{part.key}: {index.records:,} in {part.path}")
