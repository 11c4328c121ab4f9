"""Rows become records: one per image, however many rows name it, because the unit of the privacy claim is a record.

The plan is a table on the disk, so that memory does not grow with the number of rows. It holds no pictures.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.data.decode.class_list import ClassList
from murmuration.data.pack.row import (
    EMPTY_CAPTION,
    NO_CAPTION,
    NO_LABEL,
    NO_UNIT,
    UNLIKE,
    UNREADABLE,
    BadPicture,
    Fault,
    Layout,
    PackError,
    Row,
)
from murmuration.data.store.tar import shown

VERSION = 1
"""Raised whenever the same input would give other bytes."""
# Public and fixed: a record falls on the same side of the split whatever other records there are.
_SPLIT = b"murmuration hold-out 1\0"
_WHOLE = re.compile(r"([0-9]{1,19})(?:\.0+)?")
_TABLES = """
create table images(id integer primary key, image blob, file text unique, at blob, row text, size integer, label text,
    unit text, fields text, captioned integer, told integer default 0, bad text, part integer);
create table names(image blob primary key, id integer) without rowid;
create table captions(n integer primary key, id integer, text text);
create index by_image on captions(id);
create table faults(n integer primary key, id integer, row text, image blob, reason text, detail text);
"""


@dataclass(frozen=True)
class Planned:
    """One record to be written."""

    row: str
    image: str
    at: str
    captions: list[str]
    label: str | None
    fields: dict[str, Any]


class Plan:
    def __init__(
        self, path: Path, layout: Layout, unit: str | None, hold_out: float, listed: str | None = None
    ) -> None:  # fmt: skip
        """`unit` is the name under which records keep their unit; `hold_out` the share of units, or else of images,
        that goes into a second folder. `listed` is the name under which records keep the list of their classes, where
        they may have any number; labels are then JSON lists."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)  # captions are private
        os.close(descriptor)
        self._table = sqlite3.connect(path, isolation_level=None)
        self._table.executescript(f"pragma journal_mode=off; pragma synchronous=off; {_TABLES} begin;")
        self._layout, self._unit, self._hold_out, self._listed = layout, unit, hold_out, listed
        self.rows = 0
        for each in layout.rows():
            self.rows += 1
            if isinstance(each, Fault):
                self._note(None, each)
            elif not _is_text(each.label) or not _is_text(each.unit):
                self._note(None, Fault(each.row, each.image, UNREADABLE, "its label or its unit is not UTF-8"))
            else:
                self._add(each)
        self._judge()
        self._table.execute("commit")

    def close(self) -> None:
        self._table.close()

    # From rows to images.

    def _add(self, row: Row) -> None:
        number = self._number(row)
        query = "select label, unit, fields, bad from images where id=?"
        label, unit, fields, bad = self._table.execute(query, (number,)).fetchone()
        if bad:
            return
        if self._listed is not None and label and row.label:
            label = _both(label, row.label)  # tables with one row per finding are common
        new_label = None if self._listed is not None else row.label
        pairs = (("label", label, new_label), ("unit", unit, row.unit), ("fields", fields, _written(row.fields)))
        for name, known, new in pairs:
            if known and new and known != new:
                detail = f"{shown(known)} and {shown(new)}"
                self._spoil(number, Fault(row.row, row.image, UNLIKE, f"{name} {detail}"))
                return
        self._table.execute(
            "update images set label=?, unit=?, captioned=max(captioned, ?) where id=?",
            (label or row.label, unit or row.unit, row.captions is not None, number),
        )
        if row.captions is not None:
            found = [text for each in row.captions if (text := _clean(each))]
            self._table.executemany("insert into captions(id, text) values(?, ?)", [(number, text) for text in found])
            if len(found) < len(row.captions):
                self._note(number, Fault(row.row, row.image, EMPTY_CAPTION))

    def _number(self, row: Row) -> int:
        """The image of this row, which is a new one if neither its name nor its file was there before."""
        name = os.fsencode(row.image)
        if (known := self._table.execute("select id from names where image=?", (name,)).fetchone()) is not None:
            return known[0]
        try:
            file, size = self._layout.identity(row)
        except BadPicture as error:
            number = self._insert(row, None, 0)
            self._spoil(number, Fault(row.row, row.image, error.reason, error.detail))
            return number
        if (twin := self._table.execute("select id from images where file=?", (file,)).fetchone()) is not None:
            self._table.execute("insert into names values(?, ?)", (name, twin[0]))
            return twin[0]
        return self._insert(row, file, size)

    def _insert(self, row: Row, file: str | None, size: int) -> int:
        name = os.fsencode(row.image)
        number = self._table.execute(
            "insert into images(image, file, at, row, size, fields, captioned) values(?, ?, ?, ?, ?, ?, 0)",
            (name, file, os.fsencode(row.at), row.row, size, _written(row.fields)),
        ).lastrowid
        assert number is not None
        self._table.execute("insert into names values(?, ?)", (name, number))
        return number

    def _spoil(self, number: int, fault: Fault) -> None:
        self._table.execute("update images set bad=? where id=?", (fault.reason, number))
        self._note(number, fault)

    def _note(self, number: int | None, fault: Fault) -> None:
        if number is not None:
            self._table.execute("update images set told=1 where id=?", (number,))
        self._table.execute(
            "insert into faults(id, row, image, reason, detail) values(?, ?, ?, ?, ?)",
            (number, fault.row, os.fsencode(fault.image), fault.reason, fault.detail),
        )

    # What all rows together say of an image.

    def _judge(self) -> None:
        for number, name, row, label, unit, captioned, told in self._table.execute(
            "select id, image, row, label, unit, captioned, told from images where bad is null order by id"
        ):
            image = os.fsdecode(name)
            lacking = {
                NO_LABEL: label == "",
                NO_UNIT: unit == "",
                NO_CAPTION: captioned and not self._captions(number),
            }
            reason = next((reason for reason, lacks in lacking.items() if lacks), None)
            if reason is not None:
                self._table.execute("update images set bad=? where id=?", (reason, number))
                if not (reason == NO_CAPTION and told):  # its empty captions are listed already
                    self._note(number, Fault(row, image, reason))
                continue
            held = self._hold_out > 0 and _point(os.fsencode(unit) if unit else name) < self._hold_out
            self._table.execute("update images set part=? where id=?", (int(held), number))

    def _captions(self, number: int) -> list[str]:
        return [text for (text,) in self._table.execute("select text from captions where id=? order by n", (number,))]

    # What the writer asks for.

    @property
    def images(self) -> int:
        """All images that rows name, whether they can be packed or not."""
        return self._count("select count(*) from images")

    @property
    def units(self) -> int:
        return self._count("select count(distinct unit) from images where bad is null")

    @property
    def several(self) -> int:
        """Images with more than one caption."""
        of_many = "select 1 from captions join images using(id) where bad is null group by id having count(*) > 1"
        return self._count(f"select count(*) from ({of_many})")

    def planned(self, part: int) -> int:
        return self._count("select count(*) from images where part=?", part)

    def _count(self, query: str, *values: int) -> int:
        return int(self._table.execute(query, values).fetchone()[0])

    def labels(self) -> dict[str, int]:
        """How many images have which label, sorted by label."""
        query = "select label, count(*) from images where bad is null and label is not null group by label"
        found: list[tuple[str, int]] = self._table.execute(query).fetchall()
        if self._listed is None:
            return dict(sorted(found))
        counts = Counter[str]()
        for listed, count in found:
            counts.update(dict.fromkeys(json.loads(listed), count))
        return dict(sorted(counts.items()))

    def records(self, part: int, first: int = 0, count: int = -1) -> Iterator[Planned]:
        """In the order in which images are first named. `first` and `count` number the records of a part."""
        query = "select id, row, image, at, label, unit, fields from images where part=? order by id limit ? offset ?"
        for number, row, image, at, label, unit, fields in self._table.execute(query, (part, count, first)):
            more = json.loads(fields)
            if self._unit is not None:
                more[self._unit] = unit
            yield Planned(row, os.fsdecode(image), os.fsdecode(at), self._captions(number), label, more)

    def faults(self) -> Iterator[Fault]:
        for row, image, reason, detail in self._table.execute(
            "select row, image, reason, detail from faults order by n"
        ):
            yield Fault(row, os.fsdecode(image), reason, detail)

    def digest(self, settings: dict[str, Any]) -> str:
        """Covers what decides the bytes of the shards; of the pictures' contents it covers the sizes alone."""
        hashed = hashlib.sha256(json.dumps([VERSION, settings, self._hold_out, self._unit]).encode())
        query = "select id, image, size, label, unit, fields, part from images where bad is null order by id"
        for number, image, *rest in self._table.execute(query):
            hashed.update(image + json.dumps([*rest, self._captions(number)]).encode() + b"\n")
        return hashed.hexdigest()


