"""The local cache of remote bytes: right or fetched again, bounded, shared, and swept after kills."""

from __future__ import annotations

import fcntl
import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source
from murmuration.data.index.contents import forget_cached
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.cache import Cache
from murmuration.data.store.place import ShardError
from murmuration.data.store.remote import RemoteRanges
from tests.support.range_server import Fault, RangeServer

ROOT = Path(__file__).resolve().parents[2]


def _failing(fault: Fault) -> Callable[[str, int], Fault]:
    return lambda _path, _attempt: fault


def _cached(remote: ShardIndex, folder: Path, limit: int = 1 << 30, keep="records") -> ShardReader:
    return ShardReader(remote, open_source(remote, ReadOptions(cache=Cache(folder, limit, keep))))


@pytest.mark.parametrize("keep", ["records", "shards"])
def test_the_cache_answers_the_second_time(
    keep, small_set: ShardIndex, remote: ShardIndex, server: RangeServer, tmp_path: Path
) -> None:
    expected = [ShardReader(small_set).read(i) for i in range(25)]
    assert [_cached(remote, tmp_path / "cache", keep=keep).read(i) for i in range(25)] == expected
    server.fault = _failing("500")
    assert [_cached(remote, tmp_path / "cache", keep=keep).read(i) for i in range(25)] == expected
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".part", ".tar")]
    assert len(kept) == (25 if keep == "records" else 3)
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept)


def test_damaged_cache_files_are_fetched_again(
    small_set: ShardIndex, remote: ShardIndex, server: RangeServer, tmp_path: Path, no_pauses: None
) -> None:
    expected = [ShardReader(small_set).read(i) for i in range(25)]
    for keep in ("records", "shards"):
        folder = tmp_path / keep
        reader = _cached(remote, folder, keep=keep)
        assert [reader.read(i) for i in range(25)] == expected
        kept = sorted(path for path in folder.rglob("*") if path.suffix in (".part", ".tar"))
        for number, path in enumerate(kept):
            whole = path.read_bytes()
            # Cut; zeroed in the middle of a header that parsing checks; one flipped bit (kept records only).
            damage = (whole[:-1], b"", whole[:40] + bytes(len(whole) - 40), whole[:-1] + bytes([whole[-1] ^ 1]))
            path.write_bytes(damage[number % (3 if keep == "shards" else 4)])
        assert [reader.read(i) for i in range(25)] == expected
        assert [_cached(remote, folder, keep=keep).read(i) for i in range(25)] == expected


@pytest.mark.parametrize("keep", ["records", "shards"])
def test_the_cache_stays_within_its_bound(keep, remote: ShardIndex, server: RangeServer, tmp_path: Path) -> None:
    limit = 60_000 if keep == "records" else sum(shard.bytes for shard in remote.shards[:2]) + 10
    reader = _cached(remote, tmp_path / "cache", limit, keep)
    for _ in range(2):
        assert all(reader.read(i)["txt"] == f"a red {i}".encode() for i in range(25))
    kept = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.suffix in (".part", ".tar")]
    assert 0.5 * limit < sum(kept) <= limit
    assert int((tmp_path / "cache" / "used").read_text()) == sum(kept)


def test_a_fetched_shard_must_be_the_indexed_one(
    remote: ShardIndex, server: RangeServer, tmp_path: Path, no_pauses: None
) -> None:
    """Another content of the same size, from a server without ETags: only the manifest's hash can tell."""
    server.etags = False
    path = tmp_path / "000000.tar"
    whole = bytearray(path.read_bytes())
    whole[remote.locate(9)[2] - 1] ^= 1
    path.write_bytes(bytes(whole))
    reader = _cached(remote, tmp_path / "cache", keep="shards")
    reader.read(0)
    assert not list((tmp_path / "cache").rglob("*.tar")), "what is not the indexed shard is not kept"


def test_ranks_share_it_and_survive_kills(remote: ShardIndex, server: RangeServer, tmp_path: Path) -> None:
    """Two processes at once, one killed in the middle of writing: what it left is swept, the count is right."""
    folder = tmp_path / "cache"
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}]
from pathlib import Path
from murmuration.data.store.cache import Cache
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.batch.shard_reader import ReadOptions, ShardReader, open_source
index = ShardIndex.open({str(tmp_path / "remote-index")!r})
reader = ShardReader(index, open_source(index, ReadOptions(cache=Cache(Path({str(folder)!r}), 1 << 30))))
reader.read(0)
print("open", flush=True)  # from here on nobody else takes the folder for unused
for i in range(25):
    assert reader.read(i)["txt"] == f"a red {{i}}".encode()
