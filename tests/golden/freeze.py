"""Golden values: proves that a change which should change nothing did change nothing, bit for bit.

    python tests/golden/freeze.py make --out /tmp/before        before the change; takes minutes
    python tests/golden/freeze.py compare /tmp/before           after it: made anew and compared
    python tests/golden/freeze.py compare /tmp/before /tmp/after
    python tests/golden/freeze.py check [--quick]               against the committed values; no processor changes those
    python tests/golden/freeze.py refreeze                      commits to what the code does now
    python tests/golden/freeze.py show run-zero1 ledger.jsonl [DIR]

Parts, each of which --only takes (as often as wanted):
    help      --help of all launch/*.py and their subcommands
    configs   digests of all shipped recipes, by which a resumed run knows its config
    twins     --dry-run of all recipes without privacy (seconds: nothing is calibrated)
    dry-run   --dry-run of all recipes (minutes)
    ids       derived keys, Poisson draws and public epochs of a fixed key
    noise     AES and ChaCha20 noise of a fixed key, as float64 and float32
    index     bytes of indexes over shards and single files with fixed contents
    data      bytes of demo and synthetic shards                               (this machine alone)
    run-NAME  toy runs with keys from a fixed seed: zero0 zero1 zero2 zero3 fsdp2 by two processes, and other, by one,
              with other choices; console, ledger, certificate, logs, report, checkpoints, names and modes of files,
              verdict, exported weights                                        (this machine alone)
    account   account.py and plan.py on a few questions                        (this machine alone)
Those of this machine alone depend on its kernels and libraries, so they are compared between two commits on one machine
and never committed. What is left out of the comparison stands above NORMALISED in texts.py.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy loads: several threads add in another order
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from tests.golden import parts  # noqa: E402

DIGESTS, TEXTS = "golden.json", "golden.texts.json.xz"
MOST_LINES = 40
Texts = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Golden:
    """Texts by part and item, and where they were made."""

    environment: dict[str, str]
    texts: Texts

    @staticmethod
    def make(names: Iterable[str], folder: Path) -> Golden:
        texts: Texts = {}
        for part, item, text in parts.made(list(names), folder):
            texts.setdefault(part, {})[item] = text
        return Golden(parts.environment(), texts)

    @staticmethod
    def read(folder: Path) -> Golden:
        head = json.loads((folder / DIGESTS).read_text())
        texts: Texts = json.loads(lzma.decompress((folder / TEXTS).read_bytes()))
        found = Golden(head["environment"], texts)
        if found.digests() != head["digests"]:
            raise SystemExit(f"{folder / TEXTS} does not hold the texts of {DIGESTS}; make both again")
        return found

    def write(self, folder: Path) -> None:
        """One line per item in golden.json, so that a diff of it tells what changed; texts beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {"environment": self.environment, "digests": self.digests()}
        (folder / DIGESTS).write_text(json.dumps(head, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        packed = json.dumps(self.texts, sort_keys=True, ensure_ascii=False).encode()
        (folder / TEXTS).write_bytes(lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME))

    def digests(self) -> dict[str, dict[str, str]]:
        return {
            part: {item: hashlib.sha256(text.encode()).hexdigest()[:32] for item, text in items.items()}
            for part, items in self.texts.items()
        }


def differences(before: Golden, after: Golden, names: Iterable[str]) -> list[str]:
    """One text per item that differs or stands on one side only."""
    found = []
    for part in names:
        old, new = before.texts.get(part, {}), after.texts.get(part, {})
        for item in sorted(old.keys() | new.keys()):
            if item not in new or item not in old:
                found.append(f"{part} | {item}: only {'before' if item in old else 'after'}")
            elif old[item] != new[item]:
                lines = list(difflib.unified_diff(old[item].splitlines(), new[item].splitlines(), lineterm="", n=1))
                shown = [line if len(line) < 400 else f"{line[:400]} …" for line in lines[2 : 2 + MOST_LINES]]
                more = [f"… and {len(lines) - 2 - len(shown)} more lines"] if len(lines) > 2 + len(shown) else []
                found.append("\n".join([f"{part} | {item}: differs", *shown, *more]))
    return found


def judge(before: Golden, after: Golden, names: list[str]) -> int:
    """0 if all is equal, 1 otherwise, like diff."""
    names = [name for name in names if name in before.texts or name in after.texts]
    elsewhere = {
        k: (v, after.environment.get(k)) for k, v in before.environment.items() if after.environment.get(k) != v
    }
    if elsewhere:
        told = ", ".join(f"{name} {one} and {other}" for name, (one, other) in elsewhere.items())
        print(f"not made in one environment: {told}")
    found = differences(before, after, names)
    for text in found:
        print(text)
    items = sum(len(before.texts.get(name, {})) for name in names)
    print(f"{len(found)} differences" if found else f"all equal: {items} items of {', '.join(names)}")
    return 1 if found else 0


def fresh(names: list[str]) -> Golden:
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        return Golden.make(names, Path(folder).resolve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    acts = parser.add_subparsers(dest="act", required=True)
    make = acts.add_parser("make", help="make golden values and keep them in a folder")
    make.add_argument("--out", type=Path, required=True)
    compare = acts.add_parser("compare", help="compare two folders, or one with what the code does now")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path, nargs="?")
    check = acts.add_parser("check", help="compare the committed values with what the code does now")
    check.add_argument("--quick", action="store_true", help="without dry-run, which takes minutes")
    refreeze = acts.add_parser("refreeze", help="replace the committed values by what the code does now")
    for act in (make, compare, check, refreeze):
        act.add_argument("--only", action="append", choices=parts.PARTS, metavar="PART", help="; ".join(parts.PARTS))
    show = acts.add_parser("show", help="print the text of one item")
    show.add_argument("part", choices=parts.PARTS)
    show.add_argument("item")
    show.add_argument("folder", type=Path, nargs="?", default=HERE)
    arguments = parser.parse_args()
    if arguments.act == "show":
        print(Golden.read(arguments.folder).texts[arguments.part][arguments.item], end="")
        return 0
    names = arguments.only or list(parts.PARTS)
    if arguments.act == "make":
        fresh(names).write(arguments.out)
        return 0
    if arguments.act == "compare":
        before = Golden.read(arguments.before)
        names = [name for name in names if name in before.texts]
        after = Golden.read(arguments.after) if arguments.after else fresh(names)
        return judge(before, after, names)
    names = [name for name in names if name in parts.COMMITTED]
    if arguments.act == "check":
        names = [name for name in names if not arguments.quick or name in parts.QUICK]
        before, after = Golden.read(HERE), fresh(names)
        if before.environment["python"] != after.environment["python"] and "help" in names:
            print("help is not compared: another version of Python words it otherwise")
            names.remove("help")
        return judge(before, after, names)
    made = fresh(names)
    kept = Golden.read(HERE).texts if arguments.only else {}
    Golden(made.environment, kept | made.texts).write(HERE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
