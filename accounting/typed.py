"""Reads dataclasses from JSON: no required field missing, every field of its own type, and none that is unknown."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

# The `__pydantic_config__` of every dataclass that is read this way.
CLOSED = ConfigDict(extra="forbid", allow_inf_nan=False)
T = TypeVar("T")


def read(kind: type[T], fields: Any) -> T:
    """Strict: "8" is not a number, 2.0 not a count, true not 1. A ValueError names the first field at fault."""
    try:
        return _adapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {message}" if where else message) from None


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
