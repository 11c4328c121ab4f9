"""Runs whose weights a run began from: their promises are about their own records, and add up for records in both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from murmuration.accounting.strict_json import CLOSED
from murmuration.accounting.unit import RECORD


@dataclass(frozen=True)
class Origin:
    """A run that is known by its ledger; `protected` has the digests of its records, and of those of runs before it."""

    __pydantic_config__ = CLOSED
    run: str
    id: str
    """The hash of the ledger's first line."""
    epsilon: float
    """Its budget."""
    delta: float
    protected: tuple[str, ...]
    unit: str | None = None
    """What its promise is about, in words; None: a record."""

    def __post_init__(self) -> None:
        if not (self.epsilon >= 0 and 0 <= self.delta < 1):
            raise ValueError(f"epsilon = {self.epsilon} with delta = {self.delta} is no promise of an earlier run")

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"protected": list(self.protected)}
        if self.unit is None:  # as in ledgers from before there were other units
            del fields["unit"]
        return fields

    def deviation(self, unit: str = RECORD) -> str:
        """The sentences that a certificate must contain about it; `unit`: what the certificate is about, in words."""
        theirs = "" if self.unit is None else f" for {self.unit}"
        together = (
            "is promised no more than the sum of both"
            if unit == (self.unit or RECORD)
            else f"is promised nothing by both together, since this run protects {unit}"
        )
        return (
            f"The weights began from those of run {self.run!r}, which promised (epsilon = {self.epsilon:g}, delta = "
            f"{self.delta:.3g}){theirs} on records of its own. Whoever has records there, too, in whichever set of "
            f"them, {together}."
        )
