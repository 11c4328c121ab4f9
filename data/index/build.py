"""Writes an index: shards are scanned in parallel, each result is saved as soon as it is there, none is made twice.

Trust in earlier runs: a shard whose size, mtime and ctime (for a URL: size and ETag) are those noted when it was
scanned is assumed to contain the same bytes. Each noted result carries its own hash. Everything else is scanned again,
and the index is bitwise the same either way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from murmuration.accounting.durable import try_lock
from murmuration.accounting.strict_json import parse
from murmuration.data.index.census import Census, Names, read_census, remarks, total, write_census
from murmuration.data.index.format import (
    OFFSETS,
    SHARDS,
    digest_of,
    read_manifest,
    shard_of,
    write_manifest,
)
from murmuration.data.index.scan import Scan, Stamp, check_stats, scan, stamp_of
from murmuration.data.index.units import (
    DIGEST_BYTES,
    Missing,
    as_rows,
    known_digests,
    pattern_of,
    unit_named,
    write_units,
)
from murmuration.data.store.index_files import cannot_write, index_file, make_folder, mode_like, open_npy, read_json
from murmuration.data.store.place import Place, Shard, ShardError, join
from murmuration.data.store.retry import until_hopeless

# Results of earlier runs of the index builder, and whether they are still valid.
#
# They are kept in two places: the work area, with one file per shard scanned since the last complete index, and that
# index itself.

STAMPS = "stamps.json"
_ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Noted:
    """A shard's line of the manifest. Its offsets stay on disk: in the work area, or from `row` of the old index."""

    shard: Shard
    stamp: Stamp | None
    row: int | None = None
    census: Census | None = None  # set for a shard that was read since the last complete index
    names: Names | None = None  # what that index kept of the census of one that was not
    units: bool = False  # whether the hashes of its records' units lie beside its offsets

    def kept(self) -> Names | None:
        return self.names if self.census is None else Names.of(self.census)


@dataclass(frozen=True)
class WorkArea:
    """One file per scanned shard, complete or absent; worker processes write here."""

    folder: Path
    root: Place
    unit: str | None = None
    """What units are named by, if there are any."""

    def place(self, name: str) -> Place:
        return join(self.root, name)

    def note(self, name: str, scan: Scan) -> Noted:
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        shard = Shard(name, scan.records, scan.bytes, scan.sha256, scan.offsets_sha256, scan.etag)
        head: dict[str, Any] = {"place": str(self.place(name)), "stamp": scan.stamp, "shard": asdict(shard)}
        head["census"] = scan.census.facts()
        if scan.units is not None:
            head["units"] = {"by": self.unit, "sha256": hashlib.sha256(scan.units).hexdigest()}
        # Readable only by its owner: the names of records' members are private.
        with index_file(self._file(name), tidy=False) as file:
            file.write(json.dumps(head).encode() + b"\n" + scan.offsets.tobytes() + (scan.units or b""))
        return Noted(shard, scan.stamp, census=scan.census, units=scan.units is not None)

    def read(self, name: str) -> tuple[Noted, np.ndarray, bytes] | None:
        """The noted result, its offsets, and the hashes of its units; None if it is missing, incomplete, about another
        place or about other units."""
        try:
            head, _, raw = self._file(name).read_bytes().partition(b"\n")
            facts = parse(head)
            shard = shard_of(facts["shard"])
            raw, column = raw[: 8 * (shard.records + 1)], raw[8 * (shard.records + 1) :]
            if not self._same_units(facts.get("units"), shard.records, column):
                return None
            if facts["place"] != str(self.place(name)) or hashlib.sha256(raw).hexdigest() != shard.offsets_sha256:
                return None
            offsets = np.frombuffer(raw, dtype="<u8")
            if len(offsets) != shard.records + 1:
                return None
            stamp = tuple(facts["stamp"]) if facts["stamp"] else None
            census = Census.of_facts(facts["census"]) if "census" in facts else None
            return Noted(shard, stamp, census=census, units=bool(column)), offsets, column
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _same_units(self, facts: Any, records: int, column: bytes) -> bool:
        if self.unit is None or facts is None:
            return self.unit is None and facts is None and not column
        whole = len(column) == DIGEST_BYTES * records and facts["sha256"] == hashlib.sha256(column).hexdigest()
        return whole and facts["by"] == self.unit

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self.folder / hashlib.sha256(json.dumps(str(self.place(name))).encode()).hexdigest()[:40]


