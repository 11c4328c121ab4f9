"""Every way in which shards are written, and every way in which they break, by tarfile's writer and by webdataset's."""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import webdataset

from murmuration.data.batch.shard_reader import LocalFiles, ShardReader
from murmuration.data.index.format import FILES, SHARDS, digest_of
from murmuration.data.index.scan import scan
from murmuration.data.index.shard_index import ShardIndex, Wanted, build, shared_shard
from murmuration.data.store.place import Shard, ShardError

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "webdataset": None}
SUFFIXES = ("jpg", "png", "webp", "txt", "json", "cls")


@pytest.fixture(params=FORMS)
def shard(request, tmp_path: Path, write_tar: Callable[..., Path], write_members: Callable[..., Path]) -> Path:
    """Six records in class folders with all suffixes; sizes around the block size, one of them empty."""
    records = [(f"c{i % 2}/{i:05d}", {suffix: bytes([i]) * (i * 256) for suffix in SUFFIXES}) for i in range(6)]
    path = tmp_path / "shards" / "000000.tar"
    form = FORMS[request.param]
    if form is None:
        return write_tar(path, [{"__key__": key, **content} for key, content in records])
    members = [(f"{key}.{suffix}", value) for key, content in records for suffix, value in content.items()]
    return write_members(path, members, form)


def test_records_are_those_of_webdataset(shard: Path) -> None:
    index = build(shard.parent)
    theirs = list(webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False))  # pyright: ignore[reportAttributeAccessIssue]
    reader = ShardReader(index)
    assert index.records == len(theirs) == 6
    for record, sample in enumerate(theirs):
        assert reader.read(record) == {key: value for key, value in sample.items() if not key.startswith("__")}
        assert set(reader.read(record)) == set(SUFFIXES)


def test_cut_anywhere_it_is_refused(shard: Path) -> None:
    raw = shard.read_bytes()
    end = build(shard.parent).locate(5)[2]
    for length in {*range(0, end + 1024, 512), *range(1, end, 1_011), end + 1023}:
        shard.write_bytes(raw[:length])
        with pytest.raises(ShardError, match=r"000000\.tar|no record"):
            build(shard.parent)
    shard.write_bytes(raw[: end + 1024])
    assert build(shard.parent).records == 6


def test_an_archive_that_ends_after_an_extension_header_is_refused(
    tmp_path: Path, write_tar: Callable[..., Path]
) -> None:
    """Closed with a proper end marker, so nothing but the header itself tells of the file that is missing."""
    path = write_tar(tmp_path / "a.tar", [{"__key__": key, "jpg": b"1"} for key in "ab"])
    start = build(tmp_path).locate(1)[1]
    path.write_bytes(path.read_bytes()[: start + 1024] + bytes(1024))
    with tarfile.open(path) as archive, pytest.raises(tarfile.TarError):
        archive.getmembers()
    with pytest.raises(ShardError, match="ends after an extension header"):
        build(tmp_path)


def test_a_hole_anywhere_is_refused(shard: Path) -> None:
    """Zeroed blocks in headers. Inside a member's data nobody can tell them from data; the hash pins them."""
    raw = shard.read_bytes()
    index = build(shard.parent)
    with tarfile.open(shard) as archive:
        headers = [member.offset_data - 512 for member in archive]
    for at in headers:
        for blocks in (1, 3):
            shard.write_bytes(raw[:at] + bytes(512 * blocks) + raw[at + 512 * blocks :])
            with pytest.raises(ShardError):
                build(shard.parent)
    inside = raw.index(bytes([5]) * 512)
    shard.write_bytes(raw[:inside] + bytes(512) + raw[inside + 512 :])
    assert build(shard.parent).manifest_digest != index.manifest_digest


