"""Mutations that know nothing of a format: bits flipped, pieces cut, moved, doubled and put in."""

from __future__ import annotations

import random

ODD_BYTES = (
    b"", b"\0", b"\xff", b"\n", b"\r\n", b"\x1b[2K", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"PK\x03\x04",
    b"\x80\x04.", b"\x1f\x8b", b'"', b"{", b"[", b"-", b"9" * 5000, b"\0" * 512, b"\xf3\xa0\x81\x81",
)  # fmt: skip


def mutate_bytes(chance: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """One to four small changes; `other` is another file of the kind, to splice with."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = chance.choice(CHANGES)(chance, data, other)
    return data


def _span(chance: random.Random, data: bytes, most: int = 64) -> tuple[int, int]:
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + chance.randint(1, most))


def _flip(chance: random.Random, data: bytes, other: bytes) -> bytes:
    del other
    if not data:
        return data
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _replace(chance: random.Random, data: bytes, other: bytes) -> bytes:
    del other
    if not data:
        return data
    at = chance.randrange(len(data))
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def _truncate(chance: random.Random, data: bytes, other: bytes) -> bytes:
    del other
    return data[: chance.randrange(len(data) + 1)]


def _cut(chance: random.Random, data: bytes, other: bytes) -> bytes:
    del other
    start, end = _span(chance, data)
    return data[:start] + data[end:]


def _double(chance: random.Random, data: bytes, other: bytes) -> bytes:
    del other
    start, end = _span(chance, data, 512)
    return data[:end] + data[start:end] * chance.choice((1, 2, 30)) + data[end:]


def _insert(chance: random.Random, data: bytes, other: bytes) -> bytes:
    del other
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice((*ODD_BYTES, chance.randbytes(8))) + data[at:]


def _splice(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


CHANGES = (_flip, _flip, _replace, _truncate, _cut, _double, _insert, _splice)
