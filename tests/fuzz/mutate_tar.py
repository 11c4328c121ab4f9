"""Mutations of a tar archive field by field. Checksums are made to fit again, so that what lies behind is reached."""

from __future__ import annotations

import random

from tests.fuzz.mutate_bytes import mutate_bytes

BLOCK = 512
FIELDS = {"name": (0, 100), "mode": (100, 108), "uid": (108, 116), "gid": (116, 124), "size": (124, 136),
          "mtime": (136, 148), "checksum": (148, 156), "type": (156, 157), "link": (157, 257), "magic": (257, 265),
          "user": (265, 297), "device": (329, 345), "prefix": (345, 500), "rest": (500, 512)}  # fmt: skip
NUMBERS = (
    b"", b" ", b"-1", b"-0000000001", b"-00000010000", b"+10", b"0o17", b"1_0", b"9", b"77777777777", b"777777777777",
    b"\xff" * 12, b"\xff" * 11 + b"\0", b"\x80" + b"\xff" * 11, b"\x80" + b"\0" * 10 + b"\x40", b"\x80", b" 10 ",
    b"\t10\n", b"10\x0010", b"1 0", b"\x0b7", b"\x81" + b"\0" * 11, b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7,
)  # fmt: skip
NAMES = (
    b"", b".", b"..", b"/", b"a", b"a.", b".txt", b"a.txt", b"A.TXT", b"a.b/c.txt", b"../x.txt", b"/x.txt", b"a/",
    b"__m__.txt", b"\xff\xfe.txt", b"\xed\xa0\x80.txt", b"a\nb.txt", b"\x1b[2K.txt", b"a.tar.gz", b"a..txt", b" .txt",
    b"\xc3\xa9.txt", b"/" * 99, b"." * 99, b"a" * 99 + b".", b"a\0b.txt", b"000001.txt", b"000000.txt",
)  # fmt: skip
TYPES = (*(bytes([kind]) for kind in b"01234567xgLKSDVMNAX"), b"\0", b" ", b"\xff")
MAGIC = (b"ustar\x0000", b"ustar  \0", b"", b"\xff" * 8)
MANY = (1000, 20_000, 200_000)


def mutate_tar(chance: random.Random, data: bytes, other: bytes) -> bytes:
    if chance.random() < 0.15:
        return mutate_bytes(chance, data, other)
    members = split(data)
    if not members:
        return mutate_bytes(chance, data, other)
    for _ in range(chance.choice((1, 1, 2, 3))):
        members = chance.choice(CHANGES if members else (_extend,))(chance, members)
    end = chance.choice(
        (*[bytes(2 * BLOCK)] * 12, b"", bytes(BLOCK), bytes(BLOCK * 20), bytes(BLOCK * 200), bytes(700))
    )
    joined = b"".join(header + body for header, body in members) + end
    return mutate_bytes(chance, joined, other) if chance.random() < 0.05 else joined


