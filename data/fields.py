"""Numbers that come with a record: labels and its weight, from its .json or its .cls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.decode import BadRecord

_ANY_NUMBER = 1 << 62  # fits into a tensor
MOST_WEIGHT = 1e6


def numbers_of(
    members: Mapping[str, bytes], labels: Sequence[str], target: str | None, classes: int, weight: str | None
) -> tuple[list[int], float]:
    """By their names; `cls` is the record's .cls. With `classes`, the target must be the number of one of them."""
    wanted = [*(name for name in labels if name != "cls"), *([] if weight is None else [weight])]
    fields = _fields(members, wanted) if wanted else None
    found = [_class_number(members) if name == "cls" else _integer(fields, name) for name in labels]
    # A number that no class has would crash a GPU much later, and say nothing about where it came from.
    for name, number in zip(labels, found, strict=True):
        bounded = classes > 0 and name == target
        low, high = (0, classes) if bounded else (-_ANY_NUMBER, _ANY_NUMBER)
        if not low <= number < high:
            raise BadRecord(f"the record's {name} is no number of a class")
    return found, 1.0 if weight is None else _weight(fields, weight)


def _fields(members: Mapping[str, bytes], wanted: Sequence[str]) -> Any:
    try:
        return json.loads(members["json"])
    except (KeyError, ValueError, RecursionError) as error:
        raise BadRecord(f"no .json that can be read for {', '.join(wanted)} ({type(error).__name__})") from error


def _integer(fields: Any, name: str) -> int:
    try:
        return int(fields[name])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise BadRecord(f"no label {name} in the record ({type(error).__name__})") from error


def _weight(fields: Any, name: str) -> float:
    try:
        weight = fields[name]
    except (KeyError, TypeError) as error:
        raise BadRecord(f"no weight {name} in the record ({type(error).__name__})") from error
    # NaN compares as false; and true is no number here, though Python counts with it.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
        raise BadRecord(f"the record's {name} is no weight from 0 to {MOST_WEIGHT:g}")
    return float(weight)


def _class_number(members: Mapping[str, bytes]) -> int:
    """Digits alone: int() would take 1_0, and digits of any script."""
    text = members.get("cls", b"").strip()
    if not text.isdigit():
        raise BadRecord("the record has no .cls with a class number")
    return int(text)
