"""Building an index: killed at any moment it goes on, scans nothing twice, and comes out bitwise the same."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.build import WorkArea
from murmuration.data.index.scan import scan, settled
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.store.place import ShardError
from murmuration.launch.prepare import main

ROOT = Path(__file__).resolve().parents[2]
PREPARE = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index"]
SHARDS = 200


def _files(index: Path) -> tuple[bytes, bytes]:
    return (index / "offsets.npy").read_bytes(), (index / "manifest.json").read_bytes()


def _scanned(output: str) -> int:
    found = re.search(r"scanned (\d+) shards, (\d+) were known", output)
    assert found, output
    return int(found[1])


class _Counts:
    """Stands in the place of the progress bar: the first report says what was known."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.reports.append((done, total))

    @property
    def scanned(self) -> int:
        return self.reports[-1][1] - self.reports[0][0]


@pytest.fixture
def many(tmp_path: Path, write_tar: Callable[..., Path]) -> Path:
    """Large enough that a kill lands in the middle, small enough to write in a moment."""
    folder = tmp_path / "many"
    for shard in range(SHARDS):
        records = ({"__key__": f"{shard:04d}{i:04d}", "jpg": b"x" * 50 * i, "txt": b"x"} for i in range(5))
        write_tar(folder / f"{shard:06d}.tar", records)
    time.sleep(0.1)  # older than the resolution of time stamps
    return folder


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_again_and_again_it_goes_on_and_comes_out_the_same(many: Path, tmp_path: Path, workers: str) -> None:
    undisturbed = build(many, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    command = [*PREPARE, str(many), "--out", str(out), "--workers", workers]
    chance = random.Random(workers)
    noted: dict[str, int] = {}
    kills = lost = 0
    while kills < 3:
        wanted = len(noted) + chance.randint(1, SHARDS // 8)
        # A group of its own, to see whether workers outlive their killed parent.
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while len(_complete(out)) < wanted and job.poll() is None:
            time.sleep(0.002)
        job.send_signal(signal.SIGKILL)
        if job.wait() == 0 or (out / "manifest.json").exists():  # a busy machine: it was done before we came to look
            lost += 1
            assert lost < 10, "it never was killed in the middle"
            shutil.rmtree(out)
            noted, kills = {}, 0
            continue
        for _ in range(2_000):
            if not _alive(job.pid):
                break
            time.sleep(0.005)
        assert not _alive(job.pid), "worker processes outlived their parent"
        now = _complete(out)
        assert noted.items() <= now.items(), "a finished shard was scanned again"
        assert len(now) > len(noted) and not (out / "manifest.json").exists()
        noted = now
        kills += 1
        with pytest.raises(ShardError, match=r"launch/prepare\.py index"):
            ShardIndex.open(out)
    assert len(noted) < SHARDS
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert _scanned(done.stdout) == SHARDS - len(noted) and str(undisturbed.manifest_digest) in done.stdout
    assert _files(out) == _files(undisturbed.folder)
    assert not (out / ".work").exists()


def _complete(out: Path) -> dict[str, int]:
    """Noted shards and when each was written; half-written ones are hidden files."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # not yet made, or removed at the end
        for path in (out / ".work").iterdir():
            if not path.name.startswith("."):
                found[path.name] = path.stat().st_mtime_ns
    return found


def test_a_killed_builder_leaves_nothing_for_ever(small_set: ShardIndex, tmp_path: Path) -> None:
    shards, out = small_set.folder.parent, tmp_path / "out"
    command = ["index", str(shards), "--out", str(out), "--unit", "key:(.)"]
    for name in ("offsets.npy", "manifest.json", "stamps.json", "unit_digests.npy", "unit_of.npy", "units.json"):
        child = get_context("fork").Process(target=_killed_in, args=(name, command))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL and [each for each in out.rglob("*.tmp") if name in each.name]
    assert main(command) == 0
    names = {path.name for path in out.rglob("*")}
    assert not [name for name in names if name.endswith(".tmp") or name.startswith(".")], names
    assert _files(out) == _files(small_set.folder)


def _killed_in(name: str, command: list[str]) -> None:
    """The command, in a process that is killed as it makes this file durable."""
    really = os.fsync

    def fsync(descriptor: int) -> None:
        if f".{name}." in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.kill(os.getpid(), signal.SIGKILL)
        really(descriptor)

    os.fsync = fsync
    main(command)


@pytest.mark.parametrize("kind", ["shards", "images"])
@pytest.mark.parametrize("private", ["", "file", "folder"])
def test_an_index_is_for_those_who_can_read_the_records(
    write_tar: Callable[..., Path], picture: Callable[..., bytes], kind: str, private: str, capsys
) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed
        source, out = Path(name) / "source", Path(name) / "out"
        Path(name).chmod(0o755)
        source.mkdir()
        for each in "ab":
            if kind == "shards":
                write_tar(source / f"{each}.tar", [{"__key__": each, "jpg": picture(ord(each))}])
            else:
                (source / f"{each}.jpg").write_bytes(picture(ord(each)))
        if private:
            (source if private == "folder" else next(source.iterdir())).chmod(0o700)
        assert main(["index", str(source), "--out", str(out)]) == 0
        own = "salt.key", "census.json"  # always
        modes = {path.stat().st_mode & 0o777 for path in out.iterdir() if path.name not in own}
        assert (out.stat().st_mode & 0o777, modes) == ((0o700, {0o600}) if private else (0o755, {0o644}))
        assert ("only you can read the index" in capsys.readouterr().out) == bool(private)


def test_only_new_and_changed_shards_are_scanned(small_set: ShardIndex, write_tar: Callable[..., Path]) -> None:
    folder = small_set.folder.parent
    time.sleep(0.1)
    counts = _Counts()
    build(folder, progress=counts)  # the fixture's index was made too soon after the shards to be trusted
    before = _files(small_set.folder)

    counts = _Counts()
    assert build(folder, progress=counts).manifest_digest == small_set.manifest_digest
    assert counts.scanned == 0 and _files(small_set.folder) == before

    # In front and in the middle: every id after it moves, none may point at the wrong shard.
    for name in ("0.tar", "000001b.tar"):
        key = name.removesuffix(".tar")
        write_tar(folder / name, [{"__key__": f"{key}-{i}", "txt": f"{name} {i}".encode()} for i in range(4)])
    time.sleep(0.1)
    counts = _Counts()
    grown = build(folder, progress=counts)
    assert counts.scanned == 2 and grown.records == 33
    assert _files(grown.folder) == _files(build(folder, grown.folder.with_name("fresh")).folder)
    texts = [ShardReader(grown).read(record)["txt"].decode() for record in range(33)]
    assert texts[:5] == [*(f"0.tar {i}" for i in range(4)), "a red 0"]
    assert texts[14:20] == ["a red 10", *(f"000001b.tar {i}" for i in range(4)), "a red 11"] and texts[-1] == "a red 24"

    changed = folder / "000001.tar"
    write_tar(changed, [{"__key__": f"new{i}", "txt": b"new"} for i in range(3)])
    os.utime(folder / "000002.tar")  # touched, not changed: scanned again, with the same result
    time.sleep(0.1)
    counts = _Counts()
    after = build(folder, progress=counts)
    assert counts.scanned == 2 and after.records == 35
    assert [shard for shard in after.shards if shard.name != changed.name] == [
        shard for shard in grown.shards if shard.name != changed.name
    ]
    (folder / "000002.tar").unlink()
    counts = _Counts()
    assert build(folder, progress=counts).records == 21 and counts.scanned == 0


def test_same_size_and_mtime_do_not_hide_a_change(small_set: ShardIndex) -> None:
    """What rsync and cp --preserve leave behind: only ctime tells."""
    folder = small_set.folder.parent
    time.sleep(0.1)
    build(folder)
    path = folder / "000002.tar"
    old, raw = path.stat(), bytearray(path.read_bytes())
    raw[raw.index(b"a red 12") + 6] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    counts = _Counts()
    assert build(folder, progress=counts).manifest_digest != small_set.manifest_digest
    assert counts.scanned == 1


def test_a_shard_written_a_moment_ago_is_not_trusted(small_set: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes within the resolution of a time stamp look like one."""
    stat = (small_set.folder.parent / "000001.tar").stat()
    latest = max(stat.st_mtime_ns, stat.st_ctime_ns)
    assert not settled(stat, latest) and not settled(stat, latest + 1_000_000) and settled(stat, latest + 3_000_000_000)
    path = small_set.folder.parent / "000001.tar"
    for age, trusted in ((0, False), (1_000_000, False), (3_000_000_000, True)):
        monkeypatch.setattr("murmuration.data.index.scan.time.time_ns", lambda age=age: latest + age)
        assert (scan(path).stamp is not None) == trusted


def test_a_damaged_note_is_no_note(small_set: ShardIndex, tmp_path: Path) -> None:
    area = WorkArea(tmp_path / "work", small_set.folder.parent)
    found = scan(small_set.folder.parent / "000002.tar")
    noted = area.note("000002.tar", found)
    read = area.read("000002.tar")
    assert read is not None and read[0] == noted and (read[1] == found.offsets).all()
    (path,) = area.folder.iterdir()
    right = path.read_bytes()
    for wrong in (right[:-1], right[:-8] + b"\1" * 8, b"{}\n", b"", right.replace(b"000002.tar", b"000001.tar")):
        path.write_bytes(wrong)
        assert area.read("000002.tar") is None
    path.write_bytes(right)
    assert area.read("000002.tar") is not None and area.read("000001.tar") is None


def test_rescan_trusts_nothing(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    time.sleep(0.1)
    build(folder)
    before = _files(small_set.folder)
    for rescan, scanned in ((False, 0), (True, 3)):
        counts = _Counts()
        build(folder, progress=counts, wanted=Wanted(rescan=rescan))
        assert counts.scanned == scanned and _files(small_set.folder) == before


def test_damaged_notes_and_a_damaged_old_index_are_scanned_again(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    time.sleep(0.1)
    build(folder)
    before = _files(small_set.folder)
    offsets = bytearray(before[0])
    offsets[-1] ^= 1  # the last shard's part
    (small_set.folder / "offsets.npy").write_bytes(offsets)
    counts = _Counts()
    build(folder, progress=counts)
    assert counts.scanned == 1 and _files(small_set.folder) == before
    (small_set.folder / "manifest.json").write_text("{")
    counts = _Counts()
    build(folder, progress=counts)
    assert counts.scanned == 3 and _files(small_set.folder) == before


def test_a_refused_shard_does_not_waste_the_others(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    shutil.rmtree(small_set.folder)
    good = (folder / "000001.tar").read_bytes()
    for name in ("000000.tar", "000001.tar"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-9_000])
    time.sleep(0.1)
    with pytest.raises(ShardError, match=r"000000\.tar: .*\(1 more shards were refused as well\)"):
        build(folder)
    (folder / "000000.tar").unlink()
    (folder / "000001.tar").write_bytes(good)
    counts = _Counts()
    assert build(folder, progress=counts).records == 15
    assert counts.scanned == 1, "the good shard was kept"


def test_two_builders_do_not_mix(many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*PREPARE, str(many), "--out", str(out), "--workers", "1"]
    for _ in range(10):  # a job that is over before it is seen to have begun is begun anew
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not _complete(out) and job.poll() is None:
            time.sleep(0.002)
        job.send_signal(signal.SIGSTOP)
        if job.poll() is None and not (out / "manifest.json").exists():
            break
        job.send_signal(signal.SIGCONT)
        job.wait()
        shutil.rmtree(out)
    try:
        with pytest.raises(ShardError, match=r"another prepare\.py"):
            build(many, out)
    finally:
        job.send_signal(signal.SIGCONT)
    assert job.wait() == 0
    assert build(many, out).records == SHARDS * 5


def test_order_of_finishing_does_not_matter(many: Path, tmp_path: Path) -> None:
    one = build(many, tmp_path / "one", workers=1)
    assert _files(one.folder) == _files(build(many, tmp_path / "two", workers=2).folder)
    assert one.records == SHARDS * 5 and len({shard.sha256 for shard in one.shards}) == SHARDS
