"""Parquet files and Hugging Face `datasets` directories: pictures and words in the columns of Arrow tables."""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from murmuration.data.pack.columns import IMAGE_COLUMNS, Columns, texts, word
from murmuration.data.pack.row import MISSING, UNDECODABLE, BadPicture, Fault, PackError, Row

HF = (
    "what datasets' save_to_disk writes: DIR/dataset_info.json, DIR/state.json and DIR/data-00000-of-00001.arrow, or "
    "one such folder per split beside dataset_dict.json"
)
_ROWS = 64  # rows of pictures in memory at a time
_NAMES = (*IMAGE_COLUMNS, "img", "jpg", "jpeg", "png", "webp")


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise PackError(
            "parquet and Arrow files need pyarrow, which is not installed: pip install 'murmuration[arrow]'"
        ) from None
    return pyarrow


@contextmanager
def _readable(arrow: Any, path: Path, what: str, fix: str) -> Iterator[None]:
    """Errors of the library about the bytes of a file, as one sentence."""
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        raise PackError(f"{path}: not a readable {what} ({error}); {fix}") from None


class Parquet:
    """One file. `batches` begins at the group of rows that contains `row`."""

    def __init__(self, path: Path) -> None:
        self._arrow, self.path = _pyarrow(), path
        with self._opened() as file:
            self.schema = file.schema_arrow
            counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        self._starts = [0, *accumulate(counts)][:-1]

    def batches(self, columns: Sequence[str], row: int = 0) -> Iterator[tuple[int, Any]]:
        group = max(0, bisect_right(self._starts, row) - 1)
        first = self._starts[group] if self._starts else 0
        with self._opened() as file:
            groups = range(group, file.num_row_groups)
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=list(groups), columns=list(columns)):
                yield first, batch
                first += batch.num_rows

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        readable = _readable(self._arrow, self.path, "parquet file", "fetch it again")
        with readable, self._arrow.parquet.ParquetFile(self.path) as file:
            yield file


class _Stream:
    """One file of a `datasets` directory, in Arrow's form for streams, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._arrow, self.path = _pyarrow(), path
        with self._opened() as stream:
            self.schema = stream.schema

    def batches(self, columns: Sequence[str], row: int = 0) -> Iterator[tuple[int, Any]]:
        first = 0
        with self._opened() as stream:
            for batch in stream:
                if first + batch.num_rows > row:
                    for start in range(0, batch.num_rows, _ROWS):
                        yield first + start, batch.slice(start, _ROWS).select(list(columns))
                first += batch.num_rows

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        readable = _readable(self._arrow, self.path, "Arrow stream", "save the data set again")
        with readable, self._arrow.memory_map(str(self.path)) as mapped, self._arrow.ipc.open_stream(mapped) as stream:
            yield stream


_File = Parquet | _Stream


def parquet_cells(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table that names its pictures by their paths."""
    file = Parquet(table)
    for first, batch in file.batches(file.schema.names):
        for number, cells in enumerate(batch.to_pylist(), start=first):
            yield f"{table.name}[{number}]", cells


class Pictures:
    """Pictures in a column of bytes. Rows with the same bytes are one image."""

    def __init__(self, files: Sequence[_File], columns: Columns) -> None:
        self._files = files
        self._columns, self.classes = _recognised(files[0], columns)
        if odd := next((file for file in files if file.schema.names != files[0].schema.names), None):
            raise PackError(f"{odd.path}: other columns than {files[0].path.name}; name one set alone")
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        self.told = f"{files[0].path.name}{more}: {self._columns.told()}"
        self._cursor = _Cursor(files, str(self._columns.image))

    def rows(self) -> Iterator[Row | Fault]:
        used = self._columns
        names = [name for name in (used.image, used.caption, used.label, used.unit) if name is not None]
        for number, file in enumerate(self._files):
            for first, batch in file.batches(names):
                for at, cells in enumerate(batch.to_pylist(), start=first):
                    yield self._row(f"{file.path.name}[{at}]", f"{number}#{at}", cells)

    def _row(self, where: str, at: str, cells: dict[str, Any]) -> Row | Fault:
        used = self._columns
        raw = _bytes(cells[str(used.image)])
        if not raw:
            return Fault(where, "", MISSING, "no bytes of a picture in this row")
        captions = None if used.caption is None else texts(cells[used.caption])
        unit = None if used.unit is None else word(cells[used.unit])
        image = hashlib.sha256(raw).hexdigest()
        return Row(where, image, at, captions, self._label(cells), unit, {})

    def _label(self, cells: dict[str, Any]) -> str | None:
        if self._columns.label is None:
            return None
        if not self.classes or self._columns.several is not None:
            return self._columns.label_in(cells)
        label = word(cells[self._columns.label])
        return self.classes[int(label)] if label.isdecimal() and int(label) < len(self.classes) else ""

    def identity(self, row: Row) -> tuple[str, int]:
        return row.image, 0

    def picture(self, at: str) -> bytes:
        number, _, row = at.partition("#")
        return self._cursor.picture(int(number), int(row))


