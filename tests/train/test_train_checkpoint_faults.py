"""What a file system refuses, and what lies damaged on it: a sentence with the mend, and the good checkpoint stays."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.ledger.chain import Ledger
from murmuration.train.storage import checkpoint as checkpoint_module
from murmuration.train.storage.checkpoint import (
    FORMAT,
    CheckpointError,
    Checkpoints,
    Keep,
    KeptCheckpoint,
    Loaded,
    Position,
    StorageError,
)
from tests.support.checkpoint_world import HEADER, damage, save, stored, trained
from tests.support.train_helpers import LocalEngine, alone, on_ranks

NOBODY = 65534


def flat(engine: LocalEngine) -> torch.Tensor:
    return engine.flats[0].detach().clone()


def refused_in_a_process(act: Callable[[], None]) -> str:
    """The StorageError's sentence; limits and users of a process cannot be taken back, so it is another one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            text = "nothing was refused"
        except StorageError as error:
            text = str(error)
        except BaseException as error:
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        return answer.read()


def limited(folder: Path, engine: LocalEngine) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    save(folder, engine, 2)


def as_nobody(folder: Path, engine: LocalEngine) -> None:
    if os.getuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
    save(folder, engine, 2)


@pytest.mark.parametrize(("act", "why"), [(limited, "File too large"), (as_nobody, "Permission denied")])
def test_what_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, act: Callable[[Path, LocalEngine], None], why: str
) -> None:
    first, second = trained(alone(), steps=1), trained(alone(), steps=2)
    folder = tmp_path / "checkpoints"
    save(folder, first, 1)
    for part in (tmp_path, *tmp_path.parents):
        if part.stat().st_uid == os.getuid() and part.name.startswith(("test_", "popen-", "pytest-")):
            part.chmod(0o755)  # for nobody's eyes
    folder.chmod(0o555)
    message = refused_in_a_process(lambda: act(folder, second))
    assert why in message and "the checkpoint before it is whole" in message and "free space or fix" in message
    assert str(folder) in message
    folder.chmod(0o755)
    step, weights = stored(Checkpoints(folder, alone(), Keep(9)), first)
    assert step == 1 and torch.equal(weights, flat(first))
    save(folder, second, 2)  # once it was mended
    step, weights = stored(Checkpoints(folder, alone(), Keep(9)), first)
    assert step == 2 and torch.equal(weights, flat(second)) and not list(folder.glob(".*"))


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Callable[[str], None]]:
    """A file system of its own; gives a way to mount it anew with other options."""
    folder.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"file systems may not be mounted here: {done.stderr.strip()}")

    mount(f"size={kilobytes}k")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_and_a_read_only_one(tmp_path: Path) -> None:
    first, second = trained(alone(), steps=1), trained(alone(), steps=2)
    with small_disk(tmp_path / "disk", 64) as mount:
        folder = tmp_path / "disk" / "checkpoints"
        save(folder, first, 1)
        filler = tmp_path / "disk" / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(b"x" * 100_000)
        with pytest.raises(StorageError, match=r"No space left.*the checkpoint before it is whole"):
            save(folder, second, 2)
        assert stored(Checkpoints(folder, alone(), Keep()), first)[0] == 1
        filler.unlink()
        mount("remount,ro")
        with pytest.raises(StorageError, match=r"Read-only file system.*the checkpoint before it is whole"):
            save(folder, second, 2)
        assert torch.equal(stored(Checkpoints(folder, alone(), Keep()), first)[1], flat(first))
        mount("remount,rw")
        save(folder, second, 2)
        assert torch.equal(stored(Checkpoints(folder, alone(), Keep()), first)[1], flat(second))


def test_an_error_of_one_ranks_writer_reaches_every_rank_and_the_ledger_names_nothing(tmp_path: Path) -> None:
    named: list[str] = []

    def act(ranks: Any) -> str:
        engine = trained(ranks)
        first = Checkpoints(tmp_path, ranks, Keep())
        first.save(Position(0, 1), engine, 0, HEADER)
        checkpoints = Obstructed(tmp_path, ranks, Keep())
        checkpoints.begin(Position(0, 2), engine, 0, HEADER)
        with pytest.raises(StorageError) as refused:
            checkpoints.settle(named.append, {})
        loaded = checkpoints.latest()
        assert loaded is not None and loaded.position.step == 1
        first.save(Position(0, 2), engine, 0, HEADER)  # once it was mended
        return str(refused.value)

    messages = on_ranks(2, act)
    assert messages[0] == messages[1] and "piece-00001-of-00002.safetensors could not be written" in messages[0]
    assert not named and not list(tmp_path.glob(".*"))


