"""Calendar days, the only times that a ledger or a certificate may hold.

A run states when it was first and last started, and not when it ended: how long private steps take depends on the
records, so the day of the end is a measurement of them that nothing noises.
"""

from __future__ import annotations

from datetime import UTC, date, datetime


def day(text: object) -> date:
    """ValueError for anything but YYYY-MM-DD."""
    found = date.fromisoformat(text) if isinstance(text, str) else None
    if found is None or found.isoformat() != text:
        raise ValueError(f"{text!s:.50} is not a day, YYYY-MM-DD")
    return found


def day_of(seconds: float) -> str:
    """In UTC."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def stated(first: str | None, others: dict[str, str]) -> dict[str, str]:
    """`dates` of a certificate: the first start, which the ledger has, before what it does not have. Where a clock was
    set back in between, the last start was on the day of the first, as far as anyone can tell."""
    if first is None:
        return others
    return {"first_start": first} | {name: max(first, each) for name, each in others.items()}


def fault_of(dates: object, first: str | None) -> str | None:
    """Why these cannot be the dates of a run whose ledger says that it began on the day `first`; None if they can."""
    if not isinstance(dates, dict) or not dates.keys() <= {"first_start", "last_start"}:
        return "are other than those of its first and last start"
    if dates.get("first_start") != first:
        return f"say that the run began on {dates.get('first_start')}, but the ledger gives {first}"
    try:
        days = [day(dates[name]) for name in ("first_start", "last_start") if name in dates]
    except ValueError as error:
        return f"cannot be read: {error}"
    return "say that the run was last started before it began" if days != sorted(days) else None
