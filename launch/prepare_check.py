"""prepare.py check: what the records of a config look like to the trainer, before a run spends anything on them.

    python launch/prepare.py check --config my.json

Of each phase, a sample of records goes through the reader of training. The summary says how many are usable, and why
the others are not; how many have a picture, a caption and a label; which labels there are; how long captions are, and
how many are cut. A page shows some of them as the model sees them. All of this is for the owner of the data alone: what
is chosen by looking at private records (a label map, a vocabulary, a size) is covered by no epsilon.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

RECORDS, SAMPLE = 24, 2000


def declare(commands: Any) -> None:
    check = commands.add_parser("check", help="look at the records of a config as the trainer sees them",
                                description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
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


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return int(text)


def _check(arguments: argparse.Namespace) -> int:
    from murmuration.train.commands.check import Wanted, check

    out = arguments.out or Path(f"{arguments.config.stem}-check.html")
    most = None if arguments.all else max(1, arguments.sample)
    wanted = Wanted(arguments.phase, most, arguments.records, arguments.workers, out)
    check(arguments.config, arguments.set, wanted)
    return 0
