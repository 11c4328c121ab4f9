"""A plan becomes indexed tar shards, in an order and with bytes that depend on the input alone.

Each shard appears complete or not at all, and the folder gets its name with its index once all shards are there. After
a kill the same command makes what is missing, and the result is the same bytes. All of it is the owner's alone: a table
may be more private than the pictures that it names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import stat
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from murmuration.accounting.durable import remove_left, sync, try_lock
from murmuration.data.decode import pool
from murmuration.data.decode.class_list import OF_ROWS, RECEIPT, ClassList
from murmuration.data.decode.decode import FORMATS, MAX_PIXELS, BadRecord, decode_scaled, parsing
from murmuration.data.decode.fields import CAPTIONS
from murmuration.data.decode.pool import DecodePool
from murmuration.data.decode.record import DataSpec, RecordMaker
from murmuration.data.decode.resize import resized
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.pack.dicom import Window, as_png, is_dicom
from murmuration.data.pack.plan import Labels, Plan, Planned, has_numbers, settle
from murmuration.data.pack.row import MISSING, UNDECODABLE, BadPicture, Fault, Layout, PackError
from murmuration.data.store.index_files import index_file, make_folder, read_json
from murmuration.data.store.tar import shown

QUALITY = 95  # as img2dataset writes
_WITH_LOSS = ("JPEG", "WEBP")


CLASSES, LEFT_OUT = "classes.txt", "left_out.jsonl"
HELD_OUT = "-held-out"
SHRUNK_TO = "max_shorter_side"
_PARTS = ("records", "held_out")
_AT_ONCE = 64  # pictures in memory
_LONGEST_STEM = 60
_FORMS = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "gif": b"GIF8", "bmp": b"BM"}
_ODD = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class _Shrinker(RecordMaker):
    """Runs in a decoding process."""

    side: int = 0

    @property
    def row(self) -> np.dtype[np.void]:
        """A file of any size that a picture may have; memory is only taken up to the largest one that was written."""
        return np.dtype([("bytes", "i8"), ("file", "u1", (4 * MAX_PIXELS,))])

    def make(self, members: Mapping[str, bytes], record: int, step: int, key: bytes, into: np.void) -> bool:
        raw = members["jpg"]
        found = decode_scaled(raw, lambda _width, _height: None)
        size = (found.width, found.height)
        shorter = min(size)
        into["bytes"] = 0
        if shorter > self.side:
            with parsing("the image cannot be shrunk"):
                width, height = (round(self.side * side / shorter) for side in size)
                file = _file(resized(found.pixels, (0, 0, *size), (width, height)), raw)
                into["file"][: len(file)] = np.frombuffer(file, np.uint8)
                into["bytes"] = len(file)
        return True


def _file(pixels: np.ndarray, source: bytes) -> bytes:
    grey = bool((pixels == pixels[:, :, :1]).all())  # a third of the bytes, and the same pixels when decoded
    image, out = Image.fromarray(pixels[:, :, 0] if grey else pixels), io.BytesIO()
    with Image.open(io.BytesIO(source), formats=FORMATS) as before:
        form = "JPEG" if before.format in _WITH_LOSS else "PNG"
    image.save(out, form, **({"quality": QUALITY} if form == "JPEG" else {}))
    return out.getvalue()


class Shrinking:
    """Decoding processes that shrink pictures to `side` pixels of their shorter side, so that no reading decodes pixels
    that no crop needs.

    What was compressed with loss becomes JPEG, anything else PNG, which keeps the resized pixels as they are. Nothing
    but the upright pixels is kept: no EXIF block, no colour profile.
    """

    def __init__(self, side: int, processes: int) -> None:
        self._pool = DecodePool(_Shrinker(DataSpec(1), side=side), processes, most=1)

    def picture(self, raw: bytes) -> bytes:
        """The bytes themselves where the picture is small enough; raises BadRecord as decoding does."""
        found: list[bytes] = []
        wanted = pool.Wanted(0, None, lambda: {"jpg": raw})
        (made,) = self._pool.make([wanted], 0, lambda _, row: found.append(row["file"][: row["bytes"]].tobytes()))
        if not isinstance(made, bool):
            raise made
        return found[0] or raw

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True)
class Request:
    target: Path
    unit: str | None = None
    hold_out: float = 0.0
    classes: ClassList | None = None
    classes_from_rows: bool = False
    per_shard: int = 1000
    workers: int = 1
    listed: str | None = None
    """The field of the .json for the list of a record's classes, where it may have any number."""
    window: Window | None = None
    """The window of grey DICOM files; None: each file's own."""
    max_shorter_side: int | None = None
    """In pixels, to which larger pictures are shrunk."""

    def __post_init__(self) -> None:
        if self.per_shard < 1 or self.workers < 1:
            raise PackError(f"{self.per_shard} records per shard, {self.workers} workers: both must be at least 1")
        if self.max_shorter_side is not None and self.max_shorter_side < 1:
            raise PackError(f"--max-shorter-side {self.max_shorter_side}: name at least 1 pixel")
        if not 0 <= self.hold_out < 1:
            raise PackError(f"--hold-out {self.hold_out:g}: name a share from 0 to below 1")

    @property
    def targets(self) -> tuple[Path, Path]:
        return self.target, self.target.with_name(self.target.name + HELD_OUT)


