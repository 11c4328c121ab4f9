"""What comes with a picture: labels and weight, from the record's .json or .cls, and its captions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.decode import BadRecord

CAPTIONS = "captions"
"""The field of a .json that lists the captions of a picture which has several, and then no .txt."""
_ANY_NUMBER = 1 << 62  # fits into a tensor
MOST_WEIGHT = 1e6
RIGHT = "right labels"
"""The member with the numbers of all right classes, which an index adds from a list beside the records."""
# Python's own limits on long numbers and deep nesting depend on its settings and on the thread's stack. The verdict on
# a record must not, so these limits are lower.
_MOST_DIGITS = 19
_MOST_NESTED = 100
_INTEGER = re.compile(rf"-?[0-9]{{1,{_MOST_DIGITS}}}")
_NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)  # whole strings, an open one to the end


MOST_BYTES = 1 << 20
"""Of a .json or a caption. JSON takes 25 times its size in memory, and seconds for each megabyte, in the trainer."""


def numbers_of(
    members: Mapping[str, bytes], labels: Sequence[str], target: str | None, classes: int, weight: str | None,
    class_list: ClassList | None = None,
) -> tuple[list[int], float]:  # fmt: skip
    """The named labels and the weight; `cls` is the record's .cls. It and the target may be names on the list. With
    `classes`, the target must be the number of one of them. The list says which output its number stands for."""
    wanted = [*(name for name in labels if name != "cls"), *([] if weight is None else [weight])]
    fields = _fields(members, wanted) if wanted else None
    names = class_list.numbers_in_files if class_list is not None else {}
    found = [
        _class_number(members, names) if name == "cls" else _integer(fields, name, names if name == target else {})
        for name in labels
    ]
    if class_list is not None and target is not None:
        found[labels.index(target)] = _output(found[labels.index(target)], class_list)
    # A number without a class would crash a GPU much later, with no hint of where it came from.
    for name, number in zip(labels, found, strict=True):
        bounded = classes > 0 and name == target
        low, high = (0, classes) if bounded else (-_ANY_NUMBER, _ANY_NUMBER)
        if not low <= number < high:
            raise BadRecord(f"the record's {name} is not the number of a class")
    return found, 1.0 if weight is None else _weight(fields, weight)


def right_classes(members: Mapping[str, bytes]) -> list[int]:
    """The numbers of all classes that are right; none where nobody says."""
    return [int(number) for number in members.get(RIGHT, b"").split()]


def classes_listed(
    members: Mapping[str, bytes], name: str, classes: int, class_list: ClassList | None
) -> list[int]:  # fmt: skip
    """The outputs of all classes that a field lists by their names or numbers. An empty list is an answer, too."""
    fields = _fields(members, [name])
    try:
        listed = fields[name]
    except (KeyError, TypeError) as error:
        raise BadRecord(f"no labels {name} in the record ({type(error).__name__})") from error
    if not isinstance(listed, list):
        raise BadRecord(f"the record's {name} is not a list of classes")
    names = class_list.numbers_in_files if class_list is not None else {}
    found = {_listed_class(each, name, names) for each in listed}
    if class_list is not None:
        found = {_output(number, class_list) for number in found}
    if any(not 0 <= number < classes for number in found):
        raise BadRecord(f"the record's {name} lists what is not the number of a class")
    return sorted(found)


def _listed_class(value: Any, name: str, names: Mapping[str, int]) -> int:
    if isinstance(value, str) and (number := names.get(value.strip())) is not None:
        return number
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise BadRecord(f"the record's {name} lists what is neither a name on the class list nor a number")


def class_in_file(members: Mapping[str, bytes], label: str, class_list: ClassList) -> int:
    """The number that a file gives the class of its record, which may be on no list."""
    if label == "cls":
        return _class_number(members, class_list.numbers_in_files)
    return _integer(_fields(members, [label]), label, class_list.numbers_in_files)


def _output(number: int, class_list: ClassList) -> int:
    output = class_list.output(number)
    if output is None:
        raise BadRecord("the record's class has no output")
    return output


def captions_of(members: Mapping[str, bytes], suffix: str) -> list[str]:
    """The caption in the member of that suffix; without such a member, those that the .json lists. Never empty."""
    if suffix in members:
        if len(members[suffix]) > MOST_BYTES:
            raise BadRecord(f"the caption has more than {MOST_BYTES} bytes")
        try:
            return [members[suffix].decode("utf-8")]
        except UnicodeDecodeError as error:
            raise BadRecord(f"the caption is not UTF-8 ({error.reason})") from error
    fields = _fields(members, [CAPTIONS]) if "json" in members else None
    if not isinstance(fields, dict) or CAPTIONS not in fields:
        raise BadRecord(f"no caption: the record contains {sorted(members)}")
    captions = fields[CAPTIONS]
    if not isinstance(captions, list) or not captions or not all(isinstance(each, str) for each in captions):
        raise BadRecord(f"the record's {CAPTIONS} are not a list of texts")
    return captions


def has_caption(members: Mapping[str, bytes], suffix: str) -> bool:
    try:
        return bool(captions_of(members, suffix))
    except BadRecord:
        return suffix in members


def _fields(members: Mapping[str, bytes], wanted: Sequence[str]) -> Any:
    if len(members.get("json", b"")) > MOST_BYTES:
        raise BadRecord(f"no readable .json for {', '.join(wanted)} (more than {MOST_BYTES} bytes)")
    if _nested(members.get("json", b"")) > _MOST_NESTED:
        raise BadRecord(f"no readable .json for {', '.join(wanted)} (nested more than {_MOST_NESTED} deep)")
    try:
        return json.loads(members["json"], parse_int=_bounded)
    except (KeyError, ValueError, RecursionError) as error:
        raise BadRecord(f"no readable .json for {', '.join(wanted)} ({type(error).__name__})") from error


def _nested(raw: bytes) -> int:
    """The nesting depth of the brackets outside strings."""
    depth = deepest = 0
    for found in _NESTING.finditer(raw):
        depth += (found[0] in b"[{") - (found[0] in b"]}")
        deepest = max(deepest, depth)
    return deepest


def _bounded(digits: str) -> int | float:
    """A number with thousands of digits costs no more than any other; as a float it exceeds every bound here."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _integer(fields: Any, name: str, names: Mapping[str, int]) -> int:
    """A name on the list, or an integer, which may be written as 3.0 or "3"; 3.7 and "1_0" are refused, though int()
    takes them."""
    try:
        value = fields[name]
    except (KeyError, TypeError) as error:
        raise BadRecord(f"no label {name} in the record ({type(error).__name__})") from error
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, str) and (number := names.get(value.strip())) is not None:
        return number
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise BadRecord(f"the record's {name} is not a whole number{' or a name on the class list' if names else ''}")


