"""Writes an index: shards are scanned in parallel, each result is kept as soon as it is there, none is made twice.

What is trusted from an earlier run: a shard whose size, mtime and ctime (for a URL: size and ETag) are those noted
when it was scanned is taken to hold the same bytes. Noted results carry a hash of their own. Everything else is
scanned anew, and the index comes out bitwise the same by whichever way.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import numpy as np

from data.energon import check_sidecar, sidecar, trusted_scan, write_sidecar
from data.index_census import remarks, total
from data.index_files import index_file, make_folder
from data.index_format import OFFSETS, SHARDS, Place, Shard, same_content, write_manifest
from data.index_known import STAMPS, Known, Noted, WorkArea
from data.index_scan import check_stats, scan
from data.patience import until_hopeless
from data.tar import ShardError

Report = Callable[[int, int], None]
Tell = Callable[[str], None]
WORK = ".work"
# Below this many bytes, starting worker processes costs more than it saves.
_WORTH_PROCESSES = 512 << 20
_NAMED = 3  # shards that a remark names


@dataclass(frozen=True)
class Wanted:
    """How to index: `trust_sidecars` spares reading the shards, `rescan` trusts nothing from before."""

    trust_sidecars: bool = False
    write_sidecars: bool = False
    rescan: bool = False
    workers: int | None = None


def write_index(root: Place, names: Sequence[str], target: Path, wanted: Wanted, progress: Report, tell: Tell) -> int:
    """Index `root`/`names` in this order into `target`; returns how many shards had to be scanned.

    What is no reason to refuse, but may not have been meant, is told in sentences.
    """
    if wanted.write_sidecars and not isinstance(root, Path):
        raise ShardError(f"{root}: sidecars cannot be written beside remote shards; leave --energon out")
    make_folder(target)
    with _only_one(target):
        work = WorkArea(target / WORK, root)
        if wanted.rescan:
            work.clear()
            (target / STAMPS).unlink(missing_ok=True)
        known = Known(target, work)
        before = known.look_up(names, without_content=wanted.trust_sidecars)
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


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Two builders in one folder would mix their results; the lock ends with the process, however it ends."""
    folder = os.open(target, os.O_RDONLY)
    try:
        _lock(folder, target)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, target: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ShardError(f"{target}: another prepare.py is indexing into this folder; wait until it is done") from None
    except OSError as error:
        raise ShardError(f"{target}: cannot be locked ({error.strerror}); name another folder with --out") from error


def _scan_all(work: WorkArea, names: Sequence[str], wanted: Wanted) -> Generator[Noted | ShardError]:
    places = [work.place(name) for name in names]
    total = sum(place.stat().st_size for place in places if isinstance(place, Path) and place.is_file())
    large = total >= _WORTH_PROCESSES or not all(isinstance(place, Path) for place in places)
    asked = wanted.workers if wanted.workers is not None else (os.cpu_count() or 1 if large else 1)
    workers = min(asked, len(names))
    if workers <= 1:
        yield from (_scan_one(work, name, wanted) for name in names)
        return
    # Spawned, because the caller may have threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            for job in as_completed([pool.submit(_scan_one, work, name, wanted) for name in names]):
                yield job.result()
        except BrokenProcessPool:
            raise ShardError(
                f"{work.folder.parent}: a process that scans shards was killed, perhaps for memory; give the command "
                "again, with fewer --workers, and it goes on"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A worker of a killed builder would otherwise wait for work for ever."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def _scan_one(work: WorkArea, name: str, wanted: Wanted) -> Noted | ShardError:
    """Errors are returned: one damaged shard among thousands should not hide the next one until tomorrow."""
    place = work.place(name)
    try:
        trusting = wanted.trust_sidecars and isinstance(place, Path) and sidecar(place).is_file()
        found = trusted_scan(place) if trusting and isinstance(place, Path) else scan(place)
        _ask_witnesses(place, found.offsets, wanted)
    except ShardError as error:
        return error
    # Not returned: where one result cannot be written, the next one cannot either.
    _write_sidecar(place, found.offsets, wanted)
    return work.note(name, found)


def _assemble(work: WorkArea, known: Known, found: Sequence[Noted], target: Path, wanted: Wanted) -> list[str]:
    shards = [noted.shard for noted in found]
    _refuse_twins([shard for shard in shards if shard.records])
    unclear: list[str] = []

    def parts() -> Iterator[np.ndarray]:
        for noted in found:
            place, offsets = work.place(noted.shard.name), known.offsets(noted)
            if said := _ask_witnesses(place, offsets, wanted):
                unclear.append(said)
            _write_sidecar(place, offsets, wanted)
            yield offsets

    write_offsets(target, shards, parts())
    # After the offsets, so that a kill in between leaves hashes that do not match: refused, not misread.
    write_manifest(target, SHARDS, work.root, shards, {})
    stamps = {str(work.place(noted.shard.name)): noted.stamp for noted in found if noted.stamp}
    with index_file(target / STAMPS) as file:
        file.write(json.dumps(stamps).encode())
    return unclear


def _remarks(found: Sequence[Noted]) -> Iterator[str]:
    empty = [noted.shard.name for noted in found if not noted.shard.records]
    if empty:
        more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        yield f"{len(empty)} of {len(found)} shards hold no record: {', '.join(empty[:_NAMED])}{more}"
    yield from remarks(total(noted.census for noted in found if noted.census is not None))


def write_offsets(target: Path, shards: Sequence[Shard], parts: Iterable[np.ndarray]) -> None:
    """offsets.npy, one shard's part after the other: never all of it in memory."""
    with index_file(target / OFFSETS) as file:
        shape = (sum(shard.records + 1 for shard in shards),)
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": shape})
        for part in parts:
            file.write(part.astype("<u8", copy=False).tobytes())


def _ask_witnesses(place: Place, offsets: np.ndarray, wanted: Wanted) -> str | None:
    """What lies beside a shard. Asked of known shards too: it may have changed although the shard has not.

    Returns what is to be said of a witness that cannot be understood.
    """
    if not isinstance(place, Path):
        return None
    unclear = check_stats(place, len(offsets) - 1)
    if not wanted.write_sidecars:
        check_sidecar(place, offsets)
    return unclear


def _write_sidecar(place: Place, offsets: np.ndarray, wanted: Wanted) -> None:
    if wanted.write_sidecars and isinstance(place, Path):
        write_sidecar(place, offsets)


def _refuse_twins(full: Sequence[Shard]) -> None:
    if not full:
        raise ShardError("no record in any shard; records are members named like 000123.jpg")
    first: dict[str | tuple[int, str], Shard] = {}
    for shard in full:
        for key in (shard.sha256, (shard.bytes, shard.offsets_sha256)):
            twin = first.setdefault(key, shard) if key else shard
            if twin is not shard and same_content(twin, shard):
                raise ShardError(
                    f"{twin.name} and {shard.name}: the same bytes; their records would count twice, so remove one"
                )
