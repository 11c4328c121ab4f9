"""Checkpoints of our own: pieces through the shard map, whole or absent, readable at any world size.

Every rank copies its shards into host memory, and training continues while a thread writes them into a temporary
folder. `settle` then waits for all ranks; the main rank writes the manifest with the pieces' hashes, renames the
folder, writes the new pointer aside, lets the ledger name the checkpoint, and swings the pointer. A kill at any moment
leaves the previous checkpoint whole. No thread talks to other ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from murmuration.accounting.durable import remedy, sync
from murmuration.accounting.errors import RunError
from murmuration.accounting.escaping import first_line
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import parse
from murmuration.train.distributed.ranks import Ranks, on_all, raised_on_all_ranks
from murmuration.train.engines.base import Engine
from murmuration.train.storage.checkpoint_read import FIXED, FORMAT, WEIGHTS, CheckpointError, Loaded, Position, hash_of
from murmuration.train.storage.run_dir import PublicTimes, RunDir

# Which checkpoints stay: the pointer lists them in the order of writing, and retention chooses from that list.
#
# Names say nothing about order: after a rollback, an abandoned checkpoint may have a later step than the newest one.


__all__ = ["FORMAT", "CheckpointError", "Checkpoints", "Keep", "KeptCheckpoint", "Loaded", "Position", "StorageError"]
DAMAGED = "damaged-"


class PointerError(CheckpointError):
    """The pointer is damaged: its bytes can be read, but are not what was written."""


@dataclass(frozen=True)
class KeptCheckpoint:
    """A durable checkpoint, and what was measured on public records with its weights."""

    phase: int
    step: int
    manifest_sha256: str
    public: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return Position(self.phase, self.step).folder


@dataclass(frozen=True)
class Keep:
    last: int = 2
    every: int | None = None
    best: str | None = None

    def chosen(self, entries: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Chooses from all checkpoints (newest first): the `last` most recent, those at multiples of `every`, and each
        phase's best."""
        stay = {entry.folder for entry in entries[: self.last]}
        if self.every is not None:
            stay |= {entry.folder for entry in entries if entry.step and entry.step % self.every == 0}
        stay |= {entry.folder for entry in self.best_of(entries).values()}
        return [entry for entry in entries if entry.folder in stay]

    def best_of(self, entries: Sequence[KeptCheckpoint]) -> dict[int, KeptCheckpoint]:
        """Each phase's best checkpoint: the smallest loss, or the largest value of any other metric; of equals the
        newest."""
        if self.best is None:
            return {}
        sign = 1 if "loss" in self.best else -1
        found: dict[int, KeptCheckpoint] = {}
        for entry in entries:
            if not math.isfinite(entry.public.get(self.best, math.nan)):
                continue
            other = found.get(entry.phase)
            if other is None or sign * entry.public[self.best] < sign * other.public[self.best]:
                found[entry.phase] = entry
        return found


def read_pointer(path: Path) -> list[KeptCheckpoint]:
    """The checkpoints that the pointer lists, newest first; empty if nothing was ever saved."""
    if not path.exists():
        return []
    try:
        named = parse(path.read_bytes())
        return [_entry(each) for each in [named, *named.get("before", [])]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); repair the disk or the permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PointerError(
            f"{path} is damaged ({first_line(error)}); restore it, or start the training command again, which rebuilds "
            "it from the ledger"
        ) from None


def pointer_text(entries: Sequence[KeptCheckpoint]) -> bytes:
    """The pointer's content. Measurements that are not finite are left out: JSON cannot express them."""
    newest, *before = (
        {
            "folder": entry.folder,
            "manifest_sha256": entry.manifest_sha256,
            "public": {name: value for name, value in entry.public.items() if math.isfinite(value)},
        }
        for entry in entries
    )
    return (json.dumps({**newest, "before": before}, indent=1) + "\n").encode()


def _place_of(folder: str) -> tuple[int, int] | None:
    """Phase and step of a checkpoint's folder; None for other names, such as a copy that somebody made."""
    found = re.fullmatch(r"phase(\d{2,4})-step(\d{8,15})", folder, re.ASCII)
    return None if found is None else (int(found[1]), int(found[2]))


