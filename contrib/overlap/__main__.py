"""Leave out private records that look like pictures of public or evaluation sets.

    python -m murmuration.contrib.overlap --private shards/ --against imagenet/val.index demo_data/held_out

Writes exclusions.npy and exclusions.json beside the private index. Excluded records keep their places: they are drawn
like any other and contribute nothing, so n, the published number of records, stays what it was, and nobody who sees a
run learns how many were excluded. What this command prints is as private as the records. Private pictures that cannot
be decoded stay in: training deals with them. Never filter the other way round: filtering public pictures by private
ones, or a private set by itself, reveals who is in it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from murmuration.contrib.overlap.exclude import exclude_overlaps
from murmuration.data.index.open import open_index
from murmuration.data.progress import Progress
from murmuration.train.commands.exit_codes import guarded
from murmuration.train.recipe.private_around import Extent, protected_around
from murmuration.train.storage.sibling_runs import RunLog


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m murmuration.contrib.overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--private", type=Path, required=True, help="index of the records to filter")
    parser.add_argument("--against", type=Path, nargs="+", required=True, help="indexes of public or evaluation sets")
    parser.add_argument("--distance", type=int, default=4, help="bits (of 64) in which hashes of copies may differ")
    parser.add_argument(
        "--crops",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether crops that leave out up to 10 %% of a side are also found (default: yes)",
    )
    parser.add_argument(
        "--by-unit", action="store_true",
        help="leave out all records of a unit of the index with any of them; only for runs whose data.unit it is",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)),
        help="processes (default: one per core)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    return guarded(lambda: _overlap(arguments), main_rank=True)


def _overlap(arguments: argparse.Namespace) -> int:
    def protected(folder: Path) -> list[str]:
        index = open_index(folder, excluded="ignored")
        around = protected_around(index, Extent.of(index))
        runs = [str(entry.get("run")) for entry in RunLog.of(index).siblings()]
        return runs or ([around.run] if around is not None else [])

    found = exclude_overlaps(
        arguments.private,
        arguments.against,
        arguments.distance,
        arguments.workers,
        progress=lambda what: Progress(what, "records"),
        runs_on=protected,
        crops=arguments.crops,
        by_unit=arguments.by_unit,
    )
    index = open_index(arguments.private)
    print(f"{len(found.ids)} of {index.records} records look like public ones and will contribute nothing")
    print(f"n stays {index.records}; the number of excluded records is private")
    print("pictures that cannot be decoded were not compared and stay in")
    if used := RunLog.of(index).siblings():
        name = str(used[0].get("run"))
        print(f"run {name!r} began with another list; to continue it with this one, declare --new-segment 'why'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
