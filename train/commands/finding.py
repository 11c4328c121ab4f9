"""One line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    verdict: Literal["ok", "warn", "FAIL"]
    what: str
    told: str
