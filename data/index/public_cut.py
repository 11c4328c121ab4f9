"""How a set of records is split into a public and a private part, as the log of its runs states it."""

from __future__ import annotations

from dataclasses import dataclass

from murmuration.accounting.strict_json import CLOSED


@dataclass(frozen=True)
class PublicSplit:
    """How a set is split: its number of records, and the public fraction of them; or, with `unit`, of units."""

    __pydantic_config__ = CLOSED
    records: int
    public_fraction: float
    unit: str | None = None
    others: bool = False
    """Whether it is of another set that has some of these records: it deals them out differently."""

    def __post_init__(self) -> None:
        if not 0 < self.public_fraction < 1:
            raise ValueError("the public share is not between 0 and 1")

    def __str__(self) -> str:
        things = "records" if self.unit is None else f"units by {self.unit!r}"
        of = " of another set (or of other files under the same names)" if self.others else ""
        return f"{self.public_fraction!r} of {self.records:,} {things}{of}"
