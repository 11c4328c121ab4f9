"""Opacus's accountants as a third opinion, in a process of their own, because they import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from opacus.accountants import PRVAccountant, RDPAccountant
asked = json.load(sys.stdin)
found = {}
for name, kind in (("opacus_rdp", RDPAccountant), ("opacus_prv", PRVAccountant)):
    accountant = kind()
    accountant.history = [(e["sigma"], e["rate"], e["count"]) for e in asked["events"]]
    try:
        found[name] = float(accountant.get_epsilon(asked["delta"]))
    except Exception as error:
        found[name] = f"refused: {type(error).__name__}: {error}"
import opacus
found["opacus"] = opacus.__version__
print("\\n" + json.dumps(found))
"""


def opacus_epsilon(events: Sequence[Event], delta: float, timeout: float = 300.0) -> dict[str, Any]:
    """`opacus_rdp` and `opacus_prv`, each a number or the reason why Opacus gives none."""
    if any(event.cap is not None for event in events):
        raise AccountingError("Opacus cannot account for a capped batch; drop --cap or --cross-check")
    if any(event.slots > 1 for event in events):
        raise AccountingError("Opacus accounts for Poisson samples, not for random allocation; drop --cross-check")
    asked = {"delta": delta, "events": [{"rate": e.rate, "sigma": e.sigma, "count": e.count} for e in events]}
    try:
        process = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=json.dumps(asked), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise AccountingError(f"Opacus gave no answer within {timeout:g} s; drop --cross-check opacus") from None
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise AccountingError(f"Opacus cannot be asked ({reason}); install it or drop --cross-check opacus")
    return json.loads(process.stdout.strip().splitlines()[-1])
