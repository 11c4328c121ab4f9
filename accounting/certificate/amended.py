"""A certificate that amends a signed one, written after the run's key was destroyed and nobody could sign any more.

A run signs its certificate and destroys its key. Anyone who then declares that the run was chosen among several, or
that a checkpoint may be chosen by outputs, makes the claim weaker and never stronger. The new certificate contains the
signed one whole: what follows from the ledger is recomputed, and all other words are those that were signed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from murmuration.accounting.certificate.composition import SUMS, total
from murmuration.accounting.certificate.limits import claimed_events
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.epsilon.accountant import Event
from murmuration.accounting.ledger.chain import LedgerEntry
from murmuration.accounting.ledger.history import History

KEY = "amends"
# Ledger lines after which a certificate no longer covers its run. An amended certificate can cover the declared ones.
DECLARED = ("tuning", "choice")
UNCOVERED = ("open", "commit", "segment", "origin", "lost", *DECLARED)
# Parts recomputed from the ledger; the composition with other runs depends on the claim.
RECOMPUTED = (
    "format", "run", "claim", "limits", "assumption", "versions", "unit", "adjacency", "mechanism", "phases",
    "segments", "tuned_on_private_data", "composition", "ledger", "signature", KEY,
)  # fmt: skip


def uncovered(entries: list[LedgerEntry], document: dict[str, Any], lines: tuple[str, ...] = UNCOVERED) -> bool:
    """Whether the ledger has any such lines after those that the document covers."""
    return any(entry.kind in lines for entry in entries[document["ledger"]["length"] :])


def amended(earlier: dict[str, Any], history: History, entries: list[LedgerEntry]) -> dict[str, Any]:
    """`earlier` is signed, or amends a signed certificate. Deviations stay: no finished run gets lines that add any."""
    document = compose(history, entries, words_of(earlier)) | {"known_deviations": earlier["known_deviations"]}
    if "composition" in earlier:
        document["composition"] = _composition(earlier, history, entries, document["claim"]["epsilon_claimed"])
    return {**document, KEY: earlier.get(KEY, earlier)}


def words_of(document: dict[str, Any]) -> dict[str, Any]:
    """The parts that no ledger contains, without the known deviations, which are compared as they stand."""
    return {key: value for key, value in document.items() if key not in (*RECOMPUTED, "known_deviations")}


def fault_of_amendment(certificate: dict[str, Any], history: History, entries: list[LedgerEntry]) -> str | None:
    """Why this is not an honest amendment of the certificate inside it, whose signature is checked elsewhere."""
    earlier = certificate[KEY]
    if uncovered(entries, earlier, tuple(kind for kind in UNCOVERED if kind not in DECLARED)):
        return "amends one after which the run continued"
    for key in sorted((words_of(certificate).keys() | words_of(earlier).keys()) | {"known_deviations"}):
        if key not in certificate or key not in earlier or certificate[key] != earlier[key]:
            return f"differs in {key} from the signed one that it amends"
    before, now = (document["claim"]["epsilon_claimed"] for document in (earlier, certificate))
    if (before is None) != (now is None) or (before is not None and now < before):
        return "claims less than the signed one that it amends"
    expected = _composition(earlier, history, entries, now) if "composition" in earlier else {}
    stated = certificate.get("composition", {})
    # The sums themselves, which processors round, are compared where every certificate's are.
    given, asked = ({key: value for key, value in found.items() if key not in SUMS} for found in (stated, expected))
    if given != asked or stated.keys() != expected.keys():
        return "adds up different runs or steps from the signed one that it amends"
    return "carries a signature, which can only be that of another one" if "signature" in certificate else None


def _composition(
    earlier: dict[str, Any], history: History, entries: list[LedgerEntry], claimed: float
) -> dict[str, Any]:
    """The other runs as they were signed, with this run's own part recomputed."""
    stated = earlier["composition"]
    events, _ = claimed_events(history)
    signed_at = History.of(entries[: earlier["ledger"]["length"]])
    own = {"id": history.run_id, "epsilon": claimed, "by": "claim" if events is None else "ledger"}
    runs = [run | own if run["id"] == signed_at.run_id else run for run in stated["runs"]]
    if stated["epsilon_sum"] is None:
        return {**stated, "runs": runs}
    before, _ = claimed_events(signed_at)
    charged = Counter({event.kind: event.count for event in map(Event.of_dict, stated["events"])})
    charged.subtract({event.kind: event.count for event in before or ()})
    charged.update({event.kind: event.count for event in events or ()})
    return total(
        runs,
        [replace(kind, count=count).as_dict() for kind, count in charged.items() if count > 0],
        stated["delta"],
    )
