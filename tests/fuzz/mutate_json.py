"""Mutations of JSON by its structure, with what no JSON library would write: doubled keys, NaN, giant numbers.

An object is a list of pairs while it is mutated, so that a key can stand in it twice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.mutate_bytes import mutate_bytes


class Object(list[tuple[str, Any]]):
    """The pairs of a JSON object, in the order of the file."""


class Raw(str):
    """Text that is written as it stands, whether it is JSON or not."""


Place = tuple[Any, int]
"""A list or Object, and a number in it."""

NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e-9, 1e9, 1e308, 5e-324, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63),
           Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e999"), Raw("1e-999"),
           Raw("9" * 5000), Raw("-" + "9" * 5000), Raw("0." + "0" * 4000 + "1"), Raw("1" + "0" * 400), Raw("01"),
           Raw("1e99999999999"), 4096, 65537, 10**6, 10**12)  # fmt: skip
TEXTS = (
    "", " ", "\0", "x", "\ud800", "\udcff", "e\u0301", "\u202e", "\x1b[2K\x1b[1A", "a\nerror: b", "${HOME}", "$x$",
    "..", "../..", "/", "/dev/null", "file:///", "http://[", "https://127.0.0.1:1/x", "nan", "1e999", "9" * 5000,
    "<b>", "%s{0}", "\u0661\u0662", "x" * 5000, "x" * 200_000, "é" * 130, "|", "`", "{000..999}",
)  # fmt: skip


def deep(chance: random.Random) -> Raw:
    """Deeper than any recursion limit; sometimes within it, where what comes after parsing may be the one to fall."""
    depth = chance.choice((200, 900, 12_000))
    return Raw(chance.choice(("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth, "[" * depth)))


def odd_value(chance: random.Random) -> Any:
    kind = chance.randrange(7)
    if kind == 0:
        return chance.choice(NUMBERS)
    if kind == 1:
        return chance.choice(TEXTS)
    if kind == 2:
        return chance.choice((None, True, False))
    if kind == 3:
        return chance.choice(([], Object(), [[]], [None], Object([("", None)]), [0], ["x"], Object([("a", 1)])))
    if kind == 4:
        return deep(chance)
    return chance.choice((chance.choice(NUMBERS), chance.choice(TEXTS)))


def loads(text: str | bytes) -> Any:
    return json.loads(text, object_pairs_hook=Object)


def dumps(value: Any) -> str:
    """Compact, so that a ledger's line stays one line; lone surrogates are escaped."""
    out: list[str] = []
    stack = [value]
    while stack:  # not recursive: what is mutated may be deeper than Python's own stack
        item = stack.pop()
        if isinstance(item, Raw):
            out.append(str(item))
        elif isinstance(item, Object):
            parts: list[Any] = [Raw("{")]
            for number, (key, inner) in enumerate(item):
                parts += [Raw(("," if number else "") + json.dumps(key) + ":"), inner]
            stack += reversed([*parts, Raw("}")])
        elif isinstance(item, list):
            parts = [Raw("[")]
            for number, inner in enumerate(item):
                parts += [Raw(",")] * bool(number) + [inner]
            stack += reversed([*parts, Raw("]")])
        else:
            out.append(json.dumps(item))
    return "".join(out)


def plain(value: Any) -> Any:
    """A copy as mutations want it, of what Python's own JSON gave."""
    return loads(json.dumps(value))


def places(value: Any) -> Iterator[Place]:
    stack = [value]
    while stack:
        holder = stack.pop()
        if isinstance(holder, list):
            for number, inner in enumerate(holder):
                yield holder, number
                stack.append(inner[1] if isinstance(holder, Object) else inner)


def get(place: Place) -> Any:
    holder, number = place
    return holder[number][1] if isinstance(holder, Object) else holder[number]


def put(place: Place, value: Any) -> None:
    holder, number = place
    holder[number] = (holder[number][0], value) if isinstance(holder, Object) else value


def mutate_json(chance: random.Random, value: Any) -> Any:
    """One to three changes of one document; the value itself may be changed and must not be used afterwards."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = list(places(value))
        if not found or chance.random() < 0.01:
            return chance.choice((odd_value(chance), [value], Object([("a", value)])))
        chance.choice(CHANGES)(chance, found)
    return value


def mutate_text(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """JSON by its structure, most of the time."""
    if chance.random() < 0.2:
        return mutate_bytes(chance, data, other)
    try:
        return dumps(mutate_json(chance, loads(data))).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(chance, data, other)


Change = Callable[[random.Random, list[Place]], None]


def _odd(chance: random.Random, found: list[Place]) -> None:
    put(chance.choice(found), odd_value(chance))


def _similar(chance: random.Random, found: list[Place]) -> None:
    """A value of the same kind, so that the check after that of types is reached."""
    place = chance.choice(found)
    value = get(place)
    if isinstance(value, bool) or value is None:
        put(place, not value)
    elif isinstance(value, int | float):
        near = (value + 1, value - 1, -value, value * 2, value // 2, not value, str(value)[:4000])
        put(place, chance.choice((*near, float(value) if abs(value) < 1e300 else 0.1, *NUMBERS)))
    elif isinstance(value, str) and not isinstance(value, Raw):
        at = chance.randrange(len(value) + 1)
        text = chance.choice(TEXTS)
        other = (value[:at], value[:at] + text + value[at:], value[:at] + "0" + value[at + 1 :], text + value)
        put(place, chance.choice((*other, value.upper(), value * 2)))
    elif isinstance(value, list) and value:
        number = chance.randrange(len(value))
        chance.choice((lambda: value.pop(number), lambda: value.append(value[number]), value.reverse, value.clear))()


def _swap(chance: random.Random, found: list[Place]) -> None:
    """Each takes the other's value: every type in every other one's place. One within the other is only copied."""
    one, other = chance.choice(found), chance.choice(found)
    mine, theirs = loads(dumps_safe(get(one))), loads(dumps_safe(get(other)))
    put(one, theirs)
    if chance.random() < 0.5:
        put(other, mine)


def dumps_safe(value: Any) -> str:
    """JSON of a value that may hold text that is none: null takes the place of that."""
    text = dumps(value)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "null"
    return text


def _key(chance: random.Random, found: list[Place]) -> None:
    holders = [place for place in found if isinstance(place[0], Object)]
    if not holders:
        return _odd(chance, found)
    holder, number = chance.choice(holders)
    key, value = holder[number]
    what = chance.randrange(4)
    if what == 0:
        del holder[number]
    elif what == 1:
        holder.append((key, chance.choice((value, odd_value(chance)))))
    elif what == 2:
        new = chance.choice((key + "x", key.upper(), "", "__class__", chance.choice(TEXTS), "self", key[:-1]))
        holder[number] = (new, value)
    else:
        holder.append((chance.choice(("new", "self", "name", chance.choice(TEXTS))), odd_value(chance)))
    return None


def _wrap(chance: random.Random, found: list[Place]) -> None:
    place = chance.choice(found)
    value = get(place)
    inner = value[0] if isinstance(value, list) and value else value
    inner = inner[1] if isinstance(inner, tuple) else inner
    put(place, chance.choice(([value], Object([("a", value)]), inner)))


def _deep(chance: random.Random, found: list[Place]) -> None:
    put(chance.choice(found), deep(chance))


CHANGES: tuple[Change, ...] = (_odd, _odd, _similar, _similar, _similar, _swap, _key, _key, _wrap, _deep)
