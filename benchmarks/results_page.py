"""Write docs/results.md from what studies found: `python benchmarks/results_page.py > docs/results.md`.
With `--by-commit`, benchmarks/leaderboard.md from what leaderboard.py found.

Each file in benchmarks/results/studies is the `study.json` of a study under "study", with the commit, the command and
the machine, and how long it took, which a study does not say itself, since private steps tell by their time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon  # noqa: E402

STUDIES = ROOT / "benchmarks" / "results" / "studies"
LEADERBOARD = ROOT / "benchmarks" / "results" / "leaderboard.json"
HEAD = """# Results on real images

<!-- written by: python benchmarks/results_page.py > docs/results.md -->

What private training reaches on CIFAR-10, each table with its command. The 50,000 training images are private unless a
section says otherwise, and a run's δ is 1e-5. Means are over runs with their own keys and initial weights; ± is their
standard deviation. The ε below a table is what all its private runs cost a record together, first if their settings
were fixed beforehand, then in any case; runs that are not counted are in neither. [Results by
commit](../benchmarks/leaderboard.md).
"""


def page() -> str:
    studies = [section(json.loads(file.read_text()), file.stem) for file in sorted(STUDIES.glob("*.json"))]
    return HEAD + "".join(studies)


def section(told: dict[str, Any], name: str) -> str:
    found = told["study"]
    assert not found["failed"] and not found["missing"], f"{name} is not whole"
    return f"""
## {found["title"]}

{told["about"]}

    {told["command"]}

{tables(found)}![Plot](../benchmarks/results/studies/{name}.png)

{cost(found["cost"])} {told["minutes"]:g} minutes on {told["machine"]}, at commit {told["commit"]}.

{told["besides"]}
"""


def cost(spent: dict[str, Any]) -> str:
    fixed, in_any_case = (
        f"{show_epsilon(spent[f'epsilon_{by}'], 2)} at δ = {show_delta(spent[f'delta_{by}'])}"
        for by in ("together", "sum")
    )
    return f"{spent['runs']} private runs: ε = {fixed}, or {in_any_case}."


def tables(found: dict[str, Any]) -> str:
    """One table, or along an axis with several arms one for each measure."""
    labels, runs = list(found["rows"][0]["measures"]), {row["runs"] for row in found["rows"]}
    arms = list(dict.fromkeys(row["arm"] for row in found["rows"]))
    if found["axis"] is None:
        shown = [("Means", by_arm(found, labels))]
    elif len(arms) == 1:
        shown = [("Means", by_value(found, {label: (arms[0], label) for label in labels}))]
    else:
        shown = [(label, by_value(found, {arm: (arm, label) for arm in arms})) for label in labels]
    text = ""
    for title, rows in shown:
        lines = "".join("| " + " | ".join(row) + " |\n" for row in rows)
        text += f"{title}, {' or '.join(map(str, sorted(runs)))} runs each:\n\n{lines}\n"
    return text


def by_value(found: dict[str, Any], columns: dict[str, tuple[str, str]]) -> list[list[str]]:
    """A row for each place on the axis; each column is a measure of an arm."""
    places = list(dict.fromkeys(row["place"] for row in found["rows"]))
    cells = {(row["arm"], row["place"]): row["measures"] for row in found["rows"]}
    rows = [
        [f"{place:g}", *(cell(cells.get((arm, place), {}).get(label)) for arm, label in columns.values())]
        for place in places
    ]
    return [[found["axis"]["label"], *columns], ["---"] * (1 + len(columns)), *rows]


def by_arm(found: dict[str, Any], labels: list[str]) -> list[list[str]]:
    rows = [[row["arm"], *(cell(row["measures"][label]) for label in labels)] for row in found["rows"]]
    return [["", *labels], ["---"] * (1 + len(labels)), *rows]


def by_commit() -> str:
    """A table of each file of results, with a column for each number that any commit has."""
    rows = json.loads(LEADERBOARD.read_text())
    text = """# Results by commit

<!-- written by: python benchmarks/results_page.py --by-commit > benchmarks/leaderboard.md -->

Each change of committed results (`python benchmarks/leaderboard.py`). A ratio is the time of a private micro-batch over
that of a plain one in the same run; records/s depend on the machine of that day.
"""
    for name in dict.fromkeys(row["results"] for row in rows):
        mine = [row for row in rows if row["results"] == name]
        keys = list(dict.fromkeys(key for row in mine for key in row["numbers"]))
        lines = [["commit", "date", *keys], ["---"] * (2 + len(keys))]
        for row in mine:
            numbers = (f"{row['numbers'][key]:g}" if key in row["numbers"] else "–" for key in keys)
            lines.append([row["commit"] or "not yet", row["date"] or "", *numbers])
        text += f"\n`{name}`:\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return text


def cell(measure: dict[str, Any] | None) -> str:
    return "–" if measure is None else f"{measure['value']:.3f} ± {measure['sd']:.3f}"


if __name__ == "__main__":
    print(by_commit() if sys.argv[1:] == ["--by-commit"] else page(), end="")
