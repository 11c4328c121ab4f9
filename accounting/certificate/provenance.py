"""Which records weights were made from, as their run's ledger says and as a file states it away from its ledger."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.statement import may_claim
from murmuration.accounting.certificate.weights import WeightsFileError, metadata_of
from murmuration.accounting.epsilon.accountant import round_up
from murmuration.accounting.escaping import first_line
from murmuration.accounting.ledger.history import NOTHING_PRIVATE, History
from murmuration.accounting.ledger.lines import Origin
from murmuration.accounting.strict_json import JsonError, parse, read
from murmuration.accounting.unit import unit_in_words

KEY = "murmuration"
"""The key in the metadata of a safetensors file."""
MOST_DIGESTS = 1000


class ProvenanceError(ValueError):
    """A file's metadata claim to be ours, but are not what an export writes."""


@dataclass(frozen=True)
class Provenance:
    """The runs that led to some weights, including the last one, with what each promised on which records."""

    origins: tuple[Origin, ...]
    undeclared: str | None
    """Why the last run was not private in what it trained on; None where no reason is known."""
    without_noise: frozenset[str] = frozenset()
    """Digests of the records that the last run, and those whose weights it began from, used as public."""

    @staticmethod
    def of(history: History) -> Provenance:
        objection = history.why_not_private()
        harmless = (None, NOTHING_PRIVATE)  # the latter: of public records alone
        origins = tuple(history.origins)
        if history.plans:
            own = tuple(sorted({segment.manifest_digest for segment in history.segments}))
            # More than the budget where the run was chosen; rounded, as processors find another last digit.
            chosen = history.tunings and not history.faults
            promised = round_up(may_claim(history)) if chosen else history.budget()
            unit = None if history.unit is None else unit_in_words(history.unit)
            name, delta = history.run["name"], history.claimed_delta()
            origins = (*origins, Origin(name, history.ids[0], promised, delta, own, unit))
        return Provenance(origins, None if objection in harmless else objection, history.without_noise())

    def metadata(self) -> dict[str, str]:
        """The metadata for a safetensors file."""
        told: dict[str, Any] = {
            "origins": [origin.as_dict() for origin in self.origins],
            "undeclared": self.undeclared,
        }
        if self.without_noise:
            told["without_noise"] = sorted(self.without_noise)
        return {"format": "pt", KEY: json.dumps(told, sort_keys=True)}

    @staticmethod
    def inside(path: Path) -> Provenance | None:
        """The provenance in a file's metadata; None if they contain none. A file that cannot be read at all is refused
        when its weights are read."""
        try:
            text = metadata_of(path).get(KEY)
        except (WeightsFileError, OSError):
            return None
        if text is None:
            return None
        try:
            told = parse(text.encode())
            if not isinstance(told, dict) or set(told) - {"without_noise"} != {"origins", "undeclared"}:
                raise ValueError("its keys are not origins and undeclared")
            public = told.get("without_noise", [])
            if not isinstance(public, list) or len(public) > MOST_DIGESTS or not all(map(_is_digest, public)):
                raise ValueError(f"without_noise is not a list of at most {MOST_DIGESTS:,} digests")
            if not isinstance(told["undeclared"], str | None) or not isinstance(told["origins"], list):
                raise ValueError("origins is not a list, or undeclared is not a text")
            origins = tuple(read(Origin, origin) for origin in told["origins"])
            return Provenance(origins, told["undeclared"], frozenset(public))
        except (JsonError, ValueError, TypeError) as error:
            raise ProvenanceError(
                f"its metadata do not say which records it was made from ({first_line(error)}); export the weights "
                "again"
            ) from None


def _is_digest(value: object) -> bool:
    """What may be copied into a ledger, where it stays."""
    return isinstance(value, str) and re.fullmatch(r"[!-~]{1,128}", value) is not None
