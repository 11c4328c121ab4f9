"""prepare.py demo: captioned shapes that play the private set, a public held-out set, textures and a tokenizer.

`DIR/private`, `DIR/held_out` (captioned and labelled) and `DIR/textures` (no captions) appear complete or not at
all; one that is already complete is left alone. All of it is drawn, so all of it is public by construction.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.durable import sync, try_lock
from murmuration.data.progress import Progress

if TYPE_CHECKING:
    from murmuration.data.synthetic.index import Sample

ROOT = Path(__file__).resolve().parents[1]
_RECEIPT = "prepared.json"
_PER_SHARD = 1000
# Different seeds, so that no picture of one set occurs in another.
_SEEDS = {"private": 101, "held_out": 202, "textures": 303}


def declare(commands: Any) -> None:
    demo = commands.add_parser("demo", help="draw the demo data set (public by construction)", description=__doc__,
                               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    demo.set_defaults(run=_demo)
    demo.add_argument("--out", type=Path, default=ROOT / "demo_data", help="default: demo_data in the repository")
    demo.add_argument("--private", type=int, default=20_000, help="captioned records of the training set")
    demo.add_argument("--held-out", type=int, default=2_000, help="captioned and labelled public records")
    demo.add_argument("--textures", type=int, default=10_000, help="public textures for the warm start")
    demo.add_argument("--size", type=int, default=32, help="side of the square pictures, in pixels")
    demo.add_argument(
        "--tint",
        type=float,
        metavar="LEVELS",
        help="tint backgrounds by up to LEVELS of 255 in each "
        "channel, which makes shapes harder to make out (default: 6)",
    )
    demo.add_argument("--force", action="store_true", help="replace folders made with other settings")


def _demo(arguments: argparse.Namespace) -> int:
    import torch

    from murmuration.data.synthetic.index import VERSION, shape_samples, texture_samples
    from murmuration.data.synthetic.shapes import FAINT, GRAMMAR_WORDS
    from murmuration.data.text.encoder import word_tokenizer

    torch.set_num_threads(1)  # threads cost more than they save on pictures this small
    counts = {"private": arguments.private, "held_out": arguments.held_out, "textures": arguments.textures}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count}: at least 1 record is needed")
    side = arguments.size
    if not 8 <= side <= 1024:
        raise ValueError(f"--size {side}: choose 8 to 1024 pixels")
    tint = FAINT if arguments.tint is None else arguments.tint
    if not 0 <= tint <= 95:
        raise ValueError(f"--tint {tint:g}: choose 0 to 95 levels")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    samples: dict[str, Callable[[], Iterable[Sample]]] = {
        "private": lambda: shape_samples(_SEEDS["private"], counts["private"], side, tint=tint),
        "held_out": lambda: shape_samples(_SEEDS["held_out"], counts["held_out"], side, labels=True, tint=tint),
        "textures": lambda: texture_samples(_SEEDS["textures"], counts["textures"], side),
    }
    with (out / ".prepare.lock").open("w") as lock:
        if not try_lock(lock.fileno()):
            raise ValueError(f"{out}: another prepare.py is writing here; wait until it is done")
        for name, make in samples.items():
            request = {"generator": VERSION, "seed": _SEEDS[name], "records": counts[name], "size": side}
            request |= {"tint": tint} if tint != FAINT and name != "textures" else {}
            _folder(out / name, request, make, force=arguments.force)
        word_tokenizer(GRAMMAR_WORDS, out / "tokenizer.json")
    print(f"ready: {out}")
    print("next:  deepspeed launch/train.py --config ds_configs/demo.json")
    return 0


def _folder(target: Path, request: dict[str, Any], make: Callable[[], Iterable[Sample]], *, force: bool) -> None:
    """Write one data set to a hidden folder, index it, then rename: a kill leaves nothing half-written."""
    from murmuration.data.index.shard_index import build
    from murmuration.data.synthetic.index import write_shards

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
    for path in [*partial.glob("*.tar"), partial / _RECEIPT, partial]:
        sync(path)
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
    from murmuration.data.store.index_files import read_json

    try:
        found = read_json(folder / _RECEIPT)
        return found if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None


def _intact(folder: Path, records: int) -> bool:
    from murmuration.data.index.shard_index import ShardIndex
    from murmuration.data.store.place import ShardError

    try:
        index = ShardIndex.open(folder)
        index.check_unchanged(contents=True)
    except ShardError:
        return False
    return index.records == records


def _counted(samples: Iterable[Sample], total: int, what: str) -> Iterator[Sample]:
    show = Progress(what, "records")
    show(0, total)
    for number, sample in enumerate(samples, start=1):
        yield sample
        if number % _PER_SHARD == 0 or number == total:
            show(number, total)
