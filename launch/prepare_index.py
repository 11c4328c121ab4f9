"""prepare.py index: where every record begins, how many there are, and a digest that pins them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from data.progress import Progress


def declare(commands: Any) -> None:
    index = commands.add_parser("index", help="index tar shards", description=__doc__)
    index.set_defaults(run=_index)
    index.add_argument("shards", help="a folder, or a pattern such as 'shards/{000000..000019}.tar'")
    index.add_argument("--out", type=Path, default=None, help="index folder (default: index/ beside the shards)")
    index.add_argument("--workers", type=int, default=None, help="processes (default: one per core)")


def _index(arguments: argparse.Namespace) -> int:
    from data.index import build

    index = build(arguments.shards, arguments.out, workers=arguments.workers, progress=Progress("indexing", "shards"))
    print(f"{index.records} records in {len(index.shards)} shards, index in {index.folder}")
    print(f"manifest {index.manifest_digest}")
    return 0
