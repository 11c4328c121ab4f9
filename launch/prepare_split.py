"""prepare.py split: freeze which share of a set is public, once and for all runs on it.

    python launch/prepare.py split data/set --public-fraction 0.1

The first run with data.public_fraction does this by itself. Use this command if that run may not write beside the
index, or if runs were made before shares were frozen: it is then your word that all of them had this share.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from murmuration.accounting.errors import InputError


def declare(commands: Any) -> None:
    split = commands.add_parser("split", help="freeze which share of a set is public", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    split.set_defaults(run=_split)
    split.add_argument("index", type=Path, help="index, or the folder that it belongs to")
    split.add_argument("--unit", metavar="NAME", help="cut between units, as configs with this data.unit do")
    split.add_argument("--public-fraction", type=float, required=True, help="share of them, between 0 and 1")


def _split(arguments: argparse.Namespace) -> int:
    from murmuration.data.index.open import open_index, open_units
    from murmuration.data.index.public_split import FROZEN, PublicSplit, public_share
    from murmuration.train.storage.sibling_runs import RunLog

    fraction = arguments.public_fraction
    if not 0 < fraction < 1:
        raise InputError(f"--public-fraction {fraction:g}: choose a number between 0 and 1")
    index = open_index(arguments.index)
    count = index.records if arguments.unit is None else open_units(index, arguments.unit).count
    wanted = PublicSplit(count, fraction, arguments.unit)
    public = public_share(count, fraction, "record" if arguments.unit is None else "unit")
    wanted.freeze(index.folder)
    if (found := PublicSplit.frozen(index.folder)) != wanted:
        assert found is not None
        raise InputError(
            f"{index.folder / FROZEN}: frozen with {found.fraction!r} of {found.records} {found.things} already; "
            "records that one run protects would be public in another"
        )
    if runs := RunLog.beside(index.folder).siblings():
        print(f"{len(runs)} entries are in the log of runs on it; this is your word that all had this share")
    print(f"{public} of {count} {wanted.things} are public in all runs on {index.folder}, and the rest is not")
    return 0
