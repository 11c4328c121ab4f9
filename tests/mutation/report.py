"""python -m tests.mutation.report: the score of each file, and survivors with the reasons of survivors.toml."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome

from tests.mutation.session import path_of
from tests.mutation.settings import groups
from tests.mutation.tree import HERE

REASONS = Path(__file__).with_name("survivors.toml")


class Known:
    """Survivors that were looked at: by file, and by what the mutant leaves and puts there."""

    def __init__(self) -> None:
        found = tomllib.loads(REASONS.read_text())
        self._reasons = {
            (file, before, after): group["why"]
            for file, groups in found.items()
            for group in groups.values()
            for before, after in group["mutants"]
        }

    def of_no_line(self) -> Iterator[tuple[str, str]]:
        """Entries whose statement their file no longer has; lines may have been joined and indented otherwise."""
        for file, before, _ in self._reasons:
            if file != "*" and "".join(before.split()) not in "".join((HERE / file).read_text().split()):
                yield file, before

    def why(self, file: str, how: str, diff: str) -> str | None:
        if how == "the same code":
            return "It compiles to the same code."
        return self._reasons.get((file, *changes(diff))) or self._reasons.get(("*", *changes(diff)))


def changes(diff: str) -> tuple[str, str]:
    lines = diff.split("\n")
    taken = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    put = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return " ".join(taken).strip(), " ".join(put).strip()


def survivors(name: str) -> Iterator[tuple[str, int, str, str]]:
    with use_db(str(path_of(name))) as database:
        for item, result in database.completed_work_items:
            if result.test_outcome == TestOutcome.SURVIVED:
                mutation = item.mutations[0]
                yield mutation.module_path.as_posix(), mutation.start_pos[0], result.output or "", result.diff or ""


def table(names: list[str], known: Known) -> Iterator[str]:
    yield "| file | mutants | run | killed | harmless | open | score |"
    yield "|---|---|---|---|---|---|---|"
    total = Counter[str]()
    for name in names:
        of = defaultdict[str, Counter[str]](Counter)
        with use_db(str(path_of(name))) as database:
            results = dict(database.results)
            for item in database.work_items:
                count = of[item.mutations[0].module_path.as_posix()]
                result = results.get(item.job_id)
                if result is not None and result.worker_outcome == WorkerOutcome.SKIPPED:
                    count["made"] += result.output == "not in the sample"
                    continue
                count["made"] += 1
                if result is not None:
                    count["run"] += 1
                    count["killed"] += result.is_killed
        for file, _, how, diff in survivors(name):
            of[file]["harmless" if known.why(file, how, diff) else "open"] += 1
        for file, count in sorted(of.items()):
            yield row(f"`{file}`", count)
            total += count
    yield row("all", total)


def row(name: str, count: Counter[str]) -> str:
    telling = count["run"] - count["harmless"]
    score = f"{100 * count['killed'] / telling:.1f} %" if telling else "-"
    cells = [name, *(str(count[key]) for key in ("made", "run", "killed", "harmless", "open")), score]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.report", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(groups())}; default: all that were run")
    parser.add_argument("--open", action="store_true", help="the diffs of survivors without a reason alone")
    arguments = parser.parse_args()
    names = [name for name in arguments.groups or groups() if path_of(name).exists()]
    known = Known()
    if not arguments.open:
        print("\n".join(table(names, known)))
    for name in names:
        for file, line, how, diff in sorted(survivors(name)):
            why = known.why(file, how, diff)
            before, after = changes(diff)
            if why is None or not arguments.open:
                print(f"\n{file}:{line} ({how})\n  - {before}\n  + {after}" + (f"\n  {why}" if why else ""))
    for file, before in known.of_no_line():
        print(f"\n{REASONS.name}: {file} has no such line any more; delete the entry\n  - {before}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