class Known:
    """Results from both places, for shards that still look as they did when they were scanned."""

    def __init__(self, target: Path, work: WorkArea) -> None:
        self._work = work
        self._indexed: dict[str, Noted] = {}
        self._first_record: dict[str, int] = {}
        self._rows: np.ndarray | None = None
        self._units: np.ndarray | None = None
        try:
            manifest = read_manifest(target)
            stamps = read_json(target / STAMPS)
            rows = open_npy(target / OFFSETS)
        except (ShardError, OSError, ValueError):
            return
        if manifest.kind != SHARDS or rows.dtype != np.dtype("<u8") or rows.ndim != 1 or not isinstance(stamps, dict):
            return
        self._rows = rows
        digest = digest_of(SHARDS, manifest.shards)
        if work.unit is not None:
            self._units = known_digests(target, digest, manifest.records, work.unit)
        root = Path(os.path.realpath(manifest.root)) if isinstance(manifest.root, Path) else manifest.root
        names = read_census(target, digest, len(manifest.shards))
        row = 0
        for number, (shard, kept) in enumerate(zip(manifest.shards, names, strict=True)):
            place = str(join(root, shard.name))
            if isinstance(stamps.get(place), list):
                units = self._units is not None
                self._indexed[place] = Noted(shard, tuple(stamps[place]), row, names=kept, units=units)
                self._first_record[place] = row - number
            row += shard.records + 1

    def look_up(self, names: Sequence[str]) -> list[Noted | None]:
        """The known result of each shard, None if it must be scanned."""
        if all(isinstance(self._work.place(name), Path) for name in names):
            return [self._find(name) for name in names]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            return list(pool.map(self._find, names))

    def offsets(self, noted: Noted) -> np.ndarray:
        if noted.row is None:
            found = self._work.read(noted.shard.name)
            if found is None or found[0].shard != noted.shard:
                raise ShardError(f"{self._work.folder}: changed while the index was written; repeat the command")
            return found[1]
        assert self._rows is not None
        return np.asarray(self._rows[noted.row : noted.row + noted.shard.records + 1])

    def units(self, noted: Noted) -> np.ndarray:
        """The hashes of the units of a shard's records."""
        if noted.row is None:
            found = self._work.read(noted.shard.name)
            if found is None or found[0].shard != noted.shard:
                raise ShardError(f"{self._work.folder}: changed while the index was written; repeat the command")
            return as_rows(found[2])
        assert self._units is not None
        first = self._first_record[str(self._work.place(noted.shard.name))]
        return np.asarray(self._units[first : first + noted.shard.records])

    def _find(self, name: str) -> Noted | None:
        found = self._work.read(name)
        indexed = self._indexed.get(str(self._work.place(name)))
        candidates = [found[0] if found else None, indexed if indexed and self._whole(indexed) else None]
        usable = [each for each in candidates if each and each.stamp and (each.units or self._work.unit is None)]
        now = self._stamp(name) if usable else None
        fitting = next((each for each in usable if each.stamp == now), None)
        if fitting is None:
            return None
        # In the old index the shard's name may be relative to another root.
        shard = replace(fitting.shard, name=name)
        return replace(fitting, shard=shard)

    def _whole(self, noted: Noted) -> bool:
        return hashlib.sha256(self.offsets(noted).tobytes()).hexdigest() == noted.shard.offsets_sha256

    def _stamp(self, name: str) -> Stamp | None:
        """The shard's current stamp; None if it cannot be read, so that scanning reports what is wrong."""
        place = self._work.place(name)
        try:
            if isinstance(place, Path):
                return stamp_of(place.stat())
            from murmuration.data.store.remote import open_shard

            with open_shard(place) as stream:
                return (stream.size, stream.etag) if stream.etag else None
        except (OSError, ShardError):
            return None


Report = Callable[[int, int], None]
Tell = Callable[[str], None]
WORK = ".work"
# Below this many bytes, starting worker processes costs more than it saves.
_WORTH_PROCESSES = 512 << 20
_NAMED = 3  # the most shards that a remark names


@dataclass(frozen=True)
class Wanted:
    """How to index: `rescan` trusts no earlier result; `unit`: what units of several records are named by (units.py),
    and `missing` what becomes of records without that name. An index that has units keeps them where none are named."""

    rescan: bool = False
    workers: int | None = None
    unit: str | None = None
    missing: Missing = "refuse"


def write_index(root: Place, names: Sequence[str], target: Path, wanted: Wanted, progress: Report, tell: Tell) -> int:
    """Index `root`/`names` in this order into `target`; returns how many shards had to be scanned.

    `tell` gets a sentence for each finding that may be a mistake but is no reason to refuse.
    """
    make_folder(target, mode_like([join(root, name) for name in names]))
    with _only_one(target):
        wanted = _with_units(wanted, target)
        work = WorkArea(target / WORK, root, wanted.unit)
        if wanted.rescan:
            work.clear()
            (target / STAMPS).unlink(missing_ok=True)
        known = Known(target, work)
        before = known.look_up(names)
        found = {noted.shard.name: noted for noted in before if noted}
        missing = [name for name in names if name not in found]
        progress(len(found), len(names))
        refused: list[ShardError] = []
        for result in until_hopeless(_scan_all(work, missing, wanted)):
            if isinstance(result, ShardError):
                refused.append(result)
                continue
            found[result.shard.name] = result
            progress(len(found), len(names))
        if refused:
            more = f" ({len(refused) - 1} more shards were refused as well)" if len(refused) > 1 else ""
            raise ShardError(f"{min(refused, key=str)}{more}")
        inside = [found[name] for name in names]
        for sentence in [*_assemble(work, known, inside, target, wanted), *_remarks(inside)]:
            tell(sentence)
        work.clear()
    return len(missing)