@dataclass(frozen=True)
class Packed:
    """What was packed. Everything but the indexes' n is private."""

    rows: int
    images: int
    several: int
    units: int
    labels: Labels
    index: ShardIndex
    held_out: ShardIndex | None
    left_out: Counter[str]


def pack(layout: Layout, request: Request, progress: Callable[[int, int], None]) -> Packed:
    """Pack what the layout holds, or what an earlier call left."""
    work = request.target.with_name(f".{request.target.name}.partial")
    there = os.path.lexists(work)
    make_folder(work)
    if there and (not stat.S_ISDIR((about := work.lstat()).st_mode) or about.st_uid != os.geteuid()):
        raise PackError(f"{work}: somebody else made it and could read what is packed; remove it or use another --out")
    with _only_one(work):
        path = work / "plan.sqlite"
        try:
            with closing(Plan(path, layout, request.unit, request.hold_out, request.listed)) as plan:
                found = _Packer(layout, request, plan, work, progress).pack()
        except PackError:
            path.unlink(missing_ok=True)
            if not any(work.iterdir()):  # refused before anything was made
                work.rmdir()
            raise
        except sqlite3.Error as error:
            raise PackError(
                f"{path}: the plan cannot be written ({error}); free some space there, then repeat the command"
            ) from None
        shutil.rmtree(work)
    sync(request.target.parent)
    return found


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    folder = os.open(work, os.O_RDONLY)
    try:
        if not try_lock(folder):
            raise PackError(f"{work}: another prepare.py is packing here; wait until it is done")
        yield
    finally:
        os.close(folder)


