"""The page docs/encoders.md, from the results of benchmarks/encoders.py."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

EXACT = 1e-6
HEAD = """\
# Encoders by name

{passed} of these {all} encoders of timm can be trained privately ([how to name one](models.md#encoders-by-name)),
{stored} of them with stored BatchNorm statistics. For {exact:.0%}, our clipped sum equals plain autograd over single
examples to a relative 1e-6, in fp64.

Measured with timm {timm} and torch {torch} by `{command}`, at the smallest sizes that the
constructors allow ([figures](../benchmarks/results/encoders.json)). Don't edit this page: `--page` generates it.

## Equal to 1e-6, by clipping rules alone: {by_rules:.0%}

"""
WRITTEN = """
## Exact, but slower

Weights without a clipping rule, mostly tables of relative positions, have their per-example gradients written out:

"""
REFUSED = """
## Refused

| timm's name | why |
|---|---|
"""


def page(found: dict[str, Any]) -> str:
    names: dict[str, dict[str, Any]] = found["names"]
    passed = {name: row for name, row in names.items() if "ratio" in row}
    told = {"command": found["command"], "passed": len(passed), "all": len(names), **shares(names), **found["setting"]}
    by_rules = {name: row for name, row in passed.items() if row["error"] <= EXACT and not row["written_out"]}
    text = f"{HEAD.format(**told)}{_listed(by_rules)}.\n"
    text += f"{WRITTEN}{_listed(name for name, row in passed.items() if row['written_out'])}.\n"
    text += "".join(
        f"\n`{name}` has an error of {row['error']:.0e}.\n" for name, row in passed.items() if row["error"] > EXACT
    )
    text += REFUSED
    for name, row in names.items():
        if name not in passed:
            text += f"| `{name}` | {_why(row)} |\n"
    return text


def shares(names: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many have stored statistics, and what shares are exact, and by rules alone."""
    exact = [row for row in names.values() if row.get("error", 1.0) <= EXACT]
    by_rules = [row for row in exact if not row["written_out"]]
    stored = sum(row.get("statistics", False) and "ratio" in row for row in names.values())
    return {"stored": stored, "exact": len(exact) / len(names), "by_rules": len(by_rules) / len(names)}


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 120)


def _why(row: dict[str, Any]) -> str:
    told = row.get("refused") or f"it does not run: {row['broken']}"
    layer = re.search(r"its layer (\S+ \(\w+\) .*)", told)
    return (layer.group(1) if layer else told).replace("|", "\\|").rstrip(".")