class Obstructed(Checkpoints):
    """A folder lies where rank 1 would write."""

    def _fresh(self, temporary: Path) -> None:
        super()._fresh(temporary)
        (temporary / "piece-00001-of-00002.safetensors").mkdir()


def test_weights_may_change_while_they_are_written(tmp_path: Path) -> None:
    engine = trained(alone())
    expected = flat(engine)
    checkpoints = Checkpoints(tmp_path, alone(), Keep())
    checkpoints.begin(Position(0, 2), engine, 0, HEADER)
    with torch.no_grad():
        engine.flats[0].zero_()
        for tensor in engine.shards()[0].state.values():
            tensor.zero_()
    checkpoints.settle(lambda digest: None, {})
    assert torch.equal(stored(checkpoints, engine)[1], expected)
    loaded = checkpoints.latest()
    assert loaded is not None and bool(loaded.whole("exp_avg_sq", "first.weight").any())


def test_the_ledger_names_a_checkpoint_before_the_pointer_does_and_a_kill_between_is_mended(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    engine = trained(alone())
    save(tmp_path, engine, 1)
    named: list[str] = []

    def mark(digest: str) -> None:
        named.append(digest)
        assert stored(Checkpoints(tmp_path, alone(), Keep()), engine)[0] == 1
        raise Killed

    checkpoints = Checkpoints(tmp_path, alone(), Keep())
    for step in (2, 3):
        checkpoints.begin(Position(0, step), engine, 0, HEADER)
        with pytest.raises(Killed):
            checkpoints.settle(mark, {})
        # The ledger's line may or may not have reached the disk.
        Checkpoints(tmp_path, alone(), Keep()).recover([KeptCheckpoint(0, step, named[-1] if step == 3 else "another")])
        assert stored(Checkpoints(tmp_path, alone(), Keep()), engine)[0] == (1 if step == 2 else 3)
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_a_damaged_piece_is_named_and_the_one_before_can_be_gone_on_from(tmp_path: Path, how: str) -> None:
    def write(ranks: Any) -> None:
        for step in (1, 2, 3):
            checkpoints = Checkpoints(tmp_path, ranks, Keep(3))
            checkpoints.save(Position(0, step), trained(ranks, steps=step), 0, HEADER)

    on_ranks(2, write)
    for step in (2, 3):
        damage(tmp_path / Position(0, step).folder / "piece-00001-of-00002.safetensors", how)

    def read(ranks: Any) -> int:
        checkpoints = Checkpoints(tmp_path, ranks, Keep(3))
        with pytest.raises(
            CheckpointError, match=r"step00000003/piece-00001-of-00002.safetensors is (missing or )?dam"
        ):
            checkpoints.latest()
        position = checkpoints.fall_back().position
        loaded = checkpoints.latest()  # the pointer follows
        assert loaded is not None and loaded.position == position
        return position.step

    assert on_ranks(2, read) == [1, 1], "whoever hashed the damaged piece, all ranks learn of it"
    aside = sorted(path.name for path in tmp_path.glob("damaged-*"))
    assert aside == [f"damaged-{Position(0, step).folder}" for step in (2, 3)], "nothing is thrown away unasked"
    for path in (tmp_path / Position(0, 1).folder).glob("piece*"):
        damage(path, how)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole; restore one"):
        Checkpoints(tmp_path, alone(), Keep(3)).fall_back()


def test_a_pointer_of_before_lists_itself_alone_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    engine = trained(alone())
    save(tmp_path, engine, 1)
    pointer = tmp_path / "latest"
    named = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({"folder": named["folder"], "manifest_sha256": named["manifest_sha256"]}))
    assert stored(Checkpoints(tmp_path, alone(), Keep()), engine)[0] == 1
    place, huge = "phase00-step00000001", "1" + "0" * 400
    for text in (
        "", "{}", "[]", "3", '{"folder": "../../x", "manifest_sha256": "0"}', '{"folder": 3}', "[" * 50_000, "9" * 5000,
        f'{{"folder": "{place}", "manifest_sha256": 7}}', f'{{"folder": "{place}-x", "manifest_sha256": "0"}}',
        f'{{"folder": "{place}", "manifest_sha256": "0", "public": [1]}}',
        f'{{"folder": "{place}", "manifest_sha256": "0", "public": {{"x": {huge}}}}}',
        f'{{"folder": "{place}", "manifest_sha256": "0", "before": 3}}', f'{{"folder": "phase00-step{huge}"}}',
        f'{{"folder": "phase00-step00000002", "folder": "{place}", "manifest_sha256": "0"}}',
        f'{{"folder": "{place}", "manifest_sha256": "0", "public": {{"x": NaN}}}}',
    ):  # fmt: skip
        pointer.write_text(text)
        with pytest.raises(CheckpointError, match=r"latest is damaged .*restore it"):
            Checkpoints(tmp_path, alone(), Keep()).latest()