if sys.argv[1] == "live":
    sys.stdin.read()
if sys.argv[1] == "die":
    room = reader._source._room
    def parts():
        yield b"half"
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    room.add(Path({str(folder)!r}) / "aa" / "x.part", 1000, parts())
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    live = subprocess.Popen([sys.executable, "-c", code, "live"], **pipes)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert live.stdout is not None and live.stdout.readline() == b"open\n"
    assert subprocess.run([sys.executable, "-c", code, "die"], timeout=600).returncode == -signal.SIGKILL
    live.communicate(timeout=600)
    assert live.returncode == 0
    assert list(folder.rglob("*.tmp")), "the killed one left something"
    before = sum(server.requests.values())
    reader = _cached(remote, folder)
    assert all(reader.read(i)["txt"] == f"a red {i}".encode() for i in range(25))
    assert sum(server.requests.values()) == before and not list(folder.rglob("*.tmp"))
    kept = [path.stat().st_size for path in folder.rglob("*.part")]
    assert len(kept) == 25 and int((folder / "used").read_text()) == sum(kept)


def test_a_folder_in_use_is_not_counted_anew(remote: ShardIndex, tmp_path: Path) -> None:
    """Counting sweeps temporary files: those of a living process must stay."""
    folder = tmp_path / "cache"
    first = _cached(remote, folder)
    first.read(0)
    living = folder / "aa"
    living.mkdir(exist_ok=True)
    (living / "writing.tmp").write_bytes(b"half")
    _cached(remote, folder).read(1)
    assert (living / "writing.tmp").exists()
    with (folder / "users").open() as users, pytest.raises(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_ranges_are_never_mixed_up(remote: ShardIndex, server: RangeServer, tmp_path: Path) -> None:
    """Raw bytes against the files, at random ranges, through the cache and without it."""
    source = open_source(remote, ReadOptions(cache=Cache(tmp_path / "cache", 1 << 30)))
    plain = RemoteRanges({})
    rng = np.random.default_rng(0)
    for _ in range(40):
        place = remote.locate(int(rng.integers(25)))[0]
        whole = (tmp_path / str(place).rpartition("/")[2]).read_bytes()
        start = int(rng.integers(len(whole) - 1))
        end = int(rng.integers(start + 1, len(whole)))
        digest = hashlib.sha256(whole[start:end]).digest()
        assert {hashlib.sha256(s.read(place, start, end)).digest() for s in (source, plain, source)} == {digest}


@pytest.mark.parametrize("drawn", [[3, 7], None])
@pytest.mark.parametrize("keep", ["records", "shards"])
def test_a_copy_that_somebody_changed_is_no_record_of_a_repeated_step(
    keep, drawn: list[int] | None, small_set: ShardIndex, remote: ShardIndex, server: RangeServer, tmp_path: Path
) -> None:
    """With its length, and its hash where it carries one: only the index, or the store, can tell."""
    folder = tmp_path / "cache"
    expected = [ShardReader(small_set).read(i) for i in range(25)]
    assert [_cached(remote, folder, keep=keep).read(i) for i in range(25)] == expected
    for path in folder.rglob("*"):
        if path.suffix in (".part", ".tar"):
            head = 40 if path.suffix == ".part" else 0
            changed = path.read_bytes()[head:].replace(b"a red", b"a ref")
            own = len(changed).to_bytes(8, "little") + hashlib.sha256(changed).digest()
            path.write_bytes(own[:head] + changed)
    assert _cached(remote, folder, keep=keep).read(3) != expected[3], "nothing notices"
    forget_cached(remote, None if drawn is None else np.array(drawn), folder, lambda: None)
    again = _cached(remote, folder, keep=keep)
    for record in range(25) if drawn is None else drawn:
        assert again.read(record) == expected[record]
    if drawn and keep == "records":
        assert again.read(9) != expected[9], "the others stay; nobody repeats their steps"


def test_a_cached_shard_that_is_the_indexed_one_is_not_fetched_again(
    remote: ShardIndex, server: RangeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    whole = [_cached(remote, folder, keep="shards").read(i) for i in range(25)]
    server.fault = _failing("500")
    forget_cached(remote, None, folder, lambda: None)
    assert [_cached(remote, folder, keep="shards").read(i) for i in range(25)] == whole


def test_a_copy_that_cannot_be_removed_stops_the_run(
    remote: ShardIndex, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    _cached(remote, folder).read(3)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: (_ for _ in ()).throw(PermissionError(path)))
    with pytest.raises(ShardError, match="cannot be removed; remove it"):
        forget_cached(remote, np.array([3]), folder, lambda: None)