def split(data: bytes) -> list[tuple[bytes, bytes]]:
    """Headers and what follows each of them, as far as they can be told apart."""
    found, at = [], 0
    while at + BLOCK <= len(data) and any(data[at : at + BLOCK]):
        header = data[at : at + BLOCK]
        try:
            size = int(header[124:136].split(b"\0", 1)[0] or b"0", 8)
        except ValueError:
            break
        if not 0 <= size <= len(data):
            break
        end = at + BLOCK + -(-size // BLOCK) * BLOCK
        found.append((header, data[at + BLOCK : end]))
        at = end
    return found


def summed(header: bytes) -> bytes:
    """The header with the checksum that belongs to it."""
    total = sum(header[:148]) + sum(header[156:]) + 8 * 32
    return header[:148] + b"%06o\0 " % total + header[156:]


def header(name: bytes, size: int | bytes, kind: bytes = b"0") -> bytes:
    number = b"%011o\0" % size if isinstance(size, int) else size[:12].ljust(12, b"\0")
    block = name[:100].ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + number + b"00000000000\0" + bytes(8) + kind
    return summed((block.ljust(257, b"\0") + b"ustar\0" + b"00").ljust(BLOCK, b"\0"))


def padded(body: bytes) -> bytes:
    return body.ljust(-(-len(body) // BLOCK) * BLOCK, b"\0")


Members = list[tuple[bytes, bytes]]


def _field(chance: random.Random, members: Members) -> Members:
    number = chance.randrange(len(members))
    block, body = members[number]
    which = chance.choice((*["size"] * 4, *["name"] * 3, *["type"] * 3, *FIELDS))
    start, end = FIELDS[which]
    values: dict[str, tuple[bytes, ...]] = {"name": NAMES, "prefix": NAMES, "type": TYPES, "magic": MAGIC}
    value = chance.choice(values.get(which, (*NUMBERS, chance.randbytes(end - start))))
    block = block[:start] + value[: end - start].ljust(end - start, b"\0") + block[end:]
    fits = which != "checksum" and chance.random() < 0.95
    return [*members[:number], (summed(block) if fits else block, body), *members[number + 1 :]]


def _arrange(chance: random.Random, members: Members) -> Members:
    number = chance.randrange(len(members))
    what = chance.randrange(5)
    if what == 0:
        return members[:number] + members[number + 1 :]
    if what == 1:
        return [*members[: number + 1], members[chance.randrange(len(members))], *members[number + 1 :]]
    if what == 2:
        return chance.sample(members, len(members))
    if what == 3:
        return [*members[:number], (bytes(BLOCK), b""), *members[number:]]
    return [
        *members[:number],
        (members[number][0], chance.choice((b"", members[number][1] * 2))),
        *members[number + 1 :],
    ]


def _extend(chance: random.Random, members: Members) -> Members:
    """An extension header before a member: PAX, global, GNU's long name or link."""
    number = chance.randrange(len(members) + 1)
    kind = chance.choice((*[b"x"] * 5, b"g", b"g", b"L", b"L", b"K"))
    many = chance.choice(MANY)
    long = chance.choice((b"/" * many, b"a/" * many, b"." * many, b"a" * many, chance.choice(NAMES), b"\0" * many))
    body = pax(chance) if kind in b"xg" else long + chance.choice((b"", b".txt", b".txt\0"))
    size = chance.choice((*[len(body)] * 12, 0, len(body) + 1, max(0, len(body) - 1), *NUMBERS))
    return [*members[:number], (header(b"././@PaxHeader", size, kind), padded(body)), *members[number:]]


def pax(chance: random.Random) -> bytes:
    """Records of a PAX header; most with the right length, some with one that lies."""
    if chance.random() < 0.1:
        return record(b"a", b"") * chance.choice(MANY)
    out = b""
    for _ in range(chance.choice((1, 1, 2, 5))):
        key = chance.choice(
            (b"path", b"size", b"path", b"size", b"linkpath", b"GNU.sparse.major", b"mtime", b"", b"hdrcharset")
        )
        many = chance.choice(MANY)
        value = chance.choice((
            *NUMBERS, *NAMES, b"512", b"-512", b"1e3", b"9" * 5000, b"/" * many + b".txt", b"a\n", b"=", b"." * many,
            b"a/" * many + b"b.txt", b"\xd9\xa1", b"0", b"1024",
        ))  # fmt: skip
        entry = record(key, value)
        if chance.random() < 0.25:
            length = chance.choice(
                (b"-5", b"0", b"5", b"", b"9" * 5000, b"99999999999", b"1_1", b"+11", b" 9", b"\xd9\xa9", b"00011")
            )
            entry = length + chance.choice((b" ", b"", b"\t")) + key + chance.choice((b"=", b"")) + value + b"\n"
        out += entry
    return out + chance.choice((b"", b"", b"\0", b"\0" * 600, b"x"))


def record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


CHANGES = (_field, _field, _field, _arrange, _extend, _extend)
