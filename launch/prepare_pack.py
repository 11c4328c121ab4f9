"""prepare.py pack: pictures and what is known about them, as indexed tar shards with one record per image.

    python launch/prepare.py pack IMAGES --csv captions.csv --image file_name --caption caption --out shards
    python launch/prepare.py pack IMAGES --csv t.csv --label finding --classes names.txt --unit patient_id --out out
    python launch/prepare.py pack COCO --split train2017 --out shards
    python launch/prepare.py pack cifar-10-batches-bin --split test --out cifar-test

SOURCE is the folder from which the names of the images start, or the folder of a published set, which is recognised:
COCO, CC3M and SBU (pictures that are there; nothing is downloaded), CIFAR-10/100 (binary version), SVHN, Aircraft,
Caltech-101, Food-101, Places365, iNaturalist, parquet files, Hugging Face `datasets` directories and image folders with
metadata.csv, and any folder of classes. The table may be CSV, tab-separated, JSON lines, a JSON list, COCO's JSON or
parquet.

Several rows of one image become one record with several captions, of which each step takes one by key. Rows that cannot
be used are listed in OUT/left_out.jsonl. The same input gives the same bytes, and the same command continues after a
stop.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmuration.accounting.unit import KEY, SINGLE, fault_of_name
from murmuration.data.progress import Progress

if TYPE_CHECKING:
    from murmuration.data.pack.write import Packed, Request


def declare(commands: Any) -> None:
    pack = commands.add_parser("pack", help="make tar shards of pictures and tables", description=__doc__,
                               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    pack.set_defaults(run=_pack)
    pack.add_argument("source", type=Path, help="folder of the pictures, or of a published set")
    pack.add_argument("--out", type=Path, required=True, help="folder to make; what is held out goes to OUT-held-out")
    pack.add_argument("--layout", default="auto", metavar="NAME", help="a layout by name (default: recognise)")
    pack.add_argument("--split", help="which part of a published set (default: its training part)")
    table = pack.add_argument_group("table")
    table.add_argument("--csv", "--table", type=Path, dest="table", metavar="FILE", help="one row per image or caption")
    table.add_argument("--image", metavar="COLUMN", help="names of the images, below SOURCE (default: recognise)")
    table.add_argument("--caption", metavar="COLUMN", help="captions (default: recognise)")
    table.add_argument("--label", metavar="COLUMN", help="class names or numbers, which become .cls")
    table.add_argument(
        "--separator", metavar="TEXT",
        help="an image may have any number of classes: what divides them in the cells of --label, such as '|' (those "
        "of JSON and parquet may be lists); the list goes into the .json",
    )  # fmt: skip
    table.add_argument(
        "--no-class", metavar="TEXT", help="with --separator: the cell that stands for no class, such as 'No Finding'"
    )
    table.add_argument("--unit", metavar="COLUMN", help="whose image it is: kept in each .json and by the index")
    classes = pack.add_mutually_exclusive_group()
    classes.add_argument("--classes", type=Path, metavar="FILE", help="public list of the class names, one per line")
    classes.add_argument(
        "--classes-from-rows", action="store_true",
        help="list the names that occur; for private records that list is refused later, unless data.classes_public",
    )  # fmt: skip
    pack.add_argument(
        "--hold-out", type=float, default=0.0, metavar="SHARE",
        help="put this share of the units (without --unit, of the images) into OUT-held-out",
    )  # fmt: skip
    pack.add_argument(
        "--window", nargs=2, type=float, metavar=("CENTRE", "WIDTH"),
        help="which values of grey DICOM files are shown (default: each file's own first window)",
    )  # fmt: skip
    pack.add_argument(
        "--max-shorter-side", type=int, metavar="N",
        help="shrink pictures whose shorter side has more than N pixels to N, keeping their shape (default: none)",
    )  # fmt: skip
    pack.add_argument("--per-shard", type=int, default=1000, help="images in one tar file")
    pack.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="decoding processes (default: all cores)"
    )


def _pack(arguments: argparse.Namespace) -> int:
    from murmuration.data.decode.class_list import ClassList
    from murmuration.data.pack.columns import Columns, Several
    from murmuration.data.pack.dicom import Window
    from murmuration.data.pack.layouts import LAYOUTS, Source, open_layout
    from murmuration.data.pack.row import PackError
    from murmuration.data.pack.write import Request, pack

    if arguments.layout not in ("auto", *LAYOUTS):
        raise PackError(f"--layout {arguments.layout}: choose one of {', '.join(LAYOUTS)}")
    if arguments.unit is not None and (arguments.unit.startswith(KEY) or fault_of_name(arguments.unit) is not None):
        raise PackError(f"--unit {arguments.unit!r}: the index cannot name units by this; rename the column")
    if arguments.separator is None and arguments.no_class is not None:
        raise PackError("--no-class goes with --separator; name the text between two classes, such as '|'")
    if arguments.separator is not None and not (arguments.separator and arguments.label):
        raise PackError("--separator: name the text between two classes, such as '|', and their column with --label")
    several = None if arguments.separator is None else Several(arguments.separator, arguments.no_class)
    columns = Columns(arguments.image, arguments.caption, arguments.label, arguments.unit, several)
    source = Source(arguments.source, arguments.table, arguments.layout, arguments.split, columns)
    classes = ClassList.read(arguments.classes) if arguments.classes is not None else None
    request = Request(
        arguments.out.absolute(), arguments.unit, arguments.hold_out, classes, arguments.classes_from_rows,
        arguments.per_shard, arguments.workers, None if several is None else arguments.label,
        None if arguments.window is None else Window(*arguments.window), arguments.max_shorter_side,
    )  # fmt: skip
    layout = open_layout(source)
    print(layout.told)
    for line in _told(pack(layout, request, Progress("packing", "shards")), request):
        print(line)
    return 0


def _told(packed: Packed, request: Request) -> list[str]:
    from murmuration.data.pack.write import CLASSES, LEFT_OUT

    index, labels = packed.index, packed.labels
    lines = [
        f"{packed.rows} rows name {packed.images} images",
        f"{index.records} records in {len(index.shards)} shards, index in {index.folder}",
        "only you can read what was packed (folders 0700, files 0600); if all of it is public: chmod -R a+rX "
        + " ".join(shlex.quote(str(each.folder.parent)) for each in (index, packed.held_out) if each is not None),
    ]
    if request.max_shorter_side is not None:
        lines.append(
            f"pictures of more than {request.max_shorter_side} pixels on their shorter side were shrunk to that"
        )
    if packed.held_out is not None:
        lines.append(f"held out: {packed.held_out.records} records, index in {packed.held_out.folder}")
    if packed.several:
        lines.append(f"{packed.several} images have several captions; each step takes one of them by key")
    if labels.names:
        lines.append(f"{len(labels.names)} classes in {index.folder.parent / CLASSES}: name it as data.classes")
    if request.listed is not None:
        lines.append(
            f"each .json lists its classes as {request.listed!r}: name it as data.label, with data.multi_label (init: "
            "--label and --multi-label)"
        )
    if labels.from_rows:
        lines.append(
            "these class names were taken from the records; if the records are private, pack them with a public list "
            "(--classes): a class that one record alone has would tell of it"
        )
    if labels.outside:
        lines.append(
            f"labels outside the list of classes: {labels.outside}; where a run needs one they are bad records"
        )
    if request.unit is not None:
        lines.append(
            f"{packed.units} units, each record's in its .json as {request.unit!r}: what private runs protect, unless "
            f"their config says data.unit = {SINGLE!r}"
        )
    if packed.left_out:
        counted = ", ".join(f"{count} × {reason}" for reason, count in packed.left_out.most_common())
        lines.append(
            f"left out: {counted}; listed in {index.folder.parent / LEFT_OUT}, which is as private as the rows"
        )
    lines.append(f"manifest {index.manifest_digest}")
    return lines
