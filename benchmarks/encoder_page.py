"""The page docs/encoders.md, from the results of benchmarks/encoders.py."""

from __future__ import annotations

import re
from typing import Any

EXACT = 1e-6
HEAD = """\
# Encoders by name

{passed} of these {all} encoders of timm can be trained privately ([how to name one](models.md#encoders-by-name)).
{stored} use stored BatchNorm statistics. {exact:.0%} have an error of at most 1e-6, {by_rules:.0%} without a weight
written out.

`{command}` measured this with timm {timm} and torch {torch}, at the smallest sizes that
the constructors allow. Don't edit this page: `--page` generates it.

- **error**: largest relative difference between our clipped sum and plain autograd over single examples, in fp64
- **written out**: weights without a clipping rule; their per-example gradients are computed one by one, which is exact
  but slower
- **time**: a clipped micro-batch over a plain forward and backward pass, on one CPU core; lower at
  [real sizes](costs.md)

| timm's name | error | written out | time |
|---|---|---|---|
"""
REFUSED = """
## Refused

| timm's name | why |
|---|---|
"""


def page(found: dict[str, Any]) -> str:
    names: dict[str, dict[str, Any]] = found["names"]
    passed = {name: row for name, row in names.items() if "ratio" in row}
    told = {"command": found["command"], "passed": len(passed), "all": len(names)}
    text = HEAD.format(**told, **shares(names), **found["setting"])
    for name, row in passed.items():
        written = ", ".join(
            f"`{name}`" for name in dict.fromkeys(".".join(w.split(".")[-2:]) for w in row["written_out"])
        )
        cells = (f"`{name}`", f"{row['error']:.0e}", written)
        text += f"| {' | '.join(cells)} | {row['ratio']:.1f} |\n"
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