class _Cursor:
    """Remembers where it is: pictures are asked for nearly in their order."""

    def __init__(self, files: Sequence[_File], column: str) -> None:
        self._files, self._column = files, column
        self._lock = threading.Lock()
        self._file, self._batches = -1, iter(())
        self._held: list[tuple[int, Any]] = []

    def picture(self, number: int, row: int) -> bytes:
        with self._lock:
            if number != self._file or not self._held or row < self._held[0][0]:
                self._file, self._held = number, []
                self._batches = self._files[number].batches([self._column], row)
            while (found := self._within(row)) is None:
                step = next(self._batches, None)
                if step is None:
                    raise BadPicture(UNDECODABLE, "the file was cut while it was packed")
                # Threads ask a little out of order.
                self._held = [*self._held[-2:], step]
        return found

    def _within(self, row: int) -> bytes | None:
        for first, batch in self._held:
            if first <= row < first + batch.num_rows:
                return _bytes(batch.column(0)[row - first].as_py())
        return None


def _bytes(cell: Any) -> bytes:
    raw = cell.get("bytes") if isinstance(cell, dict) else cell
    return raw if isinstance(raw, bytes) else b""


def picture_columns(schema: Any) -> list[str]:
    types = _pyarrow().types

    def holds(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(each.name == "bytes" and holds(each.type) for each in kind)
        return types.is_binary(kind) or types.is_large_binary(kind)

    return [each.name for each in schema if holds(each.type)]


def _recognised(file: _File, columns: Columns) -> tuple[Columns, tuple[str, ...]]:
    """The meaning of the columns, and the names of the classes if the label is a ClassLabel of `datasets`."""
    pictures = picture_columns(file.schema)
    image = columns.image or next((name for name in (*_NAMES, *pictures) if name in pictures), None)
    if image not in pictures:
        raise PackError(f"{file.path}: no column of pictures (bytes) called {image!r}; choose one with --image")
    used = replace(columns, image=image).within(file.schema.names, file.path)
    try:
        features = json.loads((file.schema.metadata or {})[b"huggingface"])["info"]["features"]
        named = {
            name: tuple(" ".join(str(each).split()) for each in feature["names"])
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        named = {}
    if used.label is None and len(named) == 1:
        used = replace(used, label=next(iter(named)))
    return used, named.get(used.label or "", ())


def open_parquet_folder(source: Path, split: str | None, columns: Columns) -> Pictures:
    """All *.parquet in the folder or in its `data`; with a split, those named for it (train-00000-of-00002.parquet)."""
    found = parquet_files(source)
    mine = [path for path in found if split is None or path.name.startswith(split)]
    if not mine:
        there = ", ".join(path.name for path in found[:3]) + (" …" if len(found) > 3 else "")
        raise PackError(f"{source}: no parquet file whose name begins with {split!r}; there are {there}")
    splits = {path.name.partition("-")[0] for path in mine}
    if split is None and len(splits) > 1:
        raise PackError(f"{source}: holds {', '.join(sorted(splits))}; choose one with --split")
    return Pictures([Parquet(path) for path in mine], columns)


def parquet_files(source: Path) -> list[Path]:
    return sorted(source.glob("*.parquet")) or sorted((source / "data").glob("*.parquet"))


def open_saved(source: Path, split: str | None, columns: Columns) -> Pictures:
    """A `datasets` directory, or one split of a DatasetDict."""
    folder = source
    if (source / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in source.glob("*/state.json"))
        chosen = split or (splits[0] if len(splits) == 1 else None)
        if chosen not in splits:
            raise PackError(f"{source}: has the splits {', '.join(splits)}; choose one with --split")
        folder = source / str(chosen)
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackError(f"{folder}: no readable state.json ({error}); the expected layout is {HF}") from None
    if missing := [name for name in names if not (folder / name).is_file()] or not names:
        raise PackError(f"{folder}: {missing if names else 'data files'} are not there; the expected layout is {HF}")
    return Pictures([_Stream(folder / name) for name in names], columns)
