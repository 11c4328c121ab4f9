"""Energon's .tar.idx: written as Energon writes it, compared with the shard, and never believed blindly."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.energon import sidecar
from murmuration.data.index.format import same_content
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.store.place import ShardError

ROOT = Path(__file__).resolve().parents[2]
LONG = "folder/" + "k" * 300
TRUST, WRITE = Wanted(trust_sidecars=True), Wanted(write_sidecars=True)


def _as_energon_does(path: Path) -> bytes:
    """The layout by its definition, through tarfile: starts of samples, then where the archive's members end."""
    starts: list[int] = []
    key = None
    with tarfile.open(path) as archive:
        for member in archive:
            name = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
            if not member.isreg() or re.match(r"__[^/]*__($|/)", member.name) or name is None:
                continue
            if name[1] != key:
                starts.append(member.offset)
                key = name[1]
        return b"".join(struct.pack("<Q", offset) for offset in [*starts, archive.offset])


@pytest.fixture
def odd(tmp_path: Path, write_members: Callable[..., Path], write_tar: Callable[..., Path]) -> Path:
    """Every form of tar, with members that are no records before, between and after those that are."""
    names = ["README", "d/", LONG + "0.jpg", LONG + "0.txt", "a.jpg", "d2/", "ü.jpg", "__meta__/x.json", "e/", "NOTES"]
    members = [(name, name.encode() * 50) for name in names]
    folder = tmp_path / "odd"
    write_members(folder / "gnu.tar", members, tarfile.GNU_FORMAT)
    write_members(folder / "pax.tar", members)
    write_members(folder / "comment.tar", [("a.jpg", b"1"), ("b.jpg", b"2")], pax_headers={"comment": "hello"})
    write_members(folder / "ustar.tar", [("p" * 90 + "/" + "q" * 60 + "/a.jpg", b"1")], tarfile.USTAR_FORMAT)
    write_tar(folder / "wds.tar", [{"__key__": f"c{i % 3}/{i}", "jpg": b"x" * 999 * i, "txt": b"y"} for i in range(9)])
    return folder


def test_sidecars_are_those_of_energon(odd: Path) -> None:
    index = build(odd, wanted=WRITE)
    shards = sorted(odd.glob("*.tar"))
    assert len(shards) == 5 and index.records == 3 + 3 + 2 + 1 + 9
    for path in shards:
        assert sidecar(path).read_bytes() == _as_energon_does(path), path.name
    # One shard's sidecar is its part of offsets.npy.
    joined = b"".join(sidecar(path).read_bytes() for path in shards)
    assert np.load(index.folder / "offsets.npy").tobytes() == joined
    reader = ShardReader(index)
    assert [sorted(reader.read(record)) for record in range(5)] == [["jpg"], ["jpg"], ["jpg", "txt"], ["jpg"], ["jpg"]]
    assert sidecar(Path("a/x.y.tar")) == Path("a/x.y.tar.idx")


def test_a_sidecar_that_disagrees_is_refused_and_may_be_replaced(odd: Path) -> None:
    time.sleep(0.1)  # so that the shards are known afterwards
    build(odd, wanted=WRITE)
    path = sidecar(odd / "wds.tar")
    right = path.read_bytes()
    for wrong in (right[8:], right[:-16] + right[-8:], right[:-8] + struct.pack("<Q", 512), b"", right + b"x"):
        path.write_bytes(wrong)
        with pytest.raises(ShardError, match=r"wds\.tar\.idx: does not match its shard"):
            build(odd)  # although the shards themselves are known and unchanged
        with pytest.raises(ShardError, match="does not match"):
            build(odd, wanted=Wanted(rescan=True))
    build(odd, wanted=WRITE)
    assert path.read_bytes() == right
    build(odd)


