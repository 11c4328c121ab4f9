"""Forms of files began anew at version 0.3.0: what an earlier version wrote is refused in one sentence."""

from __future__ import annotations

FIRST = "0.3.0"


def written_before(what: str, remedy: str) -> str:
    return f"{what} was written by a version before {FIRST}; {remedy}"
