"""Which records weights were made from: as their run's ledger says, and as a file carries it away from the ledger."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from murmuration.accounting.ledger.chain import LedgerEntry
from murmuration.accounting.ledger.history import NOTHING_PRIVATE, History
from murmuration.accounting.ledger.warm_start_origin import Origin
from murmuration.accounting.strict_json import JsonError, parse
from murmuration.accounting.typed import read

KEY = "murmuration"
"""In the metadata of a safetensors file."""


class ProvenanceError(ValueError):
    """A file's metadata claim to be ours, and are not what an export writes."""


@dataclass(frozen=True)
class Provenance:
    """The runs that led to some weights, the last one included; with what each promised, on which records."""

    origins: tuple[Origin, ...]
    undeclared: str | None
    """Why the last run was not private by what it trained on; None where nothing of the kind is known."""

    @staticmethod
    def of(history: History, entries: list[LedgerEntry]) -> Provenance:
        objection = history.why_not_private()
        # Weights of public records alone are as good as any, and those of a simulation were made as it says.
        harmless = {None, NOTHING_PRIVATE, *(str(plan.stands_for) for plan in history.plans.values())}
        origins = tuple(history.origins)
        if history.plans:
            own = tuple(sorted({segment.manifest_digest for segment in history.segments}))
            promised = (history.budget(), history.delta())
            origins = (*origins, Origin(history.run["name"], entries[0].hash, *promised, own))
        return Provenance(origins, None if objection in harmless else objection)

    def metadata(self) -> dict[str, str]:
        """For a safetensors file."""
        told = {"origins": [origin.as_dict() for origin in self.origins], "undeclared": self.undeclared}
        return {"format": "pt", KEY: json.dumps(told, sort_keys=True)}

    @staticmethod
    def inside(path: Path) -> Provenance | None:
        """None where a file says nothing of it. What cannot be read at all is refused where the weights are."""
        try:
            with safe_open(str(path), "pt") as file:
                text = (file.metadata() or {}).get(KEY)
        except (SafetensorError, OSError):
            return None
        if text is None:
            return None
        try:
            told = parse(text.encode())
            if not isinstance(told, dict) or set(told) != {"origins", "undeclared"}:
                raise ValueError("its keys are not origins and undeclared")
            if not isinstance(told["undeclared"], str | None) or not isinstance(told["origins"], list):
                raise ValueError("origins are no list, or undeclared is no text")
            return Provenance(tuple(read(Origin, origin) for origin in told["origins"]), told["undeclared"])
        except (JsonError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0][:200]
            raise ProvenanceError(
                f"its metadata do not say which records it was made from ({reason}); export the weights again"
            ) from None