def _entry(named: dict[str, Any]) -> KeptCheckpoint:
    folder, digest, public = named["folder"], named["manifest_sha256"], named.get("public", {})
    place = _place_of(folder)
    if place is None or not isinstance(digest, str):
        raise ValueError(f"it names no checkpoint but {str(folder)[:80]!r}")
    return KeptCheckpoint(*place, digest, {str(name): float(value) for name, value in public.items()})


class StorageError(OSError):
    """A checkpoint could not be written; the previous one is whole."""


@dataclass(frozen=True)
class Pending:
    """A checkpoint on its way to the disk. `piece` is the name and hash of this rank's piece once it is written, None
    if the rank writes none; `written` is the manifest's digest if the checkpoint is on the disk already."""

    position: Position
    temporary: Path
    piece: Future[tuple[str, str]] | None
    manifest: dict[str, Any]
    written: str | None


class Checkpoints:
    def __init__(self, folder: Path, ranks: Ranks, keep: Keep) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep
        self.times = PublicTimes()
        self.pending: Pending | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    @property
    def pointer(self) -> Path:
        return self.folder / "latest"

    @property
    def next_pointer(self) -> Path:
        return self.folder / ".latest.tmp"

    def save(
        self, position: Position, engine: Engine, ranks_per_copy: int, header: dict[str, Any],
        mark: Callable[[str], None] = lambda digest: None,
    ) -> str:  # fmt: skip
        """Saves a checkpoint and returns its manifest's digest; the checkpoint is durable when it returns."""
        self.begin(position, engine, ranks_per_copy, header)
        return self.settle(mark, {})

    def begin(self, position: Position, engine: Engine, ranks_per_copy: int, header: dict[str, Any]) -> None:
        """Copies what is to be saved; weights may change as soon as this returns. A position is written once."""
        assert self.pending is None, "one checkpoint at a time"
        temporary = self.folder / f".{position.folder}.tmp"
        written = self.ranks.on_main(lambda: self._written(position))
        if written is not None:
            self.pending = Pending(position, temporary, None, {}, written)
            return
        whole = engine.whole_weights()
        self.ranks.on_main(lambda: self._fresh(temporary))
        manifest = {
            "format": FORMAT,
            "phase": position.phase,
            "step": position.step,
            "optimizer_step": engine.optimizer_step(),
            "shapes": {name: list(tensor.shape) for name, tensor in whole.items()},
            **header,
        }
        piece = None
        if self.ranks.rank < (ranks_per_copy or self.ranks.world):  # those of the first copy
            tensors = _tensors_of(engine, whole if self.ranks.main else None)
            name = f"piece-{self.ranks.rank:05d}-of-{self.ranks.world:05d}.safetensors"
            piece = self._writer.submit(_write, temporary / name, tensors)
        self.pending = Pending(position, temporary, piece, manifest, None)

    def settle(self, mark: Callable[[str], None], public: dict[str, float]) -> str:
        """Waits until all ranks have written; the checkpoint is durable and named by the pointer when it returns.

        `mark` lets the ledger name the checkpoint before anything depends on it; `public` decides which checkpoint is
        the best.
        """
        pending, self.pending = self.pending, None
        assert pending is not None, "nothing was begun"
        if pending.written is not None:
            digest = pending.written
            self.ranks.on_main(lambda: mark(digest))
            return digest
        # The piece's name and hash, or its exception, which is not raised here because the other ranks would wait. A
        # kill is no Exception.
        try:
            outcome = pending.piece.result() if pending.piece is not None else None
        except Exception as error:
            outcome = error
        outcomes = self.ranks.gather(outcome)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            self.ranks.on_main(lambda: shutil.rmtree(pending.temporary, ignore_errors=True))
            raise raised_on_all_ranks(errors[0])
        manifest = pending.manifest | {"pieces": dict(outcome for outcome in outcomes if outcome)}
        return self.ranks.on_main(lambda: self._publish(pending, manifest, mark, public))

    def _written(self, position: Position) -> str | None:
        newest = next(iter(read_pointer(self.pointer)), None)
        return newest.manifest_sha256 if newest is not None and newest.folder == position.folder else None

    def _fresh(self, temporary: Path) -> None:
        with _explained(temporary):
            if not self.folder.exists():
                self.folder.mkdir(parents=True)
                sync(self.folder.parent)
            self._drop_torn()
            temporary.mkdir()

    def _publish(
        self, pending: Pending, manifest: dict[str, Any], mark: Callable[[str], None], public: dict[str, float]
    ) -> str:
        text = json.dumps(manifest, indent=2, sort_keys=True).encode()
        digest = hashlib.sha256(text).hexdigest()
        known = read_pointer(self.pointer)
        position = pending.position
        entries = [KeptCheckpoint(position.phase, position.step, digest, public)]
        entries += [entry for entry in known if entry.folder != position.folder]
        self.times.advance()
        with _explained(pending.temporary):
            _durably(pending.temporary / "manifest.json", text)
            self.times.stamp_all(pending.temporary)
            sync(pending.temporary)
            final = self.folder / position.folder
            if final.exists():  # left by a kill before the pointer swung, or by a rollback: nothing continues from it
                shutil.rmtree(final)
            pending.temporary.rename(final)
            sync(self.folder)
            _durably(self.next_pointer, pointer_text(self.keep.chosen(entries)))
            sync(self.folder)
        mark(digest)
        with _explained(self.pointer):
            self._swing()
            self._retire()
            self.times.stamp(self.pointer, self.folder)
        return digest

    def _swing(self) -> None:
        self.next_pointer.replace(self.pointer)
        sync(self.folder)

    def _retire(self) -> None:
        kept = {entry.folder for entry in read_pointer(self.pointer)}
        for old in self.folder.glob("phase*"):
            if old.name not in kept and _place_of(old.name) is not None:
                shutil.rmtree(old)

    def recover(
        self, named: Sequence[KeptCheckpoint], measured: Callable[[KeptCheckpoint], dict[str, float]] = lambda entry: {}
    ) -> str | None:
        """On the main rank, before anything is read: swings a pointer whose checkpoint the ledger already names.

        `named` are the checkpoints that the ledger names, newest first. A pointer that is lost, damaged or older than
        those is rebuilt from them, with what was `measured` on public records; the reason is returned.
        Everything else that a kill left is removed before its steps are made again: on other ranks they round
        differently, and the two results would have the same noise.
        """
        if self.next_pointer.exists():
            try:
                ready = bool(named) and read_pointer(self.next_pointer)[0].manifest_sha256 == named[0].manifest_sha256
            except CheckpointError:  # torn by a kill, so the ledger cannot have named it
                ready = False
            self._swing() if ready else self.next_pointer.unlink()
        self._drop_torn()
        reason = self._useless(named)
        if reason is not None:
            with _explained(self.pointer):
                self._rebuild(named, measured)
        self._retire()
        return reason

    def _useless(self, named: Sequence[KeptCheckpoint]) -> str | None:
        """Why the pointer cannot be followed; None if it can."""
        try:
            entries = read_pointer(self.pointer)
        except PointerError:
            return f"{self.pointer} is damaged"
        if not named:
            return None
        if not entries:
            return f"{self.pointer} is lost"
        older = entries[0].manifest_sha256 in {entry.manifest_sha256 for entry in named[1:]}
        if older and entries[0].manifest_sha256 != named[0].manifest_sha256 and self._as_written(named[0]):
            return f"{self.pointer} names an older checkpoint than the ledger"
        return None

    def _as_written(self, entry: KeptCheckpoint) -> bool:
        try:
            content = (self.folder / entry.folder / "manifest.json").read_bytes()
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == entry.manifest_sha256

    def _rebuild(self, named: Sequence[KeptCheckpoint], measured: Callable[[KeptCheckpoint], dict[str, float]]) -> None:
        """Rebuilds the pointer. The newest checkpoint stays the newest, whole or not: whether an older one may take its
        place is not decided here."""
        if not named:
            self.pointer.unlink()
            return
        found: dict[str, KeptCheckpoint] = {}
        for entry in named:
            if entry.folder not in found and (entry is named[0] or self._as_written(entry)):
                found[entry.folder] = replace(entry, public=measured(entry))
        _durably(self.next_pointer, pointer_text(list(found.values())))
        self._swing()

    def _drop_torn(self) -> None:
        for orphan in self.folder.glob(".*.tmp"):  # folders, and a pointer that was never swung
            shutil.rmtree(orphan) if orphan.is_dir() else orphan.unlink()

    def latest(self) -> Loaded | None:
        """The checkpoint that the pointer names, each byte hashed by some rank; None if nothing was ever saved."""
        entries = read_pointer(self.pointer)
        return self._opened(entries[0]) if entries else None

    def _opened(self, entry: KeptCheckpoint) -> Loaded:
        folder, share = self.folder / entry.folder, (self.ranks.rank, self.ranks.world)
        return on_all(self.ranks, lambda: Loaded.open(folder, entry.manifest_sha256, share), CheckpointError)

    def fall_back(self) -> Loaded:
        """The newest checkpoint that is whole. The pointer swings to it; damaged ones are kept under another name."""
        entries = read_pointer(self.pointer)
        for number, entry in enumerate(entries):
            try:
                found = self._opened(entry)
            except CheckpointError:
                continue
            self.ranks.on_main(lambda number=number: self._abandon(entries[:number], entries[number:]))
            return found
        raise raised_on_all_ranks(
            CheckpointError(f"no checkpoint in {self.folder} is whole; restore one or start a new run")
        )

    def _abandon(self, damaged: Sequence[KeptCheckpoint], kept: Sequence[KeptCheckpoint]) -> None:
        _durably(self.next_pointer, pointer_text(kept))
        self._swing()
        for entry in damaged:
            aside = self.folder / f"{DAMAGED}{entry.folder}"
            if (self.folder / entry.folder).exists() and not aside.exists():
                (self.folder / entry.folder).rename(aside)

    @staticmethod
    def listed(folder: Path) -> list[KeptCheckpoint]:
        """The checkpoints that the pointer lists, newest first."""
        return read_pointer(folder / "latest")

    @staticmethod
    def newest(folder: Path) -> Loaded | None:
        """The checkpoint that the pointer names, checked; None if nothing was ever saved."""
        entries = Checkpoints.listed(folder)
        return Loaded.open(folder / entries[0].folder, entries[0].manifest_sha256) if entries else None


