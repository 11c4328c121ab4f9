"""prepare.py synthetic: pictures made by rule, as indexed tar shards, for phases that are not private.

    python launch/prepare.py synthetic --kind mixed --records 1000000 --size 224 --out textures

The same request gives the same bytes; a command that was stopped continues when it is run again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from murmuration.data.progress import Progress
from murmuration.data.synthetic.kinds import KINDS


def declare(commands: Any) -> None:
    synthetic = commands.add_parser("synthetic", help="make pictures by rule", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    synthetic.set_defaults(run=_synthetic)
    synthetic.add_argument("--kind", choices=KINDS, default="mixed", help="`shapes` have captions, the others none")
    synthetic.add_argument("--records", type=int, required=True, help="how many pictures")
    synthetic.add_argument("--size", type=int, default=224, help="side of the square pictures, in pixels")
    synthetic.add_argument("--seed", type=int, default=1, help="another seed gives other pictures")
    synthetic.add_argument("--per-shard", type=int, default=1000, help="records in one tar file")
    synthetic.add_argument("--out", type=Path, required=True, help="folder to make")
    synthetic.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)),
        help="processes (default: one per core)",
    )  # fmt: skip
    synthetic.add_argument("--device", default="cpu", help="cpu, or cuda to make them on a GPU in one process")


def _synthetic(arguments: argparse.Namespace) -> int:
    from murmuration.data.synthetic.write import Request, make

    request = Request(
        arguments.kind, arguments.records, arguments.size, arguments.seed, arguments.per_shard, arguments.device
    )
    workers = arguments.workers if arguments.device == "cpu" else 1
    index = make(request, arguments.out.resolve(), workers, Progress(arguments.kind, "shards"))
    print(f"{index.records} records in {len(index.shards)} shards, index in {index.folder}")
    print(f"manifest {index.manifest_digest}")
    return 0
