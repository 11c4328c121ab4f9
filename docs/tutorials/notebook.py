"""Writes own_loop.ipynb from own_loop.md: python docs/tutorials/notebook.py. The page is what is edited."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CODE = re.compile(r"```python\n(.*?)```\n?|^    (python [^\n]*)\n", re.DOTALL | re.MULTILINE)


def cells_of(page: str) -> list[dict[str, Any]]:
    """Text and code in turns; a command becomes a line for the shell."""
    found: list[tuple[str, str]] = []
    start = 0
    for block in CODE.finditer(page):
        found += [("markdown", page[start : block.start()]), ("code", block[1] or f"!{block[2]}")]
        start = block.end()
    found.append(("markdown", page[start:]))
    return [_cell(number, kind, text.strip("\n")) for number, (kind, text) in enumerate(found) if text.strip()]


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell = {"id": f"cell-{number}", "cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else cell | {"execution_count": None, "outputs": []}


def notebook(page: str) -> str:
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": cells_of(page), "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (HERE / "own_loop.ipynb").write_text(notebook((HERE / "own_loop.md").read_text()))
