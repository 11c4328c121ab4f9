"""Prepare data: one command each, all of them safe to stop and to run again.

    python launch/prepare.py demo        draw the demo data set
    python launch/prepare.py index       index tar shards or a folder of images that are already there
    python launch/prepare.py pack        make tar shards of pictures with a table, or of a published set
    python launch/prepare.py check       look at the records of a config as the trainer sees them
    python launch/prepare.py synthetic   make pictures by rule, for phases that are not private
    python launch/prepare.py split       freeze which share of a set is public

Each command lives in launch/prepare_<command>.py and explains itself with --help. Exit codes: 0 done, 2 bad input,
75 records cannot be read now: repair what the message names, and run the command again.
"""

from __future__ import annotations

import argparse
import errno
import io
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project

from murmuration.accounting.errors import BAD_INPUT, RunError
from murmuration.accounting.escaping import sentence
from murmuration.launch import (
    prepare_check,
    prepare_demo,
    prepare_index,
    prepare_pack,
    prepare_split,
    prepare_synthetic,
)

COMMANDS = (prepare_demo, prepare_index, prepare_pack, prepare_check, prepare_synthetic, prepare_split)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prepare data for Murmuration.")
    names = parser.add_subparsers(required=True)
    for command in COMMANDS:
        command.declare(names)
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of folders need not be text
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


if __name__ == "__main__":
    sys.exit(main())