def test_no_flipped_bit_changes_the_number_of_records(shard: Path) -> None:
    raw = shard.read_bytes()
    whole = scan(shard)
    chance = random.Random(1)
    refused = 0
    for _ in range(1_000):
        flipped = bytearray(raw)
        flipped[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        shard.write_bytes(flipped)
        try:
            again = scan(shard)
        except ShardError:
            refused += 1
        else:
            assert again.sha256 != whole.sha256 and again.offsets_sha256 == whole.offsets_sha256
    assert refused > 100, "too few flips met a header to prove anything"


def test_a_shard_that_changes_after_opening_never_gives_another_record(
    shard: Path, write_tar: Callable[..., Path]
) -> None:
    index = build(shard.parent)
    reader = ShardReader(index, LocalFiles(), pause=0, tries=2)
    first = reader.read(2)
    raw = shard.read_bytes()
    # In place: the open descriptor sees it.
    with shard.open("r+b") as file:
        file.write(raw[512:] + bytes(512))
    for record in range(6):
        with pytest.raises(ShardError, match=r"000000\.tar"):
            reader.read(record)
    shard.write_bytes(raw)
    assert reader.read(2) == first
    # Replaced by a file with other records: a reader that opens it later finds no record there, or not one.
    write_tar(shard.with_name("other"), [{"__key__": f"k{i}", "jpg": b"z" * 3_333} for i in range(30)])
    shard.with_name("other").replace(shard)
    fresh = ShardReader(index, LocalFiles(), pause=0, tries=2)
    for record in range(1, 6):
        with pytest.raises(ShardError, match=r"000000\.tar"):
            fresh.read(record)
    with pytest.raises(ShardError, match="changed since it was indexed"):
        index.check_unchanged()


def test_img2dataset_layout(tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    """Shards with their .parquet and _stats.json; failed downloads stand in the stats, not in the tar."""
    for number in range(2):
        records = [{"__key__": f"{number:05d}{i:04d}", "jpg": bytes([i]), "json": b"{}", "txt": b"x"} for i in range(8)]
        write_tar(tmp_path / f"{number:05d}.tar", [record for i, record in enumerate(records) if i != 3])
        stats = {"count": 8, "successes": 7, "failed_to_download": 1, "failed_to_resize": 0}
        (tmp_path / f"{number:05d}_stats.json").write_text(json.dumps(stats))
        (tmp_path / f"{number:05d}.parquet").write_bytes(b"PAR1")
    index = build(tmp_path)
    assert index.records == 14
    # An archive that was closed too early: complete by itself, and short of what was downloaded.
    write_tar(tmp_path / "00001.tar", records[:5])
    with pytest.raises(ShardError, match=r"00001\.tar: 5 records, but 00001_stats\.json counts 7"):
        build(tmp_path)


def test_shared_shards_are_found_whatever_their_name(
    small_set: ShardIndex, tmp_path: Path, write_tar: Callable[..., Path]
) -> None:
    other = tmp_path / "public"
    write_tar(other / "a.tar", [{"__key__": "x", "jpg": b"1"}])
    assert shared_shard(small_set.shards, build(other).shards) is None
    (other / "b.tar").write_bytes((small_set.folder.parent / "000001.tar").read_bytes())
    found = shared_shard(small_set.shards, build(other).shards)
    assert found is not None and found.name == "b.tar"
    # Also where one of the two sets was never read.
    build(other, wanted=Wanted(write_sidecars=True))
    trusted = build(other, tmp_path / "trusted", wanted=Wanted(trust_sidecars=True))
    found = shared_shard(small_set.shards, trusted.shards)
    assert found is not None and found.name == "b.tar" and not found.sha256


def test_the_digest_covers_everything_but_the_etag() -> None:
    shard = Shard("a.tar", 3, 10_240, "1" * 64, "2" * 64, "etag")
    other = {"name": "b.tar", "records": 4, "bytes": 20_480, "sha256": "", "offsets_sha256": "3" * 64}
    digests = {digest_of(SHARDS, [replace(shard, **{field: value})]) for field, value in other.items()}
    digests |= {digest_of(kind, shards) for kind in (SHARDS, FILES) for shards in ([shard], [shard, shard])}
    assert len(digests) == len(other) + 4
    assert digest_of(SHARDS, [replace(shard, etag="")]) == digest_of(SHARDS, [shard])


def test_an_index_of_an_older_format_is_refused_and_replaced(small_set: ShardIndex) -> None:
    path = small_set.folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    path.write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(ShardError, match=r"index format 1, 2 is needed; build it with: python launch/prepare\.py"):
        ShardIndex.open(small_set.folder)
    assert build(small_set.folder.parent).manifest_digest == small_set.manifest_digest
