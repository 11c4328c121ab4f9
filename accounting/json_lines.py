"""Logs of JSON lines, which a kill may cut."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def whole_lines(log: Path) -> list[dict[str, Any]]:
    """The entries of a log of JSON lines, without lines cut short by a kill; none if the log does not exist."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)  # not the strict parser: a loss may be NaN
            if isinstance(entry, dict):
                found.append(entry)
    return found