class _Packer:
    def __init__(
        self, layout: Layout, request: Request, plan: Plan, work: Path, progress: Callable[[int, int], None]
    ) -> None:
        self._layout, self._request, self._plan, self._work, self._progress = layout, request, plan, work, progress
        self._counts = [plan.planned(part) for part in (0, 1)]
        if not sum(self._counts):
            raise _nothing(plan.faults())
        if not self._counts[0]:
            raise PackError(f"--hold-out {request.hold_out:g}: holds out all records; name a smaller share")
        # Lists of a layout with published names hold numbers.
        published = layout.classes if request.listed is None else ()
        self._labels = settle(plan.labels(), published, request.classes, request.classes_from_rows)
        if self._labels.from_rows and not request.classes_from_rows:
            raise PackError(
                "the rows have names of classes and no list says which there are: name a public one with --classes, or "
                "have those that occur listed with --classes-from-rows, which private training takes only by your word"
            )
        more: dict[str, Any] = {} if request.listed is None else {"listed": request.listed}
        more |= {} if request.window is None else {"window": [request.window.centre, request.window.width]}
        more |= {} if request.max_shorter_side is None else {SHRUNK_TO: request.max_shorter_side}
        more |= {"places": True} if not self._labels.numbers and has_numbers(self._labels.names) else {}
        self._digest = plan.digest({"per_shard": request.per_shard, "classes": self._labels.names, **more})

    def pack(self) -> Packed:
        self._begin()
        total = sum(self._shards(part) for part in (0, 1))
        done = sum(self._made(part, number) for part in (0, 1) for number in range(self._shards(part)))
        self._progress(done, total)
        # Last what the command is judged by: once the first folder is there, everything is.
        for part in (1, 0):
            if self._counts[part] and not self._there(part):
                done = self._write(part, done, total)
                self._finish(part)
        plan = self._plan
        with (self._request.target / LEFT_OUT).open("rb") as file:
            left_out = Counter(json.loads(line)["reason"] for line in file)
        indexes = [ShardIndex.open(self._request.targets[part]) if self._counts[part] else None for part in (0, 1)]
        assert indexes[0] is not None
        return Packed(
            plan.rows, plan.images, plan.several, plan.units, self._labels, indexes[0], indexes[1], left_out
        )  # fmt: skip

    def _begin(self) -> None:
        """Refuse to overwrite other data; drop what was begun from another input."""
        for part, target in enumerate(self._request.targets):
            if target.exists() and not self._there(part):
                raise PackError(f"{target}: contains other data; remove it or use another --out")
        begun = self._work / RECEIPT
        if _digest_in(begun) != self._digest:
            for name in (*_PARTS, "notes"):
                shutil.rmtree(self._work / name, ignore_errors=True)
            _write_json(begun, {"digest": self._digest})
        for name in (*_PARTS, "notes"):
            make_folder(self._work / name)
            remove_left(self._work / name)

    def _there(self, part: int) -> bool:
        return _digest_in(self._request.targets[part] / RECEIPT) == self._digest

    def _shards(self, part: int) -> int:
        return -(-self._counts[part] // self._request.per_shard)

    def _shard(self, part: int, number: int) -> Path:
        return self._work / _PARTS[part] / f"{number:06d}.tar"

    def _notes(self, part: int, number: int) -> Path:
        return self._work / "notes" / f"{_PARTS[part]}-{number:06d}.json"

    def _made(self, part: int, number: int) -> bool:
        return self._there(part) or (self._shard(part, number).exists() and self._notes(part, number).exists())

    def _write(self, part: int, done: int, total: int) -> int:
        records = self._plan.records(part)
        with closing(_Pictures(self._layout, self._request)) as pictures:
            for number in range(self._shards(part)):
                chunk = list(islice(records, self._request.per_shard))
                if self._made(part, number):
                    continue
                with index_file(self._shard(part, number), tidy=False) as file:
                    faults = _write_shard(file, chunk, pictures, self._members)
                    # Before the shard gets its name: what a finished shard leaves out is known.
                    _write_json(self._notes(part, number), [asdict(fault) for fault in faults], tidy=False)
                done += 1
                self._progress(done, total)
        return done

    def _members(self, record: Planned, raw: bytes) -> dict[str, bytes]:
        # By what the file is: names of downloaded pictures often lack it, or lie.
        suffix = next((suffix for suffix, magic in _FORMS.items() if raw.startswith(magic)), "webp")
        found = {suffix: raw}
        fields = dict(record.fields)
        if len(record.captions) == 1:
            found["txt"] = record.captions[0].encode()
        elif record.captions:
            fields[CAPTIONS] = record.captions
        if record.label and self._request.listed is not None:
            fields[self._request.listed] = self._labels.values(record.label)
        elif record.label:
            found["cls"] = self._labels.member(record.label)
        if fields:
            found["json"] = json.dumps(fields, ensure_ascii=False, sort_keys=True).encode()
        return found

    def _finish(self, part: int) -> None:
        folder, target = self._work / _PARTS[part], self._request.targets[part]
        faults = [fault for number in range(self._shards(part)) for fault in read_json(self._notes(part, number))]
        if len(faults) == self._counts[part]:
            raise _nothing(iter([Fault(**fault) for fault in faults]))
        index = build(folder, wanted=Wanted(unit=self._request.unit))
        if self._labels.names:
            with index_file(folder / CLASSES) as file:
                file.write("".join(f"{name}\n" for name in self._labels.names).encode())
        if part == 0:
            with index_file(folder / LEFT_OUT) as file:
                for fault in self._plan.faults():
                    file.write(_line(asdict(fault)))
                for path in sorted((self._work / "notes").iterdir()):
                    for fault in read_json(path):
                        file.write(_line(fault))
        receipt: dict[str, Any] = {"digest": self._digest, "records": index.records}
        if self._labels.from_rows:
            receipt[OF_ROWS] = ClassList(self._labels.names).digest
        if self._request.max_shorter_side is not None:
            receipt[SHRUNK_TO] = self._request.max_shorter_side
        _write_json(folder / RECEIPT, receipt)
        folder.rename(target)


def _line(fault: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in fault.items() if value}).encode() + b"\n"


