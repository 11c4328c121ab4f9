"""Write docs/results.md from what studies found: `python benchmarks/results_page.py > docs/results.md`.

Each file in benchmarks/results/studies is the `study.json` of a study under "study", with the commit, the command and
the machine, and how long it took, which a study does not say itself, since private steps tell by their time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "benchmarks" / "results" / "studies"
HEAD = """# Results on real images

<!-- written by: python benchmarks/results_page.py > docs/results.md -->

What private training reaches on real images, each table with the command that made it. Means are over runs with their
own keys and initial weights; ± is their standard deviation.
"""


def page() -> str:
    return HEAD + "".join(section(json.loads(file.read_text()), file.stem) for file in sorted(STUDIES.glob("*.json")))


def section(told: dict[str, Any], name: str) -> str:
    found = told["study"]
    label = next(iter(found["rows"][0]["measures"]))
    places = list(dict.fromkeys(row["place"] for row in found["rows"]))
    arms = list(dict.fromkeys(row["arm"] for row in found["rows"]))
    cells = {(row["arm"], row["place"]): row["measures"][label] for row in found["rows"]}
    axis = found["axis"]["label"]
    table = [[axis, *arms], ["---"] * (1 + len(arms))]
    table += [[f"{place:g}", *(cell(cells.get((arm, place))) for arm in arms)] for place in places]
    cost, runs = found["cost"], {row["runs"] for row in found["rows"]}
    assert not found["failed"] and not found["missing"], f"{name} is not whole"
    return f"""
## {found["title"]}

{told["about"]}

    {told["command"]}

{label}, {" or ".join(map(str, sorted(runs)))} runs each:

{chr(10).join("| " + " | ".join(row) + " |" for row in table)}

![{found["title"]}](../benchmarks/results/studies/{name}.png)

The {cost["runs"]} private runs together cost a record ε = {cost["epsilon_together"]:.4g} at δ = \
{cost["delta_together"]:.3g} if their settings were fixed beforehand, and {cost["epsilon_sum"]:.4g} in any case.
{told["minutes"]:g} minutes on {told["machine"]}, at commit {told["commit"]}.

{told["besides"]}
"""


def cell(measure: dict[str, Any] | None) -> str:
    return "–" if measure is None else f"{measure['value']:.3f} ± {measure['sd']:.3f}"


if __name__ == "__main__":
    print(page(), end="")
