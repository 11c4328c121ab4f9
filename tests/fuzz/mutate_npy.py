"""Mutations of a .npy file: its header, which is a literal of Python, and the numbers after it."""

from __future__ import annotations

import io
import random
import warnings

import numpy as np

from tests.fuzz.mutate_bytes import mutate_bytes

TYPES = (
    "'<u8'", "'>u8'", "'<i8'", "'|O'", "'|V0'", "'<U1000000000'", "'<M8[ns]'", "''", "',,'", "'<u8, <u8'", "5", "None",
    "[('a', '<u8')]", "('<u8', (2,))", "{'names': ['a'], 'formats': ['<u8']}",
)  # fmt: skip
SIZES = (0, 1, 2, 5, 7, -1, 2**31, 2**40, 2**58, 2**60, 2**61, 2**62, 2**63, 2**64, 10**30)
SHAPES = ("(%d,)", "(%d,)", "(%d,)", "(%d, 1)", "[%d]", "(%d, -1)", "()", "(True,)", "%d")
WHOLE = ("[1]", "1", "{1: 1}", "{'descr': '<u8', 'shape': (1,)}", "__import__('os').getcwd()")


def mutate_npy(chance: random.Random, data: bytes, other: bytes) -> bytes:
    if chance.random() < 0.3:
        return mutate_bytes(chance, data, other)
    try:
        with warnings.catch_warnings(action="ignore"):
            numbers = np.asarray(np.load(io.BytesIO(data)), "<u8").reshape(-1)
    except Exception:  # mutated before
        return mutate_bytes(chance, data, other)
    what = chance.randrange(4)
    if what == 0 and len(numbers):
        numbers = numbers.copy()
        numbers[chance.randrange(len(numbers))] = chance.choice((0, 1, 2, 512, 2**63, 2**64 - 1, int(numbers[0])))
        return _saved(numbers)
    if what == 1:
        values = [numbers.astype(kind) for kind in ("<i8", ">u8", "<f8", "<u4", "?", "S8")]
        values += [numbers[:0], numbers[None], np.repeat(numbers, 2), numbers[::-1]]
        return _saved(chance.choice(values))
    return _headed(chance, _header(chance, len(numbers))) + numbers.tobytes()


def _saved(numbers: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, numbers)
    return out.getvalue()


def _header(chance: random.Random, count: int) -> str:
    if chance.random() < 0.2:
        depth = chance.choice((50, 150, 5000, 30_000))
        odd = ("9" * 5000, "'" + "x" * 50_000, "\x00", "1_0", "1e999", "\ud800", *WHOLE)
        return chance.choice(("(" * depth + ")" * depth, "[" * depth, "-" * depth + "1", "1" + "+1" * depth, *odd))
    shape = chance.choice(SHAPES)
    shape = shape % chance.choice((count, count, *SIZES)) if "%" in shape else shape
    kind, order = chance.choice(("'<u8'", *TYPES)), chance.choice(("False", "False", "True", "0"))
    return f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}"


def _headed(chance: random.Random, text: str) -> bytes:
    body = text.encode("utf-8", "surrogatepass") + b"\n"
    version = chance.choice((b"\x01\x00",) * 5 + (b"\x02\x00", b"\x03\x00", b"\x04\x00", b"\x00\x00"))
    wide = version[0] in (2, 3)
    body = body if chance.random() < 0.2 else body[:-1].ljust(115 if wide else 117) + b"\n"
    length = len(body) if chance.random() < 0.9 else chance.choice((0, 1, 65535, 2**31, 2**32 - 1))
    size = 4 if wide else 2
    return b"\x93NUMPY" + version + (length % 2 ** (8 * size)).to_bytes(size, "little") + body
