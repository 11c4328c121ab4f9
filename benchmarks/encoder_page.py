"""The page docs/encoders.md, from the results of benchmarks/encoders.py."""

from __future__ import annotations

import re
import textwrap
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
## The others

Weights without a clipping rule have their per-example gradients written out, which is exact but slower.

| timm's name | written out |
|---|---|
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
    listed = textwrap.fill(", ".join(f"`{name}`" for name in by_rules), 120)
    text = f"{HEAD.format(**told)}{listed}.\n{WRITTEN.format(**told)}"
    for name, row in passed.items():
        if name in by_rules:
            continue
        short = dict.fromkeys(".".join(each.split(".")[-2:]) for each in row["written_out"])
        inexact = [f"none; error {row['error']:.0e}"] if row["error"] > EXACT else []
        text += f"| `{name}` | {', '.join([*(f'`{each}`' for each in short), *inexact])} |\n"
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


def _why(row: dict[str, Any]) -> str:
    told = row.get("refused") or f"it does not run: {row['broken']}"
    layer = re.search(r"its layer (\S+ \(\w+\) .*)", told)
    return (layer.group(1) if layer else told).replace("|", "\\|").rstrip(".")
