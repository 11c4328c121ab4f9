"""Large JSON files, element by element: the annotations of a published set take gigabytes as Python objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from murmuration.data.pack.row import PackError

_CHUNK = 1 << 20
_LONGEST = 64 << 20  # characters of one element; more are no annotation
_OF_NUMBERS = "0123456789.eE+-"  # and the empty text, at the end of what was read
_DECODER = json.JSONDecoder()


def elements(path: Path) -> Iterator[tuple[str, Any]]:
    """(key, element) for each element of the arrays in the outer object; (`""`, element) where the outer value is
    an array. Other values of the outer object come as they are."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _Reader(file).outer()
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path}: not JSON ({error}); fetch it again") from None


class _Reader:
    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0

    def outer(self) -> Iterator[tuple[str, Any]]:
        first = self._next()
        if first == "[":
            yield from (("", value) for value in self._array())
        elif first == "{":
            yield from self._object()
        else:
            raise ValueError("it begins with neither { nor [")
        if self._peek():
            raise ValueError("something follows its end")

    def _object(self) -> Iterator[tuple[str, Any]]:
        if self._peek() == "}":
            self._next()
            return
        while True:
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                raise ValueError("a key or a colon is missing")
            if self._peek() == "[":
                self._next()
                yield from ((key, value) for value in self._array())
            else:
                yield key, self._value()
            if self._ends("}"):
                return

    def _array(self) -> Iterator[Any]:
        if self._peek() == "]":
            self._next()
            return
        while True:
            yield self._value()
            if self._ends("]"):
                return

    def _ends(self, bracket: str) -> bool:
        found = self._next()
        if found not in (",", bracket):
            raise ValueError(f"a comma or {bracket} is missing, so it may be cut off")
        return found == bracket

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def _next(self) -> str:
        found = self._peek()
        self._at += 1
        return found

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if self._text[end : end + 1] not in _OF_NUMBERS:  # of a number the rest may not be read yet
                    self._at = end
                    return value
                problem = ValueError("it is cut off")
            except ValueError as error:
                problem = error
            if len(self._text) - self._at > _LONGEST or not self._more():
                raise problem

    def _more(self) -> bool:
        # Twice what is there, so that a long element is not parsed anew for every chunk of it.
        chunk = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)