def _point(name: bytes) -> float:
    """A number in [0, 1) that belongs to this name."""
    return int.from_bytes(hashlib.sha256(_SPLIT + name).digest()[:7], "big") / (1 << 56)


def _both(one: str, other: str) -> str:
    return json.dumps(sorted({*json.loads(one), *json.loads(other)}), ensure_ascii=False)


def _written(fields: Mapping[str, int | str]) -> str:
    return json.dumps(dict(fields), sort_keys=True)


def _is_text(found: str | None) -> bool:
    """Whether this can be written as UTF-8; bytes of a table that are none arrive as surrogates."""
    return found is None or not any("\ud800" <= letter <= "\udfff" for letter in found)


def _clean(caption: str) -> str:
    """The caption without surrounding space; empty if it is no text that can be stored."""
    try:
        caption.encode()
    except UnicodeEncodeError:
        return ""
    return caption.strip()


@dataclass(frozen=True)
class Labels:
    """What `.cls` members hold: numbers as they came, or names, which a public list numbers."""

    names: tuple[str, ...] = ()
    numbers: bool = False
    from_rows: bool = False
    outside: int = 0

    def member(self, label: str) -> bytes:
        if (whole := _WHOLE.fullmatch(label)) is None:
            return label.encode()
        # A name that is a whole number would be read as one, so it is written as its place, or as none.
        return (whole[1] if self.numbers else str(_place(label, self.names))).encode()

    def values(self, listed: str) -> list[str | int]:
        """A list of classes as the .json keeps it."""
        return [int(self.member(each)) if _WHOLE.fullmatch(each) else each for each in json.loads(listed)]