def _write_json(path: Path, value: Any, tidy: bool = True) -> None:
    with index_file(path, tidy=tidy) as file:
        file.write(json.dumps(value).encode() + b"\n")


def _digest_in(path: Path) -> str | None:
    try:
        found = read_json(path)
        return found["digest"] if isinstance(found, dict) else None
    except (OSError, ValueError, KeyError):
        return None


def _nothing(faults: Iterator[Fault]) -> PackError:
    first, reasons = None, Counter[str]()
    for fault in faults:
        first = first or fault
        reasons[fault.reason] += 1
    if first is None:
        return PackError("no row and no image in this source; name another")
    counted = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    told = f" ({shown(first.detail)})" if first.detail else ""
    fix = "; name the folder from which their names start" if first.reason == MISSING else "; correct the rows"
    return PackError(f"nothing can be packed: {counted}, first {shown(first.image or first.row)}{told}{fix}")


class _Pictures:
    """Reads and decodes pictures several at a time. They are decoded by other processes, which a hostile file may end;
    whether it decodes is all that is used, unless they are shrunk."""

    def __init__(self, layout: Layout, request: Request) -> None:
        self._layout, self._window = layout, request.window
        side, workers = request.max_shorter_side, request.workers
        self._decoders = DecodePool(RecordMaker(DataSpec(8)), workers) if side is None else Shrinking(side, workers)
        self._threads = ThreadPoolExecutor(workers + 2)

    def each(self, records: list[Planned]) -> Iterator[tuple[Planned, bytes | Fault]]:
        for start in range(0, len(records), _AT_ONCE):
            part = records[start : start + _AT_ONCE]
            yield from zip(part, self._threads.map(self._one, part), strict=True)

    def _one(self, record: Planned) -> bytes | Fault:
        try:
            raw = self._layout.picture(record.at)
            if is_dicom(raw):
                raw = as_png(raw, self._window)
            made = self._decoders.picture(raw)
            return made if isinstance(made, bytes) else raw
        except BadPicture as error:
            return Fault(record.row, record.image, error.reason, error.detail)
        except BadRecord as error:
            return Fault(record.row, record.image, UNDECODABLE, str(error))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._decoders.close()


def _write_shard(
    file: IO[bytes], records: list[Planned], pictures: _Pictures, members: Callable[[Planned, bytes], dict[str, bytes]]
) -> list[Fault]:  # fmt: skip
    faults: list[Fault] = []
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for record, raw in pictures.each(records):
            if isinstance(raw, Fault):
                faults.append(raw)
                continue
            for suffix, content in members(record, raw).items():
                # All that tarfile would take from a file or a clock stays at its default of nothing.
                member = tarfile.TarInfo(f"{key_of(record.image)}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return faults


def key_of(image: str) -> str:
    """The image's name, as far as a key may contain it, and a hash of all of it, which keeps keys apart."""
    stem = _ODD.sub("_", os.path.splitext(os.path.basename(image))[0])[:_LONGEST_STEM]
    return f"{stem}-{hashlib.sha256(os.fsencode(image)).hexdigest()[:16]}"
