"""Prepare data: one command each, all of them safe to stop and to run again.

    python launch/prepare.py demo        draw the demo data set
    python launch/prepare.py index       index tar shards or a folder of images that are already there
    python launch/prepare.py pack        make tar shards of pictures with a table, or of a published set
    python launch/prepare.py check       look at the records of a config as the trainer sees them
    python launch/prepare.py synthetic   make pictures by rule, for phases that are not private
    python launch/prepare.py split       freeze which share of a set is public

The first three live in launch/prepare_<command>.py; each explains itself with --help. Exit codes: 0 done, 2 bad input,
75 records cannot be read now: repair what the message names, and run the command again.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project

from murmuration.accounting.errors import BAD_INPUT, InputError, RunError
from murmuration.accounting.escaping import escape_output, sentence
from murmuration.accounting.unit import SINGLE
from murmuration.data.progress import Progress
from murmuration.data.synthetic.kinds import KINDS
from murmuration.launch import prepare_demo, prepare_index, prepare_pack


def main(argv: list[str] | None = None) -> int:
    escape_output()
    parser = argparse.ArgumentParser(description="Prepare data for Murmuration.")
    names = parser.add_subparsers(required=True)
    for command in (prepare_demo, prepare_index, prepare_pack):
        command.declare(names)
    check = names.add_parser(
        "check", help="look at the records of a config as the trainer sees them", description=CHECK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    check.set_defaults(run=_check)
    check.add_argument("--config", type=Path, required=True, help="the config of the training")
    check.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key; may be repeated")
    check.add_argument("--phase", metavar="NAME", help="this phase alone (default: all that have records)")
    check.add_argument(
        "--records", type=_count, default=RECORDS, metavar="K",
        help=f"records of each phase on the page (default {RECORDS}; 0: no page)",
    )  # fmt: skip
    check.add_argument("--out", type=Path, help="the page (default: NAME-check.html for NAME.json, in this folder)")
    looked = check.add_mutually_exclusive_group()
    looked.add_argument(
        "--sample", type=_count, default=SAMPLE, metavar="N",
        help=f"records of each phase to look at (default {SAMPLE})",
    )  # fmt: skip
    looked.add_argument("--all", action="store_true", help="look at all records")
    check.add_argument("--workers", type=_count, help="decoding processes (default: one per core but one; 0: none)")
    synthetic = names.add_parser(
        "synthetic", help="make pictures by rule", description=SYNTHETIC,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
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
    split = names.add_parser(
        "split", help="freeze which share of a set is public", description=SPLIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    split.set_defaults(run=_split)
    split.add_argument("index", type=Path, help="index, or the folder that it belongs to")
    split.add_argument(
        "--unit", metavar="NAME", help="cut between these units (default: those that the index knows), or 'record'"
    )
    split.add_argument("--registry", metavar="FOLDER", help="write it there, too: what configs name as run.registry")
    split.add_argument("--public-fraction", type=float, required=True, help="share of them, between 0 and 1")
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except RunError as error:
        said, code = sentence(error), error.exit_code
    except OSError as error:
        where = error.filename or getattr(arguments, "out", None) or "a file"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some space there" if full else "check the path and its permissions"
        said, code = sentence(f"{where}: {error.strerror or error}; {fix}, then run the command again"), BAD_INPUT
    print(f"prepare.py: {said}", file=sys.stderr)
    return code


RECORDS, SAMPLE = 24, 2000

CHECK = """\
prepare.py check: what the records of a config look like to the trainer, before a run spends anything on them.

    python launch/prepare.py check --config my.json

Of each phase, a sample of records goes through the reader of training. The summary says how many are usable, and why
the others are not; how many have a picture, a caption and a label; which labels there are; how long captions are, and
how many are cut. A page shows some of them as the model sees them. All of this is for the owner of the data alone: what
is chosen by looking at private records (a label map, a vocabulary, a size) is covered by no epsilon.
"""
SYNTHETIC = """\
prepare.py synthetic: pictures made by rule, as indexed tar shards, for phases that are not private.

    python launch/prepare.py synthetic --kind mixed --records 1000000 --size 224 --out textures

The same request gives the same bytes; a command that was stopped continues when it is run again.
"""
SPLIT = """\
prepare.py split: freeze which share of a set is public, once and for all runs on it.

    python launch/prepare.py split data/set --public-fraction 0.1

The first run with data.public_fraction does this by itself. Use this command if that run may not write beside the
records. Records that a run has protected as a whole cannot be split any more.
"""


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return int(text)


def _check(arguments: argparse.Namespace) -> int:
    from murmuration.train.config.load import load

    config = load(arguments.config, arguments.set)
    # Only now: it brings PyTorch along.
    from murmuration.train.commands.check import Wanted, check

    out = arguments.out or Path(f"{arguments.config.stem}-check.html")
    most = None if arguments.all else max(1, arguments.sample)
    wanted = Wanted(arguments.phase, most, arguments.records, arguments.workers, out)
    check(config, arguments.config.name, wanted)
    return 0


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


def _split(arguments: argparse.Namespace) -> int:
    from murmuration.data.index.open import open_index, open_units, unit_known
    from murmuration.data.index.public_split import SplitIndex
    from murmuration.train.storage.sibling_runs import RunLog

    fraction = arguments.public_fraction
    if not 0 < fraction < 1:
        raise InputError(f"--public-fraction {fraction:g}: choose a number between 0 and 1")
    index = open_index(arguments.index)
    by = arguments.unit or unit_known(str(arguments.index))
    units = None if by in (None, SINGLE) else open_units(index, by)
    part = SplitIndex(index, fraction, public=True, units=units)
    RunLog.of(part, arguments.registry).freeze()
    things = "records" if part.units is None else f"units by {part.units.by!r}"
    public = part.records if part.units is None else part.units.count
    print(f"{public} of {part.cut.records} {things} are public in all runs on {index.folder}, and the rest is not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
