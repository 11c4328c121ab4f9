"""prepare.py demo: captioned shapes that play the private set, a public held-out set, textures and a tokenizer.

`DIR/private`, `DIR/held_out` (captioned and labelled) and `DIR/textures` (no captions) appear complete or not at
all; one that is already complete is left alone. All of it is drawn, so all of it is public by construction.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.durable import sync, try_lock
from murmuration.accounting.errors import InputError
from murmuration.data.progress import Progress

if TYPE_CHECKING:
    from murmuration.data.synthetic.index import Sample

ROOT = Path(__file__).resolve().parents[1]
_RECEIPT = "prepared.json"
_PER_SHARD = 1000
# Each process first imports PyTorch, which takes as long as drawing a few hundred textures.
_MOST_WORKERS = 8
# Different seeds, so that no picture of one set occurs in another.
_SEEDS = {"private": 101, "held_out": 202, "textures": 303}


def declare(commands: Any) -> None:
    demo = commands.add_parser("demo", help="draw the demo data set (public by construction)", description=__doc__,
                               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    demo.set_defaults(run=_demo)
    demo.add_argument("--out", type=Path, default=ROOT / "demo_data", help="default: demo_data in the repository")
    demo.add_argument(
        "--data", type=Path, metavar="FOLDER", help="your own pictures in class folders, into DIR/pictures; held-out "
        "pictures and names of classes count as public",
    )  # fmt: skip
    demo.add_argument("--private", type=int, default=20_000, help="captioned records of the training set")
    demo.add_argument("--held-out", type=int, default=2_000, help="captioned and labelled public records")
    demo.add_argument("--textures", type=int, default=3_000, help="public textures for the warm start")
    demo.add_argument("--size", type=int, default=32, help="side of the square pictures, in pixels")
    demo.add_argument(
        "--tint",
        type=float,
        metavar="LEVELS",
        help="tint backgrounds by up to LEVELS of 255 in each "
        "channel, which makes shapes harder to make out (default: 6)",
    )
    demo.add_argument(
        "--workers", type=int, default=min(len(os.sched_getaffinity(0)), _MOST_WORKERS),
        help="processes (default: one per core)",
    )  # fmt: skip
    demo.add_argument("--force", action="store_true", help="replace folders made with other settings")


@dataclass(frozen=True)
class _Set:
    name: str
    records: int
    side: int
    tint: float

    @property
    def request(self) -> dict[str, Any]:
        """What decides every byte, kept as the receipt."""
        from murmuration.data.synthetic.index import VERSION
        from murmuration.data.synthetic.shapes import FAINT

        request = {"generator": VERSION, "seed": _SEEDS[self.name], "records": self.records, "size": self.side}
        return request | ({"tint": self.tint} if self.tint != FAINT and self.name != "textures" else {})

    @property
    def shards(self) -> range:
        return range(-(-self.records // _PER_SHARD))

    def samples(self, shard: int) -> Iterator[Sample]:
        from murmuration.data.synthetic.index import shape_sample, texture_sample

        seed = _SEEDS[self.name]
        for number in range(shard * _PER_SHARD, min((shard + 1) * _PER_SHARD, self.records)):
            if self.name == "textures":
                yield texture_sample(seed, number, self.side)
            else:
                yield shape_sample(seed, number, self.side, labels=self.name == "held_out", tint=self.tint)


def _demo(arguments: argparse.Namespace) -> int:
    import torch

    from murmuration.data.synthetic.shapes import FAINT, GRAMMAR_WORDS
    from murmuration.data.text.encoder import word_tokenizer

    torch.set_num_threads(1)  # threads cost more than they save on pictures this small
    side = arguments.size
    if not 8 <= side <= 1024:
        raise InputError(f"--size {side}: choose 8 to 1024 pixels")
    tint = FAINT if arguments.tint is None else arguments.tint
    if not 0 <= tint <= 95:
        raise InputError(f"--tint {tint:g}: choose 0 to 95 levels")
    counts = {"textures": arguments.textures, "private": arguments.private, "held_out": arguments.held_out}
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"--{name.replace('_', '-')} {count}: at least 1 record is needed")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".prepare.lock").open("w") as lock:
        if not try_lock(lock.fileno()):
            raise InputError(f"{out}: another prepare.py is writing here; wait until it is done")
        if arguments.data is not None:
            from murmuration.launch.demo_pictures import prepare

            print(f"next:  deepspeed launch/train.py --config {prepare(arguments.data.resolve(), out / 'pictures')}")
            return 0
        sets = [_Set(name, count, side, tint) for name, count in counts.items()]
        missing = [each for each in sets if _is_missing(out / each.name, each, force=arguments.force)]
        _make(out, missing, arguments.workers)
        word_tokenizer(GRAMMAR_WORDS, out / "tokenizer.json")
    print(f"ready: {out}")
    print("next:  deepspeed launch/train.py --config ds_configs/demo.json")
    return 0


def _is_missing(target: Path, wanted: _Set, *, force: bool) -> bool:
    """Whether the set is to be made; data that only `--force` may replace are refused before anything is drawn."""
    from murmuration.data.store.index_files import read_json

    try:
        found = read_json(target / _RECEIPT)
        found = found if isinstance(found, dict) else None
    except (OSError, ValueError):
        found = None
    if found == wanted.request and _intact(target, wanted.records):
        print(f"{target.name}: {wanted.records} records are there already")
        return False
    if target.exists() and not force:
        raise InputError(f"{target}: holds other or damaged data; replace it with --force or use another --out")
    if target.exists() and found is None:
        raise InputError(f"{target}: not made by prepare.py, so --force leaves it alone; use another --out")
    return True


def _make(out: Path, sets: list[_Set], workers: int) -> None:
    """Draws shards of all sets side by side. A set gets its name once it is whole: a kill leaves nothing half-made."""
    from murmuration.data.synthetic.write import spread

    for each in sets:
        shutil.rmtree(_partial(out, each), ignore_errors=True)
        _partial(out, each).mkdir()
    parts = [(each, shard) for each in sets for shard in each.shards]
    show, started = Progress("drawing", "shards"), time.monotonic()
    show(0, len(parts))
    for done, _ in enumerate(spread(partial(_write, out), parts, workers), start=1):
        show(done, len(parts))
    for each in sets:
        _finish(_partial(out, each), out / each.name, each)
    if sets:
        made = ", ".join(f"{each.records} {each.name}" for each in sets)
        print(f"{made}: drawn in {time.monotonic() - started:.1f} s")


def _partial(out: Path, wanted: _Set) -> Path:
    return out / f".{wanted.name}.partial"


def _write(out: Path, part: tuple[_Set, int]) -> None:
    from murmuration.data.synthetic.index import shard_path, write_shard

    wanted, shard = part
    with shard_path(_partial(out, wanted), shard).open("wb") as file:
        write_shard(file, wanted.samples(shard))


def _finish(made: Path, target: Path, wanted: _Set) -> None:
    from murmuration.data.index.shard_index import build

    build(made)
    (made / _RECEIPT).write_text(json.dumps(wanted.request, indent=1) + "\n")
    for path in [*made.glob("*.tar"), made / _RECEIPT, made]:
        sync(path)
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        made.rename(target)
        shutil.rmtree(replaced)
    else:
        made.rename(target)


def _intact(folder: Path, records: int) -> bool:
    from murmuration.data.index.shard_index import ShardIndex
    from murmuration.data.store.place import ShardError

    try:
        index = ShardIndex.open(folder)
        index.check_unchanged(contents=True)
    except ShardError:
        return False
    return index.records == records
