"""Power cuts: kill -9 keeps what was written and not synced; a power cut does not. The worst disk is rebuilt and read.

A disk remembers a file as it was when it was last synced, and a folder's names as they were when the folder was. Of
what was not synced it may keep nothing, or, if it likes, the new names at once: both are tried after every sync.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from murmuration.accounting.ledger.chain import Ledger
from murmuration.train.storage.checkpoint import Checkpoints, Keep, KeptCheckpoint, Position
from tests.support.checkpoint_world import HEADER, trained
from tests.support.train_helpers import LocalEngine, alone


class Disk:
    """What would be left of the folder `root` if the power went off now."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.folders: set[int] = set()
        self._held: list[int] = []
        self.synced(root)

    def synced(self, path: Path) -> None:
        # Held open, so that no other file gets the same number.
        self._held.append(os.open(path, os.O_RDONLY))
        number = path.stat().st_ino
        if path.is_dir():
            self.folders.add(number)
            self.names[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
            self.folders |= {entry.inode() for entry in os.scandir(path) if entry.is_dir()}
        else:
            self.files[number] = path.read_bytes()

    def rebuild(self, out: Path, eager: bool) -> None:
        """`eager`: names are as they are now, whether their folder was synced or not."""
        shutil.rmtree(out, ignore_errors=True)
        self._rebuild(self.root.stat().st_ino, self.root if eager else None, out)

    def _rebuild(self, number: int, now: Path | None, out: Path) -> None:
        out.mkdir()
        if now is not None:
            found = {entry.name: (entry.inode(), Path(entry.path)) for entry in os.scandir(now)}
        else:
            found = {name: (inode, None) for name, inode in self.names.get(number, {}).items()}
        for name, (inode, path) in found.items():
            if path.is_dir() if path is not None else inode in self.folders:
                self._rebuild(inode, path, out / name)
            else:
                (out / name).write_bytes(self.files.get(inode, b""))  # never synced: empty

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)


@contextmanager
def recorded(disk: Disk, after_each: Callable[[], None]) -> Iterator[None]:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(disk.root):
            disk.synced(path)
            after_each()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def weights_of(checkpoints: Checkpoints, engine: LocalEngine) -> torch.Tensor:
    loaded = checkpoints.latest()
    assert loaded is not None
    return torch.cat([loaded.read("weights", name, 0, p.numel()) for name, p in engine.parameters.items()])


def cut_after_every_sync(tmp_path: Path, checkpoints_of: type[Checkpoints] = Checkpoints) -> int:
    """Three checkpoints, each named by a ledger; how many cuts were looked at."""
    root = tmp_path / "run"
    root.mkdir()
    engines = {step: trained(alone(), steps=step) for step in (1, 2, 3)}
    expected = {step: engine.flats[0].detach().clone() for step, engine in engines.items()}
    disk, cuts = Disk(root), 0

    def look() -> None:
        nonlocal cuts
        for eager in (False, True):
            cuts += 1
            left = tmp_path / "left"
            disk.rebuild(left, eager)
            ledger = Ledger.open(left / "ledger.jsonl") if (left / "ledger.jsonl").exists() else None
            marks = [entry for entry in ledger.entries if entry.kind == "checkpoint"] if ledger else []
            checkpoints = Checkpoints(left / "checkpoints", alone(), Keep())
            checkpoints.recover(
                [KeptCheckpoint(0, mark.fields["step"], mark.fields["digest"]) for mark in reversed(marks)]
            )
            loaded = checkpoints.latest()
            step = loaded.position.step if loaded is not None else 0
            named = marks[-1].fields["step"] if marks else 0
            assert step == named, f"the ledger names step {named}, and the disk holds step {step}"
            if step:
                assert torch.equal(weights_of(checkpoints, engines[1]), expected[step])
            if ledger is not None:
                ledger.close()

    with recorded(disk, look):
        ledger = Ledger.open(root / "ledger.jsonl")
        ledger.append("run")
        checkpoints = checkpoints_of(root / "checkpoints", alone(), Keep(2))
        for step, engine in engines.items():
            checkpoints.begin(Position(0, step), engine, 0, HEADER)
            checkpoints.settle(
                lambda digest, step=step: ledger.append("checkpoint", step=step, digest=digest) and None, {}
            )
    ledger.close()
    disk.close()
    return cuts


def test_a_power_cut_after_any_sync_leaves_what_the_ledger_names(tmp_path: Path) -> None:
    assert cut_after_every_sync(tmp_path) > 40


class Hasty(Checkpoints):
    """Swings the pointer without syncing the folder, as a first version might."""

    def _publish(self, *arguments, **options):
        import murmuration.train.storage.checkpoint as module

        real = module.sync
        module.sync = lambda path: real(path) if path.is_file() else None
        try:
            return super()._publish(*arguments, **options)
        finally:
            module.sync = real


class Careless(Checkpoints):
    """Never syncs a file."""

    def _publish(self, *arguments, **options):
        import murmuration.train.storage.checkpoint as module

        real = module.sync
        module.sync = lambda path: real(path) if path.is_dir() else None
        try:
            return super()._publish(*arguments, **options)
        finally:
            module.sync = real


@pytest.mark.parametrize("fault", [Hasty, Careless])
def test_a_sync_left_away_is_found(tmp_path: Path, fault: type[Checkpoints]) -> None:
    with pytest.raises(Exception, match=r"the ledger names step|damaged|incomplete"):
        cut_after_every_sync(tmp_path, fault)


def test_every_rename_follows_the_sync_of_what_it_names_and_is_synced_before_the_ledger_knows(tmp_path: Path) -> None:
    acts: list[tuple[str, str]] = []
    reals = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        acts.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        reals["fsync"](descriptor)

    def renaming(name: str) -> Callable[..., None]:
        def act(source: str, target: str, **options: int) -> None:
            acts.append((name, f"{source} {target}"))
            reals[name](source, target, **options)

        return act

    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, alone(), Keep())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, renaming(name))
        checkpoints.begin(Position(0, 1), trained(alone()), 0, HEADER)
        checkpoints.settle(lambda digest: acts.append(("ledger", "")), {})
    temporary, final = folder / f".{Position(0, 1).folder}.tmp", folder / Position(0, 1).folder
    assert acts == [
        ("sync", str(tmp_path)),
        ("sync", str(temporary / "piece-00000-of-00001.safetensors")),
        ("sync", str(temporary / "manifest.json")),
        ("sync", str(temporary)),
        ("rename", f"{temporary} {final}"),
        ("sync", str(folder)),
        ("sync", str(folder / ".latest.tmp")),
        ("sync", str(folder)),
        ("ledger", ""),
        ("replace", f"{folder / '.latest.tmp'} {folder / 'latest'}"),
        ("sync", str(folder)),
    ]
