"""retire RUN_DIR: closes the ledger of a run that will not be continued, certifies what it spent, destroys its key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from murmuration.accounting.errors import BAD_INPUT, DONE, RunError
from murmuration.accounting.escaping import escape_output, printable, sentence
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.train.storage.run_dir import RunDir


def main(argv: list[str] | None = None) -> int:
    escape_output()
    parser = argparse.ArgumentParser(prog="retire.py", description="Certifies what a run has spent; destroys its key.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    arguments = parser.parse_args(argv)

    try:
        if not RunDir(arguments.run_dir).ledger.is_file():
            raise LedgerError(f"there is no ledger in {arguments.run_dir}; name a run directory")
        # Only now: it brings PyTorch along.
        from murmuration.train.storage.certify import retire

        print("\n".join(printable(line) for line in retire(arguments.run_dir)))
    except (RunError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunError) else BAD_INPUT
    return DONE