def _with_units(wanted: Wanted, target: Path) -> Wanted:
    """What is wanted, with the units that the index had unless others are named; refused before anything is read."""
    if wanted.unit is None and (kept := unit_named(target)) is not None:
        wanted = replace(wanted, unit=kept[0], missing=kept[1])
    if wanted.unit is not None:
        pattern_of(wanted.unit)
    return wanted


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Lock the folder: two builders in it would mix their results. The lock ends with the process, however it ends."""
    folder = os.open(target, os.O_RDONLY)
    try:
        _lock(folder, target)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, target: Path) -> None:
    try:
        ours = try_lock(folder)
    except OSError as error:
        raise ShardError(f"{target}: cannot be locked ({error.strerror}); name another folder with --out") from error
    if not ours:
        raise ShardError(f"{target}: another prepare.py is indexing into this folder; wait until it is done")


def _scan_all(work: WorkArea, names: Sequence[str], wanted: Wanted) -> Generator[Noted | ShardError]:
    places = [work.place(name) for name in names]
    total = sum(place.stat().st_size for place in places if isinstance(place, Path) and place.is_file())
    large = total >= _WORTH_PROCESSES or not all(isinstance(place, Path) for place in places)
    asked = wanted.workers if wanted.workers is not None else (len(os.sched_getaffinity(0)) if large else 1)
    workers = min(asked, len(names))
    if workers <= 1:
        yield from (_scan_one(work, name) for name in names)
        return
    # Spawned, because the caller may have threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            for job in as_completed([pool.submit(_scan_one, work, name) for name in names]):
                yield job.result()
        except BrokenProcessPool:
            raise ShardError(
                f"{work.folder.parent}: a process that scans shards was killed, perhaps for lack of memory; repeat the "
                "command with fewer --workers, and it resumes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this worker with its builder; after a kill of the builder it would otherwise wait for work for ever."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def _scan_one(work: WorkArea, name: str) -> Noted | ShardError:
    """Errors are returned, so that one damaged shard among thousands does not hide the next one until the next run."""
    place = work.place(name)
    try:
        found = scan(place, work.unit)
        _ask_witness(place, found.records)
    except ShardError as error:
        return error
    # These errors are raised: if one result cannot be written, the next one cannot either.
    return work.note(name, found)


def _assemble(work: WorkArea, known: Known, found: Sequence[Noted], target: Path, wanted: Wanted) -> list[str]:
    shards = [noted.shard for noted in found]
    _refuse_twins([shard for shard in shards if shard.records])
    mode = mode_like([work.place(shard.name) for shard in shards])
    unclear: list[str] = []

    def parts() -> Iterator[np.ndarray]:
        for noted in found:
            if said := _ask_witness(work.place(noted.shard.name), noted.shard.records):
                unclear.append(said)
            yield known.offsets(noted)

    write_offsets(target, shards, parts(), mode)
    # After the offsets, so that a kill in between leaves hashes that do not match, which is refused and not misread.
    write_manifest(target, SHARDS, work.root, shards, {}, mode)
    write_census(target, digest_of(SHARDS, shards), [noted.kept() for noted in found])
    stamps = {str(work.place(noted.shard.name)): noted.stamp for noted in found if noted.stamp}
    with index_file(target / STAMPS, mode) as file:
        file.write(json.dumps(stamps).encode())
    if wanted.unit is not None:
        columns, records = map(known.units, found), sum(shard.records for shard in shards)
        write_units(target, digest_of(SHARDS, shards), wanted.unit, wanted.missing, columns, records)
    return unclear


def _remarks(found: Sequence[Noted]) -> Iterator[str]:
    empty = [noted.shard.name for noted in found if not noted.shard.records]
    if empty:
        more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        yield f"{len(empty)} of {len(found)} shards contain no record: {', '.join(empty[:_NAMED])}{more}"
    yield from remarks(total(noted.census for noted in found if noted.census is not None))
    if bare := sum(noted.kept() is None for noted in found):
        yield (
            f"{bare} of {len(found)} shards have no counts of the names of members and fields, so configs are not "
            "compared with them; --rescan counts them"
        )


def write_offsets(target: Path, shards: Sequence[Shard], parts: Iterable[np.ndarray], mode: int) -> None:
    """Write offsets.npy one shard's part after the other, never with all of it in memory."""
    with index_file(target / OFFSETS, mode) as file:
        shape = (sum(shard.records + 1 for shard in shards),)
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": shape})
        for part in parts:
            file.write(part.astype("<u8", copy=False).tobytes())


def _ask_witness(place: Place, records: int) -> str | None:
    """Check a shard, even a known one, against the file of counts beside it, which may have changed though the shard
    has not. Returns a remark if that cannot be understood."""
    return check_stats(place, records) if isinstance(place, Path) else None


def _refuse_twins(full: Sequence[Shard]) -> None:
    if not full:
        raise ShardError("no record in any shard; records are members named like 000123.jpg")
    first: dict[str, Shard] = {}
    for shard in full:
        if (twin := first.setdefault(shard.sha256, shard)) is not shard:
            raise ShardError(
                f"{twin.name} and {shard.name}: the same bytes; their records would count twice, so remove one"
            )
