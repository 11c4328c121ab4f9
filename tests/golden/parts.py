"""The parts of the golden values, and what they are made in."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from tests.golden import commands
from tests.golden.committed import configs, dry_runs, helps, ids, index, noise, twins
from tests.golden.local import RUNS, account, data, toy_run

Part = Callable[[Path], dict[str, str]]
COMMITTED: dict[str, Part] = {
    "help": helps, "configs": configs, "twins": twins, "ids": ids, "noise": noise, "index": index, "dry-run": dry_runs,
}  # fmt: skip
LOCAL: dict[str, Part] = {
    "data": data, **{f"run-{name}": partial(toy_run, name=name) for name in RUNS}, "account": account,
}  # fmt: skip
PARTS = COMMITTED | LOCAL
QUICK = [name for name in COMMITTED if name != "dry-run"]
"""Those of a few seconds."""


def made(names: list[str], folder: Path) -> Iterator[tuple[str, str, str]]:
    """(part, item, text) of each part in turn; says how long each took."""
    started = time.monotonic()
    commands.warm_up()
    print(f"imports: {time.monotonic() - started:.0f} s", flush=True)
    for name in names:
        started = time.monotonic()
        place = folder / name
        place.mkdir()
        # Each part forks from a process that has only imported: one that has computed has threads, which do not follow.
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as apart:
            items = apart.submit(PARTS[name], place).result()
        print(f"{name}: {len(items)} items in {time.monotonic() - started:.0f} s", flush=True)
        for item, text in sorted(items.items()):
            yield name, item, text


def environment() -> dict[str, str]:
    """What golden values may depend on beside the code; told where they differ."""
    packages = ("torch", "deepspeed", "numpy", "pillow", "dp-accounting")
    here = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    return here | {"processor": _processor()} | {name: version(name) for name in packages}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
