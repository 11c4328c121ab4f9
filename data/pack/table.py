"""Tables with one row per image or caption: CSV, tab-separated text, JSON lines, a JSON list, parquet, and the
metadata.csv of Hugging Face image folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from murmuration.data.pack.columns import Cells, Columns
from murmuration.data.pack.json_stream import elements
from murmuration.data.pack.row import UNREADABLE, Fault, Files, PackError, Row, require

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_LONGEST_CELL = 16 << 20
_MOST_LINES = 1000  # of one row
_ROWS_FOR_NAMES = 100  # a row of JSON may lack a field that others have


SBU = "dataset/ with SBU_captioned_photo_dataset_urls.txt, SBU_captioned_photo_dataset_captions.txt and the pictures"
_URLS, _CAPTIONS = "SBU_captioned_photo_dataset_urls.txt", "SBU_captioned_photo_dataset_captions.txt"
_TRIED = 1000
_FETCH = (
    "its rows name URLs, and nothing is downloaded here: fetch the pictures first (img2dataset writes tar shards, "
    "which prepare.py index takes as they are)"
)


class Table(Files):
    """`root` is the folder that relative names of images start from."""

    def __init__(self, root: Path, table: Path, columns: Columns) -> None:
        super().__init__(root)
        self._table = table
        first = list(islice(self._cells(), _ROWS_FOR_NAMES))
        known = list(dict.fromkeys(name for each in first if not isinstance(each, Fault) for name in each[1]))
        if not known:
            why = next((f" ({each.row}: {each.detail})" for each in first if isinstance(each, Fault)), "")
            raise PackError(f"{table}: no readable row{why}; name a table with one row per image or caption")
        self._columns = columns.within(known, table)
        self.told = f"{table.name}: {self._columns.told()}"

    def rows(self) -> Iterator[Row | Fault]:
        for each in self._cells():
            yield each if isinstance(each, Fault) else self._columns.row(each[1], each[0])

    def _cells(self) -> Iterator[tuple[str, Cells] | Fault]:
        kind = self._table.suffix.lower()
        if kind == ".parquet":
            from murmuration.data.pack.arrow import parquet_cells

            return parquet_cells(self._table)
        if kind in (".jsonl", ".ndjson"):
            return _json_lines(self._table)
        return _json_list(self._table) if kind == ".json" else _lines(self._table)


def _lines(table: Path) -> Iterator[tuple[str, Cells] | Fault]:
    """Text separated by commas, tabs or semicolons, with a header. Bytes that are no UTF-8 survive as surrogates,
    because names of files need not be text."""
    csv.field_size_limit(_LONGEST_CELL)
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline()
        file.seek(0)
        # open_clip writes tab-separated tables that are called .csv, and spreadsheets in much of Europe semicolons.
        rows = _rows(file, max(",\t;", key=header.count), table)
        names = next(rows, (1, []))[1]
        if isinstance(names, csv.Error) or len(set(names)) < len(names) or not names:
            raise PackError(f"{table}: its first line must name the columns, each once; add a header")
        for first, cells in rows:
            where = f"{table.name}:{first}"
            if isinstance(cells, csv.Error):
                yield Fault(where, "", UNREADABLE, str(cells))
            elif len(cells) == len(names):
                yield where, dict(zip(names, cells, strict=True))
            elif cells:
                yield Fault(where, "", UNREADABLE, f"{len(cells)} cells for {len(names)} columns")


def _rows(file: TextIO, delimiter: str, table: Path) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """The number of each row's first line, and its cells or what is wrong. Quotes within one line are taken as they
    come; those that are not closed in the line where they begin take whole rows for text, so they must be right."""
    last = [""]

    def noted(line: str) -> str:
        last[0] = line
        return line

    rows = csv.reader(map(noted, file), delimiter=delimiter, strict=True)
    while True:
        first, fault = rows.line_num + 1, ""
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            cells, fault = error, str(error)
        taken = rows.line_num - first
        if taken and (fault or taken > _MOST_LINES):
            raise PackError(
                f"{table}:{first}: a quote that begins in this row takes {taken} more lines for its text"
                f"{f' ({fault})' if fault else ''}; close it, or write a quote within a quoted cell twice"
            )
        if fault:
            try:
                cells = next(csv.reader(last, delimiter=delimiter))
            except csv.Error as error:
                cells = error
        yield first, cells


def _json_lines(table: Path) -> Iterator[tuple[str, Cells] | Fault]:
    with table.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _object(json.loads(line), f"{table.name}:{number}")
                except (ValueError, RecursionError) as error:
                    yield Fault(f"{table.name}:{number}", "", UNREADABLE, str(error))


def _json_list(table: Path) -> Iterator[tuple[str, Cells] | Fault]:
    for number, (key, value) in enumerate(elements(table)):
        if key:
            raise PackError(f"{table}: neither a list of rows nor COCO's images and annotations; name another table")
        yield _object(value, f"{table.name}[{number}]")


def _object(value: Any, where: str) -> tuple[str, Cells] | Fault:
    return (where, value) if isinstance(value, dict) else Fault(where, "", UNREADABLE, "not a JSON object")


class Urls(Files):
    """Rows of a caption and a URL, or the other way round."""

    def __init__(self, root: Path, told: str) -> None:
        super().__init__(root)
        self.told = f"{told}: pictures are named as the ends of their URLs"

    def _require_some(self, listing: Path) -> None:
        first = [each.at for each in islice(self.rows(), _TRIED) if isinstance(each, Row)]
        if not any((self.root / name).is_file() for name in first):
            raise PackError(f"{listing}: none of the first {len(first)} pictures is in {self.root}; {_FETCH}")

    def _row(self, where: str, caption: str, url: str) -> Row | Fault:
        try:
            file = urlsplit(url.strip()).path.rpartition("/")[2]
        except ValueError as error:
            return Fault(where, "", UNREADABLE, str(error))
        # Two URLs that end alike name one file, which is the picture of one of them: such rows disagree about the URL.
        return (
            Row(where, file, file, [caption], fields={"url": url.strip()})
            if file
            else Fault(where, "", UNREADABLE, "no URL of a file")
        )

    def rows(self) -> Iterator[Row | Fault]:
        raise NotImplementedError


class Tsv(Urls):
    """CC3M: a caption, a tab and a URL in each line, without quotes and without a header."""

    def __init__(self, root: Path, listing: Path) -> None:
        self._listing = listing
        super().__init__(root, listing.name)
        self._require_some(listing)

    def rows(self) -> Iterator[Row | Fault]:
        with _opened(self._listing) as file:
            for number, line in enumerate(file, start=1):
                cells = line.rstrip("\r\n").split("\t")
                where = f"{self._listing.name}:{number}"
                if len(cells) < 2:
                    yield Fault(where, "", UNREADABLE, "no tab between caption and URL")
                else:
                    caption, url = cells[:2] if is_url(cells[1]) else cells[1::-1]
                    yield self._row(where, caption, url)


class Sbu(Urls):
    """Two files whose lines belong together: captions and URLs without pictures, as SBU is published. Nothing is
    downloaded: a picture is the file that has the last part of its URL as its name, as torchvision stores SBU."""

    def __init__(self, source: Path) -> None:
        root = source / "dataset" if (source / "dataset").is_dir() else source
        require(root, "SBU", [_URLS, _CAPTIONS], SBU)
        super().__init__(root, "SBU")
        self._require_some(root / _URLS)

    def rows(self) -> Iterator[Row | Fault]:
        with _opened(self.root / _URLS) as urls, _opened(self.root / _CAPTIONS) as captions:
            for number, (url, caption) in enumerate(zip_longest(urls, captions), start=1):
                if url is None or caption is None:
                    raise PackError(
                        f"{self.root}: {_URLS} and {_CAPTIONS} differ in their number of lines; fetch them again"
                    )
                yield self._row(f"{_URLS}:{number}", caption, url)


def _opened(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="surrogateescape", newline="\n")


def is_url(text: str) -> bool:
    return text.strip().lower().startswith(("http://", "https://"))


def names_urls(table: Path) -> bool:
    """Whether the first line is a caption and a URL, with a tab between them, and no header."""
    with table.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        cells = file.readline(1 << 20).split("\t")
    return len(cells) >= 2 and any(is_url(cell) for cell in cells[:2])
