"""Prepare data: draw the demo data set, or index tar shards that are already there.

    python launch/prepare.py demo [--out DIR] [--private 20000] [--held-out 2000] [--textures 10000]
                                  [--size 32] [--force]
    python launch/prepare.py index 'shards/{000000..000019}.tar'        (or a folder)

`demo` writes DIR/private (captioned shapes, playing the private set), DIR/held_out (public, captioned and
labelled), DIR/textures (public, no captions) and DIR/tokenizer.json. Each folder appears complete or not at
all; one that is already complete is left alone. Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parent
# Python puts this folder first on the path, where launch/train.py would hide the package `train`. By value,
# because worker processes start from a copy of this list.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (_HERE, ROOT)]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from data.synthetic import Sample

_RECEIPT = "prepared.json"
_PER_SHARD = 1000
# Apart, so that no picture of one set occurs in another.
_SEEDS = {"private": 101, "held_out": 202, "textures": 303}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prepare.py", description="Prepare data for Murmuration.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="draw the demo data set (public by construction)")
    demo.add_argument("--out", type=Path, default=ROOT / "demo_data", help="default: demo_data in the repository")
    demo.add_argument("--private", type=int, default=20_000, help="captioned records of the training set")
    demo.add_argument("--held-out", type=int, default=2_000, help="captioned and labelled public records")
    demo.add_argument("--textures", type=int, default=10_000, help="public textures for the warm start")
    demo.add_argument("--size", type=int, default=32, help="side of the square pictures, in pixels")
    demo.add_argument("--force", action="store_true", help="replace folders made with other settings")
    index = commands.add_parser("index", help="index tar shards")
    index.add_argument("shards", help="a folder, or a pattern such as 'shards/{000000..000019}.tar'")
    index.add_argument("--out", type=Path, default=None, help="index folder (default: index/ beside the shards)")
    index.add_argument("--workers", type=int, default=None, help="processes (default: one per core)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        return {"demo": _demo, "index": _index}[arguments.command](arguments)
    except (ValueError, OSError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2


def _index(arguments: argparse.Namespace) -> int:
    from data.index import build

    index = build(arguments.shards, arguments.out, workers=arguments.workers, progress=_progress("indexing", "shards"))
    print(f"{index.records} records in {len(index.shards)} shards, index in {index.folder}")
    print(f"manifest {index.manifest_digest}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from data.shapes import GRAMMAR_WORDS
    from data.synthetic import VERSION, shape_samples, texture_samples
    from data.text import word_tokenizer

    counts = {"private": arguments.private, "held_out": arguments.held_out, "textures": arguments.textures}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count}: at least 1 record is needed")
    side = arguments.size
    if not 8 <= side <= 1024:
        raise ValueError(f"--size {side}: choose 8 to 1024 pixels")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    samples: dict[str, Callable[[], Iterable[Sample]]] = {
        "private": lambda: shape_samples(_SEEDS["private"], counts["private"], side),
        "held_out": lambda: shape_samples(_SEEDS["held_out"], counts["held_out"], side, labels=True),
        "textures": lambda: texture_samples(_SEEDS["textures"], counts["textures"], side),
    }
    with (out / ".prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out}: another prepare.py is writing here; wait until it is done") from None
        for name, make in samples.items():
            request = {"generator": VERSION, "seed": _SEEDS[name], "records": counts[name], "size": side}
            _folder(out / name, request, make, force=arguments.force)
        word_tokenizer(GRAMMAR_WORDS, out / "tokenizer.json")
    print(f"ready: {out}")
    print("next:  deepspeed launch/train.py --config ds_configs/demo.json")
    return 0


def _folder(target: Path, request: dict[str, Any], make: Callable[[], Iterable[Sample]], *, force: bool) -> None:
    """Write one data set to a hidden folder, index it, then rename: a kill leaves nothing half-written."""
    from data.index import build
    from data.synthetic import write_shards

    found = _receipt(target)
    if found == request and _intact(target, request["records"]):
        print(f"{target.name}: {request['records']} records are there already")
        return
    if target.exists() and not force:
        raise ValueError(f"{target}: holds other or damaged data; replace it with --force or use another --out")
    if target.exists() and found is None:
        raise ValueError(f"{target}: not made by prepare.py, so --force leaves it alone; use another --out")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    started = time.monotonic()
    write_shards(partial, _counted(make(), request["records"], target.name), _PER_SHARD)
    build(partial)
    (partial / _RECEIPT).write_text(json.dumps(request, indent=1) + "\n")
    _durable(partial)
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    print(f"{target.name}: {request['records']} records in {time.monotonic() - started:.1f} s")


def _receipt(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / _RECEIPT).read_bytes())
    except (OSError, ValueError):
        return None


def _intact(folder: Path, records: int) -> bool:
    from data.index import ShardError, ShardIndex

    try:
        index = ShardIndex.open(folder)
        index.check_unchanged(contents=True)
    except ShardError:
        return False
    return index.records == records


def _durable(folder: Path) -> None:
    for path in [*folder.glob("*.tar"), folder / _RECEIPT, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _counted(samples: Iterable[Sample], total: int, what: str) -> Iterator[Sample]:
    show = _progress(what, "records")
    for number, sample in enumerate(samples, start=1):
        yield sample
        if number % _PER_SHARD == 0 or number == total:
            show(number, total)


def _progress(what: str, unit: str) -> Callable[[int, int], None]:
    """One line that rewrites itself on a terminal; silent in logs, where it would be a thousand lines."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{what}: {done}/{total} {unit}", end=end, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
