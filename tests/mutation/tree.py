"""The copy of the working tree in which files are mutated, so that no mutant can ever be committed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
# This file itself is copied too, and what mutates runs in the copy.
TREE = HERE if HERE.parts[-3:] == ("build", "mutation", "tree") else HERE / "build" / "mutation" / "tree"
WORK = TREE.parent


def copy_tree() -> None:
    """What git tracks, and what it does not ignore, as it is now."""
    assert HERE != TREE, "the copy does not copy itself"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for folder in (TREE, WORK / "originals"):
        shutil.rmtree(folder, ignore_errors=True)
    for name in listed:
        source, target = HERE / name, TREE / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


ORIGINALS = WORK / "originals"


class Mutated:
    """A file of the copy with other text. Its time is one it never had: no compiled file fits by chance."""

    _so_far = 0

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text

    def __enter__(self) -> None:
        path, original = TREE / self._file, ORIGINALS / self._file
        original.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, original)
        Mutated._so_far += 1
        path.write_text(self._text)
        later = original.stat().st_mtime + 10 * Mutated._so_far
        os.utime(path, (later, later))

    def __exit__(self, *_: object) -> None:
        os.replace(ORIGINALS / self._file, TREE / self._file)


def restore_what_was_interrupted() -> None:
    for original in ORIGINALS.rglob("*.py"):
        os.replace(original, TREE / original.relative_to(ORIGINALS))