def _weight(fields: Any, name: str) -> float:
    try:
        weight = fields[name]
    except (KeyError, TypeError) as error:
        raise BadRecord(f"no weight {name} in the record ({type(error).__name__})") from error
    # Comparisons with NaN are false; true is not a number here, though it is one in Python.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
        raise BadRecord(f"the record's {name} is not a weight from 0 to {MOST_WEIGHT:g}")
    return float(weight)


def _class_number(members: Mapping[str, bytes], names: Mapping[str, int]) -> int:
    """The class number in .cls, given as a number or a name. Only ASCII digits: int() would take 1_0 and any script."""
    text = members.get("cls", b"").strip()
    if text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    number = names.get(text.decode("utf-8", "replace"))
    if number is None:
        raise BadRecord("the record has no .cls with the number of a class, or with a name on the class list")
    return number


@dataclass(frozen=True)
class ClassFilter:
    """Leaves public records of some classes out, by the names in a public list. `classes` and `label` say which class a
    record of a shard has; class folders need neither.

    Only for public records. Whether a private record is of such a class is a fact about that record, and n must not
    depend on it.
    """

    excluded: ClassList
    label: str | None
    classes: ClassList | None

    def keeps(self, members: Mapping[str, bytes]) -> bool:
        """Whether a record of a shard takes part. One without a readable class does, and is a bad record."""
        assert self.label is not None and self.classes is not None
        try:
            number = class_in_file(members, self.label, self.classes)
        except BadRecord:
            return True
        names = self.classes.in_files
        return not 0 <= number < len(names) or names[number] not in self.excluded.numbers
