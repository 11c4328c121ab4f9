"""Puts a mutant into functions that are imported already: a fork that collected the tests need not import them again.

Only what lies within functions can be put in so. A constant, a default or a class's body was evaluated at the import.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType


def own(code: CodeType) -> tuple:
    """What a piece of code does by itself, without the functions that it makes."""
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    # Equal numbers of other types are other constants.
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, repr(constants)


def inner(code: CodeType) -> list[CodeType]:
    return [c for c in code.co_consts if isinstance(c, CodeType)]


def changed(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that differ, with those that make them; None where what differs was evaluated at the import."""
    is_function = bool(before.co_flags & inspect.CO_OPTIMIZED)
    whole = [(before, after)] if is_function and before.co_freevars == after.co_freevars else None
    if len(inner(before)) != len(inner(after)) or own(before) != own(after):
        return whole
    found = []
    for old, new in zip(inner(before), inner(after), strict=True):
        part = changed(old, new)
        if part is None:
            return whole
        found += part
    # An inner function is made anew at every call, from the outer one's constants; some may be alive already.
    return [(before, after), *found] if found and is_function else found


def functions_of(folder: str) -> list[FunctionType]:
    """All that are alive and were read from files below it, also of what tests/conftest.py has frozen."""
    gc.unfreeze()  # what is frozen is not listed, and a mutant put into no function survives every test
    found = (thing for thing in gc.get_objects() if type(thing) is FunctionType)
    return [function for function in found if function.__code__.co_filename.startswith(folder)]


def put_in(functions: list[FunctionType], path: str, swaps: list[tuple[CodeType, CodeType]]) -> None:
    wanted = {(old.co_qualname, old.co_firstlineno): new for old, new in swaps}
    for function in functions:
        code = function.__code__
        new = wanted.get((code.co_qualname, code.co_firstlineno))
        if new is not None and code.co_filename.endswith(path):
            function.__code__ = new


def told_apart(whole: CodeType, swaps: list[tuple[CodeType, CodeType]]) -> bool:
    """Whether no other function begins on the line of one that is to be replaced, under the same name."""
    keys = [(code.co_qualname, code.co_firstlineno) for code in all_of(whole)]
    lasting = [old for old, _ in swaps if not old.co_name.endswith(("comp>", "genexpr>"))]
    return all(keys.count((old.co_qualname, old.co_firstlineno)) == 1 for old in lasting)


def all_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in inner(code):
        yield from all_of(part)