def _place(label: str, names: Sequence[str]) -> int:
    """The line of a name on the list, from 0, and -1 for none; 1.0 is the name 1."""
    whole = _WHOLE.fullmatch(label)
    return next((names.index(name) for name in (label, whole[1] if whole else "") if name in names), -1)


def has_numbers(names: Sequence[str]) -> bool:
    return any(map(_WHOLE.fullmatch, names))


def settle(found: dict[str, int], published: tuple[str, ...], given: ClassList | None, from_rows: bool) -> Labels:
    """Names are on the list that is given, on the published one of the layout, or, `from_rows`, on one of all that
    occur. Labels that are all whole numbers are the numbers of classes, unless the list has such names itself, as of
    grades from 1 to 5, or is to be made of them."""
    names = given.names if given is not None else published
    if not found:
        return Labels(names)
    whole = [label for label in found if _WHOLE.fullmatch(label)]
    if whole and not (has_numbers(names) if names else from_rows):
        if len(whole) == len(found):
            beyond = [label for label in whole if names and int(label.partition(".")[0]) >= len(names)]
            return Labels(names, numbers=True, outside=sum(found[label] for label in beyond))
        other = next(label for label in found if label not in whole)
        raise PackError(
            f"the labels {shown(whole[0])} and {shown(other)}: some are numbers and others names, and a number in a "
            "record is taken for a class by its place; rename one kind"
        )
    if names:
        return Labels(names, outside=sum(count for label, count in found.items() if _place(label, names) < 0))
    # In numeric order, so that numbers from 0 without a gap stay what they are.
    order = sorted(found, key=lambda name: (int(match[1]) if (match := _WHOLE.fullmatch(name)) else 0, name))
    return Labels(tuple(order), from_rows=True)
