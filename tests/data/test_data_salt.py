"""Digests of records as ledgers hold them: keyed by a salt that belongs to the index and is made once."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from murmuration.data.index.exclusions import Exclusions
from murmuration.data.index.folders import build_folder
from murmuration.data.index.keyed_digest import every_ledger_digest, ledger_digests
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.salt import BESIDE_RECORDS, SALT, make_salt, read_salt
from murmuration.data.index.shard_index import ShardIndex, Wanted, build
from murmuration.data.store.place import ShardError
from murmuration.data.synthetic.index import SyntheticIndex

ROOT = Path(__file__).resolve().parents[2]
as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


def keyed(index: ShardIndex) -> str:
    return ledger_digests(index, public=False)[0]


def test_it_is_the_hmac_under_the_salt_and_nothing_that_the_records_alone_give(small_set: ShardIndex) -> None:
    path = small_set.folder / SALT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    salt = path.read_bytes()
    assert len(salt) == 32
    message = f"murmuration records {small_set.manifest_digest}".encode()
    assert keyed(small_set) == hmac.new(salt, message, hashlib.sha256).hexdigest()
    path.write_bytes(bytes(32))
    assert keyed(small_set) != hmac.new(salt, message, hashlib.sha256).hexdigest()


def test_the_list_of_excluded_records_is_keyed_too(small_set: ShardIndex) -> None:
    assert ledger_digests(small_set, public=False)[1] == ""
    Exclusions(small_set.manifest_digest, np.array([3], dtype=np.uint64)).write(small_set.folder)
    index = ShardIndex.open(small_set.folder)
    message = f"murmuration excluded {index.excluded_digest}".encode()
    expected = hmac.new((index.folder / SALT).read_bytes(), message, hashlib.sha256).hexdigest()
    assert ledger_digests(index, public=False) == (keyed(small_set), expected)


def test_indexing_again_in_place_keeps_the_salt(small_set: ShardIndex) -> None:
    before = (small_set.folder / SALT).read_bytes()
    build(small_set.folder.parent, wanted=Wanted(rescan=True))
    (small_set.folder.parent / "000001.tar").unlink()
    build(small_set.folder.parent)
    assert (small_set.folder / SALT).read_bytes() == before


def test_copies_and_second_indexes_of_the_same_shards_name_them_alike(small_set: ShardIndex, tmp_path: Path) -> None:
    shutil.copytree(small_set.folder.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    assert keyed(ShardIndex.open(tmp_path / "copy")) == keyed(small_set)
    assert keyed(build(small_set.folder.parent, tmp_path / "second")) == keyed(small_set)
    (tmp_path / "elsewhere").mkdir()
    for shard in small_set.folder.parent.glob("*.tar"):
        shutil.copy(shard, tmp_path / "elsewhere")
    other = build(tmp_path / "elsewhere")
    assert other.manifest_digest == small_set.manifest_digest and keyed(other) != keyed(small_set)


def test_an_index_without_one_gets_its_salt_when_it_is_first_used(small_set: ShardIndex) -> None:
    for salt in (small_set.folder / SALT, small_set.folder.parent / BESIDE_RECORDS):
        salt.unlink()
    index = ShardIndex.open(small_set.folder)
    assert every_ledger_digest(index) == {index.manifest_digest}, "to ask makes none: nothing can have named it"
    assert not (small_set.folder / SALT).exists()
    first = keyed(index)
    assert (small_set.folder / SALT).exists() and first == keyed(index)
    assert every_ledger_digest(index) == {index.manifest_digest, first}
    assert not list(small_set.folder.glob(f".{SALT}*")), "nothing is left aside"


_MAKER = """
import sys
from pathlib import Path
from murmuration.data.index.salt import make_salt
sys.stdin.readline()
print(make_salt(Path(sys.argv[1])).hex())
"""


def test_processes_that_make_it_at_once_end_with_one(tmp_path: Path) -> None:
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", _MAKER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(4)
    ]  # fmt: skip
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write("go\n")
        maker.stdin.flush()
    assert {maker.communicate()[0].strip() for maker in makers} == {(tmp_path / SALT).read_bytes().hex()}
    assert [path.name for path in tmp_path.iterdir()] == [SALT]


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_damaged_one_is_refused_and_never_replaced(small_set: ShardIndex, content: bytes) -> None:
    (small_set.folder / SALT).write_bytes(content)
    with pytest.raises(ShardError, match=r"salt\.key: damaged; restore it"):
        keyed(small_set)
    assert (small_set.folder / SALT).read_bytes() == content
    assert ledger_digests(small_set, public=True)[0] == small_set.manifest_digest


@as_user
def test_private_records_need_it_and_public_ones_do_not(small_set: ShardIndex) -> None:
    (small_set.folder / SALT).chmod(0)
    with pytest.raises(ShardError, match="ask its owner for access"):
        keyed(small_set)
    assert ledger_digests(small_set, public=True)[0] == small_set.manifest_digest
    (small_set.folder / SALT).chmod(0o600)
    (small_set.folder / SALT).unlink()
    small_set.folder.chmod(0o500)
    try:
        with pytest.raises(ShardError, match=r"bare hash of private records; ask the owner.*--out"):
            keyed(small_set)
        assert ledger_digests(small_set, public=True)[0] == small_set.manifest_digest
    finally:
        small_set.folder.chmod(0o700)


def test_what_cannot_be_made_is_a_sentence_with_the_fix(small_set: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_set.folder / SALT).unlink()

    def refuse(*_args: object, **_more: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("murmuration.data.index.keyed_digest.make_salt", refuse)
    with pytest.raises(ShardError, match=r"Read-only file system.*bare hash of private records.*prepare\.py index"):
        keyed(small_set)
    assert ledger_digests(small_set, public=True)[0] == small_set.manifest_digest


def test_without_hard_links_it_is_made_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert make_salt(tmp_path) == read_salt(tmp_path / SALT) == make_salt(tmp_path)


def test_folders_and_parts_are_keyed_and_rules_are_not(tmp_path: Path, small_set: ShardIndex) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / "1.jpg").write_bytes(b"x")
    folder = build_folder(tmp_path / "set")
    assert (folder.folder / SALT).exists()
    assert ledger_digests(folder, public=False)[0] not in ("", folder.manifest_digest)
    parts = [SplitIndex(small_set, 0.2, public) for public in (True, False)]
    digests = [ledger_digests(part, public=part.public)[0] for part in parts] + [keyed(small_set)]
    assert len({*digests, *(part.manifest_digest for part in parts)}) == 5
    rule = SyntheticIndex("spectrum", 9, 1, 16)
    assert ledger_digests(rule, public=True) == (rule.manifest_digest, "")
