"""python -m tests.mutation [GROUP ...]: mutates a copy of the working tree, runs the tests on each mutant, reports.

A session that was interrupted goes on (`--go-on`), with the copy that it began with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.mutation.settings import groups
from tests.mutation.tree import TREE, copy_tree


def in_the_copy(code: list[str]) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TREE)}
    return subprocess.run([sys.executable, *code], cwd=TREE, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(groups())}; default: all")
    parser.add_argument("--go-on", action="store_true", help="run what has no result yet")
    arguments = parser.parse_args()
    names = arguments.groups or list(groups())
    if unknown := [name for name in names if name not in groups()]:
        parser.error(f"no group {unknown[0]!r}; choose of {', '.join(groups())}")
    if not arguments.go_on:
        copy_tree()
    for name in names:
        if not arguments.go_on:
            in_the_copy(["-m", "tests.mutation.measure", name])
            in_the_copy(["-c", f"from tests.mutation.session import begin; begin({name!r})"])
        if in_the_copy(["-m", "tests.mutation.run", name]):
            return 1
    return subprocess.run([sys.executable, "-m", "tests.mutation.report", *names]).returncode


if __name__ == "__main__":
    sys.exit(main())
