"""Strict reading of JSON from files that anyone may have written; each error message is the end of a sentence.

`json.loads` by itself accepts NaN and 1e999, keeps the last of two equal keys, and raises errors of other kinds for
integers of 5,000 digits and for deep nesting. No file of ours contains any of these.
"""

from __future__ import annotations

import contextlib
import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # help texts are shown without it
    from pydantic import ConfigDict, TypeAdapter

MOST_DEPTH = 100
SMALLEST, LARGEST = -(2**63), 2**64 - 1
LONGEST = len(str(SMALLEST))


class JsonError(ValueError):
    """Continues a sentence that begins with the name of the file: "... is not valid JSON: ..."."""


class NotJson(JsonError):
    """The text is not JSON at all."""


def parse(content: bytes | str) -> Any:
    """The value, nested no deeper than MOST_DEPTH, with integers of at most 64 bits and only finite numbers."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise NotJson(f"is not valid JSON: {error.msg} at line {error.lineno}") from None
    except UnicodeDecodeError:
        raise JsonError("is not UTF-8 text") from None
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Refuses a value nested deeper than any file of ours: json.dumps, repr and == could end in a RecursionError."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return
        level = [child for each in containers for child in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep()


def _too_deep() -> JsonError:
    return JsonError(f"is nested more than {MOST_DEPTH} levels deep; no file of this project is")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonError(f"is ambiguous: the key {twice!r} appears twice in one object; remove one of them")
    return found


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= LONGEST else LARGEST + 1
    if not SMALLEST <= value <= LARGEST:
        raise JsonError(f"contains the integer {_shortened(digits)}, which does not fit in 64 bits; give a smaller one")
    return value


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise JsonError(f"contains {_shortened(digits)}, which is not a number that can be used; give a finite one")
    return value


def _constant(name: str) -> Any:
    raise JsonError(f"contains {name}, but {name} is not a number that can be used; give a finite one")


def _shortened(digits: str) -> str:
    return digits if len(digits) <= LONGEST else f"{digits[:LONGEST]}..."


# Dataclasses from JSON: no required field missing, every field of its own type, and none that is unknown.

# The `__pydantic_config__` of every dataclass that is read this way.
CLOSED: ConfigDict = {"extra": "forbid", "allow_inf_nan": False}
T = TypeVar("T")


def read(kind: type[T], fields: Any) -> T:
    """Strict: "8" is not a number, 2.0 not a count, true not 1. A ValueError names the first field at fault.

    Equal fields that follow each other give the same object, so nobody may change what was read.
    """
    from pydantic_core import to_json

    return _validated(kind, to_json(fields))


# Of one: most lines that commit a step repeat the line that opened it.
@lru_cache(maxsize=1)
def _validated(kind: type[T], content: bytes) -> T:
    from pydantic_core import ValidationError

    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {message}" if where else message) from None


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def whole_lines(log: Path) -> list[dict[str, Any]]:
    """The entries of a log of JSON lines, without lines cut short by a kill; none if the log does not exist."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)  # not the strict parser: a loss may be NaN
            if isinstance(entry, dict):
                found.append(entry)
    return found