def _tensors_of(engine: Engine, whole: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Copies of this rank's shards, and of the tensors in `whole` that are not trained."""
    tensors: dict[str, Tensor] = {}
    for shard in engine.shards():
        for fragment in shard.fragments:
            for kind, tensor in {WEIGHTS: shard.weights.detach(), **shard.state}.items():
                piece = fragment.of(tensor).detach().cpu().clone()
                tensors[f"{kind}|{fragment.name}|{fragment.start}"] = piece
    for name, tensor in (whole or {}).items():
        if name not in engine.shapes:
            tensors[f"{FIXED}|{name}|0"] = tensor.detach().cpu().reshape(-1).float().clone()
    return tensors


def _write(path: Path, tensors: dict[str, Tensor]) -> tuple[str, str]:
    with _explained(path):
        save_file(tensors, str(path))
        sync(path)
        return path.name, hash_of(path)


def _durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns a file system's error into one sentence with its fix."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        found = error if isinstance(error, OSError) else OSError(str(error))
        raise StorageError(
            f"{path} could not be written ({found.strerror or found}); the checkpoint before it is whole: "
            f"{remedy(found)}, then start the same command again"
        ) from None


class NoBestError(RunError, ValueError):
    """No checkpoint of this run is its best one."""


def best_checkpoint(run_dir: RunDir) -> Loaded:
    history = History.read(run_dir.ledger)[0]
    if not history.choices:
        raise NoBestError("the run kept no best checkpoint, since run.keep_best was not set; take the last one")
    found = Keep(best=history.choices[-1]).best_of(Checkpoints.listed(run_dir.checkpoints))
    if not found:
        raise NoBestError(f"no checkpoint has a public metric {history.choices[-1]!r}; take the last one")
    entry = found[max(found)]
    if entry.manifest_sha256 not in {mark.digest for mark in history.checkpoints}:
        raise CheckpointError(f"the ledger does not know {entry.folder}; take the last one")
    return Loaded.open(run_dir.checkpoints / entry.folder, entry.manifest_sha256)