def test_on_trust_the_index_is_the_same_but_pins_no_contents(odd: Path, tmp_path: Path) -> None:
    read = build(odd, tmp_path / "read", wanted=WRITE)
    trusted = build(odd, tmp_path / "trusted", wanted=TRUST)
    assert (trusted.folder / "offsets.npy").read_bytes() == (read.folder / "offsets.npy").read_bytes()
    assert [trusted.locate(record)[1:] for record in range(18)] == [read.locate(record)[1:] for record in range(18)]
    assert not any(shard.sha256 for shard in trusted.shards) and trusted.manifest_digest != read.manifest_digest
    # The same shard is still known to be the same, whichever way it was indexed.
    assert all(same_content(*pair) for pair in zip(read.shards, trusted.shards, strict=True))
    assert not same_content(read.shards[0], trusted.shards[1])
    trusted.check_unchanged(contents=True)
    # A later build that does read them is not served with what was trusted.
    again = build(odd, tmp_path / "trusted")
    assert again.manifest_digest == read.manifest_digest


def test_on_trust_a_stale_sidecar_is_noticed(odd: Path, tmp_path: Path) -> None:
    build(odd, wanted=WRITE)
    path = sidecar(odd / "wds.tar")
    right = [int(offset) for offset in np.frombuffer(path.read_bytes(), "<u8")]
    with tarfile.open(odd / "wds.tar") as archive:
        second = archive.getmembers()[3].offset
    assert right[1] < second < right[2]
    stale = {
        "offsets out of order": [*right[:2], right[3], right[2], *right[4:]],
        "out of order or beyond": [*right[:-1], right[-1] + (1 << 20)],
        "out of order": [*right[:1], right[1] + 1, *right[2:]],
        "no valid tar header": [*right[:8], right[8] + 512 * 4, *right[9:]],  # within data
        "does not start a new record": [*right[:2], second, *right[2:]],  # the record's other member
        "a record lies before the first": right[1:],
        "members lie after the last": right[:-1],
        "no end marker": [*right[:-1], (odd / "wds.tar").stat().st_size],
    }
    for what, offsets in stale.items():
        path.write_bytes(np.array(offsets, dtype="<u8").tobytes())
        with pytest.raises(ShardError, match=rf"wds\.tar.*{what}"):
            build(odd, tmp_path / what.replace(" ", "-"), wanted=TRUST)
    # The one thing that trust lets through: a record left out. It can never be read as another one.
    path.write_bytes(np.array([*right[:4], *right[5:]], dtype="<u8").tobytes())
    merged = build(odd, tmp_path / "merged", wanted=TRUST)
    assert merged.records == 17
    with pytest.raises(ShardError, match="2 keys"):
        ShardReader(merged, pause=0).read(9 + 3)


def test_on_trust_img2dataset_counts_and_missing_sidecars(odd: Path, tmp_path: Path) -> None:
    build(odd, wanted=WRITE)
    (odd / "wds_stats.json").write_text('{"successes": 10}')
    with pytest.raises(ShardError, match="counts 10"):
        build(odd, tmp_path / "a", wanted=TRUST)
    (odd / "wds_stats.json").write_text('{"successes": 9}')
    sidecar(odd / "pax.tar").unlink()
    mixed = build(odd, tmp_path / "b", wanted=TRUST)  # a shard without a sidecar is read
    assert [shard.name for shard in mixed.shards if shard.sha256] == ["pax.tar"]


def test_the_command_writes_and_trusts(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    prepare = [sys.executable, str(ROOT / "launch" / "prepare.py"), "index", str(folder)]
    written = subprocess.run([*prepare, "--energon"], capture_output=True, text=True)
    assert written.returncode == 0 and len(list(folder.glob("*.tar.idx"))) == 3
    assert small_set.manifest_digest in written.stdout and not written.stderr
    trusted = subprocess.run([*prepare, "--trust-idx", "--rescan"], capture_output=True, text=True)
    assert trusted.returncode == 0 and "3 shards were indexed on trust" in trusted.stderr
    assert ShardIndex.open(folder).manifest_digest in trusted.stdout
