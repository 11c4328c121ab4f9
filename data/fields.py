"""Numbers that come with a record: labels and its weight, from its .json or its .cls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from data.decode import BadRecord

_ANY_NUMBER = 1 << 62  # fits into a tensor
MOST_WEIGHT = 1e6


def labels_of(members: Mapping[str, bytes], names: Sequence[str], target: str | None, classes: int) -> list[int]:
    """Integers by their names; `cls` is the record's .cls. With `classes`, the target must be the number of one."""
    if not names:
        return []
    try:
        fields = json.loads(members["json"]) if set(names) != {"cls"} else {}
        found = [_class_number(members["cls"]) if name == "cls" else int(fields[name]) for name in names]
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadRecord(f"no labels {names} in the record ({error})") from error
    # A number that no class has would crash a GPU much later, and say nothing about where it came from.
    for name, number in zip(names, found, strict=True):
        bounded = classes > 0 and name == target
        low, high = (0, classes) if bounded else (-_ANY_NUMBER, _ANY_NUMBER)
        if not low <= number < high:
            raise BadRecord(f"the record's {name} is no number of a class")
    return found


def weight_of(members: Mapping[str, bytes], name: str) -> float:
    try:
        weight = json.loads(members["json"])[name]
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise BadRecord(f"no weight {name} in the record ({type(error).__name__})") from error
    # NaN compares as false; and true is no number here, though Python counts with it.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
        raise BadRecord(f"the record's {name} is no weight from 0 to {MOST_WEIGHT:g}")
    return float(weight)


def _class_number(text: bytes) -> int:
    """Digits alone: int() would take 1_0, and digits of any script."""
    if not text.strip().isdigit():
        raise ValueError("its .cls is no class number")
    return int(text)
