"""prepare.py index: where every record begins, how many there are, and a digest that pins them.

SOURCE is a folder of tar shards, a pattern such as 'shards/{000000..000019}.tar', the same behind a URL (with --out),
or a folder of images with or without class folders (ImageFolder, ImageNet, Places365, iNaturalist).

Stop it whenever you like: the same command continues where it was. Run again after shards were added or replaced,
it scans only those. A shard is taken as unchanged if its size, mtime and ctime (behind a URL: size and ETag) are
those of the last scan; --rescan trusts none of that.
"""

from __future__ import annotations

import argparse
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.unit import Unit, unit_in_words
from murmuration.data.progress import Progress

if TYPE_CHECKING:
    from murmuration.data.index.folders import FolderIndex
    from murmuration.data.index.shard_index import ShardIndex


def declare(commands: Any) -> None:
    index = commands.add_parser("index", help="index tar shards, or a folder of images", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    index.set_defaults(run=_index)
    index.add_argument("source", help="folder, pattern or URL")
    index.add_argument("--out", type=Path, help="index folder (default: index/ beside shards, FOLDER.index for images)")
    index.add_argument(
        "--budget", type=_positive, metavar="EPSILON",
        help="for all runs on these records together: later runs that would exceed it are refused",
    )  # fmt: skip
    index.add_argument(
        "--registry", metavar="FOLDER",
        help="write the budget there, too: the folder that configs name as run.registry, for read-only data",
    )  # fmt: skip
    index.add_argument(
        "--unit", metavar="NAME",
        help="let units of several records be protected as one: a field of each record's .json (patient_id), or "
        "key:PATTERN, a regular expression matched from the start of its key (key:[^_]+); kept with the index",
    )  # fmt: skip
    index.add_argument(
        "--unit-missing", choices=("refuse", "own"), default="refuse",
        help="records that name no unit: refuse them (default), or let each be a unit of its own",
    )  # fmt: skip
    shards = index.add_argument_group("tar shards")
    shards.add_argument("--workers", type=int, help="processes (default: one per core, one for less than 512 MiB)")
    shards.add_argument("--rescan", action="store_true", help="scan every shard, whatever is known about it")
    images = index.add_argument_group("images")
    images.add_argument(
        "--classes",
        choices=("auto", "top", "leaf", "none"),
        default="auto",
        help="class = first folder (top), whole path of folders (leaf: Places365), or none; default: recognise",
    )
    images.add_argument("--contents", action="store_true", help="pin contents too: reads every file, and again at use")
    images.add_argument("--refuse-twins", action="store_true", help="refuse files of equal content; reads every file")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no budget; give a finite ε above 0")
    return value


def _index(arguments: argparse.Namespace) -> int:
    from murmuration.data.index.format import MANIFEST
    from murmuration.data.index.open import is_image_folder
    from murmuration.data.store.place import ShardError

    if arguments.unit is None and arguments.unit_missing != "refuse":
        raise ShardError("--unit-missing says what becomes of records without a unit; name the unit with --unit")
    index = _images(arguments) if is_image_folder(arguments.source) else _shards(arguments)
    if not (index.folder / MANIFEST).stat().st_mode & stat.S_IROTH:
        print("only you can read the index (files 0600), as not everybody can read the records")
    unit = _told_units(index)
    if arguments.budget is not None:
        from murmuration.train.storage.sibling_runs import RunLog

        about = unit_in_words(None if arguments.unit is None else unit)
        for fault in RunLog.of(index, arguments.registry).set_budget(arguments.budget, about):
            print(f"{fault}: a lower budget that was set there before still counts", file=sys.stderr)
        protecting = "" if arguments.unit is None else f" that protect {about}"
        print(
            f"all runs on these records{protecting} together have a budget of ε = {arguments.budget:g}; their δ add up"
        )
    return 0


def _told_units(index: ShardIndex | FolderIndex) -> Unit | None:
    """Says how many units the index has, and what they are named by."""
    from murmuration.data.index.open import open_units
    from murmuration.data.index.units import unit_named

    if (named := unit_named(index.folder)) is None:
        return None
    units = open_units(index, named[0])
    print(
        f"{units.count} units by {units.by!r}, of at most {int(units.sizes.max())} records: private runs protect them"
    )
    return Unit(units.by)


def _shards(arguments: argparse.Namespace) -> ShardIndex:
    from murmuration.data.index.shard_index import Wanted, build

    known = -1

    def progress(done: int, total: int) -> None:
        nonlocal known
        known = done if known < 0 else known
        show(done, total)

    show = Progress("indexing", "shards")
    remarks: list[str] = []
    wanted = Wanted(arguments.rescan, arguments.workers, arguments.unit, arguments.unit_missing)
    index = build(arguments.source, arguments.out, progress=progress, wanted=wanted, tell=remarks.append)
    print(f"{index.records} records in {len(index.shards)} shards, index in {index.folder}")
    print(f"scanned {len(index.shards) - known} shards, {known} were known")
    print(f"manifest {index.manifest_digest}")
    print(*(f"{remark}\n" for remark in remarks), sep="", end="")
    return index


def _images(arguments: argparse.Namespace) -> FolderIndex:
    from murmuration.data.index.census import beside_images
    from murmuration.data.index.folders import build_folder

    index = build_folder(
        arguments.source,
        arguments.out,
        rule=arguments.classes,
        contents=arguments.contents,
        refuse_twins=arguments.refuse_twins,
        unit=arguments.unit,
        missing=arguments.unit_missing,
        progress=Progress("hashing", "files"),
    )
    images = f"{index.records} {'image' if index.records == 1 else 'images'}"
    names = index.classes
    classes = f"{len(names) or 'no'} {'class' if len(names) == 1 else 'classes'}"
    print(f"{images}, {classes}, index in {index.folder}")
    for remark in beside_images(Path(arguments.source)):
        print(remark)
    print(f"manifest {index.manifest_digest}")
    return index