MANIFEST = {
    "format": FORMAT, "phase": 0, "step": 1, "optimizer_step": 1, "shapes": {"w": [2]}, "pieces": {},
    "ledger": {"length": 3, "head": "f"},
}  # fmt: skip
WRONG: list[dict[str, Any]] = [
    {"format": 3}, {"format": None}, {"phase": "0"}, {"step": -1}, {"step": True}, {"optimizer_step": 1.5},
    {"step": 10**4000}, {"shapes": []}, {"shapes": {"w": 2}}, {"shapes": {"w": ["2"]}}, {"shapes": {"w": [1 << 60]}},
    {"pieces": ["a"]}, {"pieces": {"../a": "0"}}, {"pieces": {"/etc/passwd": "0"}}, {"pieces": {"a": 3}},
    {"ledger": None}, {"ledger": {"length": "3", "head": "f"}}, {"ledger": {"length": 3}}, {"objective": []},
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"null", b"\xff", b"[" * 50_000, b'{"format": ' + b"9" * 5000 + b"}",
        json.dumps(MANIFEST)[:-1].encode() + b', "step": 2}', json.dumps(MANIFEST)[:-1].encode() + b', "x": 1e999}',
        *(json.dumps(MANIFEST | wrong).encode() for wrong in WRONG),
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_wrong_types_is_damaged_and_no_traceback(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError) as refused:
        Loaded.open(tmp_path, hashlib.sha256(text).hexdigest())
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)
    assert "it is damaged" in str(refused.value) or "has format" in str(refused.value)


def test_a_manifest_that_promises_more_than_its_pieces_hold_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    text = json.dumps(MANIFEST | {"shapes": {"w": [1 << 30, 1 << 20]}}).encode()
    (tmp_path / "manifest.json").write_bytes(text)
    loaded = Loaded.open(tmp_path, hashlib.sha256(text).hexdigest())
    with pytest.raises(CheckpointError, match=f"has 0 of {1 << 50} elements of w"):
        loaded.weights()


def test_a_next_pointer_that_a_kill_tore_is_dropped(tmp_path: Path) -> None:
    engine = trained(alone())
    save(tmp_path, engine, 2)
    checkpoints = Checkpoints(tmp_path, alone(), Keep())
    for torn in (b"", b'{"folder": "phase00-st'):
        checkpoints.next_pointer.write_bytes(torn)
        checkpoints.recover([KeptCheckpoint(0, 2, "what the ledger names")])
        assert not checkpoints.next_pointer.exists() and stored(checkpoints, engine)[0] == 2


# Power cuts: kill -9 keeps what was written and not synced; a power cut does not. The worst disk is rebuilt and read.
#
# A disk remembers a file as it was when it was last synced, and a folder's names as they were when the folder was. Of
# what was not synced it may keep nothing, or, if it likes, the new names at once: both are tried after every sync.


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
        ledger.append(ledger.next("run"))
        checkpoints = checkpoints_of(root / "checkpoints", alone(), Keep(2))
        for step, engine in engines.items():
            checkpoints.begin(Position(0, step), engine, 0, HEADER)
            checkpoints.settle(
                lambda digest, step=step: ledger.append(ledger.next("checkpoint", step=step, digest=digest)), {}
            )
    ledger.close()
    disk.close()
    return cuts


def test_a_power_cut_after_any_sync_leaves_what_the_ledger_names(tmp_path: Path) -> None:
    assert cut_after_every_sync(tmp_path) > 40


@pytest.mark.parametrize("synced", [Path.is_file, Path.is_dir], ids=["no folder", "no file"])
def test_a_sync_left_away_is_found(tmp_path: Path, synced: Callable[[Path], bool]) -> None:
    """As a first version might, which swings the pointer without syncing the folder, or never syncs a file."""

    class Careless(Checkpoints):
        def _publish(self, *arguments: Any, **options: Any) -> str:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint_module, "sync", lambda path: real(path) if synced(path) else None)
                return super()._publish(*arguments, **options)

    real = checkpoint_module.sync
    with pytest.raises(Exception, match=r"the ledger names step|damaged|incomplete"):
        cut_after_every_sync(tmp_path, Careless)


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
